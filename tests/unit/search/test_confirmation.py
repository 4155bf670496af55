"""Confirming with fresh seeds, in turns with what is live, and past the answer."""

import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.confirmation import pooled_throughput_per_s
from enginegate.search.queueing import EngineTimes
from enginegate.search.search import search
from enginegate.search.trial_runner import Champion
from enginegate.serving import ServingConfig
from tests.fakes.searches import finding_of, search_on
from tests.fakes.simulated_triton import SimulatedServer

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


LOAD = Load(rate_per_s=1000.0, duration_s=10.0, seed=0)


@pytest.mark.parametrize(
    ("sent", "throughput"),
    [
        pytest.param(10_000, 1000.0, id="as-asked"),
        pytest.param(10_200, 1000.0, id="by-chance"),
        pytest.param(10_800, 1080.0, id="more"),
        pytest.param(9_200, 920.0, id="less"),
    ],
)
def test_throughput_is_the_rate_sent(make_sampled, sent, throughput):
    """Arrivals that differ from the rate by more than chance are reported as they were."""
    run = make_sampled(CONFIG, LOAD, np.full(sent, 5.0), lasted_s=10.0)

    assert pooled_throughput_per_s([run, run]) == pytest.approx(throughput)


def test_throughput_leaves_failures_out(make_sampled):
    """Of a thousand a second, a tenth of which fails, nine hundred are served."""
    latencies_ms = np.where(np.arange(10_000) % 10 == 0, np.inf, 5.0)

    assert (
        pooled_throughput_per_s([make_sampled(CONFIG, LOAD, latencies_ms, lasted_s=10.0)]) == 900.0
    )


@pytest.mark.parametrize("times", [1, 2])
def test_invalid_confirmation_is_repeated_once(make_server, bounds, slo, times):
    """An invalid confirmation costs one more seed; a rate where both are invalid is given up."""
    server, confirming = make_server(), []

    def measure(config, load, *, ends=None):
        found = server.measure(config, load, ends=ends)
        if ends is None:
            confirming.append((config, load.rate_per_s, load.seed))
        if ends is None and len(confirming) <= times:
            late = found.measurement.model_copy(update={"invalid": ("the generator was late",)})
            return found.__class__(late, found.latencies_ms)
        return found

    result = search(measure, bounds, slo, clock=server.clock)

    first, second, third = confirming[:3]
    assert result.confirmed
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert (third[:2] == first[:2]) is (times == 1)


def test_refuted_point_is_stepped_down_from(make_server, bounds, slo):
    """A point that met the SLO in the search but fails its confirmations is stepped down from."""
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


def test_confirmations_send_confirm_requests(simulated, bounds, slo):
    """A slow rate is confirmed for as long as its share of the requests takes."""
    slow = bounds.model_copy(update={"max_rate_per_s": 120.0, "min_rate_per_s": 60.0})

    result = search_on(simulated, slow, slo)

    assert result.confirmed
    assert finding_of(result, "p99_ms").samples >= slo.confirm_requests


@pytest.mark.parametrize("seed", [14, 44, 45])
def test_noisy_machine_still_gets_an_answer(make_server, bounds, slo, seed):
    """Where the same load is half as fast at times, a rate is stepped down to that is confirmed."""
    server = make_server(20.0, 1.0, limit_ms=120.0)
    server.noise = 0.5
    wide = bounds.model_copy(
        update={
            "max_batch_sizes": (8, 32),
            "queue_delays_us": (0, 1000),
            "instances": (1, 4),
            "min_rate_per_s": 40,
            "measurement_s": 2.0,
            "budget_s": 900.0,
        }
    )
    lenient = slo.model_copy(update={"p99_ms": 120.0, "min_throughput_per_s": 40.0})

    def measure(config, load, *, ends=None):
        other = load.model_copy(update={"seed": 1000 * load.seed + seed})
        return server.measure(config, other, ends=ends)

    result = search(measure, wide, lenient, clock=server.clock)

    assert result.confirmed
    assert finding_of(result, "p99_ms").outcome is Outcome.PASSED


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
def test_champion_is_measured_in_turns(make_server, bounds, slo, base_ms, outcome):
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


@pytest.mark.parametrize(("base_ms", "refuted"), [(40.0, True), (2.0, False)])
def test_rival_says_at_which_rate_the_champion_is_refuted(
    make_server, bounds, slo, base_ms, refuted
):
    """The lowest rate that it is shown not to sustain; none where it sustains the answer."""
    live = make_server(base_ms)
    config = ServingConfig(max_batch_size=16, max_queue_delay_us=0, instances=2)

    result = search_on(make_server(), bounds, slo, champion=Champion(live.measure, config, 7))

    rejected = result.rival.champion_rejected_per_s
    assert (rejected is not None) is refuted
    tried = {load.rate_per_s for _, load in live.calls}
    assert rejected is None or min(tried) <= rejected <= result.throughput_at_slo_per_s


@pytest.mark.parametrize(
    ("budget_s", "base_ms", "slower"), [(12.0, 0.65, 3.0), (40.0, 3.2, 2.0)], ids=["one", "some"]
)
def test_short_budget_still_confirms_something(budget_s, base_ms, slower):
    """A first rate far too high, or confirmations that fail: the last one is made well below."""
    server = SimulatedServer(base_ms, 0.0, limit_ms=50.0)
    bounds = Search(
        max_batch_sizes=(1,),
        queue_delays_us=(0,),
        instances=(1,),
        min_rate_per_s=5.0,
        max_rate_per_s=5000.0,
        measurement_s=2.0,
        budget_s=budget_s,
        max_measurements=30,
    )
    slo = Slo(
        p99_ms=50.0,
        min_throughput_per_s=1.0,
        confidence=0.95,
        confirmations=2,
        confirm_requests=1200,
    )
    alone = EngineTimes.fit(dict.fromkeys((1, 8), base_ms / slower))

    result = search_on(server, bounds, slo, alone=alone)

    assert result.confirmed
    assert 0.6 <= result.throughput_at_slo_per_s / (1e3 / base_ms) <= 0.95
    assert "raise [search] budget_s" in result.cut_short
    assert server.now_s <= budget_s
