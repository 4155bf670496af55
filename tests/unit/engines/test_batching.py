"""Any number of rows goes through a model that takes a few."""

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.engines.batching import check_batch, run_rows, timed_repeat
from enginegate.errors import DataError

SPECS = (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),)


def x(rows, columns=3, dtype=np.float32):
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_rows_come_back_in_order(rows):
    """Chunks are joined in order, and none is larger than the limit."""
    sizes = []

    def once(inputs):
        sizes.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2}

    found = run_rows({"x": x(rows)}, SPECS, limit=4, run_once=once)

    np.testing.assert_array_equal(found["y"], x(rows) * 2)
    assert sum(sizes) == rows
    assert max(sizes) <= 4


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param({"y": x(2)}, r"Given inputs \['y'\]; the model takes \['x'\]", id="name"),
        pytest.param({"x": x(2, 4)}, r"shape \(2, 4\); the model takes x: float32", id="shape"),
        pytest.param({"x": x(2)[0]}, r"shape \(3,\)", id="rank"),
        pytest.param({"x": x(2, dtype=np.float64)}, "'x' is float64", id="dtype"),
        pytest.param({"x": x(0)}, "at least one", id="empty"),
    ],
)
def test_wrong_inputs_are_named(inputs, message):
    """What does not fit the model is refused before it runs."""
    with pytest.raises(DataError, match=message):
        run_rows(inputs, SPECS, limit=4, run_once=lambda given: given)


def test_a_batch_larger_than_one_run_is_refused():
    """Nothing is measured on fewer rows than were given."""
    assert check_batch({"x": x(4)}, SPECS, limit=4) == 4
    with pytest.raises(DataError, match="at most 4 rows, and 5 were given"):
        check_batch({"x": x(5)}, SPECS, limit=4)


def test_repeated_runs_are_waited_for_once_at_their_end():
    """The device may still be computing when the last run was queued."""
    done = []

    seconds = timed_repeat(lambda: done.append("run"), lambda: done.append("wait"))(3)

    assert done == ["run", "run", "run", "wait"]
    assert seconds >= 0.0
