"""Every candidate in one row: accuracy change against the margin, p99 against the SLO, and rate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from enginegate.candidate import Candidate
from enginegate.charts.intervals import (
    BarFill,
    Interval,
    IntervalAxis,
    change_axis,
    interval_row,
    interval_scale,
    latency_axis,
    rate_row,
)
from enginegate.charts.svg import Svg, definitions
from enginegate.evidence import Benchmark, Finding, Outcome, Scorecard, Verdict
from enginegate.messages import per_second, short_number
from enginegate.report.content import (
    MISSING,
    change_text,
    change_unit,
    percentile_text,
    share_text,
    task_loss,
)

EMULATED = "emulated"


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One candidate.

    Attributes:
        marks: proposed, tied, emulated: decides nothing.
        accuracy: change against FP32, in percentage points or in the metric's unit.
        margin: the most that may be lost, as a negative change.
        p99: milliseconds.
        samples: that the change is of; requests: that p99 is of; 0 where there is none.
        share: of the engine's own speed.
        decides: False: the numbers are of an emulation, and are drawn hollow.
        accuracy_chart: None where there is no number; so are the other two.
    """

    candidate: str
    outcome: str
    marks: tuple[str, ...]
    accuracy: Interval | None
    margin: float | None
    accuracy_text: str
    samples: int
    p99: Interval | None
    p99_text: str
    requests: int
    rate_text: str
    share: str
    decides: bool
    accuracy_chart: Svg | None
    p99_chart: Svg | None
    rate_chart: Svg | None


@dataclass(frozen=True, slots=True)
class Forest:
    """The rows, winner first, and what the axes are.

    Attributes:
        measure: what a model of this kind is scored by.
        unit: of its change.
        accuracy_scale: the numbers above the column; None where no row has one.
        slo: milliseconds; empty where none is known.
        definitions: what marks and hatched bars of all charts refer to.
    """

    measure: str
    unit: str
    rows: tuple[ForestRow, ...]
    accuracy_scale: Svg | None
    p99_scale: Svg | None
    definitions: Svg
    slo: str


@dataclass(frozen=True, slots=True)
class _Axes:
    """What the rows share; None where no row has such a number."""

    accuracy: IntervalAxis | None
    p99: IntervalAxis | None
    slo_ms: float | None
    most_per_s: float


def forest_section(scorecard: Scorecard) -> Forest:
    """One row for each candidate, in the order of `ranked`."""
    order = [verdict for c in ranked(scorecard) if (verdict := scorecard.verdict(c))]
    losses = [loss for verdict in order if (loss := shown_loss(verdict)) is not None]
    measure, unit = (losses[0].measure, change_unit(losses[0])) if losses else ("answers", "")
    axes = _axes(scorecard, losses, unit)
    return Forest(
        measure=measure,
        unit=unit,
        rows=tuple(_row(scorecard, verdict, axes) for verdict in order),
        accuracy_scale=axes.accuracy
        and interval_scale(axes.accuracy, "Scale of the change", limit_name="margin"),
        p99_scale=axes.p99 and interval_scale(axes.p99, "Scale of p99", limit_name="SLO"),
        definitions=definitions(),
        slo="" if axes.slo_ms is None else short_number(axes.slo_ms),
    )


def ranked(scorecard: Scorecard) -> tuple[Candidate, ...]:
    """The winner, ties, then by outcome and rate; what did not run here is last."""

    def place(verdict: Verdict) -> tuple[bool, bool, bool, Outcome, bool, float]:
        candidate = verdict.candidate
        measured = scorecard.benchmark(candidate)
        return (
            candidate != scorecard.winner,
            candidate not in scorecard.tied,
            measured is None and not _was_compared(verdict),
            scorecard.outcome(candidate),
            not is_emulated(verdict),
            -(measured.throughput_at_slo_per_s if measured else 0.0),
        )

    return tuple(verdict.candidate for verdict in sorted(scorecard.verdicts, key=place))


def _was_compared(verdict: Verdict) -> bool:
    """Whether the engine itself answered, so that it could be compared with FP32."""
    return any(finding.scope.startswith("evaluation") for finding in verdict.findings)


def shown_loss(verdict: Verdict) -> Finding | None:
    """The task's loss; where no device could run the engine, the loss of its emulation."""
    real = task_loss(verdict)
    emulated = (
        f
        for f in verdict.findings
        if f.scope == EMULATED and f.gate.endswith("_loss") and f.value is not None
    )
    return real or next(emulated, None)


def is_emulated(verdict: Verdict) -> bool:
    """Whether its numbers are of an emulation, which decides nothing."""
    return any(f.scope.partition("/")[0] == EMULATED for f in verdict.findings)


def slo_p99_ms(scorecard: Scorecard) -> float | None:
    """The limit that p99 was judged by; None: nothing was benchmarked."""
    limits = (
        f.limit
        for benchmark in scorecard.benchmarks
        for f in benchmark.findings
        if f.gate == "p99_ms" and f.limit is not None
    )
    return next(limits, None)


