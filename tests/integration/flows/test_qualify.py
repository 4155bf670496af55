"""The qualify flow on real parts: registry, ONNX Runtime, TensorRT-RTX, Triton, MLflow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate.data import write_data
from enginegate.errors import InputError, ModelError, PolicyError, TrackingError
from enginegate.evidence import Outcome
from enginegate.tracking import Tracker
from flows.qualify import qualify
from tests.fakes.family import samples

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def stored(family):
    """Every file in the store that holds something finished."""
    return sorted(
        path
        for folder in ("store", "scorecards")
        for path in (family.workspace.root / folder).rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    )


def test_every_candidate_is_in_the_scorecard(qualified):
    """What can run passed or failed on evidence; what cannot is inconclusive, never dropped."""
    outcomes = {v.candidate.name: qualified.outcome(v.candidate) for v in qualified.verdicts}

    assert set(outcomes) == {"onnxruntime-fp32", "onnxruntime-int8", "tensorrt-fp16"}
    assert outcomes["onnxruntime-fp32"] is Outcome.PASSED
    assert outcomes["tensorrt-fp16"] is Outcome.INCONCLUSIVE
    unrunnable = next(v for v in qualified.verdicts if v.candidate.name == "tensorrt-fp16")
    assert "no device can run it here" in unrunnable.findings[0].reason
    assert qualified.winner is not None


def test_engines_that_run_here_are_measured_alone(qualified):
    """Each with several windows a batch size, bound to the bytes that were judged."""
    speeds = {speed.candidate.name: speed for speed in qualified.engine_speeds}

    assert set(speeds) == {"onnxruntime-fp32", "onnxruntime-int8"}
    for speed in speeds.values():
        assert speed.batches[0].batch_size == 1
        assert min(len(batch.windows_per_s) for batch in speed.batches) >= 3
        assert speed.engine_sha256 == qualified.verdict(speed.candidate).engine_sha256
    assert qualified.engine_share(qualified.winner) > 0


def test_passed_verdict_rests_on_labelled_and_shadow_data(qualified):
    """Labelled data, the shadow sample, its integrity, and slices, each with its numbers."""
    verdict = qualified.verdict(qualified.winner)
    scopes = {(f.gate, f.scope) for f in verdict.findings}

    assert ("accuracy_loss", "evaluation") in scopes
    assert ("top1_agreement", "shadow") in scopes
    assert ("shadow_integrity", "shadow") in scopes
    assert any(scope.startswith("evaluation/light=") for _, scope in scopes)
    assert all(f.samples for f in verdict.findings if f.gate == "accuracy_loss")


def test_mlflow_has_a_run_for_each_candidate(qualified, family):
    """A parent run with the scorecard's digest, and a child for each candidate with its numbers."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    parent = tracker.client.get_run(qualified.mlflow_run)
    children = tracker.client.search_runs(
        [parent.info.experiment_id],
        filter_string=f"tags.`mlflow.parentRunId` = '{qualified.mlflow_run}'",
    )

    assert parent.info.status == "FINISHED"
    assert {run.data.params["precision"] for run in children} == {"fp32", "int8", "fp16"}
    winner = next(
        run
        for run in children
        if (run.data.params["kind"], run.data.params["precision"])
        == (qualified.winner.kind, qualified.winner.precision)
    )
    assert winner.data.metrics["perf/p99_ms"] > 0
    filed = {entry.path for entry in tracker.client.list_artifacts(qualified.mlflow_run)}
    assert {"serving.html", "serving.json", "plots"} <= filed
    served = tracker.client.download_artifacts(winner.info.run_id, "serving/config.pbtxt")
    assert "# 4 is the only value" in Path(served).read_text()


def test_second_qualification_reuses_everything(qualified, family):
    """Same model, data, policy and versions: the same scorecard, and not one new file.

    Only a benchmark that decided nothing is not kept: that one is made again, and nothing else.
    """
    before = stored(family)

    again = qualify(family.policy)

    decided = [b for b in qualified.benchmarks if b.outcome in {Outcome.PASSED, Outcome.FAILED}]
    assert decided
    assert [b for b in again.benchmarks if b in decided] == decided
    assert set(before) <= set(stored(family))
    if decided == list(qualified.benchmarks):
        assert again.digest == qualified.digest
        assert stored(family) == before


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (("models:/tiny/1", "models:/tiny/99"), ModelError, r"models:/tiny/99.*versions: 1"),
        (("models:/tiny/1", "models:/absent/1"), ModelError, r"no model 'absent'.*tiny"),
        (("p99_ms", "p99_millis"), PolicyError, r"slo\.p99_millis"),
        (
            ("{root}/evaluation.npz", "{root}/nothing.npz"),
            PolicyError,
            r"no data at .*nothing\.npz",
        ),
        (
            ("[shadow]", '[shadow]\nslicer = "mine:absent"'),
            PolicyError,
            r"shadow\.slicer.*no module mine",
        ),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(family, tmp_path, edit, error, message):
    """The message says which file or setting; no engine, run or scorecard is made."""
    old, new = (part.replace("{root}", str(family.root)) for part in edit)
    before = stored(family)

    with pytest.raises(error, match=f"(?s){message}"):
        qualify(family.edited(tmp_path / "policy.toml", (old, new)))

    assert stored(family) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda x: np.where(np.arange(x.size).reshape(x.shape) == 33, np.float32("nan"), x),
            "sample 2",
        ),
        (lambda x: x[:, :8], r"shape \(600, 8\)"),
        (lambda x: x.astype(np.float64), "data.evaluation x: float64"),
    ],
    ids=["nan", "shape", "type"],
)
def test_spoilt_evaluation_data_is_refused(family, tmp_path, spoil, message):
    """Data that would make every number wrong stops the flow before anything is built."""
    good = samples(600, 1)
    x = spoil(good.inputs["x"])
    spoilt = replace(good, inputs={"x": x})
    write_data(spoilt, tmp_path / "spoilt.npz")
    policy = family.edited(
        tmp_path / "policy.toml", (f"{family.root}/evaluation.npz", f"{tmp_path}/spoilt.npz")
    )

    with pytest.raises(InputError, match=message):
        qualify(policy)


def test_unreachable_mlflow_is_named(family, monkeypatch):
    """The address and what to do, within seconds."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")

    with pytest.raises(TrackingError, match=r"/proc/nowhere"):
        qualify(family.policy)


def test_failed_candidate_is_not_benchmarked(qualified, family, tmp_path):
    """It could not win; the scorecard says so, and a key of the policy brings it back."""
    del qualified  # its engines, and its benchmarks of them, are found again
    strict = ("[slo]", "[gates.int8]\nmax_abs_error = 1e-9\n\n[repair]\nmax_builds = 0\n\n[slo]")
    also = ("[benchmark]", "[benchmark]\nalso_failed = true")

    card = qualify(family.edited(tmp_path / "strict.toml", strict))
    everything = qualify(family.edited(tmp_path / "also.toml", strict, also))

    assert card.unmeasured == {"onnxruntime-int8": "verdict failed (max_abs_error)"}
    assert [found.candidate.name for found in card.benchmarks] == ["onnxruntime-fp32"]
    assert everything.unmeasured == {}
    assert len(everything.benchmarks) == 2
