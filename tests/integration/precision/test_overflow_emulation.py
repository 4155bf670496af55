"""Emulation on a CPU has the range and the rounding that 16 bits have."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from enginegate.errors import BuildError
from enginegate.evidence import Outcome
from enginegate.policy import CalibrationTable
from enginegate.precision import convert, judge_range, open_emulated, sensitivities
from enginegate.records import sha256_bytes
from tests.integration.precision.conftest import cnn, images, kept_onnx

pytestmark = pytest.mark.xdist_group("precision")

RULES = CalibrationTable(method="max")
SQUARES = ("square", "mean", "root")


@pytest.fixture
def path(squaring):
    """The file of the squaring net."""
    return squaring.folder / "model.onnx"


@pytest.fixture
def tried(path, candidate, large):
    """Emulated answers and the finding, for a candidate of the squaring net."""

    def run(name, keep=()):
        with open_emulated(path, candidate(name), data=None, rules=RULES, keep=keep) as runner:
            answers = runner.run(dict(large.inputs))["y"]
            return answers, judge_range(runner.report(), "evaluation")

    return run


def test_overflow_that_onnxruntime_hides_is_caught(path, candidate, tried, large):
    """ONNX Runtime's CPU answers FP16 as if nothing happened; the emulation shows Inf at work."""
    made = convert(path, candidate("tensorrt-fp16"), data=None, rules=RULES).onnx
    exact = ort.InferenceSession(str(path)).run(None, dict(large.inputs))[0]
    hidden = ort.InferenceSession(made).run(None, dict(large.inputs))[0]

    answers, finding = tried("tensorrt-fp16")

    assert np.abs(hidden - exact).max() < 0.01
    assert np.abs(answers - exact).max() > 0.5
    assert finding.outcome is Outcome.FAILED
    assert "square reaches" in finding.reason


@pytest.mark.parametrize("name", ["tensorrt-fp16", "tensorrt-bf16"])
def test_emulation_agrees_with_the_reference_evaluator(path, candidate, tried, large, name):
    """ONNX's own evaluator keeps every type; both give the same, overflow included.

    Single values may differ: the evaluator also adds up in 16 bits, where GPUs add in FP32.
    """
    made = convert(path, candidate(name), data=None, rules=RULES).onnx
    with np.errstate(over="ignore"):
        expected = ReferenceEvaluator(onnx.load_from_string(made)).run(None, dict(large.inputs))[0]

    answers, _ = tried(name)

    assert np.isclose(answers, expected, rtol=1e-2, atol=1e-3).mean() > 0.95


def test_bf16_has_the_range(tried):
    """The same net is within BF16's range."""
    _, finding = tried("tensorrt-bf16")

    assert finding.outcome is Outcome.PASSED


def test_kept_nodes_do_not_overflow(path, candidate, tried, large):
    """With the nodes that sensitivity names at FP32, nothing passes through 16 bits between."""
    exact = ort.InferenceSession(str(path)).run(None, dict(large.inputs))[0]
    ranked = sensitivities(path, candidate("tensorrt-fp16"), data=large, rules=RULES, samples=40)
    worst = tuple(each.node for each in ranked[:3])

    answers, finding = tried("tensorrt-fp16", keep=worst)

    assert set(worst) == set(SQUARES)
    assert ranked[2].cost > 100 * ranked[3].cost
    assert finding.outcome is Outcome.PASSED
    assert np.abs(answers - exact).max() < 0.01


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        pytest.param("tensorrt-fp16", 2e-3, id="fp16"),
        pytest.param("tensorrt-bf16", 3e-2, id="bf16"),
        pytest.param("tensorrt-int8", 1e-1, id="int8"),
        pytest.param("tensorrt-fp8", 2e-1, id="fp8"),
    ],
)
def test_sound_network_stays_in_range(tmp_path, candidate, name, tolerance):
    """Every reduced precision of a CNN runs here, near FP32 and within range."""
    path = kept_onnx(cnn(spike=1.0), tmp_path).folder / "model.onnx"
    data, unseen = images(64, seed=1), images(70, seed=2)
    exact = ort.InferenceSession(str(path)).run(None, dict(unseen.inputs))[0]

    with open_emulated(path, candidate(name), data=data, rules=RULES) as runner:
        answers = runner.run(dict(unseen.inputs))["logits"]
        finding = judge_range(runner.report(), "evaluation")

    assert finding.outcome is Outcome.PASSED
    assert finding.samples == 70
    assert 0 < np.abs(answers - exact).max() < tolerance * np.abs(exact).max()


@pytest.mark.parametrize("name", ["tensorrt-fp16", "tensorrt-bf16"])
def test_attention_mask_is_not_an_overflow(tmp_path, candidate, name):
    """FP32's lowest value, times 0, must not become NaN; added to scores it must not alarm."""
    nodes = [
        helper.make_node("Sub", ["one", "mask"], ["hidden"], "hide"),
        helper.make_node("Mul", ["hidden", "lowest"], ["bias"], "lower"),
        helper.make_node("Add", ["scores", "bias"], ["sum"], "add"),
        helper.make_node("Softmax", ["sum"], ["y"], "softmax"),
    ]
    real = ("scores", "mask")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", 6]) for each in real],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [
            numpy_helper.from_array(np.float32(1.0), "one"),
            numpy_helper.from_array(np.finfo(np.float32).min, "lowest"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path = kept_onnx(model, tmp_path).folder / "model.onnx"
    random = np.random.default_rng(0)
    inputs = {
        "scores": random.normal(0, 3, (20, 6)).astype(np.float32),
        "mask": np.tile(np.float32([1, 1, 1, 0, 1, 0]), (20, 1)),
    }
    exact = ort.InferenceSession(str(path)).run(None, inputs)[0]

    with open_emulated(path, candidate(name), data=None, rules=RULES) as runner:
        answers = runner.run(inputs)["y"]
        finding = judge_range(runner.report(), "evaluation")

    assert finding.outcome is Outcome.PASSED, finding.reason
    np.testing.assert_allclose(answers, exact, atol=2e-2)


def test_only_what_was_compiled_is_emulated(path, candidate):
    """If the conversion gives other bytes than the engine's, nothing is claimed about it."""
    name = candidate("tensorrt-fp16")
    made = convert(path, name, data=None, rules=RULES).onnx

    with open_emulated(
        path, name, data=None, rules=RULES, converted_sha256=sha256_bytes(made)
    ) as runner:
        assert runner.device == "emulated on CPUExecutionProvider"
    with (
        pytest.raises(BuildError, match=r"was compiled.*Build it again"),
        open_emulated(path, name, data=None, rules=RULES, converted_sha256="0" * 64),
    ):
        pass
