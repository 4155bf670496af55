"""Ranges come from histograms that do not depend on how the values were cut into batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginegate.precision.calibration.methods import (
    BINS_A_SIDE,
    METHODS,
    Histogram,
    entropy,
    percentile,
    whole,
)


def seen(*batches):
    found = Histogram.empty()
    for batch in batches:
        found = found.add(np.asarray(batch, np.float32))
    return found


def tailed(count=20_000):
    """A bell around 0 with one value 50 times its width."""
    values = np.random.default_rng(0).normal(0, 1, count).astype(np.float32)
    values[count // 2] = 50.0
    return values


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=60),
    cut=st.integers(1, 59),
)
def test_batches_do_not_matter(values, cut):
    """However the values are cut, in one pass or merged, the counts and ends are the same."""
    together = seen(values)
    apart = seen(values[:cut], values[cut:])
    merged = seen(values[:cut]).merge(seen(values[cut:]))

    for other in (apart, merged):
        np.testing.assert_array_equal(other.counts, together.counts)
        assert (other.low, other.high, other.limit) == (together.low, together.high, together.limit)


def test_max_keeps_everything():
    """The ends are the smallest and largest value, with zero between."""
    assert whole(seen([2.0, 5.0], [3.0])) == (0.0, 5.0)
    assert whole(seen([-7.0, 5.0])) == (-7.0, 5.0)


@pytest.mark.parametrize("method", [entropy, percentile])
def test_outlier_is_clipped(method):
    """One value of 50 among 20 000 around 0 does not decide the range."""
    assert 2.0 < method(seen(tailed())).magnitude < 10.0


@pytest.mark.parametrize("method", [entropy, percentile])
def test_even_values_are_not_clipped(method):
    """Where every level is used as much, almost all of the range is kept."""
    values = np.linspace(-1, 1, 20_001)

    assert method(seen(values)).magnitude > 0.97


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("values", [[0.0, 0.0], [3.0], [-2.0, -2.0]], ids=["zero", "one", "below"])
def test_few_values_have_a_range(method, values):
    """Constants and zeros give a range that holds them, whatever the method."""
    low, high = method(seen(values))

    assert low <= 0.0 <= high
    assert low <= min(values) + 1e-2
    assert high >= max(values) - 1e-2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200))
def test_no_method_goes_beyond_what_was_seen(values):
    """A range never ends beyond the values, or levels would be wasted."""
    histogram = seen(values)

    for method in METHODS.values():
        low, high = method(histogram)
        assert histogram.low <= low <= 0.0 <= high <= histogram.high


def test_nan_and_inf_are_counted_apart():
    """They are in no bin and move no end."""
    found = seen([1.0, np.nan, np.inf, -np.inf])

    assert found.nonfinite == 3
    assert whole(found) == (0.0, 1.0)
    assert found.counts.sum() == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 5e3, 1e30])
def test_bins_are_those_of_double_precision(dtype, size):
    """Counting in the values' own type is exact, for each size and for more values than a piece."""
    with np.errstate(over="ignore"):
        values = (np.random.default_rng(1).normal(size=40_000) * size).astype(dtype)
    values = values[np.isfinite(values)]

    found = Histogram.empty().add(values)

    if found.limit:
        place = np.floor(values.astype(np.float64) / found.limit * BINS_A_SIDE).astype(np.int64)
        expected = np.bincount(place + BINS_A_SIDE, minlength=2 * BINS_A_SIDE)
        np.testing.assert_array_equal(found.counts, expected)
    assert found.counts.sum() == len(values)
    assert (found.low, found.high) == (min(0.0, values.min(initial=0)), values.max(initial=0))
