"""Batch sizes, lengths and parity are judged on outputs alone."""

from dataclasses import replace

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.sources.parity import (
    ModelUnderTest,
    largest_difference,
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


def under_test(model, *, limit, data=DATA, framework=None, logarithms=frozenset()):
    return ModelUnderTest(model, data, framework, limit, "m", logarithms)


def same(inputs):
    """A framework that answers with its input."""
    return {"y": inputs["x"]}


def test_batch_sizes_are_run():
    """A model that treats each sample alone is proven at every size."""
    model = Model(lambda x: 2 * x)

    assert prove_batch_sizes(under_test(model, limit=1e-6)) == (1, 2, 7)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(lambda x: x - x.mean(), "Samples influence one another", id="batch-norm"),
        pytest.param(lambda x: x[:1], "has 1 rows for 2 samples", id="reduced"),
        pytest.param(lambda x: np.where(len(x) == 2, np.nan, x), "differs by inf", id="nan"),
    ],
)
def test_company_may_not_matter(function, message):
    """Statistics over the batch, lost rows and NaN at one size are all caught."""
    with pytest.raises(ModelError, match=message):
        prove_batch_sizes(under_test(Model(function), limit=1e-6))


def test_fewer_samples_than_the_largest_batch_are_repeated():
    """Two samples are enough to run a batch of seven."""
    assert prove_batch_sizes(under_test(Model(lambda x: x), limit=0.0, data=DATA.head(2)))


def test_parity_is_the_largest_difference():
    """The recorded number is the worst over all samples, and says how many."""
    model = Model(lambda x: x + np.where(x == 33, 0.25, 0.0))

    found = measure_parity(under_test(model, limit=0.5, framework=same))

    assert (found.max_abs_error, found.samples) == (0.25, 40)


def test_parity_names_the_worst_sample():
    """Not the first over the limit: the worst, with both numbers, and how many are over."""
    model = Model(lambda x: x + np.where(x > 30, (x - 30) ** 2, 0.0) * (x < 38))

    with pytest.raises(
        ModelError,
        match=r"by up to 49 \(limit parity_max_abs_error = 0\.5\), in 7 of 40 samples of eval\.npz"
        r".*worst is y\[0\] of sample s37: 37 in the framework, 86 in ONNX\.\nThe export changed",
    ):
        measure_parity(under_test(model, limit=0.5, framework=same))


def test_nan_is_the_worst_difference():
    """NaN is the worst of all, and no limit is advised for it."""
    model = Model(lambda x: np.where(x == 33, np.nan, x + 5))

    with pytest.raises(ModelError, match=r"sample s33: 33 in the framework, nan in ONNX\.\nONNX"):
        measure_parity(under_test(model, limit=0.5, framework=same))


def test_logarithms_of_probabilities_are_compared_as_probabilities():
    """Float32's resolution beside 1 is no difference, but is one of numbers that are plain."""
    data = DataSet(
        "p.npz", {"x": np.log([[1.6e-6], [0.3]]).astype(np.float32)}, None, DATA.ids[:2], {}
    )
    model = Model(lambda x: np.log(np.exp(x) + np.float32(1.2e-7)))

    plain = under_test(model, limit=1e-3, data=data, framework=same)

    assert measure_parity(replace(plain, logarithms=frozenset({"y"}))).max_abs_error == 0.0
    with pytest.raises(ModelError, match=r"differ by up to 0\.07"):
        measure_parity(plain)


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
            raise RuntimeError(f"bad length {length}")
        total = (inputs["ids"] * inputs["mask"]).sum(1)
        return {"y": (total + (length in self._wrong_at))[: self._rows]}

    def as_framework(self, inputs):
        """A framework's refusal is an error of this program, unlike a runtime's."""
        try:
            return self.run(inputs)
        except RuntimeError as error:
            raise ModelError(str(error)) from error


def varying(model, framework=None):
    return ModelUnderTest(model, TOKENS, framework, 1e-6, "m")


def test_lengths_are_cut_from_real_samples():
    """One token, half of them, all but one and all are compared with the framework."""
    assert prove_lengths(varying(Sums(), Sums().run), "sequence", PLACES) == (1, 6, 11, 12)


