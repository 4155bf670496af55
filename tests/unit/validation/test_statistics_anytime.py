"""Shares that are looked at again and again."""

import math

import numpy as np
import pytest

from validation.statistics import Seen, log_evidence, surely


def looks(*counts, samples=20):
    return [Seen(number, samples, having) for number, having in enumerate(counts, start=1)]


@pytest.mark.parametrize(
    ("seen", "side", "limit", "expected"),
    [
        pytest.param([], "above", 0.01, False, id="nothing-seen"),
        pytest.param(looks(0), "above", 0.01, False, id="none-of-20"),
        pytest.param(looks(1), "above", 0.01, False, id="one-may-be-chance"),
        pytest.param(looks(20), "above", 0.01, True, id="all-of-20"),
        pytest.param(looks(1), "above", 0.0, True, id="one-refutes-a-limit-of-0"),
        pytest.param(looks(20), "above", 1.0, False, id="nothing-is-above-1"),
        pytest.param(looks(*[0] * 20), "below", 0.01, False, id="400-good-ones-show-little"),
        pytest.param(looks(*[0] * 40), "below", 0.01, True, id="800-good-ones-show-it"),
        pytest.param(looks(*[2] * 30), "above", 0.01, True, id="a-slow-leak-adds-up"),
        pytest.param(looks(*[0] * 999, 12), "above", 0.01, True, id="a-good-past-hides-nothing"),
        pytest.param(looks(*[0] * 999, 3), "above", 0.01, False, id="after-1000-checks-3-is-luck"),
    ],
)
def test_surely(seen, side, limit, expected):
    """Evidence adds up over checks, in either direction, and a new fault is seen at once."""
    assert surely(seen, side, limit, alpha=0.01) is expected


@pytest.mark.slow
def test_false_alarms_stay_rare_over_all_checks():
    """At exactly the limit and checked 60 times, at most alpha of the releases are ever failed;
    a test at each check alone would fail a third of them."""
    source, alpha, limit = np.random.default_rng(7), 0.05, 0.05
    failed = alone = 0
    for _ in range(200):
        seen = looks(*source.binomial(20, limit, 60).tolist())
        failed += any(surely(seen[:n], "above", limit, alpha=alpha) for n in range(1, 61))
        alone += any(look.having >= 4 for look in seen)

    assert failed <= 200 * alpha
    assert alone > 200 * 0.3


def test_evidence_is_an_average_over_what_may_come():
    """Its mean under the limit is 1, exactly, which is what makes it valid (one check of 6)."""
    limit, samples = 0.2, 6
    chances = [
        math.comb(samples, k) * limit**k * (1 - limit) ** (samples - k) for k in range(samples + 1)
    ]
    values = [math.exp(log_evidence([Seen(1, samples, k)], "above", limit)) for k in range(7)]

    assert sum(c * v for c, v in zip(chances, values, strict=True)) == pytest.approx(1.0)
