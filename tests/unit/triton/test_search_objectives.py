"""What the answers of a search are compared by: objectives, cost, overload, floor and champion."""

import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.search.search import Champion, search
from enginegate.serving import ServingConfig
from tests.fakes.searches import finding_of, only_where, search_on


def test_points_that_nothing_beats_are_kept(simulated, bounds, slo):
    """The Pareto points rise in rate and p99 together, the confirmed one among them, with cost."""
    result = search_on(simulated, bounds, slo, price_per_hour=3.6)

    rates = [point.rate_per_s for point in result.pareto]
    tails = [point.p99.value_ms for point in result.pareto]
    confirmed = [point for point in result.pareto if point.confirmed]
    assert len(rates) > 1
    assert rates == sorted(rates, reverse=True)
    assert tails == sorted(tails, reverse=True)
    assert [(point.config, point.rate_per_s) for point in confirmed] == [
        (result.chosen, result.throughput_at_slo_per_s)
    ]
    assert confirmed[0].cost_per_million == pytest.approx(1000.0 / confirmed[0].rate_per_s)


@pytest.mark.parametrize(
    ("collapses", "outcome"), [(False, Outcome.PASSED), (True, Outcome.FAILED)]
)
def test_overload_is_probed_past_the_answer(make_server, bounds, slo, collapses, outcome):
    """A third more than the answer is offered; throughput that falls there is said, as advice."""
    server = make_server()
    if collapses:
        server.overload = 1.1 * search_on(make_server(), bounds, slo).throughput_at_slo_per_s

    result = search_on(server, bounds, slo)

    found = finding_of(result, "overload")
    past = server.calls[-1][1].rate_per_s / result.throughput_at_slo_per_s
    assert found.outcome is outcome
    assert found.advisory
    assert 1.2 <= past <= 1.5
    assert result.confirmed


@pytest.mark.parametrize(
    ("base_ms", "outcome"),
    [
        pytest.param(8.0, Outcome.PASSED, id="slower-champion"),
        pytest.param(4.0, Outcome.INCONCLUSIVE, id="itself"),
    ],
)
def test_the_champion_is_measured_in_turns(make_server, bounds, slo, base_ms, outcome):
    """Confirmations alternate with what is live, under the same arrivals; its spread is noise."""
    server, live, order = make_server(), make_server(base_ms), []
    config = ServingConfig(max_batch_size=16, max_queue_delay_us=0, instances=2)

    def champion(serving, load, *, ends=None):
        return live.measure(serving, load, ends=ends)

    result = search_on(
        server,
        bounds.model_copy(update={"instances": (2,), "queue_delays_us": (0,)}),
        slo,
        champion=Champion(champion, config, release=7),
        progress=lambda step: order.append((step.step, step.measurement.load)),
    )

    turns = [(step, load.seed) for step, load in order if step in {"champion", "confirm"}]
    assert len(turns) >= 2 * slo.confirmations
    assert [step for step, _ in turns] == ["champion", "confirm"] * (len(turns) // 2)
    assert all(turns[i][1] == turns[i + 1][1] for i in range(0, len(turns), 2))
    assert result.rival.release == 7
    assert len(result.rival.candidate_p99_ms) == len(result.rival.champion_p99_ms) >= 3
    assert result.rival.noise_ms == pytest.approx(np.ptp(result.rival.champion_p99_ms))
    assert 0 < result.rival.champion_throughput_per_s <= result.throughput_at_slo_per_s
    assert finding_of(result, "champion").outcome is outcome
    assert finding_of(result, "champion").advisory


def test_a_candidate_below_the_floor_is_not_searched_to_its_edge(make_server, bounds, slo):
    """Once no configuration can reach what matters, no further look is spent on it."""
    whole, floored = make_server(), make_server()

    search_on(whole, bounds, slo)
    result = search_on(floored, bounds, slo, floor_per_s=50_000.0)

    assert len(floored.calls) < len(whole.calls)
    assert result.confirmed


def test_the_objective_latency_compares_at_one_rate(simulated, bounds, slo):
    """The lowest p99 at the rate that is asked for wins, and every load is at that rate."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 300.0})

    result = search_on(simulated, asked, slo)

    assert {load.rate_per_s for _, load in simulated.calls[:-1]} == {300.0}
    assert result.throughput_at_slo_per_s == 300.0
    assert (result.chosen.instances, result.chosen.max_queue_delay_us) == (2, 2000)


def test_the_objective_latency_is_confirmed_at_its_rate(simulated, bounds, slo):
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


def test_the_objective_latency_asks_all_before_it_fails(simulated, bounds, slo, make_sampled):
    """Three slow ones do not end it while nothing has held."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 100.0})
    measure = only_where(
        simulated, lambda config: config.instances == 1 and config.max_batch_size == 1, make_sampled
    )

    result = search(measure, asked, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.chosen.max_batch_size == 1


def test_the_objective_cost_pays_for_fewer_gpus(make_server, bounds, slo):
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