def _axes(scorecard: Scorecard, losses: Iterable[Finding], unit: str) -> _Axes:
    changes = [(change, _turned(loss, loss.limit)) for loss in losses if (change := _change(loss))]
    latencies = [p99 for benchmark in scorecard.benchmarks if (p99 := _p99(benchmark))]
    rates = (benchmark.throughput_at_slo_per_s for benchmark in scorecard.benchmarks)
    slo_ms = slo_p99_ms(scorecard)
    margins = [margin for _, margin in changes if margin is not None]
    return _Axes(
        accuracy=change_axis([c for c, _ in changes], margins, f" {unit}") if changes else None,
        p99=latency_axis(latencies, slo_ms) if latencies else None,
        slo_ms=slo_ms,
        most_per_s=max(rates, default=0.0),
    )


def _row(scorecard: Scorecard, verdict: Verdict, axes: _Axes) -> ForestRow:
    candidate = verdict.candidate
    measured = scorecard.benchmark(candidate)
    loss, p99 = shown_loss(verdict), _p99(measured)
    change = _change(loss)
    margin = _turned(loss, loss.limit) if loss else None
    share = scorecard.engine_share(candidate)
    said = _against_margin(loss, change, margin) if loss and change else ""
    fill = _fill(scorecard, verdict)
    return ForestRow(
        candidate=candidate.name,
        outcome=scorecard.outcome(candidate).word,
        marks=tuple(_marks(scorecard, verdict)),
        accuracy=change,
        margin=margin,
        accuracy_text=change_text(loss) if loss else MISSING,
        samples=loss.samples if loss else 0,
        p99=p99,
        p99_text=percentile_text(measured.p99_at_slo if measured else None),
        requests=measured.p99_at_slo.samples if measured and measured.p99_at_slo else 0,
        rate_text=measured.throughput_text if measured else MISSING,
        share=MISSING if share is None else share_text(share),
        decides=not is_emulated(verdict),
        accuracy_chart=axes.accuracy
        and change
        and interval_row(change, axes.accuracy, fill, said, margin),
        p99_chart=axes.p99
        and p99
        and interval_row(p99, axes.p99, fill, _against_slo(p99, axes.slo_ms), axes.slo_ms),
        rate_chart=_rate_chart(measured, axes.most_per_s, fill),
    )


def _fill(scorecard: Scorecard, verdict: Verdict) -> BarFill:
    if is_emulated(verdict):
        return "hollow"
    undecided = scorecard.outcome(verdict.candidate) is Outcome.INCONCLUSIVE
    return "hatched" if undecided else "solid"


def _marks(scorecard: Scorecard, verdict: Verdict) -> Iterator[str]:
    candidate = verdict.candidate
    if candidate == scorecard.winner:
        yield "proposed"
    elif candidate in scorecard.tied:
        yield f"tied with {scorecard.winner}" if scorecard.winner else "tied"
    if is_emulated(verdict):
        yield "emulated: decides nothing"


def _change(loss: Finding | None) -> Interval | None:
    """A loss as a change against FP32: a score that is lost is negative."""
    if loss is None or loss.value is None:
        return None
    low, high = loss.change_ends or (None, None)
    return Interval.of(loss.as_change(loss.value), low, high)


def _turned(loss: Finding, number: float | None) -> float | None:
    return None if number is None else loss.as_change(number)


def _p99(benchmark: Benchmark | None) -> Interval | None:
    p99 = benchmark.p99_at_slo if benchmark else None
    return Interval.of(p99.value_ms, p99.low_ms, p99.high_ms) if p99 else None


def _against_margin(loss: Finding, change: Interval, margin: float | None) -> str:
    """The picture in words, which the number beside it does not say."""
    if margin is None:
        return "no margin is set"
    limit = f"the margin of {short_number(margin)}"
    if loss.of_error:  # an error grows to the right
        change, margin = Interval(-change.value, -change.high, -change.low), -margin
    if change.low >= margin:
        return f"the whole interval is within {limit}"
    if change.high < margin:
        return f"the whole interval is beyond {limit}"
    return f"the interval crosses {limit}"


def _against_slo(p99: Interval, slo_ms: float | None) -> str:
    if slo_ms is None:
        return "no SLO is known"
    limit = f"the SLO of {short_number(slo_ms)} ms"
    if p99.high <= slo_ms:
        return f"the whole interval is below {limit}"
    if p99.low > slo_ms:
        return f"the whole interval is above {limit}"
    return f"the interval crosses {limit}"


def _rate_chart(measured: Benchmark | None, most_per_s: float, fill: BarFill) -> Svg | None:
    if measured is None or not measured.throughput_at_slo_per_s:
        return None
    label = f"{measured.throughput_at_slo_per_s / most_per_s:.0%} of the highest rate"
    rejected = measured.rejected_rate_per_s
    if measured.is_lower_bound:
        label += ", and a lower bound: nothing above it could be tried"
    elif rejected is not None:
        label += f"; {per_second(rejected)} was not seen to meet the SLO"
    return rate_row(
        measured.throughput_at_slo_per_s,
        most_per_s,
        fill,
        label,
        is_lower_bound=measured.is_lower_bound,
        rejected_per_s=rejected,
    )
