"""Latency against load, as it was measured, with the chosen point."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from enginegate.charts.intervals import (
    Interval,
    IntervalAxis,
    interval_row,
    interval_scale,
    invalid_row,
    latency_axis,
)
from enginegate.charts.load_curve import LoadCurve, LoadPoint, PointKind, load_chart
from enginegate.charts.svg import Svg
from enginegate.evidence import Benchmark, Scorecard
from enginegate.measurement import Measurement, Percentile
from enginegate.messages import per_second, short_number
from enginegate.report.content import MISSING, one_line, percentile_text
from enginegate.report.decision_page.forest import forest_section, slo_p99_ms
from enginegate.serving import ServingConfig

# Lines of the table under the curve: a search makes 20 to 60 measurements of one candidate. Points
# of the pictures, and rows where there is one load: few more would be told apart by eye.
_MOST_LINES, _MOST_POINTS, _MOST_ROWS, _MOST_ROWS_OF_OTHERS = 60, 100, 24, 8
_MEDIAN = 0.5


class LoadLine(NamedTuple):
    """One measurement as text."""

    load: str
    answered: str
    p50: str
    p99: str
    requests: str
    batch: str
    note: str


class LoadKey(NamedTuple):
    """One entry of the legend: the class and form of a mark, and what it stands for."""

    glyph: str
    classes: str
    meaning: str


class StripRow(NamedTuple):
    """One measurement at the only load that was offered, or all confirmations together."""

    configuration: str
    is_chosen: bool
    chart: Svg | None
    p50: str
    p99: str
    requests: str
    note: str


class Strip(NamedTuple):
    """Every measurement at one load, one below the other: there is no curve to draw."""

    load: str
    scale: Svg
    rows: tuple[StripRow, ...]


class CandidateCurve(NamedTuple):
    """One candidate's picture, with what is needed to read it.

    Attributes:
        strip: in place of chart and lines where everything was measured at one load.
    """

    candidate: str
    configuration: str
    chart: Svg
    keys: tuple[LoadKey, ...]
    lines: tuple[LoadLine, ...]
    hidden: int
    strip: Strip | None = None


class LoadCurves(NamedTuple):
    """The proposed candidate's curve, and smaller ones of all others that were benchmarked."""

    first: CandidateCurve
    others: tuple[CandidateCurve, ...]


def load_curve_section(scorecard: Scorecard) -> LoadCurves | None:
    """The content of ``load_curve.html``; None: nothing was measured under Triton."""
    slo_ms = slo_p99_ms(scorecard)
    by_name = {b.candidate.name: b for b in scorecard.benchmarks if b.measurements}
    order = [row.candidate for row in forest_section(scorecard).rows if row.candidate in by_name]
    if not order:
        return None
    first, *others = (by_name[name] for name in order)
    return LoadCurves(
        _whole(first, slo_ms),
        tuple(_small(benchmark, slo_ms) for benchmark in others),
    )


def curve_of(benchmark: Benchmark, slo_ms: float | None) -> LoadCurve:
    """What is drawn of a benchmark."""
    config = shown_config(benchmark)
    p99 = benchmark.p99_at_slo
    chosen = None
    if benchmark.chosen is not None and p99 is not None:
        chosen = (benchmark.offered_at_slo_per_s, _interval(p99))
    return LoadCurve(
        name=benchmark.candidate.name,
        points=tuple(_point(m, config) for m in _chosen_first(benchmark)[:_MOST_POINTS]),
        chosen=chosen,
        slo_ms=slo_ms,
        ceiling_per_s=_ceiling(benchmark),
    )


def shown_config(benchmark: Benchmark) -> ServingConfig | None:
    """The chosen configuration; where none meets the SLO, that of the lowest valid p99."""
    if benchmark.chosen is not None:
        return benchmark.chosen
    found = [
        (bool(m.invalid), p99.value_ms, m.config)
        for m in benchmark.measurements
        if (p99 := m.p99) is not None
    ]
    best = min(found, key=lambda each: each[:2], default=None)
    return best[2] if best else None


