"""A fresh sample of live requests against FP32 and calibration, for the watch."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import OnnxModel
from enginegate.data import DataSet, Tensors
from enginegate.data_sources import load_data
from enginegate.decision import Release
from enginegate.engines import open_reference
from enginegate.errors import DataError, EnginegateError, InputError, ServerError
from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import Gates, gates_for
from enginegate.policy.operating import LiveTables, Watch
from enginegate.policy.recording import TrafficTables
from enginegate.shadow import (
    TrafficSample,
    call_hook,
    latest_sample,
    read_traffic_sample,
    record_live,
    sample_info,
)
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import live_addresses
from enginegate.triton.server import connect
from enginegate.watch.log import SampledTraffic, WatchCheck, WatchLog
from enginegate.workspace import Workspace, now
from validation.agreement import compare
from validation.drift import measure_drift
from validation.live import (
    agreeing,
    count_agreement,
    judge_agreement,
    judge_live_drift,
    live_finding,
    not_measured,
)
from validation.outputs import OutputSpec

_log = logging.getLogger("enginegate.watch")
_ROWS = 1000
# Asked one after the other, beside the users' own requests.
_ASKED_ROWS = 200
_RECORD_EVERY = timedelta(hours=1)


@task(task_run_name="compare-live-{release.version}", cache_policy=NO_CACHE)
def compare_live(
    release: Release,
    tables: LiveTables,
    traffic: TrafficTables,
    gates: Mapping[Any, Gates],
    asked: tuple[OutputSpec, ...],
    workspace: Workspace,
) -> SampledTraffic:
    """Compare the newest sample with FP32, unless an earlier check of this release did so.

    Where the policy lets live traffic be recorded ([shadow] without traffic), one is recorded when
    the newest is used and an hour old. A sample that is there and cannot be compared is errored:
    agreement is not watched then.

    Args:
        release: what is live.
        tables: where, and what it is held to.
        traffic: what may be recorded, and what its inputs are compared with.
        gates: what agreement means, by precision.
        asked: what each output means.
        workspace: keeps samples, the FP32 model, and earlier checks.
    """
    past = WatchLog.at(workspace, release).read()
    try:
        path = _unused_sample(tables, traffic, past, workspace)
        if path is None:
            return SampledTraffic()
        sample = read_traffic_sample(path)
        agrees = _agreeing(release, tables, sample, gates, asked, workspace)
        drift = _drift(traffic, tables.watch, sample.data, past)
    except _NotComparedError as error:
        _log.warning("no live sample was compared: %s", error)
        note = live_finding("agreement", Outcome.INCONCLUSIVE, str(error), advisory=True)
        return SampledTraffic((note,))
    except EnginegateError as error:
        return SampledTraffic((not_measured(f"a live sample could not be compared: {error}"),))
    if agrees is None:
        return SampledTraffic(drift, (), sample.info.digest)
    rows, agreed = agrees
    counts = count_agreement(agreed, dict(rows.slices), asked[0].max_values)
    findings = judge_agreement(counts, tables.watch, past)
    return SampledTraffic((*findings, *drift), counts, sample.info.digest)


class _NotComparedError(InputError):
    """There is no sample to compare, and the policy names none."""


def _unused_sample(
    tables: LiveTables,
    traffic: TrafficTables,
    past: tuple[WatchCheck, ...],
    workspace: Workspace,
) -> Path | None:
    """A sample that no check of this release has used; recorded now where that may be done."""
    home, used = workspace.shadow, {check.sample for check in past}
    newest = latest_sample(home, tables.model)
    info = sample_info(newest) if newest else None
    if info is not None and info.digest not in used:
        return newest
    wanted, addresses = traffic.shadow, live_addresses(tables.target)
    if wanted is None or wanted.traffic is not None or traffic.data.shadow is not None:
        return None
    if addresses is None or (info is not None and now() - info.recorded_at < _RECORD_EVERY):
        return None
    try:
        server, duration_s = connect(addresses.grpc), tables.watch.look_s
        return record_live(server, tables.model, wanted, home=home, duration_s=duration_s)[0]
    except (DataError, ServerError) as error:
        # A dead server fails the check itself; a server without traces or users is no fault.
        raise _NotComparedError(f"No live request could be recorded: {error}") from error


def _agreeing(
    release: Release,
    tables: LiveTables,
    sample: TrafficSample,
    gates: Mapping[Any, Gates],
    asked: tuple[OutputSpec, ...],
    workspace: Workspace,
) -> tuple[DataSet, NDArray[np.bool_]] | None:
    """The rows that were compared, and which agree with FP32; None: no gate says what agreeing is.

    Raises:
        _NotComparedError: the sample was recorded without an input.
    """
    reference, folder = _reference(release, workspace)
    missing = sorted({spec.name for spec in reference.inputs} - set(sample.data.inputs))
    if missing:
        raise _NotComparedError(
            f"{sample.info.origin} was recorded without {', '.join(missing)}, so FP32 cannot "
            "answer it. Let [shadow] keep the model's inputs to watch agreement."
        )
    sample.data.in_types(reference.inputs).check_fits(reference.inputs)
    rows, answers = _answers(release, tables, sample)
    with open_reference(reference, folder) as runner:
        expected = runner.run(dict(rows.in_types(reference.inputs).inputs))
    limits = gates_for(gates, release.engine.candidate.precision)
    agrees = np.ones(len(rows), np.bool_)
    for spec in asked:
        one = agreeing(compare(expected, answers, rows, "live", asked=spec), limits)
        if one is None:
            return None
        agrees &= one
    return rows, agrees


def _reference(release: Release, workspace: Workspace) -> tuple[OnnxModel, Path]:
    """The very model that the release was compared with before; MLflow is not needed for it."""
    wanted = workspace.scorecard(release.scorecard_sha256).onnx_sha256
    for manifest in sorted(workspace.onnx.glob("[!.]*/manifest.json")):
        onnx = OnnxModel.read(manifest)
        if onnx.file.sha256 == wanted:
            return onnx, manifest.parent
    raise InputError(
        f"The FP32 model {wanted[:12]} of release {release.version} is not in {workspace.onnx}. "
        "Run `enginegate qualify` on this machine, or share its workspace with the watch."
    )


def _answers(
    release: Release, tables: LiveTables, sample: TrafficSample
) -> tuple[DataSet, Tensors]:
    """Recorded answers of this release; without any, its answers now."""
    names = {spec.name for spec in release.outputs}
    recorded = np.flatnonzero(sample.model_versions == release.version)[:_ROWS]
    if len(recorded) and names <= set(sample.outputs) and not sample.info.rewritten:
        answers = {name: np.asarray(sample.outputs[name][recorded]) for name in names}
        return _rows(sample.data, recorded), answers
    rows = sample.data.head(_ASKED_ROWS)
    addresses = live_addresses(tables.target)
    if addresses is None:
        raise ServerError("no live server is known")
    with TritonClient(addresses.grpc) as client:
        replies = [
            client.infer(tables.model, inputs, version=str(release.version)).outputs
            for inputs in rows.batches(1)
        ]
    return rows, {name: np.concatenate([reply[name] for reply in replies]) for name in names}


def _rows(data: DataSet, rows: NDArray[np.int64]) -> DataSet:
    return replace(
        data,
        inputs={name: np.asarray(array[rows]) for name, array in data.inputs.items()},
        labels=None,
        ids=data.ids[rows],
        slices={name: column[rows] for name, column in data.slices.items()},
        targets={},
    )


def _drift(
    traffic: TrafficTables, limits: Watch, data: DataSet, past: tuple[WatchCheck, ...]
) -> tuple[Finding, ...]:
    if traffic.data.calibration is None:
        return ()
    calibration = load_data(traffic.data.calibration).head(traffic.calibration.max_samples)
    hook = traffic.shadow.embedder if traffic.shadow else None
    drifts = measure_drift(calibration, data, embed=partial(call_hook, hook) if hook else None)
    return (judge_live_drift(drifts, (len(calibration), len(data)), limits, past),)
