"""What a search says when something ends it, stands in its way, or nothing meets the SLO."""

import numpy as np
import pytest

from enginegate.errors import NotLoadedError
from enginegate.evidence import Outcome
from enginegate.measurement import Generator, LatencySample
from enginegate.search.search import search
from tests.fakes.searches import finding_of, only_where, search_on
from tests.fakes.simulated_triton import SimulatedServer


@pytest.mark.parametrize("budget_s", [1.0, 15.0, 30.0])
def test_budget_ends_the_search(simulated, bounds, slo, budget_s):
    """No search runs past its budget, and what it leaves out is inconclusive, never passed."""
    short = bounds.model_copy(update={"budget_s": budget_s})
    greedy = slo.model_copy(update={"min_throughput_per_s": 6000.0})

    result = search_on(simulated, short, greedy)

    assert simulated.now_s <= budget_s
    assert finding_of(result, "throughput").outcome is Outcome.INCONCLUSIVE
    assert "budget_s" in finding_of(result, "throughput").remedy


def test_no_configuration_holds(make_server, bounds, slo):
    """An SLO below the service time fails, says the nearest number and where the time goes."""
    server, strict = make_server(limit_ms=3.0), slo.model_copy(update={"p99_ms": 3.0})

    result = search_on(server, bounds, strict)

    latency, throughput = finding_of(result, "p99_ms"), finding_of(result, "throughput")
    assert not result.confirmed
    assert result.throughput_at_slo_per_s == 0.0
    assert latency.outcome is throughput.outcome is Outcome.FAILED
    assert latency.value > 3.0
    assert "no configuration met the SLO" in latency.reason
    assert "of 8 were measured" in latency.reason
    assert "a request alone takes 4.2" in latency.reason
    assert len(server.calls) < 8
    assert "of the mean server time" in latency.remedy


def test_throughput_below_the_minimum_fails(simulated, bounds, slo):
    """A throughput floor above what meets the SLO fails that gate only."""
    fast = slo.model_copy(update={"min_throughput_per_s": 3200.0})
    low = bounds.model_copy(update={"max_batch_sizes": (1,), "instances": (1,)})

    result = search_on(simulated, low, fast)

    assert finding_of(result, "p99_ms").outcome is Outcome.PASSED
    throughput = finding_of(result, "throughput")
    assert throughput.outcome is Outcome.FAILED
    assert throughput.value == result.throughput_at_slo_per_s < throughput.limit
    assert throughput.remedy.startswith("queueing is")


@pytest.mark.parametrize("late_from_per_s", [400.0, 150.0])
@pytest.mark.parametrize("instances", [(1,), (1, 2)])
def test_late_generator_does_not_save_what_fails_at_the_lowest_rate(
    make_server, bounds, slo, late_from_per_s, instances
):
    """Lower rates were sent in time, and showed in every configuration that it is too slow."""
    server = make_server(12.0)
    server.is_invalid = lambda _config, load: load.rate_per_s >= late_from_per_s
    sizes = {"max_batch_sizes": (1,), "queue_delays_us": (0,), "max_rate_per_s": 2000.0}
    only = bounds.model_copy(update=sizes | {"instances": instances})

    result = search_on(server, only, slo)

    assert any(load.rate_per_s >= late_from_per_s for _, load in server.calls)
    assert finding_of(result, "p99_ms").outcome is Outcome.FAILED
    assert finding_of(result, "throughput").outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("base_ms", "outcome"), [(5.0, Outcome.FAILED), (1.0, Outcome.INCONCLUSIVE)]
)
def test_late_generator_matters_where_it_ends_the_search(
    make_server, bounds, slo, base_ms, outcome
):
    """Not sustained at a rate that was sent in time: too slow. Sustained to the last: unknown."""
    server = make_server(base_ms)
    server.is_invalid = lambda _config, load: load.rate_per_s >= 400
    sizes = {"max_batch_sizes": (1,), "queue_delays_us": (0,), "instances": (1,)}
    only = bounds.model_copy(update=sizes | {"min_rate_per_s": 50.0})

    result = search_on(server, only, slo)

    assert any(load.rate_per_s >= 400 for _, load in server.calls)
    assert finding_of(result, "p99_ms").outcome is Outcome.PASSED
    assert finding_of(result, "throughput").outcome is outcome


def test_rate_that_was_never_offered_is_inconclusive(simulated, bounds, slo):
    """If no rate of the policy reaches the floor, the gate says to add one."""
    slow = bounds.model_copy(update={"min_rate_per_s": 100.0, "max_rate_per_s": 200.0})

    result = search_on(simulated, slow, slo.model_copy(update={"confirm_requests": 900}))

    throughput = finding_of(result, "throughput")
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert "max_rate_per_s" in throughput.remedy
    assert result.throughput_at_slo_per_s == 200.0


