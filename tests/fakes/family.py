"""A small model family: an ONNX classifier in a real registry, data it was made for, a policy."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginegate.data import DataSet, write_data
from enginegate.workspace import Workspace
from tests.fakes.tracking import tracked_at

CLASSES, FEATURES, HIDDEN = 4, 16, 64

_POLICY = """
schema_version = 1
name = "tiny"
task = "classification"

[model]
uri = "models:/tiny/1"

[data]
evaluation = "{root}/evaluation.npz"
calibration = "{root}/calibration.npz"

[shadow]
traffic = "{root}/traffic.npz"
rate_per_s = 200
trace_rate = 2
max_samples = 400

[candidates]
onnxruntime = ["fp32", "int8"]
tensorrt = ["fp16"]

[calibration]
method = "max"

[gates.default]
confidence = 0.95
min_samples = 400
max_accuracy_loss = 0.02
min_slice_samples = 100
max_slice_accuracy_loss = 0.10
min_top1_agreement = 0.95
max_kl_p99_nats = 0.1
max_abs_error = 5.0

[slo]
p99_ms = 250
min_throughput_per_s = 50
confidence = 0.9
confirmations = 1
confirm_requests = 250

[search]
max_batch_sizes = [4]
queue_delays_us = [0]
instances = [1]
min_rate_per_s = 150
max_rate_per_s = 150
measurement_s = 2
budget_s = 120

[benchmark]
engine_alone_s = 0.5

[target]
repository = "{root}/live"

[approval]
expires_hours = 1
"""


@dataclass(frozen=True, slots=True)
class Family:
    """Where everything is."""

    root: Path
    policy: Path
    workspace: Workspace

    def edited(self, target: Path, *edits: tuple[str, str]) -> Path:
        """A copy of the policy with replacements, written to ``target``."""
        text = self.policy.read_text()
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new, 1)
        target.write_text(text)
        return target


def classifier(seed: int = 0) -> onnx.ModelProto:
    """Input ``x`` (N, 16) -> ``logits`` (N, 4): the class is the largest of four sums of inputs."""
    random = np.random.default_rng(seed)
    spread = np.repeat(np.eye(CLASSES, dtype=np.float32), FEATURES // CLASSES, axis=0)
    first = random.normal(0, 0.02, (FEATURES, HIDDEN)).astype(np.float32)
    first[:, :CLASSES] += spread
    second = random.normal(0, 0.02, (HIDDEN, CLASSES)).astype(np.float32)
    second[:CLASSES] += np.eye(CLASSES, dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"], name="first_matmul"),
        helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
        helper.make_node("MatMul", ["active", "second"], ["logits"], name="second_matmul"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def samples(count: int, seed: int, *, labelled: bool = True) -> DataSet:
    """Clear cases of each class, in two slices."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    x = random.normal(0, 0.3, (count, FEATURES)).astype(np.float32)
    for index, label in enumerate(labels):
        x[index, label * 4 : label * 4 + 4] += 1.0
    return DataSet(
        f"samples {seed}",
        {"x": x},
        labels.astype(np.int64) if labelled else None,
        np.array([f"s{seed}-{index}" for index in range(count)]),
        {"light": np.where(np.arange(count) % 2, "day", "night")},
    )


def register(workspace: Workspace, model: onnx.ModelProto) -> str:
    """Log the model and register it as the next version of ``tiny``; its URI."""
    import mlflow

    from enginegate.tracking import Tracker

    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    experiment = tracker.connection.experiment("training/tiny")
    with (
        tracked_at(workspace.tracking_uri),
        mlflow.start_run(experiment_id=experiment) as run,
    ):
        logged = mlflow.onnx.log_model(
            model, name="model", pip_requirements=["onnxruntime"], save_as_external_data=False
        )
    version = tracker.register("tiny", logged.model_id, run_id=run.info.run_id, tags={})
    return f"models:/tiny/{version}"


def make_family(root: Path) -> Family:
    """Write the data and the policy below ``root``, and register version 1."""
    workspace = Workspace(root / "workspace")
    write_data(samples(600, 1), root / "evaluation.npz")
    write_data(samples(128, 2), root / "calibration.npz")
    write_data(samples(400, 3, labelled=False), root / "traffic.npz")
    policy = root / "tiny.toml"
    policy.write_text(_POLICY.format(root=root))
    register(workspace, classifier())
    return Family(root, policy, workspace)
