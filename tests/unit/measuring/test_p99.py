"""The 99th percentile: nearest rank, interval, and the three tests of "p99 is within the limit"."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from enginegate.evidence import Outcome, PointDecision
from enginegate.measurement import Load, StageSplit
from enginegate.measuring.p99 import (
    SequentialTest,
    clustering,
    decide_fixed,
    decide_on_server,
    decide_points,
    decide_pooled,
    fewest_over,
    fewest_requests,
    interval_ranks,
    lowest_refuted,
    nearest_rank,
    percentiles,
)
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


@pytest.mark.parametrize(
    ("latencies", "quantile", "expected"),
    [
        pytest.param(range(1, 101), 0.99, 99.0, id="hundred"),
        pytest.param(range(1, 11), 0.99, 10.0, id="ten-have-only-their-largest"),
        pytest.param([3.0, 1.0, 2.0], 0.5, 2.0, id="median-in-any-order"),
        pytest.param([1.0] * 98 + [np.inf] * 2, 0.99, np.inf, id="falls-on-a-failure"),
        pytest.param([1.0] * 99 + [np.inf], 0.99, 1.0, id="one-failure-in-a-hundred"),
    ],
)
def test_nearest_rank(latencies, quantile, expected):
    """The smallest value that at least the share does not exceed; no interpolation."""
    assert nearest_rank(np.array(latencies, np.float64), quantile) == expected


@pytest.mark.parametrize(("count", "quantile"), [(200, 0.5), (1000, 0.9), (1000, 0.99)])
def test_intervals_cover_the_true_percentile(count, quantile):
    """Over 2,000 trials the interval holds the true percentile at least 95 % of the time."""
    source = np.random.default_rng(3)
    ranks = interval_ranks(count, quantile, confidence=0.95)
    true = -np.log(1 - quantile)

    draws = np.sort(source.exponential(size=(2000, count)), axis=1)
    covered = (draws[:, ranks.low - 1] <= true) & (true <= draws[:, ranks.high - 1])

    assert covered.mean() >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 2000)
    assert covered.mean() < 0.985


def test_few_samples_have_no_bound():
    """Fifty samples cannot bound a 99th percentile from above, and say so."""
    found = percentiles(np.arange(1.0, 51.0))

    p99 = next(percentile for percentile in found if percentile.quantile == 0.99)
    assert (p99.value_ms, p99.high_ms, p99.samples) == (50.0, None, 50)
    assert p99.low_ms is not None
    assert percentiles(np.array([])) == ()


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
    assert decide_fixed(requests, over, confidence=0.99).outcome is outcome


def test_undecided_says_how_many_would_decide():
    """The number that is named does decide when the share over stays the same."""
    good, bad = decide_fixed(1000, 5, confidence=0.99), decide_fixed(1000, 14, confidence=0.99)

    assert (
        decide_fixed(good.needed, int(0.005 * good.needed), confidence=0.99).outcome
        is Outcome.PASSED
    )
    assert (
        decide_fixed(bad.needed, int(0.014 * bad.needed), confidence=0.99).outcome is Outcome.FAILED
    )
    assert decide_fixed(100, 0, confidence=0.99).needed == 459
    assert decide_fixed(10_000, 100, confidence=0.99).needed is None
    assert decide_fixed(459, 0, confidence=0.99).needed is None


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED])
def test_wrong_answers_are_as_rare_as_promised(outcome):
    """A server exactly at the limit gets either verdict in at most 1 % of 4,000 trials."""
    over = np.random.default_rng(1).binomial(2000, 0.01, size=4000)

    wrong = sum(
        decide_fixed(2000, int(count), confidence=0.99).outcome is outcome for count in over
    )

    assert wrong <= binom.ppf(0.9999, len(over), 0.01)
    assert wrong > 0


def test_power_is_what_was_planned():
    """With 10,000 requests a server at half the allowed share passes nearly always."""
    over = np.random.default_rng(2).binomial(10_000, 0.005, size=500)

    passed = [decide_fixed(10_000, int(n), confidence=0.99).outcome is Outcome.PASSED for n in over]

    assert np.mean(passed) > 0.99


SEQUENTIAL = SequentialTest(confidence=0.99)
LENGTH, TRIALS = 8000, 3000


@pytest.fixture(scope="module")
def at_the_limit():
    """How many of 1, 2, ... requests were over, of servers whose share is exactly the limit."""
    over = np.random.default_rng(4).random((TRIALS, LENGTH)) < 0.01
    return np.cumsum(over, axis=1, dtype=np.int16)


def _most_that_pass(outcome_of):
    """For every number of requests, the most over that pass, -1 for none; it never falls."""
    most, found = -1, []
    for requests in range(1, LENGTH + 1):
        while outcome_of(requests, most + 1) is Outcome.PASSED:
            most += 1
        found.append(most)
    return np.array(found)


def _fewest_that_fail(outcome_of):
    """For every number of requests, the fewest over that fail; it never falls."""
    fewest, found = 1, []
    for requests in range(1, LENGTH + 1):
        while fewest <= requests and outcome_of(requests, fewest) is not Outcome.FAILED:
            fewest += 1
        found.append(fewest)
    return np.array(found)


def _fixed(requests, over):
    return decide_fixed(requests, over, confidence=0.99).outcome


def test_server_at_the_limit_rarely_passes_a_sequential_test(at_the_limit):
    """Looked at after every request, at most 1 % of runs at the limit ever pass."""
    ever = (at_the_limit <= _most_that_pass(SEQUENTIAL.decide)).any(axis=1).sum()

    assert 0 < ever <= binom.ppf(0.9999, TRIALS, 0.01)


def test_server_at_the_limit_rarely_fails_a_sequential_test(at_the_limit):
    """Looked at after every request, at most 1 % of runs at the limit ever fail."""
    ever = (at_the_limit >= _fewest_that_fail(SEQUENTIAL.decide)).any(axis=1).sum()

    assert 0 < ever <= binom.ppf(0.9999, TRIALS, 0.01)


def test_fixed_count_rule_is_not_valid_sequentially(at_the_limit):
    """Asked after every request, the rule for a fixed count passes too many at the limit."""
    ever = (at_the_limit <= _most_that_pass(_fixed)).any(axis=1).mean()

    assert ever > 0.02


@given(
    st.integers(0, 30_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.sampled_from([0.9, 0.95, 0.99]),
    st.sampled_from([0.9, 0.99, 0.999]),
)
def test_sequential_answers_agree_with_the_fixed_count_rule(counts, confidence, quantile):
    """A sequential answer is also the fixed-count rule's answer for the same two numbers."""
    outcome = SequentialTest(confidence, quantile).decide(*counts)

    fixed = decide_fixed(*counts, confidence=confidence, quantile=quantile).outcome
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
def test_sequential_test(requests, over, expected):
    """Shown, refuted or neither, at 99 % confidence of a 99th percentile."""
    assert SEQUENTIAL.decide(requests, over) is expected


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
def test_sequential_test_decides_early(share, expected, most):
    """Away from the limit it decides after far fewer than 10,000 requests, on average."""
    source = np.random.default_rng(5)
    took, right = [], 0
    for _ in range(40):
        over = 0
        for requests, missed in enumerate(source.random(20_000) < share, start=1):
            over += missed
            outcome = Outcome.INCONCLUSIVE if requests % 5 else SEQUENTIAL.decide(requests, over)
            if outcome is not Outcome.INCONCLUSIVE:
                break
        took.append(requests)
        right += outcome is expected

    assert right >= 39
    assert np.mean(took) < most