def _chosen_first(benchmark: Benchmark) -> list[Measurement]:
    """Valid measurements of the chosen configuration, then of others, then invalid ones."""
    config = shown_config(benchmark)
    return sorted(
        benchmark.measurements,
        key=lambda m: (bool(m.invalid), m.config != config, str(m.config), m.rate_per_s),
    )


def _whole(benchmark: Benchmark, slo_ms: float | None) -> CandidateCurve:
    curve, config = curve_of(benchmark, slo_ms), shown_config(benchmark)
    order = _chosen_first(benchmark)
    chosen_per_s = curve.chosen[0] if curve.chosen else None
    return CandidateCurve(
        candidate=benchmark.candidate.name,
        configuration=str(config) if config else MISSING,
        chart=load_chart(curve),
        keys=_keys(benchmark, curve),
        lines=tuple(_line(m, config, chosen_per_s) for m in order[:_MOST_LINES]),
        hidden=max(0, len(order) - _MOST_LINES),
        strip=_strip(benchmark, order[:_MOST_ROWS], curve),
    )


def _strip(benchmark: Benchmark, order: Sequence[Measurement], curve: LoadCurve) -> Strip | None:
    """None: several loads were offered, so that there is a curve."""
    loads = {m.rate_per_s for m in benchmark.measurements}
    if len(loads) > 1:
        return None
    known = [_interval(p) for m in order if not m.invalid and (p := m.p99)]
    if curve.chosen is not None:
        known.append(curve.chosen[1])
    shared = latency_axis(known, curve.slo_ms)
    rows = [_strip_row(m, shared, curve.slo_ms) for m in order]
    if benchmark.p99_at_slo is not None and benchmark.chosen is not None:
        rows.insert(0, _confirmed_row(benchmark, benchmark.p99_at_slo, shared, curve.slo_ms))
    return Strip(
        load=per_second(loads.pop()),
        scale=interval_scale(shared, "Scale of latency", limit_name="SLO"),
        rows=tuple(rows),
    )


def _strip_row(m: Measurement, shared: IntervalAxis, slo_ms: float | None) -> StripRow:
    p50, p99 = m.percentile(_MEDIAN), m.p99
    return StripRow(
        configuration=str(m.config),
        is_chosen=False,
        chart=None if p99 is None else _strip_chart(m, p99, shared, slo_ms),
        p50=f"{p50.value_ms:.2f}" if p50 else MISSING,
        p99=percentile_text(p99),
        requests=f"{max((p.samples for p in m.percentiles), default=0):,}",
        note=f"invalid: {one_line(m.invalid[0])}" if m.invalid else "",
    )


def _strip_chart(
    m: Measurement, p99: Percentile, shared: IntervalAxis, slo_ms: float | None
) -> Svg:
    interval, p50 = _interval(p99), m.percentile(_MEDIAN)
    if m.invalid:
        return invalid_row(interval, shared, "invalid", slo_ms)
    median = p50.value_ms if p50 else None
    label = f"p99 is {p99.value_ms / median:.1f} times p50" if median else "p99"
    return interval_row(interval, shared, "solid", label, slo_ms, median=median)


def _confirmed_row(
    benchmark: Benchmark, p99: Percentile, shared: IntervalAxis, slo_ms: float | None
) -> StripRow:
    return StripRow(
        configuration=str(benchmark.chosen),
        is_chosen=True,
        chart=interval_row(_interval(p99), shared, "solid", "chosen", slo_ms),
        p50="",
        p99=percentile_text(p99),
        requests=f"{p99.samples:,}",
        note="chosen: all confirmations together",
    )


