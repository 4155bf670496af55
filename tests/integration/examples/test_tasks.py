"""An example of every task: its policy is whole, and ONNX Runtime's int8 is judged as it should."""

from dataclasses import replace

import numpy as np
import pytest

from enginegate.candidate import Candidate
from enginegate.data_sources import load_data
from enginegate.engines import build_engine, open_onnx, plan_engine
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.sources import onnx_from_source
from enginegate.workspace import Workspace
from examples.tasks.models import EXAMPLES
from tasks.validate import EvaluationSamples, observe, validate
from validation.outputs import outputs_to_compare


def judged(example, folder, precision="int8"):
    """The policy, and the verdict on one candidate of ONNX Runtime."""
    policy = read_policy(example.write(folder))
    workspace = Workspace.of(policy)
    data = load_data(policy.data.evaluation)
    onnx = onnx_from_source(
        policy.model, data, onnx_root=folder / "onnx", tracking_uri="", open_onnx=open_onnx
    )
    calibration = load_data(policy.data.calibration)
    plan = plan_engine(
        onnx,
        Candidate.parse(f"onnxruntime-{precision}"),
        tables=policy.engine_tables,
        calibration=calibration,
    )
    asked = outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices)
    samples = EvaluationSamples(policy.data.evaluation)
    reference = observe.fn(onnx, samples, asked, policy.evaluation, workspace)
    engine = build_engine(plan, folder / "engines")
    made = validate.fn(engine, reference, policy.gates, policy.engine_tables, workspace)
    return made.verdict


SCORES = {
    "multi_label": "label_f1",
    "regression": "r2",
    "embedding": "recall",
    "segmentation": "miou",
    "detection": "map",
    "multi_output": "accuracy",
    "metric": "within_a_tenth",
}
CLASSES = {"multi_label": 3, "segmentation": 3, "detection": 2}


@pytest.mark.parametrize("name", EXAMPLES)
def test_int8_is_judged_by_the_score_of_its_task(name, tmp_path):
    """It passes by the standard tolerances; FP32's own score is shown and better than chance."""
    verdict = judged(EXAMPLES[name](), tmp_path)

    assert verdict.outcome is Outcome.PASSED, [f.reason for f in verdict.blocking]
    loss = verdict.task_loss
    assert loss.gate == f"{SCORES[name]}_loss"
    assert loss.low <= loss.value <= loss.high <= loss.limit
    own = verdict.finding(f"{SCORES[name]}_fp32", loss.scope)
    assert own.outcome is (Outcome.INCONCLUSIVE if name == "metric" else Outcome.PASSED)
    assert own.value > 0.6
    by_class = [f for f in verdict.task_losses if "/class=" in f.scope]
    assert len(by_class) == CLASSES.get(name, 0)


@pytest.mark.parametrize(
    ("name", "permuted"),
    [
        pytest.param("multi_label", lambda labels: np.roll(labels, 1, axis=0), id="multi-label"),
        pytest.param("segmentation", lambda labels: (labels + 1) % 3, id="segmentation"),
        pytest.param("detection", lambda labels: np.roll(labels, 1, axis=0), id="detection"),
    ],
)
def test_permuted_labels_pass_nobody(name, permuted, tmp_path):
    """FP32 is no better than chance on labels of other samples or classes, so nothing is shown."""
    example = EXAMPLES[name]()
    (label,) = (key for key in example.rows if key.startswith("label"))
    rows = example.rows | {label: permuted(example.rows[label])}

    verdict = judged(replace(example, rows=rows), tmp_path)

    loss = verdict.finding(f"{SCORES[name]}_loss", "evaluation")
    assert loss.outcome is Outcome.INCONCLUSIVE
    assert "FP32 itself scores" in loss.reason
