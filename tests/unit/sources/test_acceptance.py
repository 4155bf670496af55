"""Batch sizes and parity are judged on outputs alone."""

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.sources.acceptance import (
    Trial,
    max_abs_error,
    measure_parity,
    prove_batch_sizes,
    prove_lengths,
)

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


TOKENS = DataSet(
    "tokens.npz",
    {"ids": np.arange(24, dtype=np.float32).reshape(2, 12), "mask": np.ones((2, 12), np.float32)},
    None,
    np.array(["a", "b"]),
    {},
)
PLACES = (("ids", 1), ("mask", 1))


class Sums:
    """Sums over the sequence, and goes wrong at some lengths."""

    def __init__(self, *, wrong_at=(), refuses=(), rows=None):
        self._wrong_at, self._refuses, self._rows = wrong_at, refuses, rows

    def run(self, inputs):
        length = inputs["ids"].shape[1]
        if length in self._refuses or inputs["mask"].shape != inputs["ids"].shape:
            raise ModelError(f"bad length {length}")
        total = (inputs["ids"] * inputs["mask"]).sum(1)
        return {"y": (total + (length in self._wrong_at))[: self._rows]}


def trial(model, framework=None):
    return Trial(model, TOKENS, framework, 1e-6, "m")


def test_lengths_are_cut_from_real_samples():
    """One token, half of them, all but one and all are compared with the framework."""
    assert prove_lengths(trial(Sums(), Sums().run), "sequence", PLACES) == (1, 6, 11, 12)


def test_without_a_framework_a_single_token_proves_nothing():
    """Nobody says that an ONNX file must work with one token."""
    assert prove_lengths(trial(Sums(refuses=(1,))), "sequence", PLACES) == (6, 11, 12)


def test_length_that_the_framework_refuses_is_left_out():
    """An image smaller than a kernel is not the export's fault."""
    assert prove_lengths(trial(Sums(), Sums(refuses=(1,)).run), "height", PLACES) == (6, 11, 12)


@pytest.mark.parametrize(
    ("model", "framework", "message"),
    [
        pytest.param(
            Sums(wrong_at=(6,)), Sums().run, r"sequence = 6, ONNX and .* differ by 1 ", id="wrong"
        ),
        pytest.param(Sums(refuses=(1,)), Sums().run, r"sequence = 1 cannot be run", id="fixed"),
        pytest.param(Sums(refuses=(6,)), None, r"sequence = 6 cannot be run", id="onnx"),
        pytest.param(Sums(rows=1), None, r"'y' has 1 rows for 2 samples", id="rows"),
    ],
)
def test_size_that_was_fixed_by_the_export_is_named(model, framework, message):
    """Wrong numbers, a refusal and lost rows at one length are all caught."""
    with pytest.raises(ModelError, match=message):
        prove_lengths(trial(model, framework), "sequence", PLACES)


def test_axis_that_never_varied_is_refused():
    """A dynamic axis that the framework runs at one size only is not dynamic."""
    stubborn = Sums(refuses=(1, 6, 11)).run

    with pytest.raises(ModelError, match=r"\[1, 6, 11, 12\] the model takes only \[12\]"):
        prove_lengths(trial(Sums(), stubborn), "height", PLACES)
