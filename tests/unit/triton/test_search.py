from collections import Counter

import numpy as np
import pytest

from enginegate.errors import NotLoadedError, ServerError
from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.serving import ServingConfig
from enginegate.triton.search import Champion, search
from enginegate.triton.sequential import Sequential
from tests.fakes.simulated_triton import LOAD_S, PROFILES, SimulatedServer


def _finding(result, gate):
    return next(finding for finding in result.findings if finding.gate == gate)


def _search(server, bounds, slo, **options):
    return search(server.measure, bounds, slo, clock=server.clock, **options)


def _confirming(server, result):
    return [load for config, load in server.calls if config == result.chosen][-4:-1]


SEEDS = {"slow": range(50), "fast": range(10), "two cores": range(40)}


def test_finds_the_optimum_in_few_measurements():
    """Of a hundred seeds 95 find 95 % of the optimum within 20 measurements; no winner violates."""
    good, violations = 0, []
    for name, seeds in SEEDS.items():
        profile = PROFILES[name]
        for seed in seeds:
            server = profile.server()
            result = _search(server, profile.bounds(seed), profile.slo())
            enough = result.throughput_at_slo_per_s >= 0.95 * profile.best_per_s
            good += enough and len(result.measurements) <= 20
            if profile.violates(result.chosen, result.throughput_at_slo_per_s):
                violations.append((name, seed))

    assert good >= 95
    assert violations == []


def test_an_slo_that_just_cannot_hold_is_never_confirmed():
    """One call in a hundred breaks the limit by itself, so no rate holds a p99 below it."""
    profile = PROFILES["fast"]

    for seed in range(3):
        server = SimulatedServer(4.0, 0.25, limit_ms=20.0, outliers=0.013)
        result = _search(server, profile.bounds(seed), profile.slo())

        assert not result.confirmed
        assert _finding(result, "p99_ms").outcome is not Outcome.PASSED


def test_a_confirmed_result_carries_its_evidence(simulated, bounds, slo):
    """The findings pass with number, limit, interval and count; fresh seeds did the confirming."""
    result = _search(simulated, bounds, slo)

    latency, throughput = _finding(result, "p99_ms"), _finding(result, "throughput")
    confirming = _confirming(simulated, result)
    searching = {load.seed for _, load in simulated.calls} - {load.seed for load in confirming}
    assert latency.outcome is throughput.outcome is Outcome.PASSED
    assert latency.low <= latency.value <= latency.high
    assert latency.value == result.p99.value_ms <= latency.limit == 20.0
    assert latency.samples >= slo.confirm_requests
    assert {load.rate_per_s for load in confirming} == {result.throughput_at_slo_per_s}
    assert len({load.seed for load in confirming}) == slo.confirmations
    assert searching
    assert f"{result.rejected_rate_per_s:.4g}/s was not seen to hold" in throughput.reason
    assert result.rejected_rate_per_s > result.throughput_at_slo_per_s


def test_every_chosen_value_has_its_reason(simulated, bounds, slo):
    """Each field says what its other values did: measured where they were, else expected."""
    result = _search(simulated, bounds, slo)

    assert set(result.reasons) == {
        "max_batch_size",
        "max_queue_delay_us",
        "instances",
        "preferred_batch_sizes",
        "gpus",
    }
    assert result.reasons["max_batch_size"].startswith("16 was confirmed at ")
    assert "1 not measured: at most" in result.reasons["max_batch_size"]
    assert result.reasons["gpus"] == "none is the only value in the search space"


def test_points_that_nothing_beats_are_kept(simulated, bounds, slo):
    """The Pareto points rise in rate and p99 together, the confirmed one among them, with cost."""
    result = _search(simulated, bounds, slo, price_per_hour=3.6)

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


def test_the_same_answers_ask_the_same_questions(make_server, bounds, slo):
    """A second search repeats every load of the first, seeds included, so a cache answers it."""
    first, second = make_server(), make_server()

    _search(first, bounds, slo)
    _search(second, bounds, slo)

    assert first.calls == second.calls


