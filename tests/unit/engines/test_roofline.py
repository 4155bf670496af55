import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.candidate import Precision
from enginegate.engines.peak_throughput import PeakThroughput, peak_throughput
from enginegate.engines.roofline import explain, roofline
from enginegate.engines.work import Work, work_of
from tests.fakes import recurrent

FP32 = Precision.FP32
DEVICE = PeakThroughput(flops_per_s=1e12, bytes_per_s=1e11, one_thread_flops_per_s=4e11)


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
    work = work_of(model, FP32, batch_size=4)

    assert (work.flops, work.bytes_moved) == (flops, 4 * numbers)
    assert work.uncounted == {}


def test_a_recurrent_layer_is_counted_over_its_length():
    """Every step multiplies the input and the state by the weights of every gate."""
    model = _graph(
        [_node("LSTM", "x", "w", "r", hidden_size=5)], x=(7, 4, 3), w=(1, 20, 3), r=(1, 20, 5)
    )

    assert work_of(model, FP32, batch_size=7).flops == 2 * 7 * 4 * (60 + 100)


@pytest.mark.parametrize(
    ("precision", "size"), [("fp32", 4), ("tf32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)]
)
def test_precision_sets_the_size_of_numbers(precision, size):
    """The same arithmetic moves fewer bytes in a narrower type."""
    wide, found = (
        work_of(CONV, Precision(name), batch_size=1) for name in (Precision.FP32, precision)
    )

    assert found.flops == wide.flops
    assert found.bytes_moved == wide.bytes_moved * size / 4


def test_weights_are_moved_once_a_batch():
    """Twice the samples are twice the arithmetic, but less than twice the traffic."""
    one, two = (work_of(GEMM, FP32, batch_size=size) for size in (1, 2))

    assert two.flops == 2 * one.flops
    assert two.bytes_moved == one.bytes_moved + 4 * (64 + 10)


def test_axes_of_no_fixed_size_come_from_a_request():
    """A sequence length of a typical request sizes the work; without one it is 1."""
    model = _graph([_node("MatMul", "x", "w")], x=("batch", "length", 64), w=(64, 32))

    long = work_of(model, FP32, batch_size=2, shapes={"x": (1, 100, 64)})
    short = work_of(model, FP32, batch_size=2)

    assert long.flops == 100 * short.flops == 2 * 200 * 64 * 32


def test_a_shape_that_is_computed_is_followed():
    """A reshape by the input's own shape keeps the layers behind it countable."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], end=2),
        helper.make_node("Concat", ["shape", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["heads"]),
        _node("MatMul", "heads", "w"),
    ]
    model = _graph(nodes, x=("batch", "length", 64), w=(16, 16))
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 16]), "rest"))

    work = work_of(model, FP32, batch_size=2, shapes={"x": (1, 10, 64)})

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
    work = work_of(model(), FP32, batch_size=1)

    assert work.uncounted == {}
    assert work.flops == flops


def test_what_is_not_known_is_listed():
    """Operators without a rule are named, and a graph that is mostly unknown gets no verdict."""
    nodes = [
        helper.make_node("Sparkle", ["x"], ["z"], domain="com.example"),
        helper.make_node("Relu", ["x"], ["r"]),
        _node("MatMul", "z", "w"),
    ]

    work = work_of(_graph(nodes, x=("batch", 64), w=(64, 10)), FP32, batch_size=1)
    line = roofline(work, DEVICE)

    assert work.uncounted == {"MatMul": 1, "Sparkle": 1}
    assert work.covered == pytest.approx(1 / 3)
    assert line.bound == "unknown"
    assert "33% of the graph's nodes counted, not 1 MatMul, 1 Sparkle" in explain(line, work)


def test_shapes_that_contradict_each_other_are_not_counted():
    """A layer whose operands do not fit together is listed, not counted."""
    model = _graph([_node("MatMul", "x", "w")], x=("batch", 64), w=(32, 10))

    work = work_of(model, FP32, batch_size=1)

    assert (work.flops, work.uncounted) == (0.0, {"MatMul": 1})


def test_the_work_of_a_file_needs_no_weights(tmp_path):
    """A file whose weights lie beside it is counted also where they are missing."""
    path = tmp_path / "model.onnx"
    onnx.save(GEMM, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()

    assert work_of(path, FP32, batch_size=4).flops == 2 * 4 * 64 * 10


@pytest.mark.parametrize(
    ("flops", "moved", "instances", "bound", "reached", "said"),
    [
        pytest.param(1e9, 1e7, 4, "compute", 0.4, "compute-bound; reaches 40%", id="compute"),
        pytest.param(1e9, 1e7, 1, "compute", 1.0, "4 would balance", id="one-thread"),
        pytest.param(1e7, 1e8, 4, "memory", 0.4, "memory-bound", id="memory"),
        pytest.param(0.0, 1e8, 4, "unknown", 0.4, "not decided", id="nothing-multiplied"),
    ],
)
def test_the_larger_time_is_the_bound(flops, moved, instances, bound, reached, said):
    """Arithmetic or traffic limits, whichever takes longer; reached is the share of that limit."""
    work = Work(8, flops, moved, layers=10, uncounted={})

    line = roofline(work, DEVICE, samples_per_s=8 * 400.0, instances=instances)

    assert line.bound == bound
    assert line.reached == pytest.approx(reached)
    assert said in explain(line, work)


def test_unknown_ceilings_decide_nothing():
    """Without a device's ceilings the work is told and nothing is concluded."""
    work = Work(8, 1e9, 1e7, layers=10, uncounted={})

    line = roofline(work, PeakThroughput(bytes_per_s=1e11), samples_per_s=100.0)

    assert (line.bound, line.reached) == ("unknown", None)
    assert "ceilings are not known" in explain(line, work)


def test_the_ceilings_of_this_processor():
    """A real device multiplies and copies; threads together are no slower than one."""
    found = peak_throughput("cpu", FP32)

    assert found.flops_per_s >= found.one_thread_flops_per_s > 1e8
    assert found.bytes_per_s > 1e8
    assert found.flops_for(1) == found.one_thread_flops_per_s
    assert found.flops_for(10_000) == found.flops_per_s
