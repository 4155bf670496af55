"""Every candidate in one row: accuracy change against the margin, p99 against the SLO, and rate."""

from dataclasses import dataclass

from enginegate.candidate import Candidate
from enginegate.evidence import Finding, Scorecard, Verdict
from enginegate.measurement import Percentile
from enginegate.report.content import (
    MISSING,
    change_text,
    in_points,
    percentile_text,
    share_text,
    task_loss,
)

EMULATED = "emulated"


@dataclass(frozen=True, slots=True)
class DrawnInterval:
    """A number with its interval and its limit, all in the unit of the axis.

    Attributes:
        value: the point.
        low: None: too few samples for an end.
        limit: the margin, or the SLO; None: no limit is known.
    """

    value: float
    low: float | None
    high: float | None
    limit: float | None


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One candidate.

    Attributes:
        marks: winner, tied, emulated: decides nothing.
        accuracy: change against FP32, in percentage points or in the metric's unit.
        p99: milliseconds.
        share: of the engine's own speed.
        decides: False: the numbers are of an emulation, and are drawn hollow.
    """

    candidate: str
    outcome: str
    marks: tuple[str, ...]
    accuracy: DrawnInterval | None
    accuracy_text: str
    p99: DrawnInterval | None
    p99_text: str
    rate_text: str
    share: str
    decides: bool


@dataclass(frozen=True, slots=True)
class Forest:
    """The rows, winner first, and what the axes are."""

    measure: str
    unit: str
    rows: tuple[ForestRow, ...]


def forest_section(scorecard: Scorecard) -> Forest:
    """One row for each candidate: the winner, ties, then by outcome."""
    order = sorted(scorecard.verdicts, key=lambda verdict: _place(scorecard, verdict.candidate))
    losses = [loss for verdict in order if (loss := shown_loss(verdict)) is not None]
    points = not losses or in_points(losses[0])
    measure = losses[0].gate.removesuffix("_loss") if losses else "accuracy"
    return Forest(
        measure=measure.replace("_", " "),
        unit="pp" if points else (losses[0].unit if losses else ""),
        rows=tuple(_row(scorecard, verdict) for verdict in order),
    )


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


def _place(scorecard: Scorecard, candidate: Candidate) -> tuple[int, int, int]:
    if candidate == scorecard.winner:
        return (0, 0, 0)
    tied = 0 if candidate in scorecard.tied else 1
    verdict = scorecard.verdict(candidate)
    return (1, tied, scorecard.outcome(candidate) + (4 if verdict and is_emulated(verdict) else 0))


def _row(scorecard: Scorecard, verdict: Verdict) -> ForestRow:
    candidate = verdict.candidate
    measured = scorecard.benchmark(candidate)
    loss, p99 = shown_loss(verdict), measured.p99_at_slo if measured else None
    share = scorecard.engine_share(candidate)
    return ForestRow(
        candidate=candidate.name,
        outcome=scorecard.outcome(candidate).word,
        marks=tuple(_marks(scorecard, verdict)),
        accuracy=_change(loss),
        accuracy_text=change_text(loss) if loss else MISSING,
        p99=_p99(p99, slo_p99_ms(scorecard)),
        p99_text=percentile_text(p99),
        rate_text=measured.throughput_text if measured else MISSING,
        share=MISSING if share is None else share_text(share),
        decides=not is_emulated(verdict),
    )


def _marks(scorecard: Scorecard, verdict: Verdict) -> list[str]:
    candidate = verdict.candidate
    marks = []
    if candidate == scorecard.winner:
        marks.append("proposed")
    if candidate in scorecard.tied and candidate != scorecard.winner:
        marks.append("tied")
    if is_emulated(verdict):
        marks.append("emulated: decides nothing")
    return marks


def _change(loss: Finding | None) -> DrawnInterval | None:
    """A loss turned into a change: what is lost is negative, and so is the margin."""
    if loss is None or loss.value is None:
        return None
    scale = -100.0 if in_points(loss) else -1.0

    def turned(number: float | None) -> float | None:
        return None if number is None else scale * number

    return DrawnInterval(
        scale * loss.value, turned(loss.high), turned(loss.low), turned(loss.limit)
    )


def _p99(p99: Percentile | None, slo_ms: float | None) -> DrawnInterval | None:
    if p99 is None:
        return None
    return DrawnInterval(p99.value_ms, p99.low_ms, p99.high_ms, slo_ms)


def slo_p99_ms(scorecard: Scorecard) -> float | None:
    """The limit that p99 was judged by; None: nothing was benchmarked."""
    limits = (
        f.limit
        for benchmark in scorecard.benchmarks
        for f in benchmark.findings
        if f.gate == "p99_ms" and f.limit is not None
    )
    return next(limits, None)
