"""Benchmarks put together where nothing else was judged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.benchmark.config_comments import measured_config
from enginegate.candidate import Candidate, Engine, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.engines import runnable_here
from enginegate.evidence import Benchmark
from enginegate.policy import Policy
from enginegate.report import ServingReport
from enginegate.repository import Layout
from validation.decide import choose_served
from validation.speed import with_speed


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """What a benchmark run ends in.

    Attributes:
        report: every candidate that could be measured, and the best of them.
        config_pbtxt: the winner's, with what chose each line; empty without a winner.
        unmeasured: candidate -> why it was not measured.
    """

    report: ServingReport
    config_pbtxt: str
    unmeasured: dict[Candidate, str]


@task(task_run_name="served", cache_policy=NO_CACHE)
def report_benchmarks(
    rules: Policy,
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    benchmarks: Sequence[Benchmark | None],
) -> BenchmarkReport:
    """The best of what was measured, and its configuration."""
    layout = Layout(rules.target.repository, rules.name)
    current = layout.current()
    live = layout.release(current.version).engine_sha256 if current else None
    asked = {_candidate(attempt) for attempt in attempts}
    left_out = set(rules.candidates.all()) - asked
    judged = with_speed(benchmarks, rules.slo, rules.search, live=live, left_out=left_out)
    measured = tuple(found for found in judged if found is not None)
    choice = choose_served(measured, rules.search)
    report = ServingReport(
        model=rules.name,
        model_uri=rules.model.uri,
        slo=rules.slo,
        candidates=measured,
        winner=choice.winner,
        reason=choice.reason,
        tied=choice.tied,
    )
    return BenchmarkReport(report, _config(rules, report, attempts), dict(_unmeasured(attempts)))


def _candidate(attempt: ContentFolder[Engine] | Unbuilt) -> Candidate:
    return attempt.candidate if isinstance(attempt, Unbuilt) else attempt.value.candidate


def _config(
    rules: Policy, report: ServingReport, attempts: Sequence[ContentFolder[Engine] | Unbuilt]
) -> str:
    best = report.best
    for attempt in attempts:
        if best is None or isinstance(attempt, Unbuilt):
            continue
        if attempt.value.candidate == best.candidate:
            return measured_config(
                rules.name, attempt.value, attempt.folder, best, model_uri=report.model_uri
            )
    return ""


def _unmeasured(
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
) -> Iterator[tuple[Candidate, str]]:
    for attempt in attempts:
        if isinstance(attempt, Unbuilt):
            yield attempt.candidate, f"not built: {attempt.why}"
        elif (obstacle := runnable_here(attempt.value)) is not None:
            yield attempt.value.candidate, obstacle
