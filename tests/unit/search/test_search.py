"""What a search finds, and which questions it asks on the way."""

from dataclasses import replace

import numpy as np
import pytest

from enginegate.errors import NotLoadedError, ServerError
from enginegate.evidence import Outcome, PointDecision
from enginegate.measurement import Load
from enginegate.measuring.p99 import SloDecision
from enginegate.search.confirmation import ConfirmedPoint
from enginegate.search.queueing import EngineTimes
from enginegate.search.search import (
    SearchResult,
    _unmeasurable_above,
    confirm_upper_bound,
    search,
)
from enginegate.search.trial_history import TrialHistory
from enginegate.search.trial_runner import SearchSettings, TrialRunner
from enginegate.serving import ServingConfig
from tests.fakes.searches import finding_of, search_on
from tests.fakes.simulated_triton import PROFILES, SimulatedServer, sampled


def _confirming(server, result):
    return [load for config, load in server.calls if config == result.chosen][-4:-1]


SEEDS = {"slow": 50, "fast": 10, "two cores": 40}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "wanted"),
    [pytest.param(5, 19, id="a-fifth"), pytest.param(1, 95, id="all", marks=pytest.mark.long)],
)
def test_finds_the_optimum_in_few_measurements(of, wanted):
    """Of a hundred seeds 95 find 95 % of the optimum within 20 measurements; no winner violates."""
    good, violations = 0, []
    for name, seeds in SEEDS.items():
        profile = PROFILES[name]
        for seed in range(seeds // of):
            server = profile.server()
            result = search_on(server, profile.bounds(seed), profile.slo())
            enough = result.throughput_at_slo_per_s >= 0.95 * profile.best_per_s
            good += enough and len(result.measurements) <= 20
            if profile.violates(result.chosen, result.throughput_at_slo_per_s):
                violations.append((name, seed))

    assert good >= wanted
    assert violations == []


def test_slo_just_out_of_reach_is_never_confirmed():
    """One call in a hundred breaks the limit by itself, so no rate meets a p99 below it."""
    profile = PROFILES["fast"]

    for seed in range(3):
        server = SimulatedServer(4.0, 0.25, limit_ms=20.0, outliers=0.013)
        result = search_on(server, profile.bounds(seed), profile.slo())

        assert not result.confirmed
        assert finding_of(result, "p99_ms").outcome is not Outcome.PASSED


def test_confirmed_result_carries_its_evidence(simulated, bounds, slo):
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
    assert f"{result.rejected_rate_per_s:,.0f}/s was not seen to be sustained" in throughput.reason
    assert result.rejected_rate_per_s > result.throughput_at_slo_per_s


def test_equal_answers_repeat_every_trial(make_server, bounds, slo):
    """A second search repeats every load of the first, seeds included, so a cache answers it."""
    first, second = make_server(), make_server()

    search_on(first, bounds, slo)
    search_on(second, bounds, slo)

    assert first.calls == second.calls


def test_moved_slo_repeats_known_trials(make_server, bounds, slo):
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


def test_no_configuration_loads(simulated, bounds, slo):
    """If no configuration loads, the search ends with the first message, after asking each once."""
    asked = []

    def measure(config, load, *, ends=None):
        del load, ends
        asked.append(config)
        raise NotLoadedError(f"refused {len(asked)}")

    with pytest.raises(ServerError, match=r"None of the 8 configurations .*\n.*refused 1$"):
        search(measure, bounds, slo, clock=simulated.clock)

    assert len(asked) == len(set(asked)) == 8


def test_dead_server_is_an_error(simulated, bounds, slo):
    """When the server dies the search ends with that error instead of a finding."""
    simulated.dies_after = 3

    with pytest.raises(ServerError, match="died"):
        search_on(simulated, bounds, slo)


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [(600.0, ""), (30.0, "the budget ended the search: raise [search] budget_s")],
)
def test_budget_without_room_for_another_trial_cut_it_short(
    simulated, bounds, slo, budget_s, expected
):
    """A higher rate may have been wanted where it and its confirmations did not fit any more."""
    result = search_on(simulated, bounds.model_copy(update={"budget_s": budget_s}), slo)

    assert result.confirmed
    assert result.cut_short == expected


