"""Registered model -> ONNX -> engines -> benchmarks: the serving half of a qualification, alone."""

from typing import Any

from prefect import flow, unmapped
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from enginegate.candidate import Candidate
from enginegate.policy import Policy
from enginegate.retention import marked_as_running
from enginegate.workspace import Workspace
from flows.run_names import benchmark_name
from tasks.benchmark import BenchmarkReport, benchmark_engine, report_benchmarks
from tasks.build import build, export, resolve_version

_BUILDERS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2)


@flow(
    name="benchmark",
    flow_run_name=benchmark_name,
    task_runner=_BUILDERS,
    persist_result=False,
    validate_parameters=False,
)
def benchmark_candidates(policy: Policy, candidates: tuple[Candidate, ...]) -> BenchmarkReport:
    """Build what is missing and benchmark it; nothing is judged, recorded or published.

    Args:
        policy: perhaps with another load or rate than its file.
        candidates: which of its candidates.
    """
    workspace = Workspace.of(policy)
    with marked_as_running(workspace, "benchmark"):
        return _benchmarked(policy, candidates, workspace)


def _benchmarked(
    policy: Policy, candidates: tuple[Candidate, ...], workspace: Workspace
) -> BenchmarkReport:
    policy = policy.with_model(resolve_version(policy.model, workspace))
    engine_tables, tables, live = policy.engine_tables, policy.benchmark_tables, policy.live_tables
    source = export(policy.model, policy.data.evaluation, workspace)
    engines = build.map(
        candidates, unmapped(engine_tables), unmapped(source), unmapped(workspace)
    ).result()
    measured = [
        benchmark_engine(engine, tables, live, policy.traffic_tables, workspace)
        for engine in engines
    ]
    return report_benchmarks(
        engines,
        measured,
        tables,
        live,
        model_uri=policy.model.uri,
        left_out=set(policy.candidates.all()) - set(candidates),
    )
