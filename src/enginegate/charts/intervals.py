"""Intervals against a limit, one row a picture: the marks of a forest plot.

How surely a row decides is in the bar's fill: solid decided, hatched undecided, hollow emulated.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from enginegate.charts.svg import (
    Anchor,
    MarkShape,
    PlotAxis,
    Svg,
    axis_of,
    element,
    line,
    mark,
    percent,
    plot,
    words,
)
from enginegate.messages import short_number

BarFill = Literal["solid", "hatched", "hollow"]

_HEIGHT = 20
# An interval that is longer than so many limits says that it is long; drawn whole, it would press
# all others into a few pixels.
_MOST_LIMITS = 3.0
# A limit within so many times the data is a line among it; one further off is named at the edge.
_NEAR = 2.0
_HEADROOM = 0.06
_CENTRE = 0.5
# Of a column's width: what a limit's name takes, and what two labels are apart.
_LABEL, _GAP = 0.6, 0.06


class Interval(NamedTuple):
    """A value with the ends of its interval, which are the value where none is known."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, low: float | None, high: float | None) -> "Interval":
        """An interval of what a record holds."""
        return cls(value, value if low is None else low, value if high is None else high)


class IntervalAxis(NamedTuple):
    """What rows of intervals share.

    Attributes:
        axis: fitted to the intervals, and to limits that are near.
        limits: that rows have, each once.
        unit: behind a number, such as `` ms``.
    """

    axis: PlotAxis
    limits: tuple[float, ...] = ()
    unit: str = ""

    @property
    def limit_is_far(self) -> bool:
        """Whether no limit is on the axis, so that its edge names them."""
        return bool(self.limits) and not any(map(self.axis.holds, self.limits))


def change_axis(intervals: Iterable[Interval], margins: Iterable[float], unit: str) -> IntervalAxis:
    """The axis of changes against FP32, which holds no change and every margin.

    Args:
        intervals: changes; a loss is negative.
        margins: what may be lost, as negative changes.
        unit: behind a number.
    """
    shown, lost = tuple(intervals), tuple(margins)
    furthest = _MOST_LIMITS * max((abs(margin) for margin in lost), default=0.0)
    ends = [end for interval in shown for end in interval]
    if furthest:
        ends = [min(max(end, -furthest), furthest) for end in ends]
    axis = axis_of((0.0, *ends, *lost), headroom=_HEADROOM)
    return IntervalAxis(axis, tuple(sorted(set(lost), reverse=True)), unit)


def latency_axis(intervals: Iterable[Interval], limit_ms: float | None) -> IntervalAxis:
    """The axis of latencies from 0, fitted to the data; a limit far above them is not on it."""
    ends = [end for interval in intervals for end in interval]
    if limit_ms is not None:
        ends = [min(end, _MOST_LIMITS * limit_ms) for end in ends]
    top = max(ends, default=limit_ms or 1.0) or 1.0
    if limit_ms is not None and limit_ms <= _NEAR * top:
        top = max(top, limit_ms)
    limits = () if limit_ms is None else (limit_ms,)
    return IntervalAxis(PlotAxis(0.0, top * (1.0 + _HEADROOM)), limits, " ms")


def interval_row(
    interval: Interval,
    shared: IntervalAxis,
    fill: BarFill,
    label: str,
    limit: float | None,
    *,
    median: float | None = None,
) -> Svg:
    """One interval: a bar from end to end, and a dot at its value.

    Args:
        interval: what is drawn; an end beyond the axis becomes an arrow.
        shared: the axis of all rows.
        fill: how surely it decides.
        label: the picture's text alternative.
        limit: of this row; None: it has none.
        median: of what the interval is a percentile of: a square; None: not shown.
    """
    axis = shared.axis
    start, end = axis.share(interval.low), axis.share(interval.high)
    bar = element(
        "rect",
        x=percent(start),
        y="30%",
        width=percent(end - start),
        height="40%",
        class_=f"bar {fill}",
    )
    content = [*_zero(shared), bar, *_limit(shared, limit)]
    if median is not None and axis.holds(median):
        content.append(mark("square", (axis.share(median), _CENTRE), "pt p50"))
    if axis.holds(interval.value):
        shape: MarkShape = "diamond" if fill == "hollow" else "dot"
        content.append(mark(shape, (axis.share(interval.value), _CENTRE), f"pt {fill}"))
    if interval.low < axis.low:
        content.append(mark("left", (0.0, _CENTRE), "beyond"))
    if interval.high > axis.high:
        content.append(mark("right", (1.0, _CENTRE), "beyond"))
    return plot(label, *content, height=_HEIGHT, classes="fig row")


