"""Registered model -> ONNX -> engines -> benchmarks: the serving half of a qualification, alone."""

from typing import Any

from prefect import flow, unmapped
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from enginegate.candidate import Candidate
from enginegate.policy import Policy
from tasks.benchmark import benchmark
from tasks.benchmark_report import BenchmarkReport, report_benchmarks
from tasks.build import build
from tasks.export import export, resolve

_BUILDERS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2)


@flow(
    name="benchmark",
    task_runner=_BUILDERS,
    persist_result=False,
    validate_parameters=False,
)
def benchmark_candidates(rules: Policy, candidates: tuple[Candidate, ...]) -> BenchmarkReport:
    """Build what is missing and benchmark it; nothing is judged, recorded or published.

    Args:
        rules: the policy, perhaps with another load or rate.
        candidates: which of its candidates.
    """
    rules = resolve(rules)
    source = export(rules)
    engines = build.map(candidates, unmapped(rules), unmapped(source)).result()
    measured = [benchmark(rules, engine) for engine in engines]
    return report_benchmarks(rules, engines, measured)
