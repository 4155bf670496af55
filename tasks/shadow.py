"""A sample of traffic: one that was recorded, or one recorded now as live requests are."""

import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.benchmark.deployed import ServedModel, deployed
from enginegate.candidate import Candidate, Engine, EngineKind, OnnxModel, Precision
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet, read_data
from enginegate.engines import build_engine, open_reference, plan_engine, serving
from enginegate.errors import DataError, EnginegateError, InputError
from enginegate.evidence import Finding
from enginegate.measurement import Load
from enginegate.policy import Policy
from enginegate.policy.recording import Shadow
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.serving import ServingConfig
from enginegate.shadow import (
    RecordingTarget,
    TrafficSample,
    called,
    is_sample,
    latest_sample,
    read_sample,
    record_sent,
)
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from enginegate.wording import counted
from enginegate.workspace import Workspace, remembered
from validation.drift import judge_drift, measure_drift
from validation.shadow import judge_recording, judge_version, not_replayable

_log = logging.getLogger("enginegate.shadow")
_REFERENCE = Candidate(kind=EngineKind.ONNXRUNTIME, precision=Precision.FP32)
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
    """A sample of ours.

    Attributes:
        version: the version it must be of, if it was recorded from the reference for this.
    """

    sample: TrafficSample
    version: int | None


class _Notes(Record):
    """What was found out about a sample, kept in the store."""

    findings: tuple[Finding, ...]


@task(task_run_name="record-shadow", cache_policy=NO_CACHE)
def record_shadow(rules: Policy, source: ContentFolder[OnnxModel]) -> ShadowTraffic:
    """The policy's shadow sample, the newest one of live traffic, or one recorded now."""
    found = _find(rules, source)
    if found is None:
        return ShadowTraffic(None)
    if isinstance(found, DataSet):
        found.check_fits(source.value.inputs)
        return ShadowTraffic(found, _drift(rules, found))
    sample = found.sample
    missing = {spec.name for spec in source.value.inputs} - set(sample.data.inputs)
    if missing & set(sample.info.withheld):
        note = not_replayable(sample.info.origin, sample.info.withheld, len(sample.data))
        return ShadowTraffic(None, (note,))
    sample.data.check_fits(source.value.inputs)
    notes = remembered(
        Workspace.of(rules).results / "shadow" / f"{_key(rules, source.value, found)}.json",
        _Notes,
        partial(_notes, rules, source, found),
        worth_keeping=lambda _: True,
    )
    return ShadowTraffic(sample.data, notes.findings)


def _find(rules: Policy, source: ContentFolder[OnnxModel]) -> _Recorded | DataSet | None:
    given, wanted, home = rules.data.shadow, rules.shadow, Workspace.of(rules).shadow
    if given is not None:
        return _Recorded(read_sample(given), None) if is_sample(given) else read_data(given)
    if wanted is None:
        return None
    if wanted.traffic is not None:
        return _recorded_here(rules, source, read_data(wanted.traffic))
    newest = latest_sample(home, rules.name)
    if newest is None:
        raise DataError(
            f"No live request to {rules.name} was recorded: {home} holds no sample of it.\n"
            "Record one with `enginegate shadow record`, name one in [data] shadow, or name inputs "
            "to send in [shadow] traffic."
        )
    return _Recorded(read_sample(newest), None)


def _recorded_here(rules: Policy, source: ContentFolder[OnnxModel], traffic: DataSet) -> _Recorded:
    traffic.check_fits(source.value.inputs)
    path = _place(rules, source.value, traffic)
    try:
        sample = read_sample(path)
    except InputError:
        _capture(rules, source, traffic, path)
        sample = read_sample(path)
    else:
        _log.info("%s recorded earlier", counted(sample.info.requests, "request"))
    return _Recorded(sample, _VERSION)


