"""A sample of traffic: one that was recorded, or one recorded now as live requests are."""

import logging
import math
from dataclasses import dataclass
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import OnnxModel
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.engines import REFERENCE, build_engine, open_reference, plan_engine, serving
from enginegate.errors import DataError, EnginegateError, InputError
from enginegate.evidence import Finding
from enginegate.loadgen.sent_sample import record_sent
from enginegate.measurement import Load
from enginegate.messages import counted
from enginegate.policy.building import EngineTables
from enginegate.policy.recording import Shadow, TrafficTables
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.report.progress import told_as
from enginegate.serving import ServingConfig
from enginegate.shadow import (
    RecordingTarget,
    TrafficSample,
    call_hook,
    is_sample,
    latest_sample,
    read_traffic_sample,
)
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from enginegate.workspace import Workspace, remembered
from validation.drift import judge_drift, measure_drift
from validation.shadow import judge_recording, judge_version, not_replayable

_log = logging.getLogger("enginegate.shadow")
_SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
# Of the one version that is deployed to be recorded.
_VERSION = 1
# Another model differs on the first rows as on all.
_INTEGRITY_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ShadowTraffic:
    """Recorded requests, and what is known about the recording itself.

    Attributes:
        data: None when the policy names neither a sample nor a way to get one, or when the inputs
            were redacted; the notes then say so.
    """

    data: DataSet | None
    notes: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A sample that this program recorded or imported.

    Attributes:
        version: the version it must be of, if it was recorded from the reference for this.
    """

    sample: TrafficSample
    version: int | None


class _Notes(Record):
    """Findings about a sample, kept in the store."""

    findings: tuple[Finding, ...]


@task(task_run_name="record-shadow", cache_policy=NO_CACHE)
@told_as("live traffic")
def record_shadow(
    traffic: TrafficTables,
    tables: EngineTables,
    source: ContentFolder[OnnxModel],
    workspace: Workspace,
) -> ShadowTraffic:
    """The policy's shadow sample, the newest one of live traffic, or one recorded now."""
    recorded = _find(traffic, tables, source, workspace)
    if recorded is None:
        return ShadowTraffic(None)
    if isinstance(recorded, DataSet):
        recorded.check_fits(source.value.inputs)
        return ShadowTraffic(recorded, _drift(traffic, recorded))
    sample = recorded.sample
    missing = {spec.name for spec in source.value.inputs} - set(sample.data.inputs)
    if missing & set(sample.info.withheld):
        note = not_replayable(sample.info.origin, sample.info.withheld, len(sample.data))
        return ShadowTraffic(None, (note,))
    # Recorded in front of an engine that may take fewer bits than the model.
    data = sample.data.in_types(source.value.inputs)
    data.check_fits(source.value.inputs)
    notes = remembered(
        workspace.results / "shadow" / f"{_key(traffic, source.value, recorded)}.json",
        _Notes,
        partial(_notes, traffic, source, recorded),
        worth_keeping=lambda _: True,
    )
    return ShadowTraffic(data, notes.findings)


def _find(
    traffic: TrafficTables,
    tables: EngineTables,
    source: ContentFolder[OnnxModel],
    workspace: Workspace,
) -> _Recorded | DataSet | None:
    given, wanted, home = traffic.data.shadow, traffic.shadow, workspace.shadow
    if given is not None:
        if given.path is not None and is_sample(given.path):
            return _Recorded(read_traffic_sample(given.path), None)
        return load_data(given)
    if wanted is None:
        return None
    if wanted.traffic is not None:
        return _recorded_here(traffic.model, wanted, tables, source, workspace)
    newest = latest_sample(home, traffic.model)
    if newest is None:
        raise DataError(
            f"No live request to {traffic.model} was recorded: {home} holds no sample of it.\n"
            "Record one with `enginegate shadow record`, name one in [data] shadow, or name inputs "
            "to send in [shadow] traffic."
        )
    return _Recorded(read_traffic_sample(newest), None)