def test_a_moved_slo_asks_old_questions_again(make_server, bounds, slo):
    """Rates are on a fixed grid and seeds belong to a point, so most loads under a tighter SLO
    that were offered before are the very same."""
    first, second = make_server(), make_server(limit_ms=18.0)
    tighter = slo.model_copy(update={"p99_ms": 18.0})

    _search(first, bounds, slo)
    _search(second, bounds, tighter)

    known = {(config, load.rate_per_s): load.seed for config, load in first.calls}
    again = [(config, load) for config, load in second.calls if (config, load.rate_per_s) in known]
    assert again
    assert second.calls[0] == first.calls[0]


def test_a_cached_answer_that_decides_nothing_is_asked_for_again(make_server, bounds, slo):
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


@pytest.mark.parametrize("budget_s", [1.0, 15.0, 30.0])
def test_the_budget_ends_it(simulated, bounds, slo, budget_s):
    """No search runs past its budget, and what it leaves out is inconclusive, never passed."""
    short = bounds.model_copy(update={"budget_s": budget_s})
    greedy = slo.model_copy(update={"min_throughput_per_s": 6000.0})

    result = _search(simulated, short, greedy)

    assert simulated.now_s <= budget_s
    assert _finding(result, "throughput").outcome is Outcome.INCONCLUSIVE
    assert "budget_s" in _finding(result, "throughput").remedy


@pytest.mark.parametrize("most", [1, 4, 7, 11])
def test_the_number_of_measurements_ends_it(simulated, bounds, slo, most):
    """A search never makes more measurements than the policy allows, confirmations included."""
    result = _search(simulated, bounds.model_copy(update={"max_measurements": most}), slo)

    assert len(simulated.calls) <= most
    assert result.confirmed or _finding(result, "p99_ms").outcome is Outcome.INCONCLUSIVE


def test_no_configuration_holds(make_server, bounds, slo):
    """An SLO below the service time fails, says the nearest number and where the time goes."""
    server, strict = make_server(limit_ms=3.0), slo.model_copy(update={"p99_ms": 3.0})

    result = _search(server, bounds, strict)

    latency, throughput = _finding(result, "p99_ms"), _finding(result, "throughput")
    assert not result.confirmed
    assert result.throughput_at_slo_per_s == 0.0
    assert latency.outcome is throughput.outcome is Outcome.FAILED
    assert latency.value > 3.0
    assert "no configuration held the SLO" in latency.reason
    assert "of 8 were measured" in latency.reason
    assert "a request alone takes 4.2" in latency.reason
    assert len(server.calls) < 8
    assert "of the mean server time" in latency.remedy


def test_holds_but_too_slow(simulated, bounds, slo):
    """A throughput floor above what holds the SLO fails that gate only."""
    fast = slo.model_copy(update={"min_throughput_per_s": 3200.0})
    low = bounds.model_copy(update={"max_batch_sizes": (1,), "instances": (1,)})

    result = _search(simulated, low, fast)

    assert _finding(result, "p99_ms").outcome is Outcome.PASSED
    throughput = _finding(result, "throughput")
    assert throughput.outcome is Outcome.FAILED
    assert throughput.value == result.throughput_at_slo_per_s < throughput.limit
    assert throughput.remedy.startswith("queueing is")


def test_a_rate_that_was_never_offered_is_inconclusive(simulated, bounds, slo):
    """If no rate of the policy reaches the floor, the gate says to add one."""
    slow = bounds.model_copy(update={"min_rate_per_s": 100.0, "max_rate_per_s": 200.0})

    result = _search(simulated, slow, slo.model_copy(update={"confirm_requests": 900}))

    throughput = _finding(result, "throughput")
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert "max_rate_per_s" in throughput.remedy
    assert result.throughput_at_slo_per_s == 200.0


