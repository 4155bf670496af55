import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from enginegate.evidence import Outcome
from enginegate.measuring.p99 import decide
from enginegate.measuring.sequential import Sequential

TEST = Sequential(confidence=0.99)
LENGTH, TRIALS = 8000, 3000


@pytest.fixture(scope="module")
def at_the_limit():
    """How many of 1, 2, ... requests were over, of servers whose share is exactly the limit."""
    over = np.random.default_rng(4).random((TRIALS, LENGTH)) < 0.01
    return np.cumsum(over, axis=1, dtype=np.int16)


def _most_that_pass(look):
    """For every number of requests, the most over that pass, -1 for none; it never falls."""
    most, found = -1, []
    for requests in range(1, LENGTH + 1):
        while look(requests, most + 1) is Outcome.PASSED:
            most += 1
        found.append(most)
    return np.array(found)


def _fewest_that_fail(look):
    """For every number of requests, the fewest over that fail; it never falls."""
    fewest, found = 1, []
    for requests in range(1, LENGTH + 1):
        while fewest <= requests and look(requests, fewest) is not Outcome.FAILED:
            fewest += 1
        found.append(fewest)
    return np.array(found)


def _fixed(requests, over):
    return decide(requests, over, confidence=0.99).outcome


def test_a_server_at_the_limit_rarely_passes_however_often_one_looks(at_the_limit):
    """Looked at after every request, at most 1 % of runs at the limit ever pass."""
    ever = (at_the_limit <= _most_that_pass(TEST.look)).any(axis=1).sum()

    assert 0 < ever <= binom.ppf(0.9999, TRIALS, 0.01)


def test_a_server_at_the_limit_rarely_fails_however_often_one_looks(at_the_limit):
    """Looked at after every request, at most 1 % of runs at the limit ever fail."""
    ever = (at_the_limit >= _fewest_that_fail(TEST.look)).any(axis=1).sum()

    assert 0 < ever <= binom.ppf(0.9999, TRIALS, 0.01)


def test_the_rule_for_a_fixed_count_would_not_do(at_the_limit):
    """The same looks with the rule for a fixed count pass servers at the limit too often."""
    ever = (at_the_limit <= _most_that_pass(_fixed)).any(axis=1).mean()

    assert ever > 0.02


@given(
    st.integers(0, 30_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.sampled_from([0.9, 0.95, 0.99]),
    st.sampled_from([0.9, 0.99, 0.999]),
)
def test_what_it_says_the_fixed_rule_says_too(counts, confidence, quantile):
    """An answer that holds under repeated looks holds for one look at the same numbers."""
    outcome = Sequential(confidence, quantile).look(*counts)

    fixed = decide(*counts, confidence=confidence, quantile=quantile).outcome
    assert outcome in {Outcome.INCONCLUSIVE, fixed}


@pytest.mark.parametrize(
    ("requests", "over", "expected"),
    [
        pytest.param(0, 0, Outcome.INCONCLUSIVE, id="nothing-sent"),
        pytest.param(555, 0, Outcome.INCONCLUSIVE, id="one-too-few"),
        pytest.param(556, 0, Outcome.PASSED, id="fewest-that-pass"),
        pytest.param(1000, 10, Outcome.INCONCLUSIVE, id="at-the-limit"),
        pytest.param(8005, 50, Outcome.PASSED, id="a-few-over"),
        pytest.param(1, 1, Outcome.INCONCLUSIVE, id="one-over-proves-nothing"),
        pytest.param(2000, 40, Outcome.FAILED, id="twice-the-limit"),
        pytest.param(100, 100, Outcome.FAILED, id="all-over"),
        pytest.param(1_000_000, 5000, Outcome.PASSED, id="very-many-within"),
        pytest.param(1_000_000, 20_000, Outcome.FAILED, id="very-many-over"),
    ],
)
def test_look(requests, over, expected):
    """Shown, refuted or neither, at 99 % confidence of a 99th percentile."""
    assert TEST.look(requests, over) is expected


@pytest.mark.parametrize(
    ("share", "expected", "most"),
    [
        pytest.param(0.0, Outcome.PASSED, 600, id="none-over"),
        pytest.param(0.0025, Outcome.PASSED, 1600, id="a-quarter"),
        pytest.param(0.005, Outcome.PASSED, 4200, id="half"),
        pytest.param(0.02, Outcome.FAILED, 2300, id="twice"),
        pytest.param(0.05, Outcome.FAILED, 250, id="five-times"),
    ],
)
def test_it_decides_early(share, expected, most):
    """Away from the limit it decides after far fewer than 10,000 requests, on average."""
    source = np.random.default_rng(5)
    took, right = [], 0
    for _ in range(40):
        over = 0
        for requests, missed in enumerate(source.random(20_000) < share, start=1):
            over += missed
            outcome = Outcome.INCONCLUSIVE if requests % 5 else TEST.look(requests, over)
            if outcome is not Outcome.INCONCLUSIVE:
                break
        took.append(requests)
        right += outcome is expected

    assert right >= 39
    assert np.mean(took) < most
