"""What a search finds, and which questions it asks on the way."""

import numpy as np

from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.measuring.p99 import SequentialTest
from enginegate.search.search import search
from tests.fakes.searches import finding_of, only_where, search_on
from tests.fakes.simulated_triton import PROFILES, SimulatedServer


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
            result = search_on(server, profile.bounds(seed), profile.slo())
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
        result = search_on(server, profile.bounds(seed), profile.slo())

        assert not result.confirmed
        assert finding_of(result, "p99_ms").outcome is not Outcome.PASSED


def test_a_confirmed_result_carries_its_evidence(simulated, bounds, slo):
    """The findings pass with number, limit, interval and count; fresh seeds did the confirming."""
    result = search_on(simulated, bounds, slo)

    latency, throughput = finding_of(result, "p99_ms"), finding_of(result, "throughput")
    confirming = _confirming(simulated, result)
    searching = {load.seed for _, load in simulated.calls} - {load.seed for load in confirming}
    assert latency.outcome is throughput.outcome is Outcome.PASSED
    assert latency.low <= latency.value <= latency.high
    assert latency.value == result.p99.value_ms <= latency.limit == 20.0
    assert latency.samples >= slo.confirm_requests
    assert {load.rate_per_s for load in confirming} == {result.throughput_at_slo_per_s}
    assert result.confirmed_rate_per_s == result.throughput_at_slo_per_s
    (decided,) = (
        point
        for point in result.decisions
        if (point.config, point.rate_per_s) == (result.chosen, result.confirmed_rate_per_s)
    )
    assert decided.outcome is Outcome.PASSED
    points = {(m.config, m.rate_per_s) for m in result.measurements if not m.invalid}
    assert {(point.config, point.rate_per_s) for point in result.decisions} == points
    assert len({load.seed for load in confirming}) == slo.confirmations
    assert searching
    assert f"{result.rejected_rate_per_s:,.0f}/s was not seen to hold" in throughput.reason
    assert result.rejected_rate_per_s > result.throughput_at_slo_per_s


def test_every_chosen_value_has_its_reason(simulated, bounds, slo):
    """Each field says what its other values did: measured where they were, else expected."""
    result = search_on(simulated, bounds, slo)

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


def test_the_same_answers_ask_the_same_questions(make_server, bounds, slo):
    """A second search repeats every load of the first, seeds included, so a cache answers it."""
    first, second = make_server(), make_server()

    search_on(first, bounds, slo)
    search_on(second, bounds, slo)

    assert first.calls == second.calls


def test_a_moved_slo_asks_old_questions_again(make_server, bounds, slo):
    """Rates are on a fixed grid and seeds belong to a point, so most loads under a tighter SLO
    that were offered before are the very same."""
    first, second = make_server(), make_server(limit_ms=18.0)
    tighter = slo.model_copy(update={"p99_ms": 18.0})

    search_on(first, bounds, slo)
    search_on(second, bounds, tighter)

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


def test_a_lucky_point_is_refuted_and_a_lower_one_wins(make_server, bounds, slo):
    """A point that held in the search but fails its confirmations is stepped down from."""
    server = make_server()
    narrow = bounds.model_copy(
        update={"max_batch_sizes": (16,), "queue_delays_us": (0,), "instances": (1,)}
    )
    honest = search_on(make_server(), narrow, slo).throughput_at_slo_per_s

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


def test_the_one_configuration_that_holds_is_found(simulated, bounds, slo, make_sampled):
    """Where all others fail every request, each is asked in the end."""
    only = bounds.model_copy(update={"max_batch_sizes": (1, 2, 8, 32), "instances": (1, 2, 4)})
    measure = only_where(
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


def test_progress_is_told(simulated, bounds, slo):
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
    assert all(isinstance(ends, SequentialTest) for ends in near)
    assert near[-1].decide(10_000, 0) is Outcome.INCONCLUSIVE
    assert near[-1].decide(1_000, 500) is Outcome.FAILED


def test_confirmations_make_the_requests_the_policy_wants(simulated, bounds, slo):
    """A slow rate is confirmed for as long as its share of the requests takes."""
    slow = bounds.model_copy(update={"max_rate_per_s": 120.0, "min_rate_per_s": 60.0})

    result = search_on(simulated, slow, slo)

    assert result.confirmed
    assert finding_of(result, "p99_ms").samples >= slo.confirm_requests


def test_a_load_is_its_own_record():
    """The seeds of arrivals and of inputs differ, so each source of randomness moves alone."""
    server, profile = SimulatedServer(), PROFILES["fast"]

    search_on(server, profile.bounds(0), profile.slo())

    loads = [load for _, load in server.calls]
    assert all(isinstance(load, Load) and load.order_seed != load.seed for load in loads)