def test_without_a_framework_a_single_token_proves_nothing():
    """Nobody says that an ONNX file must work with one token."""
    assert prove_lengths(varying(Sums(refuses=(1,))), "sequence", PLACES) == (6, 11, 12)


def test_length_that_the_framework_refuses_is_left_out():
    """An image smaller than a kernel is not the export's fault."""
    assert prove_lengths(varying(Sums(), Sums(refuses=(1,)).as_framework), "height", PLACES) == (
        6,
        11,
        12,
    )


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
        prove_lengths(varying(model, framework), "sequence", PLACES)


def test_axis_that_never_varied_is_refused():
    """A dynamic axis that the framework runs at one size only is not dynamic."""
    stubborn = Sums(refuses=(1, 6, 11)).as_framework

    with pytest.raises(ModelError, match=r"\[1, 6, 11, 12\] the model takes only \[12\]"):
        prove_lengths(varying(Sums(), stubborn), "height", PLACES)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.5], 0.5, id="difference"),
        pytest.param([-np.inf], [-np.inf], 0.0, id="equal-infinities"),
        pytest.param([1.0, np.nan], [1.0, 2.0], np.inf, id="nan"),
        pytest.param([1.0, 2.0], [1.0], np.inf, id="shapes"),
        pytest.param([], [], 0.0, id="empty"),
    ],
)
def test_largest_absolute_difference(left, right, expected):
    """Equal infinities are equal; other shapes and NaN are infinitely far."""
    assert largest_difference(np.array(left), np.array(right)).error == expected


@pytest.mark.parametrize(
    ("left", "right", "low", "high"),
    [
        pytest.param(1.6e-6, 1.72e-6, 0.0, 0.0, id="a-unit-near-one"),
        pytest.param(1e-6, 5e-6, 1.2, 1.3, id="small-but-another"),
        pytest.param(1e-5, 0.9, 11.3, 11.4, id="no-limit-is-above-all-differences"),
        pytest.param(0.40, 0.41, 0.024, 0.025, id="ordinary"),
        pytest.param(1.0, 0.998, 0.0019, 0.0021, id="near-one"),
    ],
)
def test_logarithms_of_probabilities(left, right, low, high):
    """The difference beyond float32's resolution, either way round, however large it is."""
    ends = np.log([left]), np.log([right])

    for first, second in (ends, ends[::-1]):
        assert low <= largest_difference(first, second, logarithm=True).error <= high


def test_logarithms_are_never_judged_more_loosely_than_they_deviate():
    """Only float32's resolution is taken off the plain difference of logarithms."""
    random = np.random.default_rng(0)
    left = random.uniform(1e-3, 1.0, 1000)
    right = np.clip(left * (1 + random.normal(0, 0.01, 1000)), 1e-3, 1.0)

    for first, second in zip(np.log(left), np.log(right), strict=True):
        apart = largest_difference(np.array([first]), np.array([second]), logarithm=True).error
        assert abs(first - second) * 0.95 - 5e-4 <= apart <= abs(first - second)


@pytest.mark.parametrize(
    ("left", "right", "logarithm", "advice"),
    [
        pytest.param([2e5], [2e5 + 0.05], False, "float32's last places", id="rounding"),
        pytest.param([0.5], [0.505], False, "near the limit", id="near"),
        pytest.param([0.5], [0.9], False, "The export changed the model", id="far"),
        pytest.param([-1.0], [-2.0], True, "Trees differ where a feature", id="probabilities"),
        pytest.param([0.5], [np.nan], False, "no limit mends that", id="nan"),
        pytest.param([0.5], [0.5, 0.5], False, "changed the output's shape", id="shape"),
    ],
)
def test_advice_fits_the_case(left, right, logarithm, advice):
    """Raising the limit is advised for rounding only."""
    worst = largest_difference(np.array(left), np.array(right), logarithm=logarithm)

    assert advice in worst.advice(1e-3)
    assert ("parity_max_abs_error" in worst.advice(1e-3)) == (advice[:4] in {"floa", "near"})