SLOW_MS, REQUESTS = 50.0, 4000


def load(rate_per_s):
    return Load(rate_per_s=rate_per_s, duration_s=10, seed=0)


def slow_at(places):
    latencies_ms = np.full(REQUESTS, 5.0)
    latencies_ms[places] = SLOW_MS
    return latencies_ms


SPREAD = slow_at(np.arange(0, REQUESTS, 66))  # 61 of 4000, 1.5 %
ONE_BURST = slow_at(np.arange(1000, 1061))  # the same number, one after another


@pytest.mark.parametrize(
    ("latencies_ms", "confidence", "outcome"),
    [
        pytest.param(SPREAD, 0.99, Outcome.FAILED, id="independent"),
        pytest.param(ONE_BURST, 0.99, Outcome.INCONCLUSIVE, id="one-cluster-is-one-event"),
        pytest.param(SPREAD, 0.9999, Outcome.INCONCLUSIVE, id="the-policys-confidence"),
        pytest.param(slow_at([]), 0.99, Outcome.PASSED, id="met"),
    ],
)
def test_points_are_decided_as_the_gate_is(make_sampled, slo, latencies_ms, confidence, outcome):
    """At the policy's confidence, at what clustered requests are worth."""
    run = make_sampled(CONFIG, load(400.0), latencies_ms)

    (decided,) = decide_points([run], slo.model_copy(update={"confidence": confidence}))

    assert decided.outcome is outcome
    assert (decided.config, decided.rate_per_s) == (CONFIG, 400.0)
    assert decided.requests == REQUESTS


