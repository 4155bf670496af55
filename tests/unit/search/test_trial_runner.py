"""Trials within a budget, repeated where they are invalid."""

from collections import Counter

import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.search.search import search
from enginegate.search.trial_runner import Budget, SearchSettings
from enginegate.serving import ServingConfig
from tests.fakes.searches import finding_of, search_on
from tests.fakes.simulated_triton import PROFILES, SimulatedServer


def test_undecided_cached_trial_is_repeated_with_a_fresh_seed(make_server, bounds, slo):
    """A measurement cut short under another SLO is pooled with one of a fresh seed."""
    server = make_server()

    def cached(config, load, *, ends=None):
        found = server.measure(config, load, ends=ends)
        if load.rate_per_s == server.calls[0][1].rate_per_s and len(server.calls) == 1:
            brief = np.r_[np.full(99, 1.0), 50.0]
            stub = found.measurement.model_copy(update={"lasted_s": 0.2, "stages": None})
            return found.__class__(stub, brief)
        return found

    search(cached, bounds, slo, clock=server.clock)

    (config, first), (same_config, second) = server.calls[:2]
    assert (config, first.rate_per_s) == (same_config, second.rate_per_s)
    assert first.seed != second.seed


def test_progress_of_each_measurement(simulated, bounds, slo):
    """Each measurement is announced, in order, with the time spent and what is still to come."""
    told = []

    result = search_on(simulated, bounds, slo, progress=told.append)

    assert [step.done for step in told] == list(range(1, len(result.measurements) + 1))
    assert [step.step for step in told[-4:]] == ["confirm", "confirm", "confirm", "overload"]
    assert told[-1].spent_s == simulated.now_s
    assert told[0].measurement == result.measurements[0]
    assert told[0].left > 0
    assert 0 < told[0].left_s <= bounds.budget_s


def test_arrivals_come_from_the_policy(simulated, bounds, slo):
    """Every load is spaced as the policy says."""
    search_on(simulated, bounds, slo, arrivals="constant")

    assert {load.arrivals for _, load in simulated.calls} == {"constant"}


def test_load_seeds_differ_for_arrivals_and_order():
    """The seeds of arrivals and of inputs differ, so each source of randomness moves alone."""
    server, profile = SimulatedServer(), PROFILES["fast"]

    search_on(server, profile.bounds(0), profile.slo())

    loads = [load for _, load in server.calls]
    assert all(isinstance(load, Load) and load.order_seed != load.seed for load in loads)


def test_server_start_counts_once(simulated, bounds, slo):
    """The seconds that the server takes to start are not expected of every measurement."""
    small = bounds.model_copy(
        update={"max_batch_sizes": (1,), "queue_delays_us": (0,), "instances": (1,)}
    )
    short = small.model_copy(
        update={"budget_s": 100.0, "min_rate_per_s": 50.0, "max_rate_per_s": 100.0}
    )
    easy = slo.model_copy(
        update={"min_throughput_per_s": 60.0, "confidence": 0.95, "confirm_requests": 1200}
    )

    def measure(config, load, *, ends=None):
        simulated.now_s += 0.0 if simulated.calls else 60.0
        return simulated.measure(config, load, ends=ends)

    result = search(measure, short, easy, clock=simulated.clock)

    assert result.confirmed
    assert finding_of(result, "throughput").outcome is Outcome.PASSED


@pytest.mark.parametrize(("busy", "confirmed"), [(5, True), (100, False)])
def test_busy_moment_at_the_lowest_rate_is_waited_out(simulated, bounds, slo, busy, confirmed):
    """Below it there is nothing to fall back to, so it is tried again and again, not for ever."""
    simulated.is_invalid = lambda _config, _load: len(simulated.calls) <= busy
    only = {"max_batch_sizes": (1,), "queue_delays_us": (0,), "instances": (1,)}
    low = bounds.model_copy(update=only | {"min_rate_per_s": 100.0, "max_rate_per_s": 100.0})
    easy = slo.model_copy(update={"confidence": 0.95, "confirm_requests": 1200})

    result = search_on(simulated, low, easy)

    assert result.confirmed is confirmed
    assert confirmed or len(simulated.calls) == 8


@pytest.mark.parametrize("most", [1, 4, 7, 11])
def test_max_measurements_ends_the_search(simulated, bounds, slo, most):
    """A search never makes more measurements than the policy allows, confirmations included."""
    result = search_on(simulated, bounds.model_copy(update={"max_measurements": most}), slo)

    assert len(simulated.calls) <= most
    assert result.confirmed or finding_of(result, "p99_ms").outcome is Outcome.INCONCLUSIVE


