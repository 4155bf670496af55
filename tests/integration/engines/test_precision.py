"""An FP32 model becomes one at another precision, with ONNX Runtime's tools."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from enginegate.candidate import Candidate, Precision
from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.errors import BuildError, DataError
from enginegate.policy import CalibrationTable
from enginegate.precision import convert
from enginegate.precision.fp16_bf16 import to_half

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="session")
def converted(cnn, samples):
    """Converts the CNN for a candidate."""

    def run(name, *, data=samples, **rules):
        path = cnn.folder / "model.onnx"
        return convert(path, Candidate.parse(name), data=data, rules=CalibrationTable(**rules))

    return run


def counted(found):
    """Layers of a conversion by type, and those between pairs."""
    stats = found.stats()
    return stats.layers, stats.quantised


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("tensorrt-fp32", ({"fp32": 3}, 0), id="fp32"),
        pytest.param("tensorrt-fp16", ({"fp16": 3}, 0), id="fp16"),
        pytest.param("tensorrt-bf16", ({"bf16": 3}, 0), id="bf16"),
        pytest.param("tensorrt-int8", ({"int8": 3}, 3), id="int8"),
        pytest.param("tensorrt-fp8", ({"fp8": 3}, 3), id="fp8"),
        pytest.param("onnxruntime-int8", ({"int8": 3}, 3), id="onnxruntime-int8"),
    ],
)
def test_every_layer_has_the_type(converted, name, expected):
    """All layers of a small CNN are converted; inputs and outputs stay FP32."""
    found = converted(name)
    graph = onnx.load_from_string(found.onnx).graph

    assert counted(found) == expected
    assert {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)} == {1}
    assert (found.converter == "none") == (name == "tensorrt-fp32")


@pytest.mark.parametrize(
    ("name", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2), ("int8", 5e-2), ("fp8", 1e-1)]
)
def test_answers_stay_near_fp32(converted, samples, name, tolerance):
    """Computed by ONNX's own evaluator, which keeps every type, the outputs are near FP32's."""
    images = samples.inputs["image"][:4]

    def answer(kind):
        model = onnx.load_from_string(converted(f"tensorrt-{kind}").onnx)
        return ReferenceEvaluator(model).run(None, {"image": images})[0]

    exact = answer("fp32")
    error = np.abs(answer(name) - exact).max() / np.abs(exact).max()

    assert 0 < error < tolerance


def test_bf16_weights_are_rounded_once(converted, fp32_onnx):
    """Weights go from FP32 to BF16 directly, not through FP16, which would round twice."""
    exact = {t.name: numpy_helper.to_array(t) for t in fp32_onnx.graph.initializer}
    found = onnx.load_from_string(converted("tensorrt-bf16").onnx)

    halves = [t for t in found.graph.initializer if t.data_type == TensorProto.BFLOAT16]

    assert len(halves) == 6
    for tensor in halves:
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensor).astype(np.float32),
            exact[tensor.name].astype(ml_dtypes.bfloat16).astype(np.float32),
        )


def mixed_model(opset):
    """An operation without a 16-bit form, a constant, and an explicit cast to FP32."""
    nodes = [
        helper.make_node(
            "Constant", [], ["c"], name="c", value=numpy_helper.from_array(np.float32([3.14159265]))
        ),
        helper.make_node("Mul", ["x", "c"], ["scaled"], name="scale"),
        helper.make_node("CumSum", ["scaled", "axis"], ["summed"], name="sum"),
        helper.make_node("Cast", ["summed"], ["cast"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["cast", "w"], ["y"], name="multiply"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [
            numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"),
            numpy_helper.from_array(np.int64(1), "axis"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_operations_without_a_16_bit_form_stay_fp32(precision):
    """An old model with such an operation, casts and constants still becomes valid."""
    x = np.float32([[1, 2], [3, 4]])

    found = to_half(mixed_model(opset=17), precision, origin="m")

    assert found.opset_import[0].version == (22 if precision is Precision.BF16 else 17)
    expected = ReferenceEvaluator(mixed_model(opset=17)).run(None, {"x": x})[0]
    answer = ReferenceEvaluator(found).run(None, {"x": x})[0]
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected, rtol=1e-2)


def attention_model():
    """One attention layer with a causal mask of infinities."""
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], name="query"),
        helper.make_node("Reshape", ["q", "split"], ["heads"], name="split"),
        helper.make_node("Transpose", ["heads"], ["h"], name="heads", perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["heads"], ["k"], name="keys", perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["h", "k"], ["scores"], name="scores"),
        helper.make_node("Add", ["scores", "mask"], ["masked"], name="mask"),
        helper.make_node("Softmax", ["masked"], ["weights"], name="softmax"),
        helper.make_node("MatMul", ["weights", "h"], ["y"], name="mix"),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 4, 4])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(mask, "mask"),
            numpy_helper.from_array(np.array([0, 4, 2, 4]), "split"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def test_attention_with_infinite_masks_is_quantised(tmp_path):
    """Infinities have no scale, so only the layers are quantised, and ONNX Runtime runs it."""
    path = tmp_path / "attention.onnx"
    onnx.save(attention_model(), path)
    x = np.random.default_rng(1).normal(size=(32, 4, 8)).astype(np.float32)
    data = DataSet("calibration.npz", {"x": x}, None, np.arange(32).astype(str), {})

    found = convert(path, Candidate.parse("onnxruntime-int8"), data=data, rules=CalibrationTable())
    (tmp_path / "int8.onnx").write_bytes(found.onnx)

    with open_onnx(path) as exact, open_onnx(tmp_path / "int8.onnx") as quantised:
        expected, answer = exact.run({"x": x})["y"], quantised.run({"x": x})["y"]
    assert counted(found) == ({"int8": 3}, 3)
    assert np.abs(answer - expected).mean() < 0.05 * np.abs(expected).mean()


def test_quantising_twice_gives_the_same_bytes(converted):
    """Scales depend on the data, the method and the batch size, and on nothing else."""
    assert converted("onnxruntime-int8").onnx == converted("onnxruntime-int8").onnx


def test_max_does_not_depend_on_the_batch_size(converted):
    """Data is read in batches; the largest value over batches is the largest value."""
    small = converted("tensorrt-int8", method="max", batch_size=7)
    large = converted("tensorrt-int8", method="max", batch_size=64)

    assert small.onnx == large.onnx


def input_scale(content):
    """The scale of the image's Quantize node."""
    graph = onnx.load_from_string(content).graph
    node = next(n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "image")
    return next(
        float(numpy_helper.to_array(t)) for t in graph.initializer if t.name == node.input[1]
    )


