"""Batch sizes and parity are judged on outputs alone."""

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.sources.acceptance import max_abs_error, measure_parity, prove_batch_sizes

DATA = DataSet(
    "eval.npz",
    {"x": np.arange(40, dtype=np.float32).reshape(40, 1)},
    None,
    np.array([f"s{index}" for index in range(40)]),
    {},
)


class Model:
    """A model made of a function, for faults that no sound exporter makes."""

    def __init__(self, function):
        self._function = function

    def run(self, inputs):
        return {"y": self._function(inputs["x"])}


def test_batch_sizes_are_run():
    """A model that treats each sample alone is proven at every size."""
    model = Model(lambda x: 2 * x)

    assert prove_batch_sizes(model, DATA, limit=1e-6, origin="m") == (1, 2, 7)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(lambda x: x - x.mean(), "Samples influence one another", id="batch-norm"),
        pytest.param(lambda x: x[:1], "has 1 rows for 2 samples", id="reduced"),
        pytest.param(lambda x: np.where(len(x) == 2, np.nan, x), "differs by nan", id="nan"),
    ],
)
def test_company_may_not_matter(function, message):
    """Statistics over the batch, lost rows and NaN at one size are all caught."""
    with pytest.raises(ModelError, match=message):
        prove_batch_sizes(Model(function), DATA, limit=1e-6, origin="m")


def test_fewer_samples_than_the_largest_batch_are_repeated():
    """Two samples are enough to run a batch of seven."""
    assert prove_batch_sizes(Model(lambda x: x), DATA.head(2), limit=0.0, origin="m")


def test_parity_is_the_largest_difference():
    """The recorded number is the worst over all samples, and says how many."""
    model = Model(lambda x: x + np.where(x == 33, 0.25, 0.0))

    found = measure_parity(lambda i: {"y": i["x"]}, model, DATA, limit=0.5, origin="m")

    assert (found.max_abs_error, found.samples) == (0.25, 40)


def test_parity_names_the_sample():
    """Over the limit: the number, the limit and the sample that shows it."""
    model = Model(lambda x: np.where(x == 33, np.nan, x))

    with pytest.raises(
        ModelError, match=r"differ by nan in output 'y' of sample s33 \(limit.*0\.5"
    ):
        measure_parity(lambda i: {"y": i["x"]}, model, DATA, limit=0.5, origin="m")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.5], 0.5, id="difference"),
        pytest.param([-np.inf], [-np.inf], 0.0, id="equal-infinities"),
        pytest.param([1.0, 2.0], [1.0], np.inf, id="shapes"),
        pytest.param([], [], 0.0, id="empty"),
    ],
)
def test_max_abs_error(left, right, expected):
    """Equal infinities are equal; other shapes are infinitely far."""
    assert max_abs_error(np.array(left), np.array(right)) == expected