def test_too_few_requests_are_inconclusive(simulated, bounds, slo):
    """A confirmation of too few requests for a p99 claim passes nothing, and says how many would
    decide."""
    few = bounds.model_copy(update={"measurement_s": 0.5, "max_rate_per_s": 100.0})

    result = _search(simulated, few, slo.model_copy(update={"confirm_requests": 100}))

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "about 459 requests would decide" in latency.remedy
    assert not result.confirmed


def test_a_lucky_point_is_refuted_and_a_lower_one_wins(make_server, bounds, slo):
    """A point that held in the search but fails its confirmations is stepped down from."""
    server = make_server()
    narrow = bounds.model_copy(
        update={"max_batch_sizes": (16,), "queue_delays_us": (0,), "instances": (1,)}
    )
    honest = _search(make_server(), narrow, slo).throughput_at_slo_per_s

    def lucky(config, load, *, ends=None):
        found = server.measure(config, load, ends=ends)
        if ends is not None and load.rate_per_s < 1.2 * honest:
            return found.__class__(found.measurement, np.full(900, 1.0))
        return found

    result = search(lucky, narrow, slo, clock=server.clock)

    refuted = [load.rate_per_s for _, load in server.calls if load.rate_per_s > honest]
    assert refuted
    assert result.confirmed
    assert result.throughput_at_slo_per_s <= honest * 1.05


def test_rates_the_generator_cannot_make_bound_the_search(simulated, bounds, slo):
    """A void load is repeated once, then the search goes on below it and says so: inconclusive."""
    simulated.void = lambda _config, load: load.rate_per_s >= 700

    result = _search(simulated, bounds, slo)

    throughput = _finding(result, "throughput")
    void = Counter(load.rate_per_s for _, load in simulated.calls if load.rate_per_s >= 700)
    assert 600 < result.throughput_at_slo_per_s < 700
    assert throughput.outcome is Outcome.INCONCLUSIVE
    assert throughput.remedy == "the generator was late"
    assert set(void.values()) == {2}


def test_nothing_valid(simulated, bounds, slo):
    """If no measurement is valid at all, nothing passes and the cause is named."""
    simulated.void = lambda _config, _load: True

    result = _search(simulated, bounds, slo)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert f"none of {len(simulated.calls)} measurements is valid" in latency.reason
    assert latency.remedy == "the generator was late"


def test_failures_count_as_over(simulated, bounds, slo, make_sampled):
    """A server that answers fast but drops 3 % holds nothing."""

    def dropping(config, load, *, ends=None):  # noqa: ARG001 - it never ends early
        latencies_ms = np.full(2000, 1.0)
        latencies_ms[::33] = np.inf
        return make_sampled(config, load, latencies_ms)

    result = search(dropping, bounds, slo, clock=simulated.clock)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.FAILED
    assert latency.value is None
    assert "p99 falls on failed requests" in latency.reason


def _only(server, holds, make_sampled):
    """Answers nothing, but for the configurations that hold."""

    def measure(config, load, *, ends=None):
        if holds(config):
            return server.measure(config, load, ends=ends)
        server.now_s += 0.5 + LOAD_S
        return make_sampled(config, load, np.full(400, np.inf), lasted_s=0.5)

    return measure


def test_the_one_configuration_that_holds_is_found(simulated, bounds, slo, make_sampled):
    """Where all others fail every request, each is asked in the end."""
    only = bounds.model_copy(update={"max_batch_sizes": (1, 2, 8, 32), "instances": (1, 2, 4)})
    measure = _only(
        simulated, lambda config: config.instances == 1 and config.max_batch_size <= 2, make_sampled
    )

    result = search(measure, only, slo, clock=simulated.clock)

    assert result.confirmed
    assert (result.chosen.instances, result.chosen.max_batch_size) == (1, 2)


def test_a_model_that_expects_little_ends_nothing(simulated, bounds, slo):
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


