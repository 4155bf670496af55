"""Operations and weights are counted by type, in the graph as it is and as it was optimised."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.engines.typed import Typed, executed_layers, typed_census
from tests.fakes import recurrent
from tests.fakes.recurrent import CLASSES, FEATURES, HIDDEN, STEPS, TRIPS


def model(nodes, weights, *, inputs=("n", 3, 8, 8), outputs=None):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


W = np.ones((4, 3, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("nodes", "weights", "inputs", "flops"),
    [
        pytest.param(
            [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
            {"w": W},
            ("n", 3, 8, 8),
            2 * 4 * 8 * 8 * 3 * 3 * 3,
            id="conv",
        ),
        pytest.param(
            [helper.make_node("Conv", ["x", "w"], ["y"], group=3)],
            {"w": np.ones((6, 1, 3, 3), np.float32)},
            ("n", 3, 8, 8),
            2 * 6 * 6 * 6 * 1 * 3 * 3,
            id="grouped",
        ),
        pytest.param(
            [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
            {"w": np.ones((5, 7), np.float32)},
            ("n", 7),
            2 * 5 * 7,
            id="gemm",
        ),
        pytest.param(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            {"w": np.ones((7, 5), np.float32)},
            ("n", "t", 7),
            2 * 12 * 5 * 7,
            id="matmul",
        ),
    ],
)
def test_operations_of_one_sample(nodes, weights, inputs, flops):
    """A multiplication and an addition are two; the batch is one sample, other axes as given."""
    shape = tuple(12 if axis == "t" else 99 if axis == "n" else axis for axis in inputs)

    found = typed_census(model(nodes, weights, inputs=inputs), {"x": shape})

    numbers = {"fp32": next(iter(weights.values())).size}
    assert found == Typed({"fp32": flops}, numbers, unsized=0, multiplied=numbers)


def pairs(name):
    return [
        helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}q"]),
        helper.make_node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]),
    ]


def test_pairs_around_a_layer_make_it_int8():
    """Operations count as int8 when both operands were quantised; scales are no weights."""
    nodes = [
        *pairs("x"),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"]),
        helper.make_node("Conv", ["xd", "wd"], ["y"]),
    ]
    weights = {"w": W.astype(np.int8), "s": np.float32(1.0), "z": np.int8(0)}

    found = typed_census(model(nodes, weights), {})

    assert found.flops == {"int8": 2 * 4 * 6 * 6 * 27}
    assert found.weights == {"int8": W.size}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param([helper.make_node("QLinearConv", ["x", "w"], ["y"])], {"int8": 1}, id="q"),
        pytest.param(
            [helper.make_node("MatMulIntegerToFloat", ["x", "w"], ["y"])], {"int8": 1}, id="integer"
        ),
        pytest.param([helper.make_node("QGemm", ["x", "w"], ["y"])], {"int8": 1}, id="qgemm"),
        pytest.param([helper.make_node("FusedConv", ["x", "w"], ["y"])], {"fp32": 1}, id="fused"),
        pytest.param(
            [
                helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
                helper.make_node("Relu", ["h"], ["r"]),
                helper.make_node("MatMul", ["r", "r"], ["y"]),
            ],
            {"fp16": 1},
            id="cast",
        ),
        pytest.param(
            [*pairs("x"), helper.make_node("Conv", ["xd", "w"], ["y"])],
            {"fp32": 1},
            id="converted-back",
        ),
    ],
)
def test_optimised_graphs_are_read_by_what_they_run(nodes, expected):
    """Fused integer operators are int8; a float layer between pairs is not."""
    weights = {"w": W, "s": np.float32(1.0), "z": np.int8(0)}

    assert executed_layers(model(nodes, weights)) == expected


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    [
        pytest.param(
            recurrent.gru,
            (1, STEPS, FEATURES),
            2 * STEPS * 3 * HIDDEN * (FEATURES + HIDDEN) + 2 * HIDDEN * CLASSES,
            id="gru",
        ),
        pytest.param(
            recurrent.scan,
            (1, STEPS, FEATURES),
            2 * STEPS * HIDDEN * (FEATURES + HIDDEN) + 2 * HIDDEN * CLASSES,
            id="scan",
        ),
        pytest.param(
            recurrent.branch,
            (1, FEATURES),
            2 * 2 * FEATURES * FEATURES + 2 * FEATURES * CLASSES,
            id="if",
        ),
    ],
)
def test_sequences_count_each_step(model, shape, flops):
    """A recurrent operator and the body of a Scan multiply once for every step."""
    found = typed_census(model(), {"x": shape})

    assert (found.flops, found.unsized) == ({"fp32": flops}, 0)


def test_loop_of_unknown_sizes_is_weighed_by_its_weights():
    """A Loop's state may grow, so its sizes are not known; how often it runs is."""
    found = typed_census(recurrent.loop(), {"x": (1, FEATURES)})

    assert (found.flops, found.unsized) == ({}, 2)
    assert found.multiplied == {"fp32": TRIPS * FEATURES * FEATURES + FEATURES * CLASSES}


@pytest.mark.parametrize("model", [recurrent.gru, recurrent.scan, recurrent.loop, recurrent.branch])
def test_optimised_bodies_are_read_without_stated_types(model):
    """ONNX Runtime writes no types into what it optimised; they are carried into every body."""
    graph = model()
    expected = {"fp32": 3 if model in {recurrent.scan, recurrent.branch} else 2}

    assert executed_layers(graph) == expected
