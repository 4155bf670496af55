"""How far two answers are apart is told at the worst number, and what helps depends on it."""

import numpy as np
import pytest

from enginegate.sources.differences import worst_of


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
    assert worst_of(np.array(left), np.array(right)).error == expected


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
        assert low <= worst_of(first, second, logarithm=True).error <= high


def test_logarithms_are_never_judged_more_loosely_than_they_deviate():
    """Only float32's resolution is taken off the plain difference of logarithms."""
    random = np.random.default_rng(0)
    left = random.uniform(1e-3, 1.0, 1000)
    right = np.clip(left * (1 + random.normal(0, 0.01, 1000)), 1e-3, 1.0)

    for first, second in zip(np.log(left), np.log(right), strict=True):
        apart = worst_of(np.array([first]), np.array([second]), logarithm=True).error
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
    worst = worst_of(np.array(left), np.array(right), logarithm=logarithm)

    assert advice in worst.advice(1e-3)
    assert ("parity_max_abs_error" in worst.advice(1e-3)) == (advice[:4] in {"floa", "near"})