def invalid_row(interval: Interval, shared: IntervalAxis, label: str, limit: float | None) -> Svg:
    """An interval that must not be used: a grey cross at its value (an arrow beyond), no bar."""
    content = [*_zero(shared), *_limit(shared, limit)]
    if shared.axis.holds(interval.value):
        content.append(mark("cross", (shared.axis.share(interval.value), _CENTRE), "pt invalid"))
    else:
        content.append(mark("right", (1.0, _CENTRE), "beyond invalid"))
    return plot(label, *content, height=_HEIGHT, classes="fig row")


def interval_scale(shared: IntervalAxis, label: str, *, limit_name: str) -> Svg:
    """The numbers above the rows: zero, the limit, and the axis's far end."""
    axis, content = shared.axis, []
    numbers = " or ".join(_number(limit) for limit in shared.limits)
    name = f"{limit_name} {numbers}{shared.unit}" if numbers else ""
    place = max((axis.share(limit) for limit in shared.limits), default=0.0)
    anchor: Anchor = "start" if place < _CENTRE else "end"
    if shared.limit_is_far:
        content.append(words(f"{name} →", (1.0, 0.0), "end", by=(0, 11), classes="limit"))
    elif name:
        content.append(words(name, (place, 0.0), anchor, by=(0, 11), classes="limit"))
    zero = axis.share(0.0)
    if not name or not 0.0 <= zero - place < (_LABEL if anchor == "start" else _GAP):
        content.append(words("0", (zero, 0.0), "start" if zero < _GAP else "middle", by=(0, 11)))
    return plot(label, *content, height=14, classes="fig scale")


def rate_row(
    rate_per_s: float,
    most_per_s: float,
    fill: BarFill,
    label: str,
    *,
    is_lower_bound: bool,
    rejected_per_s: float | None,
) -> Svg:
    """A rate from 0: a bar, an arrow where it is a lower bound, a bracket up to what failed.

    Args:
        rate_per_s: within the SLO.
        most_per_s: of all rows.
        fill: how surely it decides.
        label: the picture's text alternative.
        is_lower_bound: nothing above could be tried.
        rejected_per_s: the lowest rate at which the SLO was not seen to be met.
    """
    axis = PlotAxis(0.0, most_per_s * (1.0 + _HEADROOM) or 1.0)
    end = axis.share(rate_per_s)
    content = [
        line((0, 0), (0, 1), "zero"),
        element("rect", x=0, y="20%", width=percent(end), height="60%", class_=f"bar {fill}"),
    ]
    if is_lower_bound:
        arrow = mark("right", (end, _CENTRE), "beyond")
        content.append(element("g", arrow, transform="translate(11)"))
    elif rejected_per_s is not None:
        stop = axis.share(rejected_per_s)
        content += [
            line((end, _CENTRE), (stop, _CENTRE), "whisker"),
            line((stop, 0.25), (stop, 0.75), "whisker"),
        ]
    return plot(label, *content, height=_HEIGHT, classes="fig row")


def _zero(shared: IntervalAxis) -> list[Svg]:
    if not shared.axis.holds(0.0):
        return []
    place = shared.axis.share(0.0)
    return [line((place, 0), (place, 1), "zero")]


def _limit(shared: IntervalAxis, limit: float | None) -> list[Svg]:
    if limit is None or not shared.axis.holds(limit):
        return []
    place = shared.axis.share(limit)
    return [line((place, 0), (place, 1), "limit")]


def _number(value: float) -> str:
    return short_number(value)
