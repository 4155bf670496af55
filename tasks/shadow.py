"""A sample of traffic, recorded as live requests are."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import Candidate, Engine, EngineKind, OnnxModel, Precision
from enginegate.canonical import Record, canonical_json, sha256_bytes
from enginegate.data import DataSet, read_data, write_data
from enginegate.durable import write_file
from enginegate.engines import build_engine, open_reference, plan_engine, serving
from enginegate.errors import InputError, ServerError
from enginegate.evidence import Finding, Load, ServingConfig
from enginegate.policy import Policy, Shadow
from enginegate.sources import Kept
from enginegate.triton.deploy import ServedModel, deployed
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from enginegate.triton.trace import recorded
from enginegate.triton.trace_file import ShadowSample
from enginegate.triton.traffic import Traffic, run_load
from enginegate.workspace import Workspace
from validation.shadow import judge_recording

_log = logging.getLogger("enginegate.shadow")
_REFERENCE = Candidate(kind=EngineKind.ONNXRUNTIME, precision=Precision.FP32)
_SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


@dataclass(frozen=True, slots=True)
class ShadowTraffic:
    """Recorded requests, and what is known about the recording itself.

    Attributes:
        data: None when the policy names neither a sample nor traffic to record one from.
    """

    data: DataSet | None
    notes: tuple[Finding, ...] = ()


class _Notes(Record):
    """Kept beside a recorded sample."""

    sample_sha256: str
    findings: tuple[Finding, ...]


@task(task_run_name="record-shadow", cache_policy=NO_CACHE)
def record_shadow(rules: Policy, source: Kept[OnnxModel]) -> ShadowTraffic:
    """The policy's shadow sample, or one recorded now from the FP32 reference under Triton."""
    if rules.data.shadow is not None:
        return ShadowTraffic(read_data(rules.data.shadow))
    if rules.shadow is None:
        return ShadowTraffic(None)
    traffic = read_data(rules.shadow.traffic)
    traffic.check_fits(source.value.inputs)
    path = _place(rules, source.value, traffic)
    return _kept(path) or _record(rules, source, traffic, path)


def _record(rules: Policy, source: Kept[OnnxModel], traffic: DataSet, path: Path) -> ShadowTraffic:
    plan = plan_engine(source, _REFERENCE, policy=rules, calibration=None)
    sample = _capture(rules, build_engine(plan, Workspace.here().engines), traffic)
    data = _with_slices(sample.data, traffic)
    with open_reference(source.value, source.folder) as reference:
        integrity = judge_recording(sample.outputs, reference.run(dict(data.inputs)), data)
    write_data(data, path)
    notes = _Notes(sample_sha256=data.sha256, findings=(integrity,))
    write_file(path.with_suffix(".json"), notes.pretty_json(), mode=0o600)
    return ShadowTraffic(data, notes.findings)


def _capture(rules: Policy, reference: Kept[Engine], traffic: DataSet) -> ShadowSample:
    """Serve the reference, send the traffic, and record it through Triton's trace extension."""
    workspace, wanted = Workspace.here(), _wanted(rules)
    served = serving(reference.value, reference.folder)
    model = ServedModel.of(rules.name, reference.value, served)
    requests = wanted.max_samples * wanted.trace_rate
    load = Load(rate_per_s=wanted.rate_per_s, duration_s=requests / wanted.rate_per_s * 1.1, seed=0)
    _log.info("recording 1 of %d requests for %.0f s", wanted.trace_rate, load.duration_s)
    repository = workspace.scratch / "shadow" / "repository"
    repository.mkdir(parents=True, exist_ok=True)
    install = find_triton(workspace.root / "triton")
    with (
        start(install, repository, folder=workspace.logs / "shadow") as server,
        deployed(server, model) as deployment,
    ):
        deployment.serve(_SERVING)
        with recorded(
            server, model.name, one_in=wanted.trace_rate, max_requests=wanted.max_samples
        ) as recorder:
            sent = run_load(server.grpc, Traffic.from_data(model.name, traffic), load)
        recording = recorder.read()
    if sent.failed:
        raise ServerError(
            f"{sent.failed} of {len(sent.due_s)} requests failed while the shadow sample was "
            f"recorded: {sent.errors}. See {workspace.logs / 'shadow'}."
        )
    sample = recording.sample(f"shadow sample of {rules.model.uri}", wanted.max_samples)
    _log.info("%d requests recorded, %d damaged", len(sample.data), len(recording.lost))
    return sample


def _with_slices(sample: DataSet, traffic: DataSet) -> DataSet:
    """Recorded requests carry the id of the sample that was sent, so its slices are known."""
    places = {str(name): place for place, name in enumerate(traffic.ids)}
    order = np.array([places[str(name).rsplit(".", 1)[0]] for name in sample.ids])
    slices = {name: column[order] for name, column in traffic.slices.items()}
    return replace(sample, slices=slices)


def _place(rules: Policy, onnx: OnnxModel, traffic: DataSet) -> Path:
    deciding = {
        "onnx": onnx.file.sha256,
        "traffic": traffic.sha256,
        "shadow": _wanted(rules).digest,
        "name": rules.name,
    }
    return Workspace.here().shadow / f"{sha256_bytes(canonical_json(deciding))}.npz"


def _kept(path: Path) -> ShadowTraffic | None:
    """The sample recorded earlier, if both files are there and belong together."""
    try:
        notes = _Notes.read(path.with_suffix(".json"))
        data = read_data(path)
    except InputError:
        return None
    if data.sha256 != notes.sample_sha256:
        return None
    _log.info("%d requests recorded earlier", len(data))
    return ShadowTraffic(data, notes.findings)


def _wanted(rules: Policy) -> Shadow:
    if rules.shadow is None:
        raise InputError("The policy has no [shadow] table.")
    return rules.shadow
