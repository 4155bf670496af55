"""Rows of a forest plot: where bars lie, how they are filled, and what lies beyond."""

import pytest

from enginegate.charts.intervals import (
    Interval,
    IntervalAxis,
    change_axis,
    interval_row,
    interval_scale,
    latency_axis,
    rate_row,
)
from enginegate.charts.svg import PlotAxis
from tests.fakes.svg import parsed

SHARED = IntervalAxis(PlotAxis(-2.0, 2.0), limits=(-1.0,), unit=" pp")


def row(interval, fill="solid", shared=SHARED, limit=-1.0):
    return parsed(interval_row(interval, shared, fill, "in words", limit))


def test_a_bar_goes_from_end_to_end():
    """Both ends of the interval and its value lie where the axis puts them."""
    drawn = row(Interval(0.0, -0.5, 1.0))

    bar, dot = drawn.find("rect"), drawn.find("use")

    assert (bar.get("x"), bar.get("width")) == ("37.5%", "37.5%")
    assert (dot.get("href"), dot.get("x")) == ("#dot", "50%")
    assert drawn.get("aria-label") == "in words"


@pytest.mark.parametrize(
    ("fill", "shape"), [("solid", "#dot"), ("hatched", "#dot"), ("hollow", "#diamond")]
)
def test_how_surely_it_decides_is_in_fill_and_shape(fill, shape):
    """Undecided and emulated are told apart without a colour."""
    drawn = row(Interval(0.0, -0.5, 1.0), fill)

    assert drawn.find("rect").get("class") == f"bar {fill}"
    assert drawn.find("use").get("href") == shape


def test_a_row_has_its_own_margin():
    """The margin depends on precision; zero stays where it is."""
    places = {found.get("class"): found.get("x1") for found in row(Interval(0, 0, 0)).iter("line")}
    own = row(Interval(0, 0, 0), limit=-1.5).find("line[@class='limit']").get("x1")

    assert places == {"zero": "50%", "limit": "25%"}
    assert own == "12.5%"


def test_what_lies_beyond_is_an_arrow():
    """A value off the axis has no dot, and an arrow at the side on which it lies."""
    marks = [found.get("href") for found in row(Interval(-5.0, -6.0, -4.0)).iter("use")]

    assert marks == ["#left"]
    assert [u.get("href") for u in row(Interval(1.0, 0.0, 3.0)).iter("use")] == ["#dot", "#right"]


def test_one_lost_engine_does_not_flatten_the_others():
    """The axis ends three margins out; an engine that lost more is an arrow."""
    good, lost = Interval(-0.1, -0.4, 0.2), Interval(-40.0, -42.0, -38.0)

    axis = change_axis([good, lost], [-1.0, -1.0], " pp")

    assert axis.axis.low == pytest.approx(-3.0 - 0.06 * 3.2)
    assert axis.limits == (-1.0,)


@pytest.mark.parametrize(("slo_ms", "is_far"), [(15.0, False), (100.0, True), (4.0, False)])
def test_an_slo_far_above_the_data_is_named_at_the_edge(slo_ms, is_far):
    """Latencies of 9 ms beside an SLO of 100 would lie on the left edge."""
    shared = latency_axis([Interval(8.0, 7.0, 9.0)], slo_ms)

    scale = parsed(interval_scale(shared, "p99", limit_name="SLO"))
    texts = [found.text for found in scale.iter("text")]

    assert shared.limit_is_far is is_far
    assert f"SLO {slo_ms:g} ms{' →' if is_far else ''}" in texts
    assert shared.axis.low == 0.0


def test_a_lower_bound_is_an_arrow_and_a_refuted_rate_a_bracket():
    """A rate that nothing above could be tried of looks like no measured end."""
    bound = parsed(rate_row(800, 800, "solid", "", is_lower_bound=True, rejected_per_s=None))
    ended = parsed(rate_row(400, 800, "solid", "", is_lower_bound=False, rejected_per_s=480))

    assert bound.find("g/use").get("href") == "#right"
    assert bound.find("line[@class='whisker']") is None
    assert ended.find("g") is None
    assert ended.find("rect").get("width") == "47.17%"
    assert ended.find("line[@class='whisker']").get("x2") == "56.6%"


def test_different_margins_are_all_named():
    """Precisions have margins of their own; each row draws its own line."""
    shared = change_axis([Interval(0.0, -0.4, 0.4)], [-1.0, -1.5, -1.0], " pp")

    texts = [
        found.text for found in parsed(interval_scale(shared, "", limit_name="margin")).iter("text")
    ]

    assert "margin -1 or -1.5 pp" in texts
