"""A fresh sample of live requests against FP32 and calibration, for the watch."""

import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import OnnxModel
from enginegate.data import DataSet, Tensors, read_data
from enginegate.decision import Release
from enginegate.engines import open_reference
from enginegate.errors import DataError, EnginegateError, InputError, ServerError
from enginegate.evidence import Finding, Outcome
from enginegate.policy import Policy
from enginegate.shadow import (
    TrafficSample,
    called,
    latest_sample,
    read_sample,
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
from validation.live_answers import agreeing, count_agreement, judge_agreement, judge_live_drift
from validation.output_spec import questions
from validation.watch import live_finding, not_measured

_log = logging.getLogger("enginegate.watch")
_ROWS = 1000
# Asked one after the other, beside the users' own requests.
_ASKED_ROWS = 200
_RECORD_EVERY = timedelta(hours=1)


@task(task_run_name="compare-live", cache_policy=NO_CACHE)
def compare_live(rules: Policy, release: Release) -> SampledTraffic:
    """Compare the newest sample with FP32, unless an earlier look at this release did so.

    Where the policy lets live traffic be recorded ([shadow] without traffic), one is recorded when
    the newest is used and an hour old. A sample that is there and cannot be compared is errored:
    nobody watches agreement then.
    """
    past = WatchLog.at(Workspace.of(rules), release).read()
    try:
        path = _fresh(rules, past)
        return _compared(rules, release, read_sample(path), past) if path else SampledTraffic()
    except _NotComparedError as error:
        _log.warning("no live sample was compared: %s", error)
        note = live_finding("agreement", Outcome.INCONCLUSIVE, str(error), advisory=True)
        return SampledTraffic((note,))
    except EnginegateError as error:
        return SampledTraffic((not_measured(f"a live sample could not be compared: {error}"),))


class _NotComparedError(InputError):
    """There is nothing to compare, and nobody asked for it."""


def _fresh(rules: Policy, past: tuple[WatchCheck, ...]) -> Path | None:
    """A sample that no look at this release has seen; recorded now where that may be done."""
    home, used = Workspace.of(rules).shadow, {look.sample for look in past}
    newest = latest_sample(home, rules.name)
    info = sample_info(newest) if newest else None
    if info is not None and info.digest not in used:
        return newest
    wanted, addresses = rules.shadow, live_addresses(rules.target)
    if wanted is None or wanted.traffic is not None or rules.data.shadow is not None:
        return None
    if addresses is None or (info is not None and now() - info.recorded_at < _RECORD_EVERY):
        return None
    try:
        server, duration_s = connect(addresses.grpc), rules.watch.look_s
        return record_live(server, rules.name, wanted, home=home, duration_s=duration_s)[0]
    except (DataError, ServerError) as error:
        # A server that is dead is told by the look itself; one without traces or users is no fault.
        raise _NotComparedError(f"No live request could be recorded: {error}") from error


def _compared(
    rules: Policy, release: Release, sample: TrafficSample, past: tuple[WatchCheck, ...]
) -> SampledTraffic:
    reference, folder = _reference(rules, release)
    missing = sorted({spec.name for spec in reference.inputs} - set(sample.data.inputs))
    if missing:
        raise _NotComparedError(
            f"{sample.info.origin} was recorded without {', '.join(missing)}, so FP32 cannot "
            "answer it. Let [shadow] keep the model's inputs to watch agreement."
        )
    sample.data.check_fits(reference.inputs)
    answered, found = _answers(rules, release, sample)
    with open_reference(reference, folder) as runner:
        expected = runner.run(dict(answered.inputs))
    gates = rules.gates_for(release.candidate.precision)
    agrees: NDArray[np.bool_] | None = np.ones(len(answered), np.bool_)
    for asked in questions(rules):
        one = agreeing(compare(expected, found, answered, "live", asked=asked), gates)
        agrees = None if one is None or agrees is None else agrees & one
    drift = _drift(rules, sample.data, past)
    if agrees is None:
        return SampledTraffic(drift, (), sample.info.digest)
    counts = count_agreement(agrees, dict(answered.slices), rules.slices.max_values)
    found_out = judge_agreement(counts, rules.watch, past)
    return SampledTraffic((*found_out, *drift), counts, sample.info.digest)


def _reference(rules: Policy, release: Release) -> tuple[OnnxModel, Path]:
    """The very model that the release was compared with before; MLflow is not needed for it."""
    workspace = Workspace.of(rules)
    wanted = workspace.scorecard(release.scorecard_sha256).onnx_sha256
    for manifest in sorted(workspace.onnx.glob("[!.]*/manifest.json")):
        onnx = OnnxModel.read(manifest)
        if onnx.file.sha256 == wanted:
            return onnx, manifest.parent
    raise InputError(
        f"The FP32 model {wanted[:12]} of release {release.version} is not in {workspace.onnx}. "
        "Run `enginegate qualify` on this machine, or share its workspace with the watch."
    )


def _answers(rules: Policy, release: Release, sample: TrafficSample) -> tuple[DataSet, Tensors]:
    """What this release answered when it was recorded; else what it answers now."""
    names = {spec.name for spec in release.outputs}
    ours = np.flatnonzero(sample.model_versions == release.version)[:_ROWS]
    if len(ours) and names <= set(sample.outputs) and not sample.info.rewritten:
        recorded = {name: np.asarray(sample.outputs[name][ours]) for name in names}
        return _rows(sample.data, ours), recorded
    rows = sample.data.head(_ASKED_ROWS)
    addresses = live_addresses(rules.target)
    if addresses is None:
        raise ServerError("no live server is known")
    with TritonClient(addresses.grpc) as client:
        replies = [
            client.infer(rules.name, inputs, version=str(release.version)).outputs
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


def _drift(rules: Policy, data: DataSet, past: tuple[WatchCheck, ...]) -> tuple[Finding, ...]:
    if rules.data.calibration is None:
        return ()
    calibration = read_data(rules.data.calibration).head(rules.calibration.max_samples)
    hook = rules.shadow.embedder if rules.shadow else None
    drifts = measure_drift(calibration, data, embed=partial(called, hook) if hook else None)
    return (judge_live_drift(drifts, (len(calibration), len(data)), rules.watch, past),)
