"""Latency against load: linear, and fitted to the loads that were sustained.

What lies beyond the fitted axes is an arrow at the edge, and so is an SLO far above the data: drawn
whole, one overloaded measurement would press all others onto the bottom line.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from enginegate.charts.intervals import Interval
from enginegate.charts.svg import (
    MarkShape,
    PlotAxis,
    Svg,
    element,
    line,
    mark,
    percent,
    plot,
    words,
)
from enginegate.messages import per_second, short_number

PointKind = Literal["chosen", "other", "invalid"]

_HEIGHT = 230
_SMALL_HEIGHT = 130
# Room above the highest value that the axis was fitted to.
_HEADROOM = 1.15
# Other configurations' points stretch the axis up to so many times what the chosen one needs.
_STRETCH = 1.6
# An SLO (or a ceiling of the load) within so many times the data is drawn among it.
_NEAR_SLO, _NEAR_CEILING = 2.5, 1.25
_CEILING_ROOM = 1.12
# Labels of two lines are set apart by so much of the height, which is a line of text.
_LABEL_GAP = 0.075


class LoadPoint(NamedTuple):
    """One measurement.

    Attributes:
        load_per_s: offered requests a second.
        p50_ms: None where it falls on failed requests.
        p99: likewise; milliseconds.
        kind: of the chosen configuration, of another one, or invalid.
        requests: that its percentiles are from.
        words: for whoever points at it.
    """

    load_per_s: float
    p50_ms: float | None
    p99: Interval | None
    kind: PointKind
    requests: int
    words: str


class LoadCurve(NamedTuple):
    """Everything that is drawn of one candidate.

    Attributes:
        name: of the candidate.
        points: every measurement.
        chosen: load and p99 that were confirmed; None: no load met the SLO.
        slo_ms: the limit of p99; None: not known.
        ceiling_per_s: above it nothing could be offered; None: nothing stopped the search.
    """

    name: str
    points: tuple[LoadPoint, ...]
    chosen: tuple[float, Interval] | None
    slo_ms: float | None
    ceiling_per_s: float | None

    @property
    def joined(self) -> tuple[LoadPoint, ...]:
        """One valid point of the chosen configuration for each load: that of the most requests.

        At the confirmed load p99 is that of all confirmations together.
        """
        by_load: dict[float, LoadPoint] = {}
        for point in self.points:
            if point.kind == "chosen":
                known = by_load.get(point.load_per_s)
                if known is None or point.requests > known.requests:
                    by_load[point.load_per_s] = point
        if self.chosen is not None and self.chosen[0] in by_load:
            load, p99 = self.chosen
            by_load[load] = by_load[load]._replace(p99=p99)
        return tuple(point for _, point in sorted(by_load.items()))

    @property
    def axes(self) -> tuple[PlotAxis, PlotAxis]:
        """Load, and milliseconds."""
        return self._load_axis(), self._latency_axis()

    @property
    def slo_is_far(self) -> bool:
        """Whether the SLO is above the picture, whose edge names it."""
        return self.slo_ms is not None and not self.axes[1].holds(self.slo_ms)

    @property
    def ceiling_is_drawn(self) -> bool:
        """Whether the loads that could not be offered are in the picture."""
        return self.ceiling_per_s is not None and self.axes[0].holds(self.ceiling_per_s)

    def _load_axis(self) -> PlotAxis:
        loads = [point.load_per_s for point in self.points]
        most = max([*loads, *([self.chosen[0]] if self.chosen else [])], default=1.0)
        top = 1.05 * most
        ceiling = self.ceiling_per_s
        if ceiling is not None and ceiling <= _NEAR_CEILING * most:
            top = max(top, _CEILING_ROOM * ceiling)
        return PlotAxis(0.0, top)

    def _latency_axis(self) -> PlotAxis:
        """Fitted to what the chosen configuration sustained; to all that is valid without one."""
        valid = [p for p in self.points if p.kind != "invalid" and p.p99 is not None]
        if self.chosen is None:
            fitted = [p.p99.value for p in valid if p.p99]
            if self.slo_ms is not None:
                fitted = [min(value, _NEAR_SLO * self.slo_ms) for value in fitted]
        else:
            load, confirmed = self.chosen
            sustained = [p for p in valid if p.kind == "chosen" and p.load_per_s <= load]
            fitted = [confirmed.high, *(p.p99.value for p in sustained if p.p99)]
        need = max(fitted, default=self.slo_ms or 1.0) or 1.0
        others = [p.p99.value for p in valid if p.p99 and p.p99.value <= _STRETCH * need]
        top = max([need, *others])
        if self.slo_ms is not None and self.slo_ms <= _NEAR_SLO * top:
            top = max(top, self.slo_ms)
        return PlotAxis(0.0, _HEADROOM * top)


def load_chart(curve: LoadCurve, *, small: bool = False) -> Svg:
    """p50 and p99 at each load.

    Args:
        curve: of one candidate.
        small: lower, and with one point for each load, to stand beside others.
    """
    loads, latencies = curve.axes
    points = list(curve.points)
    if small:
        points = [point._replace(words="") for point in curve.joined]
    content = [
        *_ceiling(curve, loads),
        *_grid(loads, latencies),
        *_slo(curve, latencies),
        *(drawn for point in points for drawn in _whisker(point, loads, latencies)),
        *_lines(curve.joined, loads, latencies),
        *(drawn for point in points for drawn in _marks(point, loads, latencies)),
        *_chosen(curve, loads, latencies, small=small),
    ]
    height = _SMALL_HEIGHT if small else _HEIGHT
    return plot(describe_curve(curve), *content, height=height, classes="fig curve")


def describe_curve(curve: LoadCurve) -> str:
    """The picture in words."""
    said = [f"{curve.name}: latency against offered load."]
    joined = [point for point in curve.joined if point.p99 is not None]
    if len(joined) > 1:
        first, last = joined[0], joined[-1]
        said.append(f"p99 goes from {_point_words(first)} to {_point_words(last)}.")
    elif joined:
        said.append(f"It was measured at one load: p99 {_point_words(joined[0])}.")
    if curve.chosen is not None:
        load, p99 = curve.chosen
        said.append(f"Chosen: {per_second(load)} at a p99 of {short_number(p99.value)} ms.")
    else:
        said.append("No load met the SLO.")
    if curve.slo_ms is not None:
        far = ", above the picture" if curve.slo_is_far else ""
        said.append(f"The SLO is {short_number(curve.slo_ms)} ms{far}.")
    invalid = sum(point.kind == "invalid" for point in curve.points)
    if invalid:
        said.append(f"{invalid} of {len(curve.points)} measurements are invalid.")
    if curve.ceiling_per_s is not None:
        said.append(f"Above {per_second(curve.ceiling_per_s)} nothing could be offered.")
    return " ".join(said)


def _point_words(point: LoadPoint) -> str:
    value = short_number(point.p99.value) if point.p99 else "n/a"
    return f"{value} ms at {per_second(point.load_per_s)}"


def _grid(loads: PlotAxis, latencies: PlotAxis) -> Iterator[Svg]:
    for tick in latencies.ticks(4):
        y = 1.0 - latencies.share(tick)
        yield line((0, y), (1, y), "grid" if tick else "axis")
        yield words(short_number(tick), (0, y), "end", by=(-8, 4))
    for tick in loads.ticks(4):
        x = loads.share(tick)
        yield line((x, 1), (x, 1.02), "axis")
        yield words(short_number(tick, 4), (x, 1), by=(0, 18))
    yield words("ms", (0, 0), "end", by=(-8, -6), classes="unit")
    yield words("offered requests/s", (1, 1), "end", by=(0, 34), classes="unit")


def _ceiling(curve: LoadCurve, loads: PlotAxis) -> Iterator[Svg]:
    if curve.ceiling_is_drawn and curve.ceiling_per_s is not None:
        start = loads.share(curve.ceiling_per_s)
        yield element(
            "rect", x=percent(start), y=0, width=percent(1 - start), height="100%", class_="ceiling"
        )
        yield line((start, 0), (start, 1), "ceiling-edge")


def _slo(curve: LoadCurve, latencies: PlotAxis) -> Iterator[Svg]:
    limit = curve.slo_ms
    if limit is None:
        return
    if curve.slo_is_far:
        times = short_number(limit / latencies.high, 2)
        text = f"↑ SLO {short_number(limit)} ms, {times} times the top of this axis"
        yield words(text, (0, 0), "start", by=(6, 12), classes="limit")
        return
    y = 1.0 - latencies.share(limit)
    yield line((0, y), (1, y), "limit")
    yield words(f"SLO {short_number(limit)} ms", (0, y), "start", by=(6, -5), classes="limit")


def _whisker(point: LoadPoint, loads: PlotAxis, latencies: PlotAxis) -> Iterator[Svg]:
    p99 = point.p99
    if p99 is None or point.kind != "chosen" or p99.low > latencies.high or p99.low == p99.high:
        return
    x = loads.share(point.load_per_s)
    low, high = 1 - latencies.share(p99.low), 1 - latencies.share(p99.high)
    yield line((x, low), (x, high), "whisker")


def _lines(joined: Sequence[LoadPoint], loads: PlotAxis, latencies: PlotAxis) -> Iterator[Svg]:
    """Both percentiles over the loads, named where they end."""
    ends: list[tuple[str, float, float]] = []
    for name in ("p99", "p50"):
        places = [
            (loads.share(point.load_per_s), value)
            for point in joined
            if (value := _value(point, name)) is not None
        ]
        for (x1, low), (x2, high) in pairwise(places):
            start, end = _clipped((x1, low), (x2, high), latencies)
            if start != end:
                yield line(start, end, name)
        shown = [(x, value) for x, value in places if latencies.holds(value)]
        if shown:
            ends.append((name, shown[-1][0], 1.0 - latencies.share(shown[-1][1])))
    if len(ends) > 1 and abs(ends[0][2] - ends[1][2]) < _LABEL_GAP:
        (_, x, y), (_, other_x, other_y) = ends
        ends = [("p99", x, y - _LABEL_GAP / 2), ("p50", other_x, other_y + _LABEL_GAP / 2)]
    for name, x, y in ends:
        yield words(name, (x, y), "start", by=(13, 4), classes=f"name {name}")


def _clipped(
    start: tuple[float, float], end: tuple[float, float], latencies: PlotAxis
) -> tuple[tuple[float, float], tuple[float, float]]:
    """A stretch of a line in shares of the picture, ended where it leaves through the top."""
    top = latencies.high

    def cut(inside: tuple[float, float], outside: tuple[float, float]) -> tuple[float, float]:
        along = (top - inside[1]) / (outside[1] - inside[1])
        return inside[0] + along * (outside[0] - inside[0]), top

    if start[1] > top and end[1] > top:
        return (start[0], 0.0), (start[0], 0.0)
    if end[1] > top:
        end = cut(start, end)
    elif start[1] > top:
        start = cut(end, start)
    (x1, low), (x2, high) = start, end
    return (x1, 1.0 - latencies.share(low)), (x2, 1.0 - latencies.share(high))


def _marks(point: LoadPoint, loads: PlotAxis, latencies: PlotAxis) -> Iterator[Svg]:
    x = loads.share(point.load_per_s)
    shapes: dict[PointKind, MarkShape] = {"chosen": "dot", "other": "diamond", "invalid": "cross"}
    classes = {"chosen": "pt p99", "other": "pt other", "invalid": "pt invalid"}[point.kind]
    if point.p99 is None or not latencies.holds(point.p99.value):
        yield mark("up", (x, 0.0), f"beyond {point.kind}", title=point.words)
    else:
        y = 1.0 - latencies.share(point.p99.value)
        yield mark(shapes[point.kind], (x, y), classes, title=point.words)
    if point.kind == "chosen" and point.p50_ms is not None and latencies.holds(point.p50_ms):
        y = 1.0 - latencies.share(point.p50_ms)
        yield mark("square", (x, y), "pt p50")


def _chosen(
    curve: LoadCurve, loads: PlotAxis, latencies: PlotAxis, *, small: bool
) -> Iterator[Svg]:
    if curve.chosen is None:
        return
    load, p99 = curve.chosen
    x, y = loads.share(load), 1.0 - latencies.share(p99.value)
    yield mark("ring", (x, y), "ring")
    found = (per_second(load), f"{short_number(p99.value)} ms")
    text = ", ".join(found) if small else "chosen: {}, p99 {}".format(*found)
    side: Literal["start", "end"] = "end" if x > 1 / 2 else "start"
    yield words(text, (x, y), side, by=(-14 if side == "end" else 14, -10), classes="name ring")


def _value(point: LoadPoint, name: str) -> float | None:
    if name == "p50":
        return point.p50_ms
    return point.p99.value if point.p99 else None
