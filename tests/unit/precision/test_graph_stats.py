"""Layers, operations, weights and traffic are counted on the graph, by type."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.candidate import Precision
from enginegate.precision.graph_stats import count_convolutions, executed_layers, graph_stats
from tests.fakes import recurrent
from tests.fakes.recurrent import CLASSES, FEATURES, HIDDEN, STEPS, TRIPS


def counted(model):
    """Layers, those between pairs, and recurrent ones."""
    stats = graph_stats(model)
    return stats.layers, stats.quantised, stats.recurrent


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
        pytest.param(layer(TensorProto.FLOAT), ({"fp32": 1}, 0, {}), id="fp32"),
        pytest.param(layer(TensorProto.FLOAT16), ({"fp16": 1}, 0, {}), id="fp16"),
        pytest.param(layer(TensorProto.BFLOAT16), ({"bf16": 1}, 0, {}), id="bf16"),
        pytest.param(layer(TensorProto.FLOAT, pairs="xw"), ({"int8": 1}, 1, {}), id="int8"),
        pytest.param(layer(TensorProto.FLOAT, pairs="w"), ({"fp32": 1}, 0, {}), id="weight-only"),
        pytest.param(layer(TensorProto.FLOAT, pairs="x"), ({"fp32": 1}, 0, {}), id="input-only"),
    ],
)
def test_effective_type(model, expected):
    """Only a layer whose two operands are dequantised computes in the quantised type."""
    assert counted(model) == expected


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

    assert counted(model) == ({"fp32": 2}, 0, {})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(recurrent.gru, ({"fp32": 2}, 0, {"fp32": 1}), id="gru"),
        pytest.param(recurrent.scan, ({"fp32": 3}, 0, {}), id="scan"),
        pytest.param(recurrent.loop, ({"fp32": 2}, 0, {}), id="loop"),
        pytest.param(recurrent.branch, ({"fp32": 3}, 0, {}), id="if"),
    ],
)
def test_recurrent_layers_and_bodies_are_typed(model, expected):
    """A GRU is a layer; bodies see the weights around them, and what is given to their inputs."""
    assert counted(model()) == expected


def test_products_of_indices_are_no_layers():
    """A MatMul of whole numbers computes positions: no precision names its type."""
    assert counted(layer(TensorProto.INT64)) == ({}, 0, {})


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

    found = graph_stats(model(nodes, weights, inputs=inputs), shapes={"x": shape})

    numbers = {"fp32": next(iter(weights.values())).size}
    assert (found.layer_flops, found.unsized) == ({"fp32": flops}, 0)
    assert found.weights == found.layer_weights == numbers


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

    found = graph_stats(model(nodes, weights))

    assert found.layer_flops == {"int8": 2 * 4 * 6 * 6 * 27}
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
    found = graph_stats(model(), shapes={"x": shape})

    assert (found.layer_flops, found.unsized) == ({"fp32": flops}, 0)


def test_loop_of_unknown_sizes_is_weighed_by_its_weights():
    """A Loop's state may grow, so its sizes are not known; how often it runs is."""
    found = graph_stats(recurrent.loop(), shapes={"x": (1, FEATURES)})

    assert (found.layer_flops, found.unsized) == ({}, 2)
    assert found.layer_weights == {"fp32": TRIPS * FEATURES * FEATURES + FEATURES * CLASSES}


@pytest.mark.parametrize("model", [recurrent.gru, recurrent.scan, recurrent.loop, recurrent.branch])
def test_optimised_bodies_are_read_without_stated_types(model):
    """ONNX Runtime writes no types into what it optimised; they are carried into every body."""
    graph = model()
    expected = {"fp32": 3 if model in {recurrent.scan, recurrent.branch} else 2}

    assert executed_layers(graph) == expected


def _graph(nodes, x=("batch", 3, 32, 32), kind=TensorProto.FLOAT, opset=17, **weights):
    graph = helper.make_graph(
        nodes,
        "counted",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", kind, None)],
        [
            numpy_helper.from_array(np.zeros(shape, np.float32), name)
            for name, shape in weights.items()
        ],
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=domains)


