"""Latency against load: fitted axes, and a mark for each kind of measurement."""

import pytest

from enginegate.charts.intervals import Interval
from enginegate.charts.load_curve import LoadCurve, LoadPoint, describe_curve, load_chart
from tests.fakes.svg import parsed


def point(load, p99, kind="chosen", *, p50=None, requests=1000):
    found = None if p99 is None else Interval(p99, 0.9 * p99, 1.1 * p99)
    return LoadPoint(load, p50, found, kind, requests, f"{kind} at {load}")


CHOSEN = (200.0, Interval(10.0, 9.0, 12.0))


def curve(*points, chosen=CHOSEN, slo=20.0, ceiling=None):
    return LoadCurve("onnxruntime-int8", points, chosen, slo, ceiling)


def uses(drawn):
    return [
        (found.get("href"), found.get("x"), found.get("y")) for found in parsed(drawn).iter("use")
    ]


THREE = (point(100, 6, p50=2.0), point(200, 10, p50=4.0), point(400, 300, p50=90.0))


def test_axes_fit_what_was_sustained():
    """One overloaded measurement does not press the others onto the bottom line."""
    loads, latencies = curve(*THREE).axes

    assert loads.high == pytest.approx(420)
    assert latencies == (0.0, pytest.approx(1.15 * 20.0))


def test_each_measurement_lies_at_its_load_and_percentile():
    """p99 is a dot, p50 a square, and what is beyond the axis an arrow at the top."""
    marks = uses(load_chart(curve(*THREE)))

    assert ("#dot", "23.81%", "73.91%") in marks
    assert ("#square", "23.81%", "91.3%") in marks
    assert ("#up", "95.24%", "0%") in marks
    assert ("#ring", "47.62%", "56.52%") in marks


@pytest.mark.parametrize(("kind", "shape"), [("invalid", "#cross"), ("other", "#diamond")])
def test_other_kinds_have_other_shapes(kind, shape):
    """An invalid point and one of another configuration are told apart without a colour."""
    drawn = load_chart(curve(*THREE[:2], point(150, 9, kind)))

    assert shape in [mark for mark, _, _ in uses(drawn)]
    assert f"pt {kind}" in drawn


def test_invalid_points_are_joined_to_nothing():
    """The line goes through valid points of the chosen configuration alone."""
    with_invalid = curve(*THREE, point(150, 2, "invalid"), point(150, 2, "other"))

    assert with_invalid.joined == curve(*THREE).joined


def test_the_line_goes_through_the_longest_measurement_of_a_load():
    """And at the confirmed load through what all confirmations came to."""
    points = (point(100, 6, requests=10), point(100, 7, requests=99), point(200, 3))

    assert [p.p99.value for p in curve(*points).joined] == [7, 10]


@pytest.mark.parametrize(
    ("slo", "is_far", "text"),
    [
        (20.0, False, "SLO 20 ms"),
        (100.0, True, "↑ SLO 100 ms, 7.2 times the top of this axis"),
    ],
)
def test_a_far_slo_is_named_at_the_edge(slo, is_far, text):
    """Otherwise it is a line across the picture."""
    found = curve(*THREE[:2], slo=slo)
    root = parsed(load_chart(found))

    assert found.slo_is_far is is_far
    assert text in [words.text for words in root.iter("text")]
    assert (root.find("line[@class='limit']") is None) is is_far


@pytest.mark.parametrize(("ceiling", "start"), [(220.0, "89.29%"), (20_000.0, None), (None, None)])
def test_what_could_not_be_offered_is_shaded(ceiling, start):
    """From the ceiling to the edge, where the ceiling is near the data."""
    shade = parsed(load_chart(curve(*THREE[:2], ceiling=ceiling))).find("rect")

    assert (None if shade is None else shade.get("x")) == start


def test_a_line_ends_where_it_leaves_the_picture():
    """It points at the measurement that lies above, and does not cross the heading."""
    lines = parsed(load_chart(curve(*THREE))).findall("line[@class='p99']")

    assert lines[-1].get("y2") == "0%"
    assert 47.62 < float(lines[-1].get("x2").rstrip("%")) < 60


def test_text_alternative():
    """What the picture shows, in words."""
    said = describe_curve(curve(*THREE, point(150, 9, "invalid"), slo=100.0, ceiling=220.0))

    assert "p99 goes from 6 ms at 100/s to 300 ms at 400/s" in said
    assert "Chosen: 200/s at a p99 of 10 ms" in said
    assert "The SLO is 100 ms, above the picture" in said
    assert "1 of 4 measurements are invalid" in said
    assert "Above 220/s nothing could be offered" in said


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(curve(chosen=None, slo=None), id="nothing"),
        pytest.param(curve(point(100, None), chosen=None), id="failed-requests"),
        pytest.param(curve(point(100, 90), chosen=None), id="none-met-the-slo"),
        pytest.param(curve(point(0.001, 0.0), chosen=None, slo=None), id="zeros"),
    ],
)
def test_every_search_can_be_drawn(found):
    """Whatever was found, a picture comes out, and the same one again."""
    assert load_chart(found) == load_chart(found)
    assert parsed(load_chart(found, small=True)).get("role") == "img"
