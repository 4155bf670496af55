"""Layers are counted by the type they compute in."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.precision.census import Census, census
from tests.fakes import recurrent


def layer(kind, *, pairs=""):
    """One MatMul of an element type; ``pairs`` says which of x and w come from Q/DQ."""
    matrix = helper.make_node("MatMul", ["x_" if "x" in pairs else "x", "w_"], ["y"])
    nodes = [matrix]
    weight = numpy_helper.from_array(np.ones((2, 2), np.int8), "w")
    scale = numpy_helper.from_array(np.float32(1), "s")
    zero = numpy_helper.from_array(np.int8(0), "z")
    if "x" in pairs:
        nodes.insert(0, helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]))
        nodes.insert(1, helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["x_"]))
    if "w" in pairs:
        nodes.insert(0, helper.make_node("DequantizeLinear", ["w", "s", "z"], ["w_"]))
    else:
        weight = helper.make_tensor("w_", kind, (2, 2), [1.0] * 4)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 2])],
        [helper.make_tensor_value_info("y", kind, ["n", 2])],
        [weight, scale, zero],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(layer(TensorProto.FLOAT), Census({"fp32": 1}, 0), id="fp32"),
        pytest.param(layer(TensorProto.FLOAT16), Census({"fp16": 1}, 0), id="fp16"),
        pytest.param(layer(TensorProto.BFLOAT16), Census({"bf16": 1}, 0), id="bf16"),
        pytest.param(layer(TensorProto.FLOAT, pairs="xw"), Census({"int8": 1}, 1), id="int8"),
        pytest.param(layer(TensorProto.FLOAT, pairs="w"), Census({"fp32": 1}, 0), id="weight-only"),
        pytest.param(layer(TensorProto.FLOAT, pairs="x"), Census({"fp32": 1}, 0), id="input-only"),
    ],
)
def test_effective_type(model, expected):
    """Only a layer whose two operands are dequantised computes in the quantised type."""
    assert census(model) == expected


def test_branches_are_counted():
    """A layer inside an If is a layer."""
    inner = layer(TensorProto.FLOAT).graph
    del inner.input[:]
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner)
    graph = helper.make_graph(
        [branch],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2]),
            helper.make_tensor_value_info("yes", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)

    assert census(model) == Census({"fp32": 2}, 0)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(recurrent.gru, Census({"fp32": 2}, 0, {"fp32": 1}), id="gru"),
        pytest.param(recurrent.scan, Census({"fp32": 3}, 0), id="scan"),
        pytest.param(recurrent.loop, Census({"fp32": 2}, 0), id="loop"),
        pytest.param(recurrent.branch, Census({"fp32": 3}, 0), id="if"),
    ],
)
def test_recurrent_layers_and_bodies_are_typed(model, expected):
    """A GRU is a layer; bodies see the weights around them, and what is given to their inputs."""
    assert census(model()) == expected


def test_products_of_indices_are_no_layers():
    """A MatMul of whole numbers computes positions: no precision names its type."""
    assert census(layer(TensorProto.INT64)) == Census({}, 0)
