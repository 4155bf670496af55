"""A few batch sizes serve every size, from fixed buffers. The CPU stands in for the GPU."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginegate.candidate import TensorSpec
from enginegate.engines.onnxruntime import gpu as onnxruntime_gpu
from enginegate.engines.onnxruntime.gpu import Bucketed, bucket_of, buckets_up_to, pad_rows
from enginegate.engines.onnxruntime.session import GpuRunner
from enginegate.errors import DataError


@pytest.mark.parametrize(
    ("limit", "wanted", "expected"),
    [
        pytest.param(1, (), (1,), id="one"),
        pytest.param(8, (), (1, 2, 4, 8), id="powers"),
        pytest.param(12, (), (1, 2, 4, 8, 12), id="limit-is-last"),
        pytest.param(12, (32, 4, 1), (1, 4, 12), id="wanted"),
    ],
)
def test_buckets_ascend_to_the_limit(limit, wanted, expected):
    """Powers of two unless others are wanted; none above the limit, which is always one."""
    assert buckets_up_to(limit, wanted) == expected


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 4), (4, 4), (5, 12), (12, 12)])
def test_rows_go_into_the_smallest_bucket_that_holds_them(rows, expected):
    """Padding is as small as the buckets allow."""
    assert bucket_of(rows, (1, 4, 12)) == expected


def test_padding_repeats_the_last_row():
    """Padded rows are real rows: no zero can make an Inf, no index can be out of range."""
    found = pad_rows(np.array([[1, 2], [3, 4]]), 4)

    np.testing.assert_array_equal(found, [[1, 2], [3, 4], [3, 4], [3, 4]])


@pytest.fixture
def session():
    """Doubles its input, of any length."""
    import onnxruntime

    shape = ["n", "t"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.fixture
def bucketed(session, monkeypatch):
    monkeypatch.setattr(onnxruntime_gpu, "_DEVICE", "cpu")
    return Bucketed(lambda: session, (1, 4, 8), graphs=False)


def rows(count, length=3):
    return {"x": np.random.default_rng(count).random((count, length), dtype=np.float32)}


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8])
def test_every_row_is_answered_as_if_alone(bucketed, count):
    """Padding changes no answer, and no padded row comes back."""
    bucketed.warm_up({"x": np.ones((1, 3), np.float32)})
    inputs = rows(count)

    found = bucketed.run(inputs)

    np.testing.assert_array_equal(found["y"], inputs["x"] * 2)


def test_warm_buckets_allocate_nothing_more(bucketed):
    """After the warm-up every batch size finds its buffers, and answers do not share memory."""
    bucketed.warm_up({"x": np.ones((1, 3), np.float32)})
    before = dict(bucketed._kept)

    first = bucketed.run(rows(2))
    kept = first["y"].copy()
    for count in (1, 2, 5, 8):
        bucketed.run(rows(count))

    assert dict(bucketed._kept) == before
    np.testing.assert_array_equal(first["y"], kept)


def test_new_shapes_push_the_oldest_out(bucketed, monkeypatch):
    """Other axes may vary: their buffers are made when they come, and given back in turn."""
    monkeypatch.setattr(onnxruntime_gpu, "_KEPT_SHAPES", 4)

    for length in range(2, 9):
        inputs = rows(3, length)
        np.testing.assert_array_equal(bucketed.run(inputs)["y"], inputs["x"] * 2)

    assert len(bucketed._kept) == 4


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3, 4, 1), (1, 1, 1)])
def test_requests_are_joined_without_changing_an_answer(bucketed, sizes):
    """Rows of several requests come back in their order, however many there were before."""
    bucketed.warm_up({"x": np.ones((1, 3), np.float32)})
    bucketed.run_joined([rows(8)])
    parts = [rows(size) for size in sizes]

    found = bucketed.run_joined(parts)

    np.testing.assert_array_equal(found["y"], 2 * np.concatenate([part["x"] for part in parts]))


def test_joined_requests_of_a_new_shape_get_buffers_of_their_own(bucketed):
    """A sequence length that was never seen is answered too."""
    parts = [rows(2, length=5), rows(1, length=5)]

    found = bucketed.run_joined(parts)

    np.testing.assert_array_equal(found["y"], 2 * np.concatenate([part["x"] for part in parts]))


def test_every_bucket_has_a_session_of_its_own(session, monkeypatch):
    """A session plans for the shape it saw last, so no bucket may share one, nor may new shapes."""
    monkeypatch.setattr(onnxruntime_gpu, "_DEVICE", "cpu")
    opened = []
    bucketed = Bucketed(lambda: opened.append(session) or session, (1, 4, 8), graphs=False)

    bucketed.warm_up({"x": np.ones((1, 3), np.float32)})
    for count in (1, 2, 5, 8):
        bucketed.run(rows(count))
    after_buckets = len(opened)
    for length in (4, 5, 6):
        bucketed.run(rows(2, length))

    assert (after_buckets, len(opened)) == (3, 4)


def test_bound_inputs_are_computed_on_without_being_copied_again(bucketed, monkeypatch):
    """Repeated runs use the warm bucket's buffers, which hold the batch, padded."""
    bucketed.warm_up({"x": np.ones((1, 3), np.float32)})
    runner = GpuRunner(bucketed, (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),))
    inputs = rows(3)

    with runner.bound(inputs) as repeat:
        monkeypatch.setattr(onnxruntime_gpu.Buffers, "load", None)
        seconds = repeat(2)

    found = bucketed.buffers({"x": pad_rows(inputs["x"], 4)}).read()["y"]
    np.testing.assert_array_equal(found[:3], inputs["x"] * 2)
    assert seconds > 0.0


def test_more_rows_than_the_largest_bucket_are_not_bound(bucketed):
    """One run is what is timed."""
    runner = GpuRunner(bucketed, (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),))

    with pytest.raises(DataError, match="at most 8 rows"), runner.bound(rows(9)):
        pass
