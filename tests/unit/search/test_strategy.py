"""What the answers of a search are compared by: objectives, cost, overload, floor and champion."""

from dataclasses import replace

import pytest

from enginegate.evidence import Outcome
from enginegate.measuring.p99 import SequentialTest
from enginegate.search.queueing import EngineTimes
from enginegate.search.search import search
from tests.fakes.searches import finding_of, only_where, search_on
from tests.fakes.simulated_triton import SharedGpu, SimulatedServer


def test_candidate_below_the_floor_is_not_searched_to_capacity(make_server, bounds, slo):
    """Once no configuration can reach what matters, no further trial is spent on it."""
    whole, floored = make_server(), make_server()

    search_on(whole, bounds, slo)
    result = search_on(floored, bounds, slo, floor_per_s=50_000.0)

    assert len(floored.calls) < len(whole.calls)
    assert result.confirmed


def test_objective_latency_compares_at_one_rate(simulated, bounds, slo):
    """The lowest p99 at the rate that is asked for wins, and every load is at that rate."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 300.0})

    result = search_on(simulated, asked, slo)

    assert {load.rate_per_s for _, load in simulated.calls[:-1]} == {300.0}
    assert result.throughput_at_slo_per_s == 300.0
    assert (result.chosen.instances, result.chosen.max_queue_delay_us) == (2, 2000)


def test_objective_latency_is_confirmed_at_its_rate(simulated, bounds, slo):
    """The rate that was asked for is confirmed, also where a queue is not steady for long."""
    asked = bounds.model_copy(
        update={
            "objective": "latency",
            "at_rate_per_s": 1950.0,
            "max_batch_sizes": (16,),
            "instances": (1,),
            "measurement_s": 2.0,
        }
    )
    patient = slo.model_copy(update={"p99_ms": 200.0})
    simulated.limit_ms = 200.0

    result = search_on(simulated, asked, patient)

    assert result.confirmed
    assert {load.rate_per_s for _, load in simulated.calls[:-1]} == {1950.0}


def test_objective_latency_tries_all_before_it_fails(simulated, bounds, slo, make_sampled):
    """Three slow ones do not end it while nothing has met the SLO."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 100.0})
    measure = only_where(
        simulated, lambda config: config.instances == 1 and config.max_batch_size == 1, make_sampled
    )

    result = search(measure, asked, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.chosen.max_batch_size == 1


def test_objective_cost_pays_for_fewer_gpus(make_server, bounds, slo):
    """Where a second GPU adds nothing, the cheapest answer is on one."""
    server = make_server()

    def shared(config, load, *, ends=None):
        alone = config.model_copy(update={"gpus": ()})
        found = server.measure(alone, load, ends=ends)
        measured = found.measurement.model_copy(update={"config": config})
        return found.__class__(measured, found.latencies_ms)

    cheap = bounds.model_copy(update={"objective": "cost", "gpus": (0, 1), "instances": (1,)})

    result = search(shared, cheap, slo, clock=server.clock, price_per_hour=1.0)

    assert result.chosen.gpus == (0,)


def test_trials_near_capacity_end_early_only_when_refuted(make_server, bounds, slo):
    """A queue takes time to fill, so a short run within the SLO proves nothing near capacity."""
    server, asked = make_server(), []

    def listening(config, load, *, ends=None):
        asked.append((load, ends))
        return server.measure(config, load, ends=ends)

    search(listening, bounds, slo, clock=server.clock)

    confirming = [ends for load, ends in asked if load.duration_s and ends is None]
    near = [ends for _, ends in asked if ends is not None]
    assert len(confirming) > slo.confirmations
    assert all(isinstance(ends, SequentialTest) for ends in near)
    assert near[-1].decide(10_000, 0) is Outcome.INCONCLUSIVE
    assert near[-1].decide(1_000, 500) is Outcome.FAILED


def test_only_sustaining_configuration_is_found(simulated, bounds, slo, make_sampled):
    """Where all others fail every request, each is asked in the end."""
    only = bounds.model_copy(update={"max_batch_sizes": (1, 2, 8, 32), "instances": (1, 2, 4)})
    measure = only_where(
        simulated, lambda config: config.instances == 1 and config.max_batch_size <= 2, make_sampled
    )

    result = search(measure, only, slo, clock=simulated.clock)

    assert result.confirmed
    assert (result.chosen.instances, result.chosen.max_batch_size) == (1, 2)


def test_pessimistic_predictions_do_not_end_the_search(simulated, bounds, slo):
    """Where only the smallest are fast enough, slow answers of the others do not end the search."""
    slow = SimulatedServer(base_ms=60.0)
    wide = bounds.model_copy(update={"max_batch_sizes": (1, 2, 8, 32), "instances": (1, 2, 4)})

    def measure(config, load, *, ends=None):
        small = config.instances == 1 and config.max_batch_size <= 2
        server = simulated if small else slow
        found = server.measure(config, load, ends=ends)
        simulated.now_s = slow.now_s = server.now_s
        return found

    result = search(measure, wide, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.chosen.instances == 1


@pytest.mark.parametrize(("most_per_s", "budget_s"), [(4000.0, 40.0), (1000.0, 60.0)])
def test_slo_out_of_reach_is_refuted_though_no_confirmation_fits(bounds, slo, most_per_s, budget_s):
    """After a first rate that fails, the lowest one is tried: it needs no time to be confirmed."""
    lists = {"max_batch_sizes": (1, 8), "queue_delays_us": (0,), "instances": (1, 2)}
    given = {"min_rate_per_s": 100.0, "max_rate_per_s": most_per_s, "measurement_s": 5.0}
    tight = bounds.model_copy(update=lists | given | {"budget_s": budget_s})
    demanding = slo.model_copy(
        update={"p99_ms": 4.0, "confirm_requests": 10_000, "confirmations": 3}
    )

    result = search_on(SimulatedServer(5.0, 0.0, limit_ms=4.0), tight, demanding)

    assert finding_of(result, "p99_ms").outcome is Outcome.FAILED


@pytest.fixture
def wide(bounds):
    """Rates of a small, fast engine; one configuration for each number of processes."""
    return bounds.model_copy(
        update={
            "max_batch_sizes": (16,),
            "queue_delays_us": (0,),
            "instances": (1,),
            "max_rate_per_s": 30_000.0,
            "measurement_s": 1.0,
        }
    )


def engine_alone(server, **more):
    return EngineTimes(server.base_s * 1e3, server.item_s * 1e3, shared=True, **more)


def test_processes_share_a_gpu_where_one_is_the_limit(wide, slo):
    """One process serves a third of the engine: more are tried while each more serves more."""
    server = SharedGpu(0.2, 0.05, request_ms=0.1)

    result = search_on(server, wide, slo, alone=engine_alone(server))

    alone_per_s = 16 / (0.2 + 16 * 0.05) * 1e3
    assert result.chosen.processes in {2, 3, 4}
    assert result.throughput_at_slo_per_s > 0.7 * alone_per_s
    assert "1 sustained" in result.reasons["processes"]


def test_processes_are_begun_with_where_their_price_is_known(wide, slo):
    """The fewest that are expected to serve four fifths of the engine: no fewer are tried."""
    server = SharedGpu(0.2, 0.05, request_ms=0.1)

    result = search_on(server, wide, slo, alone=engine_alone(server, request_ms=0.1))

    assert server.calls[0][0].processes == 3
    assert {config.processes for config, _ in server.calls} <= {3, 4}
    assert result.throughput_at_slo_per_s > 0.7 * 16_000
    assert "fewer are expected to serve less than 80 %" in result.reasons["processes"]


def test_one_process_is_kept_where_the_engine_is_the_limit(wide, slo):
    """Above four fifths of the engine alone no other process is tried, nor without its times."""
    slow = SharedGpu(2.0, 0.5, request_ms=0.02)
    search_on(slow, wide, slo, alone=engine_alone(slow, request_ms=0.02))
    unknown = SharedGpu(0.2, 0.05, request_ms=0.1)
    search_on(unknown, wide, slo)

    assert {config.processes for config, _ in slow.calls + unknown.calls} == {1}


def test_processes_that_gain_nothing_end_it(wide, slo):
    """Where two processes serve no more than one, three are not tried, and one is chosen."""
    server = SharedGpu(0.2, 0.3, request_ms=0.0)
    twice_as_fast = EngineTimes(0.1, 0.15, shared=True)

    result = search_on(server, wide, slo, alone=twice_as_fast)

    assert {config.processes for config, _ in server.calls} == {1, 2}
    assert result.chosen.processes == 1


def test_first_rate_is_what_the_serving_process_takes(wide, slo):
    """Far below an engine that is faster than any process serves it."""
    server = SharedGpu(0.2, 0.05, request_ms=0.2)
    one = wide.model_copy(update={"processes": (1,)})

    search_on(server, one, slo, alone=engine_alone(server, request_ms=0.2))

    assert 3000.0 <= server.calls[0][1].rate_per_s <= 4000.0


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_slow_loading_leaves_time_to_confirm_what_is_loaded(bounds, slo, objective):
    """A second configuration is not loaded where the budget ends before it is; that is said."""
    server, load_s = SimulatedServer(), 30.0

    def measure(config, load, *, ends=None):
        loads = not server.calls or server.calls[-1][0] != config
        server.now_s += load_s if loads else 0.0
        found = server.measure(config, load, ends=ends)
        changes = {"cold_start_s": load_s if loads else None}
        return replace(found, measurement=found.measurement.model_copy(update=changes))

    short = bounds.model_copy(
        update={"objective": objective, "at_rate_per_s": 500.0, "budget_s": 80.0}
    )

    result = search(measure, short, slo, clock=server.clock)

    assert result.confirmed
    assert "raise [search] budget_s" in result.cut_short
    assert len({config for config, _ in server.calls}) == 1
    assert server.now_s <= 90.0
