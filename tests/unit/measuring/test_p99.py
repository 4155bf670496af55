import numpy as np
import pytest
from scipy.stats import binom

from enginegate.evidence import Outcome
from enginegate.measuring.p99 import decide, fewest_requests


@pytest.mark.parametrize(
    ("over", "quantile", "confidence", "expected"),
    [
        (0, 0.99, 0.99, 459),
        (1, 0.99, 0.99, 662),
        (5, 0.99, 0.99, 1307),
        (10, 0.99, 0.99, 2010),
        (50, 0.99, 0.99, 6898),
        (0, 0.90, 0.99, 44),
        (1, 0.90, 0.99, 64),
        (0, 0.95, 0.99, 90),
        (0, 0.999, 0.99, 4603),
        (100, 0.9999, 0.99, 1_258_374),
        (0, 0.99, 0.95, 299),
        (0, 0.999, 0.95, 2995),
    ],
)
def test_fewest_requests_equal_loadgen(over, quantile, confidence, expected):
    """The minimum counts are those of MLPerf LoadGen's early stopping."""
    assert fewest_requests(over, confidence=confidence, quantile=quantile) == expected


@pytest.mark.parametrize(
    ("requests", "over", "outcome"),
    [
        pytest.param(0, 0, Outcome.INCONCLUSIVE, id="nothing-sent"),
        pytest.param(458, 0, Outcome.INCONCLUSIVE, id="one-too-few"),
        pytest.param(459, 0, Outcome.PASSED, id="just-enough"),
        pytest.param(1000, 2, Outcome.PASSED, id="two-allowed"),
        pytest.param(1000, 3, Outcome.INCONCLUSIVE, id="three-undecided"),
        pytest.param(10_000, 77, Outcome.PASSED, id="within-at-ten-thousand"),
        pytest.param(10_000, 78, Outcome.INCONCLUSIVE, id="above-at-ten-thousand"),
        pytest.param(1000, 20, Outcome.FAILED, id="definitely-over"),
        pytest.param(1, 1, Outcome.FAILED, id="one-request-over"),
        pytest.param(50, 50, Outcome.FAILED, id="all-over"),
    ],
)
def test_decide(requests, over, outcome):
    """Shown, refuted or neither, at 99 % confidence of a 99th percentile."""
    assert decide(requests, over, confidence=0.99).outcome is outcome


def test_undecided_says_how_many_would_decide():
    """The number that is named does decide when the share over stays the same."""
    good, bad = decide(1000, 5, confidence=0.99), decide(1000, 14, confidence=0.99)

    assert decide(good.needed, int(0.005 * good.needed), confidence=0.99).outcome is Outcome.PASSED
    assert decide(bad.needed, int(0.014 * bad.needed), confidence=0.99).outcome is Outcome.FAILED
    assert decide(100, 0, confidence=0.99).needed == 459
    assert decide(10_000, 100, confidence=0.99).needed is None
    assert decide(459, 0, confidence=0.99).needed is None


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED])
def test_wrong_answers_are_as_rare_as_promised(outcome):
    """A server exactly at the limit gets either verdict in at most 1 % of 4,000 trials."""
    over = np.random.default_rng(1).binomial(2000, 0.01, size=4000)

    wrong = sum(decide(2000, int(count), confidence=0.99).outcome is outcome for count in over)

    assert wrong <= binom.ppf(0.9999, len(over), 0.01)
    assert wrong > 0


def test_power_is_what_was_planned():
    """With 10,000 requests a server at half the allowed share passes nearly always."""
    over = np.random.default_rng(2).binomial(10_000, 0.005, size=500)

    passed = [decide(10_000, int(n), confidence=0.99).outcome is Outcome.PASSED for n in over]

    assert np.mean(passed) > 0.99