def test_too_few_requests_are_inconclusive(simulated, bounds, slo):
    """A confirmation of too few requests for a p99 claim passes nothing, and says how many would
    decide."""
    few = bounds.model_copy(update={"measurement_s": 0.5, "max_rate_per_s": 100.0})

    result = search_on(simulated, few, slo.model_copy(update={"confirm_requests": 100}))

    latency = finding_of(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "about 459 requests would decide" in latency.remedy
    assert not result.confirmed


def test_no_valid_measurement_is_inconclusive(simulated, bounds, slo):
    """If no measurement is valid at all, nothing passes and the cause is named."""
    simulated.is_invalid = lambda _config, _load: True

    result = search_on(simulated, bounds, slo)

    latency = finding_of(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert f"none of {len(simulated.calls)} measurements is valid" in latency.reason
    assert latency.remedy == "the generator was late"


def test_failures_count_as_over(simulated, bounds, slo, make_sampled):
    """A server that answers fast but drops 3 % sustains nothing."""

    def dropping(config, load, *, ends=None):  # noqa: ARG001 - it never ends early
        latencies_ms = np.full(2000, 1.0)
        latencies_ms[::33] = np.inf
        return make_sampled(config, load, latencies_ms)

    result = search(dropping, bounds, slo, clock=simulated.clock)

    latency = finding_of(result, "p99_ms")
    assert latency.outcome is Outcome.FAILED
    assert latency.value is None
    assert "p99 falls on failed requests" in latency.reason


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        pytest.param((0.4, 0.9), (Outcome.FAILED, "a request alone takes 0.4 ms"), id="server"),
        pytest.param((0.005, 0.9), (Outcome.INCONCLUSIVE, "up to 0.9 ms here"), id="sender"),
        pytest.param((0.005, None), (Outcome.INCONCLUSIVE, "up to 5 ms here"), id="unknown"),
        pytest.param((0.005, 0.001), (Outcome.FAILED, "all were measured"), id="quick-sender"),
    ],
)
def test_sender_time_is_not_the_engines_loss(bounds, slo, make_sampled, times_ms, expected):
    """Below what sending takes an SLO fails only if the server's own time is surely above it."""
    (server_ms, null_ms), (outcome, said) = times_ms, expected

    def measure(config, load, *, ends=None):  # noqa: ARG001 - it never ends early
        count = int(load.rate_per_s * load.duration_s)
        sizes, latencies_ms = np.ones(count, int), np.full(count, 1.0)
        found = make_sampled(config, load, latencies_ms, batches=(sizes, np.full(count, server_ms)))
        stages = found.measurement.stages.model_copy(update={"judged_server_ms": server_ms})
        known = {"stages": stages, "generator": Generator(null_p99_ms=null_ms)}
        return LatencySample(found.measurement.model_copy(update=known), latencies_ms)

    impossible = slo.model_copy(update={"p99_ms": 0.01})

    result = search(measure, bounds, impossible, clock=SimulatedServer().clock)

    latency = finding_of(result, "p99_ms")
    assert latency.outcome is outcome
    assert said in latency.reason
    assert finding_of(result, "throughput").outcome is outcome


def test_request_too_slow_alone_fails_despite_invalid_trials(simulated, bounds, slo):
    """What could not be measured at higher rates would not make a single request faster."""
    simulated.is_invalid = lambda _config, load: load.rate_per_s > bounds.min_rate_per_s

    result = search_on(simulated, bounds, slo.model_copy(update={"p99_ms": 0.01}))

    latency = finding_of(result, "p99_ms")
    assert any(measured.invalid for measured in result.measurements)
    assert latency.outcome is Outcome.FAILED
    assert "of the mean server time" in latency.remedy


@pytest.mark.parametrize(
    ("most", "outcome", "said"),
    [
        pytest.param(60, Outcome.FAILED, "all were measured", id="all"),
        pytest.param(12, Outcome.INCONCLUSIVE, "are not shown to fail at 100/s", id="some"),
    ],
)
def test_untried_configurations_leave_it_inconclusive(
    bounds, slo, make_sampled, most, outcome, said
):
    """FAILED needs every configuration refuted at the lowest rate; else it is inconclusive."""
    server = SimulatedServer()
    wide = bounds.model_copy(
        update={"max_batch_sizes": (1, 4, 16), "instances": (1, 2, 3), "max_measurements": most}
    )
    measure = only_where(server, lambda _config: False, make_sampled)

    latency = finding_of(search(measure, wide, slo, clock=server.clock), "p99_ms")

    assert latency.outcome is outcome
    assert said in latency.reason


def test_refuted_points_leave_lower_ones_open(simulated, bounds, slo):
    """Confirmations that fail at a few rates say nothing of the rates below: inconclusive."""

    def fickle(config, load, *, ends=None):
        found = simulated.measure(config, load, ends=ends)
        value_ms = 50.0 if ends is None else 1.0
        return found.__class__(found.measurement, np.full(900, value_ms))

    result = search(fickle, bounds, slo, clock=simulated.clock)

    latency = finding_of(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "what was not tried may meet the SLO" in latency.remedy


def test_configuration_that_does_not_load_is_left_out(simulated, bounds, slo):
    """One that does not fit in memory is no choice; the others are searched, and it is said."""

    def measure(config, load, *, ends=None):
        if config.max_batch_size == 16:
            raise NotLoadedError("failed to allocate memory")
        return simulated.measure(config, load, ends=ends)

    result = search(measure, bounds, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.chosen.max_batch_size == 1
    assert "16 does not load" in result.reasons["max_batch_size"]


def test_load_errors_are_named_when_nothing_is_sustained(simulated, bounds, slo, make_sampled):
    """A failure names the configurations that were not measured because they do not load."""
    failing = only_where(simulated, lambda _config: False, make_sampled)

    def measure(config, load, *, ends=None):
        if config.max_batch_size == 16:
            raise NotLoadedError("failed to allocate memory")
        return failing(config, load, ends=ends)

    latency = finding_of(search(measure, bounds, slo, clock=simulated.clock), "p99_ms")

    assert latency.outcome is Outcome.FAILED
    assert "4 do not load, such as batch <= 16" in latency.reason
    assert "failed to allocate memory" in latency.reason