@pytest.mark.parametrize(
    ("most", "outcome", "said"),
    [
        pytest.param(60, Outcome.FAILED, "all were measured", id="all"),
        pytest.param(12, Outcome.INCONCLUSIVE, "are not shown to fail at 100/s", id="some"),
    ],
)
def test_what_was_not_tried_did_not_fail(bounds, slo, make_sampled, most, outcome, said):
    """FAILED needs every configuration refuted at the lowest rate; else it is inconclusive."""
    server = SimulatedServer()
    wide = bounds.model_copy(
        update={"max_batch_sizes": (1, 4, 16), "instances": (1, 2, 3), "max_measurements": most}
    )
    measure = _only(server, lambda _config: False, make_sampled)

    latency = _finding(search(measure, wide, slo, clock=server.clock), "p99_ms")

    assert latency.outcome is outcome
    assert said in latency.reason


def test_refuted_points_leave_lower_ones_open(simulated, bounds, slo):
    """Confirmations that fail at a few rates say nothing of the rates below: inconclusive."""

    def fickle(config, load, *, ends=None):
        found = simulated.measure(config, load, ends=ends)
        value_ms = 50.0 if ends is None else 1.0
        return found.__class__(found.measurement, np.full(900, value_ms))

    result = search(fickle, bounds, slo, clock=simulated.clock)

    latency = _finding(result, "p99_ms")
    assert latency.outcome is Outcome.INCONCLUSIVE
    assert "what was not tried may hold" in latency.remedy


def test_rates_that_cannot_be_made_are_halved(simulated, bounds, slo):
    """Where most rates are void the search gets below them in a few steps, and up to them again."""
    simulated.void = lambda _config, load: load.rate_per_s >= 800

    result = _search(simulated, bounds, slo)

    void = {load.rate_per_s for _, load in simulated.calls if load.rate_per_s >= 800}
    assert 0 < len(void) <= 5
    assert 750 < result.throughput_at_slo_per_s < 800


def test_a_configuration_that_does_not_load_is_left_out(simulated, bounds, slo):
    """One that does not fit in memory is no choice; the others are searched, and it is said."""

    def measure(config, load, *, ends=None):
        if config.max_batch_size == 16:
            raise NotLoadedError("failed to allocate memory")
        return simulated.measure(config, load, ends=ends)

    result = search(measure, bounds, slo, clock=simulated.clock)

    assert result.confirmed
    assert result.chosen.max_batch_size == 1
    assert "16 does not load" in result.reasons["max_batch_size"]


def test_what_does_not_load_is_said_when_nothing_holds(simulated, bounds, slo, make_sampled):
    """A failure names the configurations that were not measured because they do not load."""
    failing = _only(simulated, lambda _config: False, make_sampled)

    def measure(config, load, *, ends=None):
        if config.max_batch_size == 16:
            raise NotLoadedError("failed to allocate memory")
        return failing(config, load, ends=ends)

    latency = _finding(search(measure, bounds, slo, clock=simulated.clock), "p99_ms")

    assert latency.outcome is Outcome.FAILED
    assert "4 do not load, such as batch <= 16" in latency.reason
    assert "failed to allocate memory" in latency.reason


def test_nothing_loads(simulated, bounds, slo):
    """If no configuration loads, the search ends with the first message, after asking each once."""
    asked = []

    def measure(config, load, *, ends=None):
        del load, ends
        asked.append(config)
        raise NotLoadedError(f"refused {len(asked)}")

    with pytest.raises(ServerError, match=r"None of the 8 configurations .*\n.*refused 1$"):
        search(measure, bounds, slo, clock=simulated.clock)

    assert len(asked) == len(set(asked)) == 8


def test_a_dead_server_is_an_error(simulated, bounds, slo):
    """When the server dies the search ends with that error instead of a finding."""
    simulated.dies_after = 3

    with pytest.raises(ServerError, match="died"):
        _search(simulated, bounds, slo)