def test_points_pool_their_valid_runs(make_sampled, slo):
    """Points are told apart by configuration and rate."""
    runs = [make_sampled(CONFIG, load(rate), slow_at([])) for rate in (400.0, 400.0, 420.0)]
    invalid = make_sampled(CONFIG, load(500.0), slow_at([]), invalid=("late",))

    found = decide_points([*runs, invalid], slo)

    assert [(point.rate_per_s, point.requests) for point in found] == [
        (400.0, 2 * REQUESTS),
        (420.0, REQUESTS),
    ]


def _scattered_ms(over, *, bursts):
    """Ten seconds of 1,000 requests; those over the limit alone, or in as many bursts."""
    latencies_ms = np.full(10_000, 5.0)
    source = np.random.default_rng(1)
    if bursts:
        for start in source.choice(9_900, size=bursts, replace=False):
            latencies_ms[start : start + over // bursts] = 50.0
    else:
        latencies_ms[source.choice(10_000, size=over, replace=False)] = 50.0
    return latencies_ms


def test_independent_requests_count_in_full(make_sampled, slo):
    """Scattered over the run, 60 of 10,000 over the limit show that it is met."""
    runs = [make_sampled(CONFIG, load(1000.0), _scattered_ms(60, bursts=0), lasted_s=10.0)]

    assert clustering(runs, 20.0) < 1.5
    assert decide_pooled(runs, slo).outcome is Outcome.PASSED


def test_clustered_requests_count_less(make_sampled, slo):
    """The same 60 in three bursts are three events, which decide nothing."""
    runs = [make_sampled(CONFIG, load(1000.0), _scattered_ms(60, bursts=3), lasted_s=10.0)]

    decision = decide_pooled(runs, slo)

    assert clustering(runs, 20.0) > 10.0
    assert decision.outcome is Outcome.INCONCLUSIVE
    assert (decision.requests, decision.over) == (10_000, 60)
    assert decision.needed > 10_000


@pytest.mark.parametrize(
    ("latencies_ms", "total_ms", "limit_ms", "expected"),
    [
        pytest.param([2.0] * 4, 4.0, 1.0, 0, id="all-may-have-been-within"),
        pytest.param([2.0] * 4, 4.5, 1.0, 1, id="one-explains-it"),
        pytest.param([2.0] * 4, 8.0, 1.0, 4, id="all-of-it"),
        pytest.param([2.0, 2.0, 2.0, 100.0], 50.0, 1.0, 1, id="one-slow-request-explains-much"),
        pytest.param([0.5] * 4, 2.0, 1.0, 0, id="no-client-waited-so-long"),
        pytest.param([2.0] * 4, 99.0, 1.0, 4, id="more-than-was-waited"),
        pytest.param([], 0.0, 1.0, 0, id="nothing"),
    ],
)
def test_fewest_over_from_a_total(latencies_ms, total_ms, limit_ms, expected):
    """No request was on the server for longer than its client waited."""
    assert fewest_over(np.array(latencies_ms), total_ms, limit_ms) == expected


@given(
    times=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=60),
    limit_ms=st.floats(0.01, 5.0),
)
def test_fewest_over_is_never_above_the_true_count(times, limit_ms):
    """Whatever the single times were, the bound is not above the true count."""
    server_ms = np.array([server for server, _ in times])
    latencies_ms = server_ms + np.array([client for _, client in times])

    bound = fewest_over(latencies_ms, float(server_ms.sum()) * (1.0 - 1e-9), limit_ms)

    assert bound <= int((server_ms > limit_ms).sum())