def test_methods_treat_an_outlier_differently(converted, samples):
    """One pixel of 50 among values below 1: max keeps it, entropy clips it."""
    images = samples.inputs["image"].copy()
    images[3, 0, 0, 0] = 50.0
    data = DataSet("calibration.npz", {"image": images}, None, samples.ids, {})

    scales = {
        method: input_scale(converted("tensorrt-int8", data=data, method=method).onnx)
        for method in ("max", "entropy", "percentile")
    }

    assert scales["max"] == pytest.approx(50 / 127, rel=0.02)
    assert scales["entropy"] < scales["max"] / 2
    assert scales["percentile"] <= scales["max"]


def test_samples_beyond_the_limit_are_not_read(converted, samples):
    """Only the first max_samples decide."""
    images = samples.inputs["image"].copy()
    images[32:] = 9.0
    data = DataSet("calibration.npz", {"image": images}, None, samples.ids, {})

    limited = converted("tensorrt-int8", data=data, max_samples=32)

    assert limited.onnx == converted("tensorrt-int8", max_samples=32).onnx


@pytest.mark.parametrize("name", ["onnxruntime-int8", "tensorrt-int8", "tensorrt-fp8"])
def test_no_calibration_data_no_scales(converted, name):
    """Scales are never made from random data."""
    with pytest.raises(DataError, match=f"{name} needs calibration data.*never.*random"):
        converted(name, data=None)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        pytest.param(np.zeros((4, 1, 8, 9), np.float32), r"shape \(4, 1, 8, 9\)", id="shape"),
        pytest.param(np.zeros((4, 1, 8, 8), np.float64), "float64", id="dtype"),
        pytest.param(np.full((4, 1, 8, 8), np.nan, np.float32), "NaN", id="nan"),
    ],
)
def test_calibration_data_must_fit(converted, images, message):
    """Data of another shape or type, or with NaN, is refused by name."""
    data = DataSet("calibration.npz", {"image": images}, None, np.arange(4).astype(str), {})

    with pytest.raises(DataError, match=message):
        converted("tensorrt-int8", data=data)


def test_form_that_is_not_made_is_an_error(converted):
    """ONNX Runtime has no FP8 form of a model here."""
    with pytest.raises(BuildError, match="onnxruntime has no fp8 form"):
        converted("onnxruntime-fp8")
