"""Marks of a page's charts: places, numbers and words."""

import pytest

from enginegate.charts.svg import (
    PlotAxis,
    axis_of,
    definitions,
    element,
    mark,
    percent,
    plot,
    words,
)
from tests.fakes.svg import parsed


@pytest.mark.parametrize(
    ("value", "share"), [(10, 0.0), (15, 0.25), (30, 1.0), (50, 1.0), (-5, 0.0)]
)
def test_a_value_has_its_share_of_the_axis(value, share):
    """What is beyond an end lies at that end."""
    assert PlotAxis(10, 30).share(value) == pytest.approx(share)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(0, 57.5, (0, 20, 40), id="tens"),
        pytest.param(0, 6400, (0, 2000, 4000, 6000), id="thousands"),
        pytest.param(-1.6, 0.4, (-1.5, -1.0, -0.5, 0.0), id="below-zero"),
        pytest.param(0, 0.009, (0, 0.0025, 0.005, 0.0075), id="small"),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    """Numbers that people count in, not more than were asked for."""
    assert PlotAxis(low, high).ticks(4) == pytest.approx(expected)


def test_an_axis_has_a_length():
    """Equal values, or none, would otherwise be divided by zero."""
    assert axis_of([3.0, 3.0]) == (3.0, 4.0)
    assert axis_of([]) == (0.0, 1.0)
    assert axis_of([0.0, 10.0], headroom=0.1) == (-1.0, 11.0)


def test_text_of_others_is_escaped():
    """A model's name is text wherever it stands."""
    name = '</svg><script>"a" & b'
    drawn = plot(
        name, words(name, (0, 0)), mark("dot", (0, 0), "pt", title=name), height=9, classes=""
    )

    root = parsed(drawn)

    assert root.get("aria-label") == name
    assert root.findtext("text") == name
    assert root.findtext("use/title") == name
    assert root.find(".//script") is None


def test_numbers_are_short():
    """Equal numbers give equal bytes, and none is longer than a screen can show."""
    assert percent(1 / 3) == "33.33%"
    assert percent(-1e-9) == "0%"
    assert element("rect", x=12345.678, y=1.0) == '<rect x="12345.68" y="1"/>'


def test_every_mark_is_defined():
    """Charts refer to shapes that the page holds once."""
    held = {found.get("id") for found in parsed(definitions()).iter() if found.get("id")}

    assert {
        "dot",
        "ring",
        "cross",
        "square",
        "diamond",
        "up",
        "left",
        "right",
        "hatch",
        "dots",
    } == held