@pytest.mark.parametrize(
    ("server_ms", "limit_ms", "failing", "sure"),
    [
        pytest.param(0.3, 0.01, 0, True, id="surely-above"),
        pytest.param(0.3, 0.29, 0, False, id="above-in-the-mean-only"),
        pytest.param(0.3, 0.5, 0, False, id="below"),
        pytest.param(None, 0.01, 0, False, id="not-counted-says-nothing"),
        pytest.param(None, 0.01, 100, True, id="no-slow-sender-makes-requests-fail"),
    ],
)
def test_decide_on_server_fails_only_when_sure(
    make_sampled, slo, server_ms, limit_ms, failing, sure
):
    """A mean above the limit is not enough where few slow requests explain it."""
    latencies_ms = np.full(4000, 1.0)
    latencies_ms[::100] = 2.0
    latencies_ms[: 40 * failing : 40] = np.inf
    run = make_sampled(CONFIG, Load(rate_per_s=400, duration_s=10, seed=0), latencies_ms)
    split = StageSplit(
        queue_ms=0.0,
        compute_input_ms=0.0,
        compute_infer_ms=server_ms or 0.0,
        compute_output_ms=0.0,
        mean_batch_size=1.0,
        judged_server_ms=server_ms,
    )
    run = replace(run, measurement=run.measurement.model_copy(update={"stages": split}))

    decision = decide_on_server([run], slo.model_copy(update={"p99_ms": limit_ms}))

    assert (decision.outcome is Outcome.FAILED) is sure


@pytest.mark.parametrize(
    ("above_per_s", "expected"),
    [(0.0, 300.0), (300.0, 500.0), (500.0, None)],
)
def test_lowest_refuted(above_per_s, expected):
    """Only what is shown not to be met by that configuration, above the rate that is asked for."""
    other = CONFIG.model_copy(update={"instances": 2})
    points = [
        PointDecision(config=config, rate_per_s=rate, outcome=outcome, requests=900, over=9)
        for config, rate, outcome in (
            (CONFIG, 500.0, Outcome.FAILED),
            (CONFIG, 400.0, Outcome.INCONCLUSIVE),
            (CONFIG, 300.0, Outcome.FAILED),
            (other, 350.0, Outcome.FAILED),
        )
    ]

    assert lowest_refuted(points, CONFIG, above_per_s=above_per_s) == expected


@pytest.mark.parametrize(
    ("requests", "over", "expected"),
    [
        (10_000, 0, Outcome.INCONCLUSIVE),
        (1000, 500, Outcome.FAILED),
        (1000, 10, Outcome.INCONCLUSIVE),
    ],
)
def test_refute_only_never_passes(requests, over, expected):
    """Near capacity a run ends early only when it is refuted."""
    assert SequentialTest(0.99, refute_only=True).decide(requests, over) is expected