def _recorded_here(
    model: str,
    wanted: Shadow,
    tables: EngineTables,
    source: ContentFolder[OnnxModel],
    workspace: Workspace,
) -> _Recorded:
    """Serve the reference, send the traffic, and record what was sent and answered; once."""
    data = load_data(wanted.traffic) if wanted.traffic is not None else None
    if data is None:
        raise InputError("The policy names no [shadow] traffic to send.")
    data.check_fits(source.value.inputs)
    deciding = {
        "onnx": source.value.file.sha256,
        "traffic": data.sha256,
        "shadow": wanted.digest,
        "name": model,
    }
    path = workspace.shadow / sha256_bytes(canonical_json(deciding))
    try:
        sample = read_traffic_sample(path)
    except InputError:
        plan = plan_engine(source, REFERENCE, tables=tables, calibration=None)
        reference = build_engine(plan, workspace.engines)
        served = serving(reference.value, reference.folder)
        deployment = ServedModel.of(model, reference.value, served)
        target = RecordingTarget(path, model, f"shadow sample of {source.value.source}")
        _capture(deployment, data, wanted, target, workspace)
        sample = read_traffic_sample(path)
    else:
        _log.info("%s recorded earlier", counted(sample.info.requests, "request"))
    return _Recorded(sample, _VERSION)


def _capture(
    model: ServedModel,
    data: DataSet,
    wanted: Shadow,
    target: RecordingTarget,
    workspace: Workspace,
) -> None:
    load, repository = _load(wanted), workspace.scratch / "shadow" / "repository"
    repository.mkdir(parents=True, exist_ok=True)
    _log.info("recording 1 of %d requests for %.0f s", wanted.trace_rate, load.duration_s)
    with (
        start(
            find_triton(workspace.root / "triton"), repository, folder=workspace.logs / "shadow"
        ) as server,
        deploy(server, model) as deployment,
    ):
        deployment.serve(_SERVING)
        info = record_sent(server.grpc, data, wanted, load, target)
    _log.info("%s recorded", counted(info.requests, "request"))


def _load(wanted: Shadow) -> Load:
    if wanted.rate_per_s is None:
        raise EnginegateError("[shadow] traffic without rate_per_s passed the policy's checks.")
    requests = wanted.max_samples * wanted.trace_rate
    # Arrivals are random: so many more that one recording in 30,000 would still be too short.
    planned = requests + 4.0 * math.sqrt(requests)
    return Load(rate_per_s=wanted.rate_per_s, duration_s=planned / wanted.rate_per_s, seed=0)


def _notes(traffic: TrafficTables, source: ContentFolder[OnnxModel], recorded: _Recorded) -> _Notes:
    sample = recorded.sample
    version = judge_version(
        sample.info.model,
        sample.info.model_versions,
        wanted=traffic.model,
        version=recorded.version,
    )
    return _Notes(
        findings=(*_integrity(source, recorded), version, *_drift(traffic, sample.data)),
    )


def _integrity(source: ContentFolder[OnnxModel], recorded: _Recorded) -> tuple[Finding, ...]:
    """Whether the reference answers as was recorded; a live release need not."""
    sample = recorded.sample
    if not sample.outputs:
        return ()
    data = sample.data.head(_INTEGRITY_ROWS).in_types(source.value.inputs)
    outputs = {name: array[:_INTEGRITY_ROWS] for name, array in sample.outputs.items()}
    with open_reference(source.value, source.folder) as reference:
        replayed = reference.run(dict(data.inputs))
    advisory = recorded.version is None or sample.info.rewritten
    return (judge_recording(outputs, replayed, data, advisory=advisory),)


def _drift(traffic: TrafficTables, sample: DataSet) -> tuple[Finding, ...]:
    """Whether it still looks like what int8 and fp8 scales were made from."""
    if traffic.data.calibration is None:
        return ()
    calibration = load_data(traffic.data.calibration).head(traffic.calibration.max_samples)
    hook = traffic.shadow.embedder if traffic.shadow else None
    drifts = measure_drift(
        calibration, sample, embed=partial(call_hook, hook) if hook is not None else None
    )
    limit = traffic.shadow.max_psi if traffic.shadow else None
    return (judge_drift(drifts, (len(calibration), len(sample)), limit),)


def _key(traffic: TrafficTables, onnx: OnnxModel, recorded: _Recorded) -> str:
    calibration = traffic.data.calibration
    deciding = {
        "sample": recorded.sample.info.digest,
        "onnx": onnx.file.sha256,
        "name": traffic.model,
        "version": recorded.version,
        "calibration": load_data(calibration).sha256 if calibration else None,
        "limits": traffic.calibration.digest,
        "shadow": traffic.shadow.digest if traffic.shadow else None,
    }
    return sha256_bytes(canonical_json(deciding))
