"""Models at an earlier operator set: the same answers, or a refusal."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.errors import BuildError
from enginegate.precision import opset as opsets
from enginegate.precision.opset import lowered
from enginegate.sources.onnx_form import opset


def model(*nodes, version=22, weights=(), kind=TensorProto.FLOAT):
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 4, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


AXES = ("axes", np.array([1], dtype=np.int64))
WEIGHTS = ("w", np.eye(8, 3, dtype=np.float32))
ENCODER = model(
    helper.make_node("Gelu", ["x"], ["a"], approximate="tanh"),
    helper.make_node("Gelu", ["a"], ["b"]),
    helper.make_node("MatMul", ["b", "w"], ["c"], name="head"),
    helper.make_node("ReduceMean", ["c", "axes"], ["y"], keepdims=0, noop_with_empty_axes=0),
    weights=(AXES, WEIGHTS),
)


def test_later_operators_are_written_out():
    """Gelu came with opset 20, ReduceMean's axes became an input with 18; names stay."""
    found = lowered(ENCODER, 17, what="the encoder", shapes={})

    assert (opset(found), found.ir_version) == (17, 8)
    types = {node.op_type for node in found.graph.node}
    assert not types & {"Gelu", "CastLike"}
    assert {"Erf", "Tanh"} <= types
    assert "head" in {node.name for node in found.graph.node}


def test_earlier_models_stay_as_they_are():
    """Nothing is rewritten that need not be."""
    given = model(helper.make_node("Relu", ["x"], ["y"]), version=13)

    assert lowered(given, 17, what="it", shapes={}) is given


def test_pairs_survive():
    """INT8 by Quantize and Dequantize is the same at both sets."""
    scale, zero = ("s", np.array(0.1, np.float32)), ("z", np.array(0, np.int8))
    given = model(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        weights=(scale, zero),
    )

    found = lowered(given, 17, what="it", shapes={})

    assert [node.op_type for node in found.graph.node] == ["QuantizeLinear", "DequantizeLinear"]


def test_an_operator_without_an_earlier_form_is_named():
    """What cannot be written at the set is a refusal that says what to do."""
    given = model(helper.make_node("BitwiseNot", ["x"], ["i"]), kind=TensorProto.INT32)
    given.graph.node.append(helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT))

    with pytest.raises(
        BuildError, match=r"opset 22.*opset 17: .*BitwiseNot(.|\n)*Export the model"
    ):
        lowered(given, 17, what="it", shapes={})


def test_a_conversion_that_changes_answers_is_refused(monkeypatch):
    """The converted model is run beside the original; a difference beyond rounding is an error."""

    def wrong(given, version):
        found = real(given, version)
        held = next(each for each in found.graph.initializer if each.name == "w")
        held.CopyFrom(numpy_helper.from_array(WEIGHTS[1] * 1.01, "w"))
        return found

    real = opsets._converted
    monkeypatch.setattr(opsets, "_converted", wrong)

    with pytest.raises(BuildError, match=r"the encoder answers differently.*output 'y' by 0\.01"):
        lowered(ENCODER, 17, what="the encoder", shapes={})


def test_a_whole_graph_is_checked():
    """The result is valid ONNX of that set."""
    onnx.checker.check_model(lowered(ENCODER, 17, what="it", shapes={}), full_check=True)
