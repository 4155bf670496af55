import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.evidence import Load, Outcome
from enginegate.triton.search import configurations, search

LONG_S = 20.0


def _true_p99_ms(server, config, rate_per_s):
    load = Load(rate_per_s=rate_per_s, duration_s=LONG_S, seed=10_000)
    return np.quantile(server.latencies_ms(config, load), 0.99)


def _finding(result, gate):
    return next(finding for finding in result.findings if finding.gate == gate)


def test_finds_the_optimum_and_never_a_violation(simulated, bounds, slo):
    """Over twelve seeds the winner truly holds the SLO, at the best rate or the one below it."""
    truth = {
        (config, rate): _true_p99_ms(simulated, config, rate)
        for config in configurations(bounds)
        for rate in bounds.rates_per_s
        if rate >= 800
    }
    best = max(rate for (_, rate), p99_ms in truth.items() if p99_ms <= slo.p99_ms)

    results = [
        search(
            simulated.measure,
            bounds.model_copy(update={"seed": 1000 * seed, "measurement_s": 2.0}),
            slo.model_copy(update={"min_throughput_per_s": 400.0}),
            clock=simulated.clock,
        )
        for seed in range(12)
    ]

    rates = [result.throughput_at_slo_per_s for result in results]
    assert all(result.confirmed for result in results)
    assert all(
        truth[result.chosen, result.throughput_at_slo_per_s] <= slo.p99_ms for result in results
    )
    assert rates.count(best) >= 11
    assert max(len(result.measurements) for result in results) <= 8 + 8 + 2 * 6


def test_a_confirmed_result_carries_its_evidence(simulated, bounds, slo):
    """The findings pass with number, limit, interval and count; fresh seeds did the confirming."""
    result = search(simulated.measure, bounds, slo, clock=simulated.clock)

    latency, throughput = _finding(result, "p99_ms"), _finding(result, "throughput")
    last = simulated.calls[-slo.confirmations :]
    assert latency.outcome is throughput.outcome is Outcome.PASSED
    assert latency.low <= latency.value <= latency.high
    assert latency.value == result.p99.value_ms <= latency.limit == 20.0
    assert latency.samples == sum(m.sent for m in result.measurements[-slo.confirmations :])
    assert {config for config, _ in last} == {result.chosen}
    assert len({load.seed for _, load in last} | {bounds.seed}) == slo.confirmations + 1


def test_rates_climb_and_losers_are_tried_once(simulated, bounds, slo):
    """One that cannot beat the best so far costs one measurement, above that best."""
    search(simulated.measure, bounds, slo, clock=simulated.clock)

    calls = simulated.calls[: -slo.confirmations]
    seen = list(dict.fromkeys(config for config, _ in calls))
    tried = {config: [load.rate_per_s for c, load in calls if c == config] for config in seen}
    assert tuple(seen) == configurations(bounds)
    assert tried[seen[0]] == sorted(tried[seen[0]])
    assert tried[seen[0]][0] == bounds.rates_per_s[0]
    assert all(len(tried[config]) == 1 for config in seen[4:])


@pytest.mark.parametrize("budget_s", [1.0, 20.0, 45.0, 80.0, 110.0])
def test_the_budget_ends_it(simulated, bounds, slo, budget_s):
    """No search runs past its budget, and what it leaves out is inconclusive, never passed."""
    short = bounds.model_copy(update={"budget_s": budget_s})
    greedy = slo.model_copy(update={"min_throughput_per_s": 4800.0})

    result = search(simulated.measure, short, greedy, clock=simulated.clock)

    assert simulated.now_s <= budget_s
    assert _finding(result, "throughput").outcome is Outcome.INCONCLUSIVE
    assert "budget_s" in _finding(result, "throughput").remedy


def test_no_configuration_holds(simulated, bounds, slo):
    """An SLO below the service time fails, says the nearest number and where the time goes."""
    strict = slo.model_copy(update={"p99_ms": 3.0})

    result = search(simulated.measure, bounds, strict, clock=simulated.clock)

    latency, throughput = _finding(result, "p99_ms"), _finding(result, "throughput")
    assert not result.confirmed
    assert result.throughput_at_slo_per_s == 0.0
    assert latency.outcome is throughput.outcome is Outcome.FAILED
    assert latency.value > 3.0
    assert "no configuration held the SLO" in latency.reason
    assert latency.remedy.startswith("queueing is 61% of the mean server time")


