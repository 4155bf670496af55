"""A small convolutional classifier, fitted without training, and everything needed to judge it.

Random convolutions, and a last layer that is solved for: images are ten templates with noise, so
FP32 is right on most of them and sure of it, as a trained network is.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from enginegate.candidate import Candidate, FileDigest, OnnxModel, TensorSpec
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet
from enginegate.engines import build_engine, open_reference, plan_engine
from enginegate.evidence import Verdict
from enginegate.policy import Policy, parse_policy
from enginegate.policy.gates import Gates
from validation.chunks import Chunk, chunks_of, compare_chunk, gather, observe_chunk
from validation.expectations import judge_comparison
from validation.outputs import CLASSIFY, OutputSpec
from validation.verdict import verdict_on

SAMPLES = 10_000
CLASSES = 10
NEW_CAMERA = 200  # two per cent of the samples
MARKED = 60  # of those carry a mark that a candidate may stumble over
GATES = {
    "confidence": 0.95,
    "min_samples": 400,
    "max_accuracy_loss": 0.01,
    "min_slice_samples": 60,
    "max_slice_accuracy_loss": 0.08,
    "min_top1_agreement": 0.98,
    "max_kl_p99_nats": 0.05,
    "max_abs_error": 2.0,
    "min_sqnr_db": 20.0,
}
POLICY = {
    "schema_version": 1,
    "name": "net",
    "task": "classification",
    "model": {"uri": "models:/net/1"},
    "data": {"evaluation": "eval.npz"},
    "candidates": {"onnxruntime": ["fp32", "int8"], "tensorrt": []},
    "calibration": {"method": "entropy", "max_samples": 128},
    "gates": {"default": GATES},
    "slo": {"p99_ms": 10.0, "min_throughput_per_s": 1.0, "confidence": 0.99},
    "search": {
        "max_batch_sizes": [64],
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


@dataclass(frozen=True)
class Lab:
    """A reference, data, and a way to judge any graph against them."""

    root: Path
    reference: ContentFolder[OnnxModel]
    data: DataSet
    calibration: DataSet
    policy: Policy
    asked: tuple[OutputSpec, ...] = (CLASSIFY,)

    @property
    def graph(self) -> ModelProto:
        """A copy of the reference's graph, to break."""
        return onnx.load(self.reference.folder / "model.onnx")

    @property
    def gates(self) -> Gates:
        return self.policy.gates["default"]

    def chunks(self, size: int = 4096) -> list[Chunk]:
        def chunk(rows, start):
            outputs = self.root / "outputs" / str(size)
            return Chunk(rows, start, "evaluation", self.asked, self.reference, outputs)

        return chunks_of(self.data, size, chunk)

    def engine(self, graph: ModelProto, candidate: str = "onnxruntime-fp32", **change):
        """A real engine of a graph; ``change`` may give other calibration data."""
        digest = str(abs(hash(graph.SerializeToString())))
        source = kept_onnx(graph, self.root / "onnx" / digest)
        plan = plan_engine(
            source,
            Candidate.parse(candidate),
            tables=self.policy.engine_tables,
            calibration=change.get("calibration", self.calibration),
        )
        return build_engine(plan, self.root / "engines")

    def judge(self, engine, gates: Gates | None = None) -> Verdict:
        """The verdict on an engine, by the path that `qualify` takes."""
        chunks, folder = self.chunks(), self.root / "columns" / engine.value.digest
        for chunk in chunks:
            observe_chunk(chunk, self.root / "noise")
            compare_chunk(chunk, engine, folder)
        judged = [
            judge_comparison(gather(folder, chunks, self.data, place), gates or self.gates, asked)
            for place, asked in enumerate(self.asked)
        ]
        return verdict_on(engine.value, judged)