def _capture(rules: Policy, source: ContentFolder[OnnxModel], traffic: DataSet, path: Path) -> None:
    """Serve the reference, send the traffic, and record what was sent and answered."""
    plan = plan_engine(source, _REFERENCE, policy=rules, calibration=None)
    reference = build_engine(plan, Workspace.of(rules).engines)
    workspace, wanted, load = Workspace.of(rules), _wanted(rules), _load(_wanted(rules))
    model = _served(rules, reference)
    repository = workspace.scratch / "shadow" / "repository"
    repository.mkdir(parents=True, exist_ok=True)
    target = RecordingTarget(path, model.name, f"shadow sample of {rules.model.uri}")
    _log.info("recording 1 of %d requests for %.0f s", wanted.trace_rate, load.duration_s)
    with (
        start(
            find_triton(workspace.root / "triton"), repository, folder=workspace.logs / "shadow"
        ) as server,
        deployed(server, model) as deployment,
    ):
        deployment.serve(_SERVING)
        info = record_sent(server.grpc, traffic, wanted, load, target)
    _log.info("%s recorded", counted(info.requests, "request"))


def _served(rules: Policy, reference: ContentFolder[Engine]) -> ServedModel:
    served = serving(reference.value, reference.folder)
    return ServedModel.of(rules.name, reference.value, served)


def _load(wanted: Shadow) -> Load:
    if wanted.rate_per_s is None:
        raise EnginegateError("[shadow] traffic without rate_per_s passed the policy's checks.")
    requests = wanted.max_samples * wanted.trace_rate
    # Arrivals are random: so many more that one recording in 30,000 would still be too short.
    planned = requests + 4.0 * math.sqrt(requests)
    return Load(rate_per_s=wanted.rate_per_s, duration_s=planned / wanted.rate_per_s, seed=0)


def _notes(rules: Policy, source: ContentFolder[OnnxModel], found: _Recorded) -> _Notes:
    sample = found.sample
    version = judge_version(
        sample.info.model, sample.info.model_versions, wanted=rules.name, version=found.version
    )
    return _Notes(
        findings=(*_integrity(source, found), version, *_drift(rules, sample.data)),
    )


def _integrity(source: ContentFolder[OnnxModel], found: _Recorded) -> tuple[Finding, ...]:
    """Whether the reference answers as was recorded; a live release need not."""
    sample = found.sample
    if not sample.outputs:
        return ()
    data = sample.data.head(_INTEGRITY_ROWS)
    outputs = {name: array[:_INTEGRITY_ROWS] for name, array in sample.outputs.items()}
    with open_reference(source.value, source.folder) as reference:
        replayed = reference.run(dict(data.inputs))
    advisory = found.version is None or sample.info.rewritten
    return (judge_recording(outputs, replayed, data, advisory=advisory),)


def _drift(rules: Policy, sample: DataSet) -> tuple[Finding, ...]:
    """Whether it still looks like what int8 and fp8 scales were made from."""
    if rules.data.calibration is None:
        return ()
    calibration = read_data(rules.data.calibration).head(rules.calibration.max_samples)
    hook = rules.shadow.embedder if rules.shadow else None
    drifts = measure_drift(
        calibration, sample, embed=partial(called, hook) if hook is not None else None
    )
    limit = rules.shadow.max_psi if rules.shadow else None
    return (judge_drift(drifts, (len(calibration), len(sample)), limit),)


def _place(rules: Policy, onnx: OnnxModel, traffic: DataSet) -> Path:
    deciding = {
        "onnx": onnx.file.sha256,
        "traffic": traffic.sha256,
        "shadow": _wanted(rules).digest,
        "name": rules.name,
    }
    return Workspace.of(rules).shadow / sha256_bytes(canonical_json(deciding))


def _key(rules: Policy, onnx: OnnxModel, found: _Recorded) -> str:
    calibration = rules.data.calibration
    deciding = {
        "sample": found.sample.info.digest,
        "onnx": onnx.file.sha256,
        "name": rules.name,
        "version": found.version,
        "calibration": read_data(calibration).sha256 if calibration else None,
        "limits": rules.calibration.digest,
        "shadow": rules.shadow.digest if rules.shadow else None,
    }
    return sha256_bytes(canonical_json(deciding))


def _wanted(rules: Policy) -> Shadow:
    if rules.shadow is None:
        raise InputError("The policy has no [shadow] table.")
    return rules.shadow
