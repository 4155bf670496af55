"""Small sequence models: a GRU as one operator, layers in a Scan and in a Loop, and an If."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STEPS, FEATURES, HIDDEN, CLASSES, TRIPS = 12, 8, 16, 4, 5


def _weights(**shapes):
    random = np.random.default_rng(0)
    return [
        numpy_helper.from_array((0.3 * random.normal(size=shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]


def _value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def _constant(name, value):
    return numpy_helper.from_array(np.array(value), name)


def _model(nodes, weights, shape):
    graph = helper.make_graph(
        nodes, "sequence", [_value("x", shape)], [_value("logits", ["n", CLASSES])], weights
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


def gru():
    """One GRU operator, whose sequence is not an output, and a linear layer."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("GRU", ["steps", "W", "R"], ["", "state"], "gru", hidden_size=HIDDEN),
        helper.make_node("Squeeze", ["state", "first"], ["last"]),
        helper.make_node("Gemm", ["last", "head"], ["logits"], "head", transB=1),
    ]
    weights = _weights(
        W=(1, 3 * HIDDEN, FEATURES), R=(1, 3 * HIDDEN, HIDDEN), head=(CLASSES, HIDDEN)
    )
    return _model(nodes, [*weights, _constant("first", [0])], ["n", STEPS, FEATURES])


def scan():
    """A recurrent layer unrolled by a Scan; its weights are those of the graph around it."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["step", "W"], ["given"], "input"),
            helper.make_node("MatMul", ["before", "R"], ["kept"], "state"),
            helper.make_node("Add", ["given", "kept"], ["sum"]),
            helper.make_node("Tanh", ["sum"], ["after"]),
        ],
        "body",
        [_value("before", None), _value("step", None)],
        [_value("after", None)],
    )
    nodes = [
        helper.make_node("ReduceSum", ["x", "inner"], ["total"], keepdims=0),
        helper.make_node("Unsqueeze", ["total", "axis"], ["column"]),
        helper.make_node("Mul", ["column", "zeros"], ["start"]),
        helper.make_node(
            "Scan", ["start", "x"], ["last"], body=body, num_scan_inputs=1, scan_input_axes=[1]
        ),
        helper.make_node("MatMul", ["last", "head"], ["logits"], "head"),
    ]
    weights = _weights(W=(FEATURES, HIDDEN), R=(HIDDEN, HIDDEN), head=(HIDDEN, CLASSES))
    constants = [
        _constant("inner", [1, 2]),
        _constant("axis", [1]),
        _constant("zeros", np.zeros((1, HIDDEN), np.float32)),
    ]
    return _model(nodes, [*weights, *constants], ["n", STEPS, FEATURES])


def loop():
    """A layer that a Loop applies again and again to its own result."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["before", "W"], ["product"], "state"),
            helper.make_node("Tanh", ["product"], ["after"]),
            helper.make_node("Identity", ["going"], ["on"]),
        ],
        "body",
        [
            _value("trip", [], TensorProto.INT64),
            _value("going", [], TensorProto.BOOL),
            _value("before", None),
        ],
        [_value("on", [], TensorProto.BOOL), _value("after", None)],
    )
    nodes = [
        helper.make_node("Loop", ["trips", "yes", "x"], ["last"], body=body),
        helper.make_node("MatMul", ["last", "head"], ["logits"], "head"),
    ]
    weights = _weights(W=(FEATURES, FEATURES), head=(FEATURES, CLASSES))
    constants = [_constant("trips", TRIPS), _constant("yes", True)]  # noqa: FBT003
    return _model(nodes, [*weights, *constants], ["n", FEATURES])


def branch():
    """An If whose branches multiply by weights of the graph around it."""

    def side(name):
        nodes = [helper.make_node("MatMul", ["x", name], [f"{name}_product"], name)]
        return helper.make_graph(nodes, name, [], [_value(f"{name}_product", None)])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["either"], then_branch=side("W"), else_branch=side("V")
        ),
        helper.make_node("MatMul", ["either", "head"], ["logits"], "head"),
    ]
    weights = _weights(W=(FEATURES, FEATURES), V=(FEATURES, FEATURES), head=(FEATURES, CLASSES))
    return _model(nodes, [*weights, _constant("zero", np.float32(0))], ["n", FEATURES])
