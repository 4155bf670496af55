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
from enginegate.policy.benchmarking import BenchmarkTables
from enginegate.policy.operating import LiveTables
from enginegate.report import ServingReport
from enginegate.repository import Layout
from validation.choice import choose_served
from validation.speedup import with_speed


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


@task(task_run_name="report-benchmarks", cache_policy=NO_CACHE)
def report_benchmarks(
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    benchmarks: Sequence[Benchmark | None],
    tables: BenchmarkTables,
    live_tables: LiveTables,
    *,
    model_uri: str,
    left_out: set[Candidate],
) -> BenchmarkReport:
    """The best of what was measured, and its configuration.

    Args:
        attempts: the engines.
        benchmarks: one for each; None: it was not measured.
        tables: what serving had to deliver.
        live_tables: where the model is live.
        model_uri: which version of it was measured.
        left_out: candidates of the policy that are no part of this run.
    """
    layout = Layout(live_tables.target.repository, live_tables.model)
    current = layout.current()
    live = layout.release(current.version).engine.engine_sha256 if current else None
    judged = with_speed(benchmarks, tables.slo, tables.search, live=live, left_out=left_out)
    measured = tuple(found for found in judged if found is not None)
    choice = choose_served(measured, tables.search)
    report = ServingReport(
        model=live_tables.model,
        model_uri=model_uri,
        slo=tables.slo,
        candidates=measured,
        winner=choice.winner,
        reason=choice.reason,
        tied=choice.tied,
    )
    return BenchmarkReport(report, _config(report, attempts), dict(_unmeasured(attempts)))


def _config(report: ServingReport, attempts: Sequence[ContentFolder[Engine] | Unbuilt]) -> str:
    best = report.best
    for attempt in attempts:
        if best is None or isinstance(attempt, Unbuilt):
            continue
        if attempt.value.candidate == best.candidate:
            return measured_config(
                report.model, attempt.value, attempt.folder, best, model_uri=report.model_uri
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
