"""A CNN whose middle layer is full of outliers, in the store, and plans made from it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.candidate import Candidate, FileDigest, OnnxModel, TensorSpec
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet
from enginegate.policy import parse_policy
from enginegate.precision import modelopt

LAYERS = 8
HOSTILE = 4
CHANNELS = 16
SPIKE = 3000.0
POLICY = {
    "schema_version": 1,
    "name": "hostile",
    "task": "classification",
    "model": {"uri": "models:/hostile/1"},
    "data": {"evaluation": "eval.npz", "calibration": "calibration.npz"},
    "candidates": {"onnxruntime": ["int8"], "tensorrt": []},
    "gates": {
        "default": {
            "confidence": 0.95,
            "min_samples": 1,
            "max_accuracy_loss": 0.1,
            "min_slice_samples": 1,
            "max_slice_accuracy_loss": 0.1,
            "min_top1_agreement": 0.9,
            "max_kl_p99_nats": 0.01,
            "max_abs_error": 10.0,
        }
    },
    "slo": {"p99_ms": 10.0, "min_throughput_per_s": 1.0, "confidence": 0.99},
    "search": {
        "max_batch_sizes": [8],
        "queue_delays_us": [0],
        "instances": [1],
        "min_rate_per_s": 10.0,
        "max_rate_per_s": 10.0,
        "measurement_s": 1.0,
        "budget_s": 1.0,
    },
    "target": {"repository": "live"},
    "approval": {"expires_hours": 1.0},
}


def cnn(*, spike, channels=CHANNELS):
    """Eight convolutions with ReLU, then a linear layer; the same function whatever the spike.

    One channel between two layers is multiplied by ``spike`` and divided by it again: nothing in
    FP32, and the end of every other channel when one scale must hold them all.
    """
    random = np.random.default_rng(7)
    nodes, weights, name, width = [], [], "image", 1
    for layer in range(LAYERS):
        kernel = random.normal(0, np.sqrt(2 / (9 * width)), (channels, width, 3, 3))
        if layer == HOSTILE - 1:
            kernel[0] *= spike
        if layer == HOSTILE:
            kernel[:, 0] /= spike
        weights.append(numpy_helper.from_array(kernel.astype(np.float32), f"w{layer}"))
        made, active = f"c{layer}", f"r{layer}"
        nodes.append(
            helper.make_node("Conv", [name, f"w{layer}"], [made], f"conv{layer}", pads=[1] * 4)
        )
        nodes.append(helper.make_node("Relu", [made], [active], f"relu{layer}"))
        name, width = active, channels
    head = random.normal(0, 2.0, (10, channels)).astype(np.float32)
    weights.append(numpy_helper.from_array(head, "wh"))
    nodes += [
        helper.make_node("GlobalAveragePool", [name], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "wh"], ["logits"], "head", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "hostile",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def images(count, seed):
    """Smooth random images with ids and a slice of two values."""
    random = np.random.default_rng(seed)
    values = random.normal(0, 1, (count, 1, 8, 8)).astype(np.float32)
    shade = np.where(np.arange(count) % 4 == 0, "dark", "light")
    values[shade == "dark"] *= 0.5
    return DataSet(
        "calibration.npz",
        {"image": values},
        None,
        np.array([f"i{seed}-{row}" for row in range(count)]),
        {"shade": shade},
    )


def kept_onnx(model, folder):
    """A model as `ContentFolder`, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    value = model.graph.input[0]
    shape = tuple(axis.dim_value or -1 for axis in value.type.tensor_type.shape.dim)
    out = model.graph.output[0]
    answer = tuple(axis.dim_value or -1 for axis in out.type.tensor_type.shape.dim)
    record = OnnxModel(
        source="test",
        source_sha256="0" * 64,
        file=FileDigest.of(folder / "model.onnx"),
        inputs=(TensorSpec(name=value.name, dtype="float32", shape=shape),),
        outputs=(TensorSpec(name=out.name, dtype="float32", shape=answer),),
        opset=20,
        ir_version=9,
        producer="test",
        exporter="test",
        parity_max_abs_error=None,
        parity_tolerance=None,
        parity_samples=0,
        proven_batch_sizes=(1,),
    )
    return ContentFolder(record, folder, reused=False)


@dataclass(frozen=True)
class Hostile:
    """The model, its calibration data and other data to judge on."""

    source: ContentFolder
    calibration: DataSet
    evaluation: DataSet

    @property
    def path(self) -> Path:
        return self.source.folder / "model.onnx"


@pytest.fixture(autouse=True)
def without_modelopt(monkeypatch):
    """Tests mean ONNX Runtime's tools, wherever they run, unless they say otherwise."""
    monkeypatch.delenv("ENGINEGATE_MODELOPT", raising=False)
    modelopt._find.cache_clear()


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """The CNN with outliers."""
    folder = tmp_path_factory.mktemp("hostile")
    return Hostile(
        kept_onnx(cnn(spike=SPIKE), folder / "onnx"), images(64, seed=1), images(200, seed=2)
    )


@pytest.fixture
def policy():
    """Rules with some tables replaced."""

    def make(**tables):
        return parse_policy({**POLICY, **tables}, "test policy")

    return make


@pytest.fixture
def candidate():
    """A candidate by name."""
    return Candidate.parse


@pytest.fixture(scope="session")
def squaring(tmp_path_factory):
    """A normalisation that squares values above 256: 65536 is beyond FP16."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "product"),
        helper.make_node("Mul", ["a", "a"], ["b"], "square"),
        helper.make_node("ReduceMean", ["b", "axis"], ["c"], "mean", keepdims=1),
        helper.make_node("Sqrt", ["c"], ["d"], "root"),
        helper.make_node("Div", ["a", "d"], ["y"], "divide"),
    ]
    weights = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.int64([1]), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return kept_onnx(model, tmp_path_factory.mktemp("squaring"))


@pytest.fixture(scope="session")
def large():
    """Values around 300."""
    values = 300 * np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    return DataSet("c", {"x": values}, None, np.arange(40).astype(str), {})
