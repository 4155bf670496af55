"""Scales come from real samples, by the method that suits the model."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.data import DataSet
from enginegate.errors import BuildError, DataError, ModelError
from enginegate.policy import CalibrationTable
from enginegate.precision import convert, converter_of
from enginegate.precision import session as calibrating
from enginegate.precision.session import ON_CPU, CalibrationProvider
from tests.integration.precision.conftest import cnn, images, kept_onnx

pytestmark = pytest.mark.xdist_group("precision")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The CNN without outliers."""
    return kept_onnx(cnn(spike=1.0), tmp_path_factory.mktemp("plain")).folder / "model.onnx"


def answer(content, values):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": values})[0]


def error(content, plain, values):
    exact = answer(str(plain), values)
    return float(np.sqrt(np.square(answer(content, values) - exact).mean()) / exact.std())


@pytest.mark.parametrize("name", ["onnxruntime-int8", "tensorrt-int8", "tensorrt-fp8"])
def test_auto_is_as_good_as_the_best_method(plain, candidate, name):
    """On data that calibration never saw, auto is no worse than any method; it says which it is."""
    data, unseen = images(96, seed=3), images(200, seed=4).inputs["image"]

    made = {
        method: convert(plain, candidate(name), data=data, rules=CalibrationTable(method=method))
        for method in ("auto", "max", "entropy", "percentile")
    }
    errors = {method: error(found.onnx, plain, unseen) for method, found in made.items()}

    assert errors["auto"] <= 1.1 * min(errors.values())
    assert errors["entropy"] <= 3 * errors["max"], "a sound CNN has nothing to clip"
    assert "the best of max" in made["auto"].converter
    assert "on 24 held-out samples" in made["auto"].converter


@pytest.mark.parametrize("method", ["max", "entropy", "percentile"])
@pytest.mark.parametrize("name", ["onnxruntime-int8", "tensorrt-int8"])
def test_no_method_depends_on_the_batch_size(plain, candidate, name, method):
    """Data is streamed in batches, and the histograms are those of all of it."""
    data = images(64, seed=3)

    def made(batch_size):
        rules = CalibrationTable(method=method, batch_size=batch_size)
        return convert(plain, candidate(name), data=data, rules=rules).onnx

    assert made(7) == made(64)


@pytest.mark.parametrize("method", ["max", "entropy", "percentile"])
def test_logits_are_not_clipped(plain, candidate, method):
    """A sample brighter than every calibration sample keeps its large logits."""
    data, bright = images(64, seed=3), 4.0 * images(32, seed=4).inputs["image"]

    found = convert(
        plain, candidate("onnxruntime-int8"), data=data, rules=CalibrationTable(method=method)
    )
    graph = onnx.load_from_string(found.onnx).graph

    makers = {name: node.op_type for node in graph.node for name in node.output}
    assert makers["logits"] == "Gemm"
    assert np.abs(answer(found.onnx, bright)).max() > np.abs(answer(found.onnx, bright / 4)).max()


def test_slices_are_all_calibrated_on(plain, candidate):
    """Data sorted by slice: the bright slice, which comes last, decides the range."""
    dark, bright = images(48, seed=3).inputs["image"] * 0.1, images(16, seed=4).inputs["image"]
    values = np.concatenate([dark, bright])
    shade = np.array(["dark"] * 48 + ["bright"] * 16)
    data = DataSet("c", {"image": values}, None, np.arange(64).astype(str), {"shade": shade})
    unsliced = replace(data, slices={})

    def scale(given):
        rules = CalibrationTable(method="max", max_samples=16)
        found = convert(plain, candidate("tensorrt-int8"), data=given, rules=rules)
        graph = onnx.load_from_string(found.onnx).graph
        node = next(n for n in graph.node if n.input[0] == "image")
        return next(
            float(numpy_helper.to_array(t)) for t in graph.initializer if t.name == node.input[1]
        )

    assert scale(data) > 5 * scale(unsliced)


def test_tensorrt_pairs_sit_where_layers_read(plain, candidate):
    """Nothing lies between Conv and ReLU, so TensorRT can fuse them."""
    found = convert(
        plain,
        candidate("tensorrt-int8"),
        data=images(32, seed=3),
        rules=CalibrationTable(method="max"),
    )
    graph = onnx.load_from_string(found.onnx).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}

    before = {makers[node.input[0]] for node in graph.node if node.op_type == "Relu"}

    assert before == {"Conv"}