@pytest.mark.parametrize(
    ("invalid", "cut_short"),
    [
        pytest.param(lambda load: load.rate_per_s >= 700, True, id="every-attempt-above"),
        pytest.param(lambda load: load.seed % 3 == 0, False, id="valid-when-repeated"),
        pytest.param(lambda load: load.rate_per_s < 200, False, id="below-the-answer"),
    ],
)
def test_rate_that_could_not_be_made_cut_it_short(simulated, bounds, slo, invalid, cut_short):
    """It may have met the SLO; the reason says at which rate, and why it is invalid."""
    simulated.is_invalid = lambda _config, load: invalid(load)

    result = search_on(simulated, bounds, slo)

    assert result.confirmed
    assert result.cut_short.startswith("no measurement at ") is cut_short
    assert result.cut_short.endswith("/s is valid: the generator was late") is cut_short
    assert (result.generator_limit_per_s is not None) is cut_short
    if cut_short:
        assert result.generator_limit_per_s >= 700


def test_invalid_for_another_reason_is_no_limit_of_the_generator(simulated, bounds, slo):
    """A server that restarts at a rate may still be slow there."""
    simulated.is_invalid = lambda _config, load: load.rate_per_s >= 700
    measure = simulated.measure

    def restarting(config, load, *, ends=None):
        sample = measure(config, load, ends=ends)
        restarted = sample.measurement.model_copy(update={"generator_limited": False})
        return replace(sample, measurement=restarted)

    simulated.measure = restarting
    result = search_on(simulated, bounds, slo)

    assert result.cut_short
    assert result.generator_limit_per_s is None


ANSWER_PER_S = 1000.0


@pytest.fixture
def slow_config():
    return ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)


@pytest.fixture
def quick_config():
    return ServingConfig(max_batch_size=16, max_queue_delay_us=0, instances=2)


@pytest.fixture
def looked(simulated, bounds, slo):
    """The result of trials past an answer, and the rates of those trials.

    Two instances of batches up to sixteen make 4,000 requests/s, one without batches about 235.
    """

    def look(config, *, rejected=None, outcome=None, **changes):
        found = SearchResult((), config, ANSWER_PER_S, None, (), rejected_rate_per_s=rejected)
        if outcome is not None:
            known = PointDecision(
                config=config, rate_per_s=rejected, outcome=outcome, requests=900, over=12
            )
            found = replace(found, decisions=(known,))
        within = bounds.model_copy(update=changes)
        after = confirm_upper_bound(found, simulated.measure, within, slo, arrivals="poisson")
        rates = [load.rate_per_s / ANSWER_PER_S for _, load in simulated.calls]
        assert [m.load for m in after.measurements] == [load for _, load in simulated.calls]
        return after, rates

    return look


def test_upper_bound_refuted_close_above(looked, slow_config):
    """Two resolutions above, which is as exact as the search is; then no more is asked."""
    after, rates = looked(slow_config)

    assert rates == [pytest.approx(1.05**2)]
    assert after.rejected_rate_per_s == pytest.approx(ANSWER_PER_S * 1.05**2)


def test_upper_bound_not_refuted_tries_one_higher_rate(looked, quick_config):
    """And one more trial, which would bound it."""
    after, rates = looked(quick_config, rejected=1350.0)

    assert rates == [pytest.approx(1.05**2), pytest.approx(1.05**4)]
    assert after.rejected_rate_per_s == 1350.0