def test_holds_but_too_slow(simulated, bounds, slo):
    """A throughput floor above what holds the SLO fails that gate only."""
    fast = slo.model_copy(update={"min_throughput_per_s": 3200.0})
    low = bounds.model_copy(update={"max_batch_sizes": (1,), "instances": (1,)})

    result = search(simulated.measure, low, fast, clock=simulated.clock)

    assert _finding(result, "p99_ms").outcome is Outcome.PASSED
    throughput = _finding(result, "throughput")
    assert throughput.outcome is Outcome.FAILED
    assert throughput.value == result.throughput_at_slo_per_s < throughput.limit
    assert "queueing is 61%" in throughput.remedy


def test_a_rate_that_was_never_offered_is_inconclusive(simulated, bounds, slo):
    """If no rate of the policy reaches the floor, the gate says to add one."""
    slow = bounds.model_copy(update={"rates_per_s": (100.0, 200.0)})

    result = search(simulated.measure, slow, slo, clock=simulated.clock)

    throughput = _finding(result, "throughput")
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert "rates_per_s" in throughput.remedy


def test_too_few_requests_are_inconclusive(simulated, bounds, slo):
    """A run too short for a p99 claim passes nothing, and says how many requests would decide."""
    few = bounds.model_copy(update={"measurement_s": 0.5, "rates_per_s": (100.0,)})

    result = search(simulated.measure, few, slo, clock=simulated.clock)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "about 459 requests would decide" in latency.remedy
    assert not result.confirmed


def test_a_lucky_point_is_refuted_and_the_next_one_wins(simulated, bounds, slo):
    """A point that held once but fails its confirmations is stepped down from."""
    narrow = bounds.model_copy(
        update={"max_batch_sizes": (16,), "queue_delays_us": (0,), "instances": (1,)}
    )
    honest = simulated.measure

    def lucky(config, load):
        if load.rate_per_s == 3200 and load.seed == narrow.seed:
            return honest(config, Load(rate_per_s=100, duration_s=5, seed=1)).__class__(
                honest(config, load).measurement, np.full(500, 1.0)
            )
        return honest(config, load)

    result = search(lucky, narrow, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.throughput_at_slo_per_s < 3200


def test_void_measurements_are_repeated_then_given_up(simulated, bounds, slo):
    """A generator that cannot keep up gives no verdict on the server: inconclusive, with why."""
    simulated.void = lambda _config, load: load.rate_per_s >= 800

    result = search(simulated.measure, bounds, slo, clock=simulated.clock)

    throughput = _finding(result, "throughput")
    assert result.throughput_at_slo_per_s == 400.0
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert throughput.remedy == "the generator was late"
    assert sum(load.rate_per_s == 800 for _, load in simulated.calls) >= 2


def test_nothing_valid(simulated, bounds, slo):
    """If no measurement is valid at all, nothing passes and the cause is named."""
    simulated.void = lambda _config, _load: True

    result = search(simulated.measure, bounds, slo, clock=simulated.clock)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "none of 16 measurements is valid" in latency.reason
    assert latency.remedy == "the generator was late"


def test_failures_count_as_over(simulated, bounds, slo, make_sampled):
    """A server that answers fast but drops 3 % holds nothing."""

    def dropping(config, load):
        latencies_ms = np.full(2000, 1.0)
        latencies_ms[::33] = np.inf
        return make_sampled(config, load, latencies_ms)

    result = search(dropping, bounds, slo, clock=simulated.clock)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.FAILED
    assert latency.value is None
    assert "p99 falls on failed requests" in latency.reason


def test_a_dead_server_is_an_error(simulated, bounds, slo):
    """When the server dies the search ends with that error instead of a finding."""
    simulated.dies_after = 3

    with pytest.raises(ServerError, match="died"):
        search(simulated.measure, bounds, slo, clock=simulated.clock)


def test_progress_is_told(simulated, bounds, slo):
    """Each measurement is announced, in order, with the time spent so far."""
    told = []

    result = search(simulated.measure, bounds, slo, clock=simulated.clock, progress=told.append)

    assert [step.done for step in told] == list(range(1, len(result.measurements) + 1))
    assert told[-1].step == "confirm"
    assert told[-1].spent_s == simulated.now_s
    assert told[0].measurement == result.measurements[0]
