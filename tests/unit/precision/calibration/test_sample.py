"""Calibration reads the same share of every slice, in batches of a pinned size."""

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.data import DataSet
from enginegate.errors import DataError
from enginegate.policy import CalibrationTable
from enginegate.precision import CalibrationSample


def data(shades, **inputs):
    count = len(shades)
    inputs = inputs or {"x": np.arange(count, dtype=np.float32)[:, None]}
    slices = {"shade": np.array(shades)} if any(shades) else {}
    return DataSet("calibration.npz", inputs, None, np.arange(count).astype(str), slices)


def chosen(shades, count, batch_size=4):
    return CalibrationSample.of(
        data(shades), CalibrationTable(max_samples=count, batch_size=batch_size)
    )


def test_every_slice_has_its_share():
    """Data sorted by slice gives all slices, in proportion, not the first of them."""
    shades = ["dark"] * 10 + ["light"] * 20 + ["bright"] * 70

    rows = chosen(shades, 20).rows

    assert [shades[row] for row in rows].count("dark") == 2
    assert [shades[row] for row in rows].count("light") == 4
    assert [shades[row] for row in rows].count("bright") == 14


def test_without_slices_the_start_is_read():
    """There is nothing to stratify by."""
    np.testing.assert_array_equal(chosen([""] * 9, 4).rows, [0, 1, 2, 3])


def test_small_slices_round_to_the_wanted_count():
    """Three slices and two samples: two slices are read, and the same two every time."""
    first = chosen(["a", "b", "c"], 2).rows

    assert len(first) == 2
    np.testing.assert_array_equal(first, chosen(["a", "b", "c"], 2).rows)


def test_batches_hold_the_rows_in_order():
    """All but the last batch have the pinned size."""
    parts = [batch["x"][:, 0].tolist() for batch in chosen([""] * 6, 6, batch_size=4).batches()]

    assert parts == [[0, 1, 2, 3], [4, 5]]


def test_digest_names_what_scales_depend_on():
    """Other rows or another batch size are another digest; a later sample is not."""
    base = chosen([""] * 6, 4)

    assert base.sha256 == chosen([""] * 9, 4).sha256
    assert base.sha256 != chosen([""] * 9, 5).sha256
    assert base.sha256 != chosen([""] * 9, 4, batch_size=2).sha256


def test_held_out_samples_are_not_fitted():
    """A quarter is held out; no row is in both parts."""
    fitted, held = chosen([""] * 12, 12).split(4)

    assert held.rows.tolist() == [3, 7, 11]
    assert not set(fitted.rows) & set(held.rows)


def test_too_few_to_split_are_used_for_both():
    """With fewer rows than it takes to hold one out, both parts are the whole."""
    sample = chosen([""] * 3, 3)

    assert sample.split(4) == (sample, sample)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(np.zeros((6, 2), np.float64), "float64", id="dtype"),
        pytest.param(np.zeros((6, 2, 1), np.float32), r"shape \(4, 2, 1\)", id="rank"),
        pytest.param(np.array([[0, 0]] * 5 + [[0, np.nan]], np.float32), r"id 5", id="nan"),
    ],
)
def test_samples_must_fit_the_model(values, message):
    """Wrong type, wrong rank and NaN are refused, and the sample is named."""
    sample = CalibrationSample.of(data([""] * 6, x=values), CalibrationTable(batch_size=4))

    with pytest.raises(DataError, match=message):
        sample.check_fits((TensorSpec(name="x", dtype="float32", shape=(-1, 2)),))