def test_progress_is_told(simulated, bounds, slo):
    """Each measurement is announced, in order, with the time spent and what is still to come."""
    told = []

    result = _search(simulated, bounds, slo, progress=told.append)

    assert [step.done for step in told] == list(range(1, len(result.measurements) + 1))
    assert [step.step for step in told[-4:]] == ["confirm", "confirm", "confirm", "overload"]
    assert told[-1].spent_s == simulated.now_s
    assert told[0].measurement == result.measurements[0]
    assert told[0].left > 0
    assert 0 < told[0].left_s <= bounds.budget_s


@pytest.mark.parametrize(
    ("collapses", "outcome"), [(False, Outcome.PASSED), (True, Outcome.FAILED)]
)
def test_overload_is_probed_past_the_answer(make_server, bounds, slo, collapses, outcome):
    """A third more than the answer is offered; throughput that falls there is said, as advice."""
    server = make_server()
    if collapses:
        server.overload = 1.1 * _search(make_server(), bounds, slo).throughput_at_slo_per_s

    result = _search(server, bounds, slo)

    found = _finding(result, "overload")
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

    result = _search(
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
    assert _finding(result, "champion").outcome is outcome
    assert _finding(result, "champion").advisory


def test_a_candidate_below_the_floor_is_not_searched_to_its_edge(make_server, bounds, slo):
    """Once no configuration can reach what matters, no further look is spent on it."""
    whole, floored = make_server(), make_server()

    _search(whole, bounds, slo)
    result = _search(floored, bounds, slo, floor_per_s=50_000.0)

    assert len(floored.calls) < len(whole.calls)
    assert result.confirmed


def test_the_objective_latency_compares_at_one_rate(simulated, bounds, slo):
    """The lowest p99 at the rate that is asked for wins, and every load is at that rate."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 300.0})

    result = _search(simulated, asked, slo)

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

    result = _search(simulated, asked, patient)

    assert result.confirmed
    assert {load.rate_per_s for _, load in simulated.calls[:-1]} == {1950.0}


def test_the_objective_latency_asks_all_before_it_fails(simulated, bounds, slo, make_sampled):
    """Three slow ones do not end it while nothing has held."""
    asked = bounds.model_copy(update={"objective": "latency", "at_rate_per_s": 100.0})
    measure = _only(
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


def test_arrivals_come_from_the_policy(simulated, bounds, slo):
    """Every load is spaced as the policy says."""
    _search(simulated, bounds, slo, arrivals="constant")

    assert {load.arrivals for _, load in simulated.calls} == {"constant"}


def test_looks_near_the_edge_end_early_only_on_a_no(make_server, bounds, slo):
    """A queue takes time to fill, so a short run that holds proves nothing near capacity."""
    server, asked = make_server(), []

    def listening(config, load, *, ends=None):
        asked.append((load, ends))
        return server.measure(config, load, ends=ends)

    search(listening, bounds, slo, clock=server.clock)

    confirming = [ends for load, ends in asked if load.duration_s and ends is None]
    near = [ends for _, ends in asked if ends is not None]
    assert len(confirming) > slo.confirmations
    assert all(isinstance(ends, Sequential) for ends in near)
    assert near[-1].look(10_000, 0) is Outcome.INCONCLUSIVE
    assert near[-1].look(1_000, 500) is Outcome.FAILED


def test_confirmations_make_the_requests_the_policy_wants(simulated, bounds, slo):
    """A slow rate is confirmed for as long as its share of the requests takes."""
    slow = bounds.model_copy(update={"max_rate_per_s": 120.0, "min_rate_per_s": 60.0})

    result = _search(simulated, slow, slo)

    assert result.confirmed
    assert _finding(result, "p99_ms").samples >= slo.confirm_requests


def test_a_load_is_its_own_record():
    """The seeds of arrivals and of inputs differ, so each source of randomness moves alone."""
    server, profile = SimulatedServer(), PROFILES["fast"]

    _search(server, profile.bounds(0), profile.slo())

    loads = [load for _, load in server.calls]
    assert all(isinstance(load, Load) and load.order_seed != load.seed for load in loads)