def kept_onnx(graph: ModelProto, folder: Path) -> ContentFolder[OnnxModel]:
    """A graph as a model of the store."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(graph, folder / "model.onnx")

    def spec(value):
        dims = value.type.tensor_type.shape.dim
        return TensorSpec(
            name=value.name, dtype="float32", shape=(-1, *(d.dim_value for d in dims[1:]))
        )

    model = OnnxModel(
        source="models:/net/1",
        source_sha256="a" * 64,
        file=FileDigest.of(folder / "model.onnx"),
        inputs=tuple(spec(value) for value in graph.graph.input),
        outputs=tuple(spec(value) for value in graph.graph.output),
        opset=17,
        ir_version=8,
        producer="test",
        exporter="test",
        parity_max_abs_error=None,
        parity_tolerance=None,
        parity_samples=0,
        proven_batch_sizes=(1,),
    )
    return ContentFolder(model, folder, reused=False)


def with_weights(graph: ModelProto, **arrays: np.ndarray) -> ModelProto:
    """The graph with other weights."""
    for name, values in arrays.items():
        _initializer(graph, name).CopyFrom(numpy_helper.from_array(values.astype(np.float32), name))
    return graph


def _initializer(graph: ModelProto, name: str) -> TensorProto:
    return next(each for each in graph.graph.initializer if each.name == name)


def make_lab(root: Path, *, heads: tuple[str, ...], samples: int = SAMPLES) -> Lab:
    rng = np.random.default_rng(7)
    templates = rng.random((CLASSES, 1, 8, 8)).astype(np.float32)
    images, labels = _images(rng, templates, samples)
    images[:MARKED, 0, 7, 7] = 1.0
    shown, shown_labels = _images(rng, templates, 1000)
    graph = _network(rng, heads)
    source = kept_onnx(graph, root / "reference")
    features = _features(source, shown)
    for number, head in enumerate(heads):
        target = np.eye(CLASSES)[(shown_labels + number) % CLASSES] * 12.0 - 1.2
        bias = np.column_stack([features, np.ones(len(features))])
        ridge = bias.T @ bias + 1e-2 * np.eye(bias.shape[1])
        solved = np.linalg.solve(ridge, bias.T @ target)
        graph = with_weights(graph, **{f"{head}.weight": solved[:-1], f"{head}.bias": solved[-1]})
    camera = np.where(np.arange(samples) < NEW_CAMERA, "new", "usual").astype(np.str_)
    digits = labels.astype(np.str_)
    ids = np.array([f"s{row}" for row in range(samples)])
    data = DataSet("eval.npz", {"image": images}, labels, ids, {"digit": digits, "camera": camera})
    calibration = DataSet("cal.npz", {"image": shown[:128]}, None, ids[:128], {})
    del graph.graph.output[len(heads) :]
    reference = kept_onnx(graph, root / "reference")
    return Lab(root, reference, data, calibration, parse_policy(POLICY, "test"))


def _images(rng, templates, count):
    labels = rng.integers(0, CLASSES, count)
    noise = rng.normal(scale=0.18, size=(count, 1, 8, 8))
    images = np.clip(templates[labels] + noise, 0, 1).astype(np.float32)
    images[:, 0, 7, 7] = 0.0
    return images, labels


def _network(rng, heads) -> ModelProto:
    """Two random convolutions, pooled; each head is one dense layer. The features come last."""
    sizes = {"conv1.weight": (16, 1, 3, 3), "conv2.weight": (32, 16, 3, 3)}
    arrays = {n: rng.normal(size=s) / np.sqrt(np.prod(s[1:])) for n, s in sizes.items()}
    arrays |= {f"{h}.weight": np.zeros((512, CLASSES)) for h in heads}
    arrays |= {f"{h}.bias": np.zeros(CLASSES) for h in heads}
    nodes = [
        helper.make_node("Conv", ["image", "conv1.weight"], ["c1"], "conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "conv2.weight"], ["c2"], "conv2", pads=[1] * 4),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("MaxPool", ["r2"], ["p2"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p2"], ["features"], "flatten"),
        *(
            helper.make_node("Gemm", ["features", f"{h}.weight", f"{h}.bias"], [h], h)
            for h in heads
        ),
    ]
    outputs = [_value(head, ("batch", CLASSES)) for head in heads]
    graph = helper.make_graph(
        nodes,
        "net",
        [_value("image", ("batch", 1, 8, 8))],
        [*outputs, _value("features", ("batch", 512))],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _features(source, images):
    with open_reference(source.value, source.folder) as runner:
        return runner.run({"image": images})["features"].astype(np.float64)