def test_what_follows_no_layer_stays_fp32(candidate, tmp_path):
    """An Add and a Clip before the first layer, and an Add behind a Softmax, were rounded twice."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Add", ["image", "shift"], ["shifted"], "before"),
        helper.make_node("Clip", ["shifted", "low", "high"], ["clipped"], "clip"),
        helper.make_node("Sin", ["clipped"], ["wave"], "sin"),
        helper.make_node("MatMul", ["wave", "w"], ["product"], "layer"),
        helper.make_node("Add", ["product", "bias"], ["biased"], "follows"),
        helper.make_node("Softmax", ["biased"], ["shares"], "softmax"),
        helper.make_node("Add", ["shares", "step"], ["answer"], "behind"),
    ]
    constants = {
        "shift": np.full(8, 0.5, np.float32),
        "low": np.float32(-2.0),
        "high": np.float32(2.0),
        "w": weights,
        "bias": np.arange(4, dtype=np.float32) / 4.0,
        "step": np.arange(4, dtype=np.float32) / 8.0,
    }
    graph = helper.make_graph(
        nodes,
        "shifted",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)

    found = convert(
        tmp_path / "model.onnx",
        candidate("onnxruntime-int8"),
        data=replace(images(32, seed=3), inputs={"image": x}),
        rules=CalibrationTable(method="max"),
    )

    made = onnx.load_from_string(found.onnx).graph
    makers = {name: node.op_type for node in made.node for name in node.output}
    quantised = {
        node.op_type
        for node in made.node
        if any(makers.get(name) == "DequantizeLinear" for name in node.input)
    }
    assert "Gemm" in quantised, "the product and the bias that follows it"
    assert quantised.isdisjoint({"Add", "Clip"})
    assert {"Add", "Clip"} <= {node.op_type for node in made.node}


def test_the_record_names_tool_method_and_samples(candidate):
    """What decides the bytes is known before anything is converted."""
    told = converter_of(
        candidate("tensorrt-int8"), data=images(10, seed=1), rules=CalibrationTable(batch_size=4)
    )

    assert "QDQ, auto over 10 samples in batches of 4" in told
    assert f"onnxruntime {ort.__version__}" in told


def test_nan_weights_are_refused(candidate, tmp_path):
    """The tensor, the count and the place are named."""
    model = cnn(spike=1.0)
    broken = numpy_helper.to_array(model.graph.initializer[2]).copy()
    broken[1, 2, 0, 1] = np.nan
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(broken, "w2"))
    path = kept_onnx(model, tmp_path).folder / "model.onnx"

    for name in ("tensorrt-fp16", "onnxruntime-int8"):
        with pytest.raises(ModelError, match=r"'w2' holds 1 NaN value.*\(1, 2, 0, 1\)"):
            convert(path, candidate(name), data=images(8, seed=1), rules=CalibrationTable())


def test_unsupported_operator_is_named(candidate, tmp_path):
    """Its node, operator set and the remedy are in the message."""
    model = cnn(spike=1.0)
    model.graph.node[1].op_type = "FancyRelu"
    path = kept_onnx(model, tmp_path).folder / "model.onnx"

    with pytest.raises(ModelError, match=r"'relu0' is FancyRelu of ai.onnx opset 20.*Export the"):
        convert(
            path, candidate("onnxruntime-int8"), data=images(8, seed=1), rules=CalibrationTable()
        )


def test_activation_without_a_scale_is_named(candidate, tmp_path):
    """Infinity on a calibration sample has no range; the tensor is named."""
    nodes = [
        helper.make_node("Log", ["image"], ["logs"], "log"),
        helper.make_node("MatMul", ["logs", "w"], ["y"], "product"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path = kept_onnx(model, tmp_path).folder / "model.onnx"
    zeros = DataSet(
        "c", {"image": np.zeros((4, 4), np.float32)}, None, np.arange(4).astype(str), {}
    )

    with pytest.raises(BuildError, match="activation 'logs' is NaN or Inf 16 time"):
        convert(path, candidate("tensorrt-int8"), data=zeros, rules=CalibrationTable(method="max"))


def test_kept_nodes_must_exist(plain, candidate):
    """A node ranked on another model is refused by name."""
    with pytest.raises(BuildError, match=r"keep 'conv99' at fp32.*repair it again"):
        convert(
            plain,
            candidate("onnxruntime-int8"),
            data=images(8, seed=1),
            rules=CalibrationTable(method="max"),
            keep=("conv99",),
        )


def test_no_data_no_scales(plain, candidate):
    """Without calibration data nothing is made up."""
    with pytest.raises(DataError, match="never made from random data"):
        convert(plain, candidate("tensorrt-fp8"), data=None, rules=CalibrationTable())


@pytest.fixture
def gpu_without_cuda(monkeypatch):
    """A machine with a GPU whose ONNX Runtime is the one for processors."""
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    monkeypatch.setattr(calibrating, "gpus", lambda: "NVIDIA L4, 550.54, 23034 MiB")
    calibrating.calibration_provider.cache_clear()
    yield
    calibrating.calibration_provider.cache_clear()


def test_calibration_that_falls_back_to_the_cpu_says_so(plain, candidate, gpu_without_cuda):
    """By name, in what identifies the engine; the scales are those of the CPU, byte for byte."""
    del gpu_without_cuda
    data = images(32, seed=3)

    made = {
        device: convert(
            plain,
            candidate("tensorrt-int8"),
            data=data,
            rules=CalibrationTable(method="max", device=device),
        )
        for device in ("auto", "cpu")
    }

    assert "on the CPU (ONNX Runtime" in made["auto"].converter
    assert "has no CUDA provider here)" in made["auto"].converter
    assert "on the CPU" not in made["cpu"].converter
    assert made["auto"].onnx == made["cpu"].onnx


def test_calibration_that_insists_on_a_gpu_is_refused_without_one(
    plain, candidate, gpu_without_cuda
):
    """A fallback would be as slow as it is silent."""
    del gpu_without_cuda

    with pytest.raises(BuildError, match=r'device is "cuda", and ONNX Runtime .*onnxruntime-gpu'):
        convert(
            plain,
            candidate("onnxruntime-int8"),
            data=images(8, seed=3),
            rules=CalibrationTable(method="max", device="cuda"),
        )


def test_calibration_provider_is_part_of_the_engines_identity():
    """Where scales were found may change their last digits."""
    assert CalibrationProvider("CUDAExecutionProvider").identity == " on CUDAExecutionProvider"
    assert ON_CPU.identity == ""