def _node(kind, *inputs, **attributes):
    return helper.make_node(kind, list(inputs), ["y"], **attributes)


CONV = _graph([_node("Conv", "x", "w", pads=[1, 1, 1, 1])], w=(16, 3, 3, 3))
GEMM = _graph([_node("Gemm", "x", "w", "b", transB=1)], x=("batch", 64), w=(10, 64), b=(10,))
PRODUCT = _graph([_node("MatMul", "x", "w")], x=("batch", 128, 64), w=(64, 32))


@pytest.mark.parametrize(
    ("model", "flops", "numbers"),
    [
        pytest.param(CONV, 2 * 4 * 16 * 1024 * 27, 4 * 3 * 1024 + 432 + 4 * 16 * 1024, id="conv"),
        pytest.param(
            _graph([_node("Conv", "x", "w", group=3)], w=(6, 1, 5, 5)),
            2 * 4 * 6 * 28 * 28 * 25,
            4 * 3 * 1024 + 150 + 4 * 6 * 784,
            id="grouped-conv",
        ),
        pytest.param(
            _graph([_node("ConvTranspose", "x", "w", strides=[2, 2])], w=(3, 8, 2, 2)),
            2 * 4 * 3 * 1024 * 8 * 4,
            4 * 3 * 1024 + 96 + 4 * 8 * 4096,
            id="transposed-conv",
        ),
        pytest.param(GEMM, 2 * 4 * 64 * 10, 4 * 64 + 640 + 10 + 40, id="gemm"),
        pytest.param(
            PRODUCT, 2 * 4 * 128 * 64 * 32, 4 * 128 * 64 + 2048 + 4 * 128 * 32, id="matmul"
        ),
        pytest.param(
            _graph([_node("Einsum", "x", "w", equation="bij,jk->bik")], x=("b", 8, 16), w=(16, 2)),
            2 * 4 * 8 * 16 * 2,
            4 * 8 * 16 + 32 + 4 * 8 * 2,
            id="einsum",
        ),
        pytest.param(
            _graph([_node("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2])]),
            4 * 4 * 3 * 256,
            4 * 3 * 1024 + 4 * 3 * 256,
            id="pool",
        ),
        pytest.param(
            _graph([_node("Softmax", "x")], x=("batch", 10)), 5 * 40, 2 * 40, id="softmax"
        ),
        pytest.param(_graph([_node("Transpose", "x")]), 0, 2 * 4 * 3 * 1024, id="transpose"),
        pytest.param(_graph([_node("Relu", "x")]), 4 * 3 * 1024, 0, id="fused-away"),
        pytest.param(_graph([_node("Add", "x", "x")]), 4 * 3072, 4 * 3072, id="second-operand"),
        pytest.param(
            _graph([_node("Attention", "x", "x", "x")], x=("batch", 2, 16, 8), opset=23),
            4 * 4 * 2 * 16 * 16 * 8,
            4 * 4 * 2 * 16 * 8,
            id="attention",
        ),
    ],
)
def test_work_of_one_layer(model, flops, numbers):
    """Operations and numbers moved by a batch of four, worked out by hand."""
    work = graph_stats(model, batch_size=4)

    assert (work.flops, work.bytes_moved) == (flops, 4 * numbers)
    assert work.uncounted == {}


def test_recurrent_layer_is_counted_over_its_length():
    """Every step multiplies the input and the state by the weights of every gate."""
    model = _graph(
        [_node("LSTM", "x", "w", "r", hidden_size=5)], x=(7, 4, 3), w=(1, 20, 3), r=(1, 20, 5)
    )

    assert graph_stats(model, batch_size=7).flops == 2 * 7 * 4 * (60 + 100)


@pytest.mark.parametrize(
    ("precision", "size"), [("fp32", 4), ("tf32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)]
)
def test_precision_sets_the_size_of_numbers(precision, size):
    """The same arithmetic moves fewer bytes in a narrower type."""
    wide, found = (
        graph_stats(CONV, precision=Precision(name), batch_size=1)
        for name in (Precision.FP32, precision)
    )

    assert found.flops == wide.flops
    assert found.bytes_moved == wide.bytes_moved * size / 4


def test_weights_are_moved_once_a_batch():
    """Twice the samples are twice the arithmetic, but less than twice the traffic."""
    one, two = (graph_stats(GEMM, batch_size=size) for size in (1, 2))

    assert two.flops == 2 * one.flops
    assert two.bytes_moved == one.bytes_moved + 4 * (64 + 10)


def test_axes_of_no_fixed_size_come_from_a_request():
    """A sequence length of a typical request sizes the work; without one it is 1."""
    model = _graph([_node("MatMul", "x", "w")], x=("batch", "length", 64), w=(64, 32))

    long = graph_stats(model, batch_size=2, shapes={"x": (1, 100, 64)})
    short = graph_stats(model, batch_size=2)

    assert long.flops == 100 * short.flops == 2 * 200 * 64 * 32


def test_computed_reshape_is_followed():
    """A reshape by the input's own shape keeps the layers behind it countable."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], end=2),
        helper.make_node("Concat", ["shape", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["heads"]),
        _node("MatMul", "heads", "w"),
    ]
    model = _graph(nodes, x=("batch", "length", 64), w=(16, 16))
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 16]), "rest"))

    work = graph_stats(model, batch_size=2, shapes={"x": (1, 10, 64)})

    assert work.flops == 2 * 2 * 10 * 4 * 16 * 16
    assert work.covered == 1.0


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        pytest.param(recurrent.gru, 2 * 12 * 48 * (8 + 16) + 2 * 16 * 4, id="gru"),
        pytest.param(
            recurrent.scan, 12 * (2 * 16 * (8 + 16) + 2 * 16) + 2 * 16 * 4 + 112, id="scan"
        ),
    ],
)
def test_sequences_are_counted_by_the_step(model, flops):
    """A recurrent operator without its sequence as output, and the body of a Scan, are counted."""
    work = graph_stats(model(), batch_size=1)

    assert work.uncounted == {}
    assert work.flops == flops


def test_unknown_operators_are_listed():
    """Operators without a rule are named, and lower the share that was counted."""
    nodes = [
        helper.make_node("Sparkle", ["x"], ["z"], domain="com.example"),
        helper.make_node("Relu", ["x"], ["r"]),
        _node("MatMul", "z", "w"),
    ]

    work = graph_stats(_graph(nodes, x=("batch", 64), w=(64, 10)), batch_size=1)

    assert work.uncounted == {"MatMul": 1, "Sparkle": 1}
    assert work.covered == pytest.approx(1 / 3)


def test_shapes_that_contradict_each_other_are_not_counted():
    """A layer whose operands do not fit together is listed, not counted."""
    model = _graph([_node("MatMul", "x", "w")], x=("batch", 64), w=(32, 10))

    work = graph_stats(model, batch_size=1)

    assert (work.flops, work.uncounted) == (0.0, {"MatMul": 1})


def test_the_work_of_a_file_needs_no_weights(tmp_path):
    """A file whose weights lie beside it is counted also where they are missing."""
    path = tmp_path / "model.onnx"
    onnx.save(GEMM, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()

    assert graph_stats(path, batch_size=4).flops == 2 * 4 * 64 * 10


def test_convolutions_are_counted_in_bodies_too():
    """Whatever their type; a matrix product is none."""
    inner = helper.make_graph([helper.make_node("QLinearConv", ["a"], ["b"])], "inner", [], [])
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner),
    ]

    assert count_convolutions(helper.make_model(helper.make_graph(nodes, "g", [], []))) == 3
    assert count_convolutions(layer(TensorProto.FLOAT)) == 0