def test_rates_the_generator_cannot_make_bound_the_search(simulated, bounds, slo):
    """An invalid load is repeated once, then the search goes on below it: inconclusive."""
    simulated.is_invalid = lambda _config, load: load.rate_per_s >= 700

    result = search_on(simulated, bounds, slo)

    throughput = finding_of(result, "throughput")
    invalid = Counter(load.rate_per_s for _, load in simulated.calls if load.rate_per_s >= 700)
    assert 600 < result.throughput_at_slo_per_s < 700
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert throughput.remedy == "the generator was late"
    assert set(invalid.values()) == {2}


def test_late_generator_costs_no_answer_where_the_budget_is_short(make_server, bounds, slo):
    """Before anything was measured a rate is not tried twice: a lower one is, and is confirmed."""
    server = make_server()
    server.is_invalid = lambda _config, load: load.rate_per_s >= 400
    short = bounds.model_copy(update={"budget_s": 30.0, "max_rate_per_s": 2000.0})
    easy = slo.model_copy(
        update={"min_throughput_per_s": 100.0, "confidence": 0.95, "confirm_requests": 1000}
    )

    result = search_on(server, short, easy)

    rates = [load.rate_per_s for _, load in server.calls]
    assert rates[0] >= 400 > rates[1]
    assert {f.gate: f.outcome for f in result.findings if not f.advisory} == {
        "p99_ms": Outcome.PASSED,
        "throughput": Outcome.PASSED,
    }


@pytest.mark.parametrize("late", [1, 2])
def test_rate_that_a_busy_moment_spoiled_is_offered_again(simulated, bounds, slo, late):
    """After a valid measurement below it, so that one moment caps no answer."""
    simulated.is_invalid = lambda _config, _load: len(simulated.calls) <= late

    result = search_on(simulated, bounds, slo)

    rates = [load.rate_per_s for _, load in simulated.calls]
    assert rates[late] < rates[0]
    assert result.throughput_at_slo_per_s > 3 * rates[0]
    assert result.generator_limit_per_s is None


def test_rates_that_cannot_be_made_are_halved(simulated, bounds, slo):
    """Where most rates are invalid the search gets below them in a few steps, and up again."""
    simulated.is_invalid = lambda _config, load: load.rate_per_s >= 800

    result = search_on(simulated, bounds, slo)

    invalid = {load.rate_per_s for _, load in simulated.calls if load.rate_per_s >= 800}
    assert 0 < len(invalid) <= 5
    assert 750 < result.throughput_at_slo_per_s < 800


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        pytest.param({}, True, id="enough"),
        pytest.param({"budget_s": 25.0}, True, id="just-enough-time"),
        pytest.param({"budget_s": 23.0}, False, id="too-little-time"),
        pytest.param({"max_measurements": 8}, True, id="just-enough-measurements"),
        pytest.param({"max_measurements": 7}, False, id="too-few-measurements"),
    ],
)
def test_room_left_after_the_last_trial(bounds, slo, make_sampled, changes, room):
    """Three trials of 2 s with 1 s of overhead each; five measurements more would take 15 s."""
    moments = {"now_s": 0.0}
    settings = SearchSettings(
        bounds.model_copy(update={"budget_s": 100.0} | changes),
        slo,
        clock=lambda: moments["now_s"],
    )
    budget = Budget(settings)
    config = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
    for step in ["search"] * 3 + ["confirm"] * 3:
        moments["now_s"] += 3.0
        load = Load(rate_per_s=100, duration_s=2.0, seed=0)
        budget.count(step, make_sampled(config, load, np.full(200, 5.0)))

    assert budget.left_room_for(*[2.0] * 5) is room


def test_room_left_without_a_trial(bounds, slo):
    """Nothing was tried, so no trial was left out."""
    assert Budget(SearchSettings(bounds, slo)).left_room_for(1e6)


def test_trial_at_a_low_rate_lasts_until_it_can_be_valid(make_server, bounds, slo):
    """A measurement of the usual length would have too few requests to say anything."""
    server = make_server()
    low = bounds.model_copy(update={"min_rate_per_s": 4.0, "measurement_s": 2.0})

    out_of_reach = slo.model_copy(update={"p99_ms": 0.5})
    search(server.measure, low, out_of_reach, clock=server.clock)

    trials = [load for _, load in server.calls]
    assert min(load.rate_per_s for load in trials) == pytest.approx(4.0)
    assert all(load.rate_per_s * load.duration_s >= 40.0 for load in trials)
