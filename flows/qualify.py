"""Registered model -> ONNX -> engines -> verdicts -> benchmarks -> scorecard. Needs no person."""

from pathlib import Path
from typing import Any

from prefect import flow, unmapped
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from enginegate.benchmark.engine_alone import fastest_first
from enginegate.candidate import Engine, OnnxModel, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.devices import PartIdentity
from enginegate.evidence import Benchmark, Scorecard
from enginegate.policy import Policy, read_policy
from enginegate.repository import Layout
from enginegate.retention import marked_as_running
from enginegate.workspace import Workspace
from flows.notices import notify_of_question
from flows.pools import check_pools, is_made, qualify_on_pool
from flows.run_names import qualification_name, qualification_title
from flows.states import completed_as, end_of_qualification
from tasks.artifacts import log_result, show_scorecard
from tasks.benchmark import benchmark_engine, skip_hopeless
from tasks.build import build, check, export, resolve_version
from tasks.devices import all_made
from tasks.engine_speed import measure_alone, measure_eager
from tasks.record import (
    Qualification,
    digests_of,
    file_scorecard,
    gather_parts,
    gather_scorecard,
    make_scorecard,
)
from tasks.release import recover_interrupted
from tasks.repair import repair
from tasks.run_page import rename_run
from tasks.shadow import record_shadow
from tasks.validate import EvaluationSamples, Judgement, observe, validate
from validation.outputs import outputs_to_compare

_BUILDERS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2)


@flow(
    name="qualify",
    flow_run_name=qualification_name,
    task_runner=_BUILDERS,
    persist_result=False,
    validate_parameters=False,
)
def qualify(policy: Path, model_uri: str | None = None) -> Scorecard:
    """Collect all the evidence on every candidate of one model version.

    Everything is remembered by content: a second run with the same model, data, policy and versions
    builds and measures nothing, and a killed run continues where it was. What a killed promotion
    left in the live repository is finished or undone first.

    Args:
        policy: the model family's policy file.
        model_uri: another registry version than the policy's ``model.uri``.
    """
    origin = Path(policy)
    opened = read_policy(origin)
    if model_uri:
        opened = opened.with_model(model_uri)
    workspace = Workspace.of(opened)
    recover_interrupted(opened.live_tables, workspace)
    with marked_as_running(workspace, "qualify"):
        check(opened, origin, workspace, here=not opened.devices)
        resolved = opened.with_model(resolve_version(opened.model, workspace))
        rename_run(qualification_title(resolved.name, resolved.model.uri))
        source = export(resolved.model, resolved.data.evaluation, workspace)
        card = (
            _on_devices(resolved, origin, source, workspace)
            if resolved.devices
            else _qualified(resolved, source, workspace)
        )
    show_scorecard(card, workspace)
    log_result(card, origin)
    notify_of_question(card, opened, origin, workspace)
    name, message = end_of_qualification(card)
    return completed_as(name, card, message)


def _qualified(policy: Policy, source: ContentFolder[OnnxModel], workspace: Workspace) -> Scorecard:
    found = collect_evidence(policy, source, workspace)
    card = make_scorecard(found, policy.slo, policy.search, policy.target.repository, workspace)
    return file_scorecard(card, found, policy.slo, policy.approval, policy.signing, workspace)


def _on_devices(
    policy: Policy, origin: Path, source: ContentFolder[OnnxModel], workspace: Workspace
) -> Scorecard:
    """The parts of all kinds of device, which their pools make side by side, on one scorecard."""
    file, names = origin.absolute(), policy.device_names
    wanted = {name: identify_part(policy, name, source) for name in names}
    kinds = {name: policy.devices[name] for name in names}
    check_pools({n: kind for n, kind in kinds.items() if not is_made(wanted[n], kind, workspace)})
    waiting: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=len(names))
    with waiting as pools:
        asked = [
            pools.submit(
                qualify_on_pool,
                {
                    "identity": wanted[name],
                    "kind": policy.devices[name],
                    "policy": file,
                    "workspace": workspace,
                },
            )
            for name in names
        ]
        ended = [part.result(raise_on_failure=False) for part in asked]
    parts = all_made(dict(zip(names, ended, strict=True)))
    found = gather_parts(parts, source.value, policy.approval.expires_hours, workspace)
    card = gather_scorecard(parts, found[0], policy.target.repository, workspace)
    return file_scorecard(
        card, found[0], policy.slo, policy.approval, policy.signing, workspace, further=found[1:]
    )