def _small(benchmark: Benchmark, slo_ms: float | None) -> CandidateCurve:
    curve, config = curve_of(benchmark, slo_ms), shown_config(benchmark)
    return CandidateCurve(
        candidate=benchmark.candidate.name,
        configuration=str(config) if config else MISSING,
        chart=load_chart(curve, small=True),
        keys=(),
        lines=(),
        hidden=0,
        strip=_strip(benchmark, _chosen_first(benchmark)[:_MOST_ROWS_OF_OTHERS], curve),
    )


def _point(m: Measurement, config: ServingConfig | None) -> LoadPoint:
    p50, p99 = m.percentile(_MEDIAN), m.p99
    kind: PointKind = "chosen" if m.config == config else "other"
    requests = max((p.samples for p in m.percentiles), default=0)
    said = f"p99 {percentile_text(p99)} ms" if p99 else "p99 falls on failed requests"
    text = f"{per_second(m.rate_per_s)}: {said} of {requests:,} requests"
    if kind == "other":
        text += f"; {m.config}"
    if m.invalid:
        text += f"; invalid: {one_line(m.invalid[0])}"
    return LoadPoint(
        load_per_s=m.rate_per_s,
        p50_ms=p50.value_ms if p50 else None,
        p99=_interval(p99) if p99 else None,
        kind="invalid" if m.invalid else kind,
        requests=requests,
        words=text,
    )


def _interval(p: Percentile) -> Interval:
    return Interval.of(p.value_ms, p.low_ms, p.high_ms)


def _ceiling(benchmark: Benchmark) -> float | None:
    """The lowest rate above which nothing could be offered, by the policy or by the sender."""
    known = (benchmark.ceiling_per_s, benchmark.generator_limit_per_s)
    return min((rate for rate in known if rate is not None), default=None)


def _keys(benchmark: Benchmark, curve: LoadCurve) -> tuple[LoadKey, ...]:
    """What the marks that are there stand for."""
    kinds = {point.kind for point in curve.points}
    beyond = any(
        point.p99 is None or not curve.axes[1].holds(point.p99.value) for point in curve.points
    )
    found = [
        ("●", "p99", "p99, with its interval", "chosen" in kinds),
        ("■", "p50", "p50", "chosen" in kinds),
        ("◯", "ring", "chosen, all its confirmations together", curve.chosen is not None),
        ("◇", "other", "p99 of other configurations", "other" in kinds),
        ("✕", "invalid", "invalid: decides nothing", "invalid" in kinds),
        ("▲", "beyond", "above this axis, or on failed requests", beyond),
    ]
    keys = [LoadKey(*entry) for *entry, is_there in found if is_there]
    ceiling = _ceiling_words(benchmark)
    if ceiling:
        keys.append(LoadKey("▒" if curve.ceiling_is_drawn else "→", "ceiling-key", ceiling))
    return tuple(keys)


def _ceiling_words(benchmark: Benchmark) -> str:
    """Who sets the highest load."""
    sender, policy = benchmark.generator_limit_per_s, benchmark.ceiling_per_s
    if sender is not None and (policy is None or sender < policy):
        return f"from {per_second(sender)} on the load generator, not the server, is the limit"
    return f"above {per_second(policy)} the policy allows no trial" if policy is not None else ""


def _line(m: Measurement, config: ServingConfig | None, chosen_per_s: float | None) -> LoadLine:
    p50 = m.percentile(_MEDIAN)
    notes = []
    if m.invalid:
        notes.append(f"invalid: {one_line(m.invalid[0])}")
    if m.config != config:
        notes.append(str(m.config))
    elif chosen_per_s is not None and math.isclose(m.rate_per_s, chosen_per_s):
        notes.append("chosen load")
    return LoadLine(
        load=short_number(m.rate_per_s, 4),
        answered=short_number(m.throughput_per_s, 4),
        p50=f"{p50.value_ms:.2f}" if p50 else MISSING,
        p99=percentile_text(m.p99),
        requests=f"{max((p.samples for p in m.percentiles), default=0):,}",
        batch=f"{m.stages.mean_batch_size:.1f}" if m.stages else MISSING,
        note="; ".join(notes),
    )
