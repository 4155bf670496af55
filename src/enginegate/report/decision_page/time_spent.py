"""Where the time of a request goes at each candidate's result, and what limits the chosen one."""

from collections.abc import Iterator
from typing import NamedTuple

from enginegate.charts.stages import StageTime, stage_bar, stage_key
from enginegate.charts.svg import Svg
from enginegate.evidence import Benchmark, Scorecard
from enginegate.measurement import Measurement, StageSplit
from enginegate.measuring.bottleneck import explain_p99, latency_breakdown
from enginegate.messages import per_second, short_number
from enginegate.report.content import MISSING, alone_sentence
from enginegate.report.decision_page.forest import forest_section, slo_p99_ms
from enginegate.report.serving import generator_sentence, roofline_sentence

# In the order that a request passes them; the last one is around all others.
STAGES = ("queueing", "preparing inputs", "computing", "returning outputs", "client and network")


class StageName(NamedTuple):
    """A column of the table, with the fill that it has in the bars."""

    name: str
    key: Svg


class TimeRow(NamedTuple):
    """One candidate's mean request.

    Attributes:
        at: the load of the measurement that it is of.
        times: milliseconds, one for each stage; n/a where it was not counted.
    """

    candidate: str
    at: str
    total: str
    times: tuple[str, ...]
    bar: Svg


class TimeSpent(NamedTuple):
    """The bars, and sentences on the proposed candidate."""

    stages: tuple[StageName, ...]
    rows: tuple[TimeRow, ...]
    sentences: tuple[str, ...]


def time_spent_section(scorecard: Scorecard) -> TimeSpent | None:
    """The content of ``time_spent.html``; None: no server counted where the time went."""
    by_name = {b.candidate.name: b for b in scorecard.benchmarks}
    order = [row.candidate for row in forest_section(scorecard).rows if row.candidate in by_name]
    found = [
        (by_name[name], measured, measured.stages)
        for name in order
        if (measured := result_of(by_name[name])) is not None and measured.stages is not None
    ]
    if not found:
        return None
    longest_ms = max(_total_ms(stages) for _, _, stages in found)
    return TimeSpent(
        stages=tuple(StageName(name, stage_key(n)) for n, name in enumerate(STAGES)),
        rows=tuple(_row(*each, longest_ms) for each in found),
        sentences=tuple(_sentences(scorecard, found[0][0], found[0][1])),
    )


def result_of(benchmark: Benchmark) -> Measurement | None:
    """The measurement at the result; where nothing was chosen, the last valid one."""
    valid = [m for m in benchmark.measurements if not m.invalid]
    return benchmark.at_slo or (valid[-1] if valid else None)


def stage_times(stages: StageSplit) -> tuple[StageTime, ...]:
    """The parts of a request's time in the order that it passes them."""
    found = {part.name: part for part in latency_breakdown(stages)}
    return tuple(
        StageTime(name, number, found[name].time_ms, found[name].share)
        for number, name in enumerate(STAGES)
        if name in found
    )


def _as_confirmed(benchmark: Benchmark, measured: Measurement) -> Measurement:
    """With the p99 of all confirmations together, which is the one that was decided on."""
    p99 = benchmark.p99_at_slo
    if p99 is None:
        return measured
    others = tuple(p for p in measured.percentiles if p.quantile != p99.quantile)
    return measured.model_copy(update={"percentiles": (*others, p99)})


def _total_ms(stages: StageSplit) -> float:
    return sum(stage.time_ms for stage in stage_times(stages))


def _row(
    benchmark: Benchmark, measured: Measurement, stages: StageSplit, longest_ms: float
) -> TimeRow:
    name, times = benchmark.candidate.name, stage_times(stages)
    by_name = {stage.name: stage for stage in times}
    largest = max(times, key=lambda stage: stage.time_ms, default=None)
    label = f"{name}: {largest.name} takes {largest.share:.0%}" if largest else f"{name}: no time"
    return TimeRow(
        candidate=name,
        at=per_second(measured.rate_per_s),
        total=short_number(_total_ms(stages)),
        times=tuple(_time(by_name.get(stage)) for stage in STAGES),
        bar=stage_bar(times, longest_ms, label),
    )


def _time(stage: StageTime | None) -> str:
    return MISSING if stage is None else f"{short_number(stage.time_ms)} ({stage.share:.0%})"


def _sentences(scorecard: Scorecard, benchmark: Benchmark, measured: Measurement) -> Iterator[str]:
    """What the numbers come to, for the candidate that is shown first."""
    limit_ms = slo_p99_ms(scorecard)
    if limit_ms is not None:
        yield explain_p99(_as_confirmed(benchmark, measured), limit_ms)
    alone = alone_sentence(scorecard, benchmark.candidate)
    if alone:
        yield alone
    if benchmark.roofline is not None and benchmark.roofline.bound != "unknown":
        yield roofline_sentence(benchmark.roofline)
    yield generator_sentence(measured)
