"""Stacked bars of a request's time."""

from enginegate.charts.stages import StageTime, stage_bar
from tests.fakes.svg import parsed


def test_parts_follow_one_another_on_one_scale():
    """Each part begins where the last one ended, and has its own fill."""
    parts = (StageTime("queueing", 0, 1.0, 0.25), StageTime("computing", 2, 3.0, 0.75))

    found = parsed(stage_bar(parts, 8.0, "computing takes 75%")).findall("rect")

    assert [(r.get("x"), r.get("width"), r.get("class")) for r in found] == [
        ("0%", "12.5%", "stage s0"),
        ("12.5%", "37.5%", "stage s2"),
    ]