def test_upper_bound_ignores_invalid_measurements(looked, simulated, slow_config):
    """What the sender could not make is no rate that was not sustained."""
    simulated.is_invalid = lambda _config, _load: True

    after, _ = looked(slow_config, rejected=1350.0)

    assert after.rejected_rate_per_s == 1350.0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rejected": 1100.0, "outcome": Outcome.FAILED}, id="one-that-close-is-refuted"
        ),
        pytest.param({"max_rate_per_s": 1050.0}, id="above-the-highest-rate"),
        pytest.param({"objective": "latency", "at_rate_per_s": 1000.0}, id="one-rate-only"),
    ],
)
def test_upper_bound_is_not_measured_when_known_or_impossible(looked, slow_config, changes):
    """The result is what it was."""
    after, rates = looked(slow_config, **changes)

    assert (rates, after.rejected_rate_per_s) == ([], changes.get("rejected"))


def test_upper_bound_is_measured_above_an_undecided_rate(looked, slow_config):
    """An undecided rate just above the answer makes no throughput exact."""
    after, rates = looked(slow_config, rejected=1050.0, outcome=Outcome.INCONCLUSIVE)

    assert rates == [pytest.approx(1.05**2)]
    assert after.rejected_rate_per_s == 1050.0
    assert after.decisions[-1].outcome is Outcome.FAILED


def test_no_upper_bound_without_an_answer(simulated, bounds, slo, slow_config):
    """Nothing was confirmed."""
    found = replace(SearchResult((), slow_config, 0.0, None, ()), chosen=None)

    assert confirm_upper_bound(found, simulated.measure, bounds, slo, arrivals="poisson") is found


@pytest.mark.parametrize("budget_s", [40.0, 64.0])
@pytest.mark.parametrize("believed", [0.5, 0.8, None])
@pytest.mark.parametrize("name", PROFILES)
def test_small_budget_ends_in_a_rate_that_is_sustained(name, believed, budget_s):
    """Whatever the engine alone promised: after a rate too high, a lower one is confirmed."""
    profile = PROFILES[name]
    lists = {"instances": (1, 2), "max_batch_sizes": (8, 16, 32)}
    batch_ms = {size: profile.base_ms + profile.item_ms * size for size in (1, 8, 32)}
    for seed in range(3):
        alone = believed and EngineTimes.fit({n: ms * believed for n, ms in batch_ms.items()})
        bounds = profile.bounds(seed).model_copy(
            update={"measurement_s": 2.0, "budget_s": budget_s} | lists
        )
        result = search_on(profile.server(), bounds, profile.slo(), alone=alone or None)

        assert result.confirmed
        assert not profile.violates(result.chosen, result.confirmed_rate_per_s)


@pytest.mark.parametrize("is_refuted", [True, False])
def test_nothing_is_missed_past_what_a_configuration_does_not_sustain(
    bounds, slo, slow_config, quick_config, is_refuted
):
    """A rate that could not be made matters where that configuration may have sustained it."""
    history = TrialHistory(slo)
    if is_refuted:
        load = Load(rate_per_s=600.0, duration_s=3.0, seed=1)
        history.add(sampled(slow_config, load, np.full(900, 90.0)))
    runner = TrialRunner(None, SearchSettings(bounds, slo), None, history)
    runner.reasons_invalid = {(slow_config, 700.0): ["the generator was late"]}
    decision = SloDecision(Outcome.PASSED, 900, 0, None)
    best = ConfirmedPoint(quick_config, 500.0, 500.0, None, decision, ())

    missed, _ = _unmeasurable_above(runner, best)

    assert missed.startswith("no measurement at 700/s" if not is_refuted else "")
    assert bool(missed) is not is_refuted


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_engines_own_speed_saves_trials(slower):
    """The first trial is near the answer, also where serving takes twice as long as the engine."""
    counts = {}
    for known in (False, True):
        counts[known] = 0
        for name in ("slow", "two cores"):
            for seed in range(4):
                profile = PROFILES[name]
                server = profile.server()
                batch_ms = {
                    size: (profile.base_ms + profile.item_ms * size) / slower for size in (1, 8, 32)
                }
                alone = EngineTimes.fit(batch_ms) if known else None
                result = search_on(server, profile.bounds(seed), profile.slo(), alone=alone)
                counts[known] += len(result.measurements)
                assert result.throughput_at_slo_per_s >= 0.9 * profile.best_per_s

    assert counts[True] < counts[False]