def identify_part(policy: Policy, device: str, source: ContentFolder[OnnxModel]) -> PartIdentity:
    """What decides the part of one kind of device.

    Args:
        policy: the whole policy, for one version of the model.
        device: the kind.
        source: the version as ONNX.
    """
    data, live = digests_of(policy.data, None), None
    if policy.slo.faster_than == "champion":
        layout = Layout(policy.target.repository, policy.name)
        current = layout.current()
        live = layout.release(current.version).digest if current else None
    return PartIdentity(
        device=device,
        model=policy.name,
        model_uri=policy.model.uri,
        policy_sha256=policy.digest,
        onnx_sha256=source.value.file.sha256,
        evaluation_sha256=data.evaluation,
        calibration_sha256=data.calibration,
        live_sha256=live,
    )


def collect_evidence(
    policy: Policy, source: ContentFolder[OnnxModel], workspace: Workspace
) -> Qualification:
    """Everything that this machine can find out about every candidate of one model version.

    Args:
        policy: what is asked; of several kinds of device, that of one.
        source: the version as ONNX.
        workspace: remembers what was built, judged and measured.
    """
    tables, gates = policy.engine_tables, policy.gates
    # What is built is judged while the others are still building. Nothing is timed before all are.
    building = build.map(
        tables.candidates.all(), unmapped(tables), unmapped(source), unmapped(workspace)
    )
    shadow = record_shadow(policy.traffic_tables, tables, source, workspace)
    samples = EvaluationSamples(policy.data.evaluation, shadow.data, shadow.notes)
    asked = outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices)
    reference = observe(source, samples, asked, policy.evaluation, workspace)

    def judge(engine: ContentFolder[Engine] | Unbuilt) -> Judgement:
        return validate(engine, reference, gates, tables, workspace)

    engines, judged = [], []
    for future in building:
        engines.append(future.result())
        judged.append(judge(engines[-1]))
    repairs = [
        repair(engine, each.verdict, lambda e: judge(e).verdict, tables, source, workspace)
        for engine, each in zip(engines, judged, strict=True)
    ]
    repaired = [each.attempt for each in repairs if each and each.attempt]
    engines = [*engines, *repaired]
    judged += [judge(engine) for engine in repaired]
    verdicts = [each.verdict for each in judged]
    skipped = skip_hopeless(
        verdicts, policy.benchmark, policy.approval, policy.slo, policy.live_tables
    )
    speeds = [
        measure_alone(engine, policy.benchmark, policy.search, policy.traffic_tables, workspace)
        for engine in engines
    ]
    eager = measure_eager(
        source, tables, policy.benchmark, policy.search, policy.traffic_tables, workspace
    )
    measured: list[Benchmark | None] = [None] * len(engines)
    for place in fastest_first(speeds):
        if verdicts[place].candidate not in skipped:
            measured[place] = benchmark_engine(
                engines[place],
                policy.benchmark_tables,
                policy.live_tables,
                policy.traffic_tables,
                workspace,
                speeds[place],
            )
    return Qualification(
        policy_sha256=policy.digest,
        model=policy.name,
        model_uri=policy.model.uri,
        onnx=source.value,
        data=digests_of(policy.data, shadow.data),
        attempts=engines,
        verdicts=verdicts,
        results=[each.results for each in judged],
        benchmarks=measured,
        engine_speeds=speeds,
        eager_speeds=eager,
        approval_hours=policy.approval.expires_hours,
        unmeasured=skipped,
        curves={c: each.curve for each in repairs if each for c in each.candidates},
    )
