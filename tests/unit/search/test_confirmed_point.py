import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.measuring.cluster_adjusted import clustering, judge, throughput_per_s
from enginegate.policy.benchmarking import Slo
from enginegate.search.search import search
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
LOAD = Load(rate_per_s=1000.0, duration_s=10.0, seed=0)
SLO = Slo(p99_ms=20.0, min_throughput_per_s=1.0, confidence=0.99)


def _latencies_ms(over, *, bursts):
    """Ten seconds of 1,000 requests; those over the limit alone, or in as many bursts."""
    latencies_ms = np.full(10_000, 5.0)
    source = np.random.default_rng(1)
    if bursts:
        for start in source.choice(9_900, size=bursts, replace=False):
            latencies_ms[start : start + over // bursts] = 50.0
    else:
        latencies_ms[source.choice(10_000, size=over, replace=False)] = 50.0
    return latencies_ms


def test_independent_requests_count_in_full(make_sampled):
    """Scattered over the run, 60 of 10,000 over the limit show that it holds."""
    runs = [make_sampled(CONFIG, LOAD, _latencies_ms(60, bursts=0), lasted_s=10.0)]

    assert clustering(runs, 20.0) < 1.5
    assert judge(runs, SLO).outcome is Outcome.PASSED


def test_clustered_requests_count_less(make_sampled):
    """The same 60 in three bursts are three events, which decide nothing."""
    runs = [make_sampled(CONFIG, LOAD, _latencies_ms(60, bursts=3), lasted_s=10.0)]

    decision = judge(runs, SLO)

    assert clustering(runs, 20.0) > 10.0
    assert decision.outcome is Outcome.INCONCLUSIVE
    assert (decision.requests, decision.over) == (10_000, 60)
    assert decision.needed > 10_000


@pytest.mark.parametrize(
    ("sent", "throughput"),
    [
        pytest.param(10_000, 1000.0, id="as-asked"),
        pytest.param(10_200, 1000.0, id="by-chance"),
        pytest.param(10_800, 1080.0, id="more"),
        pytest.param(9_200, 920.0, id="less"),
    ],
)
def test_throughput_is_what_was_really_sent(make_sampled, sent, throughput):
    """Arrivals that differ from the rate by more than chance are told as they were."""
    run = make_sampled(CONFIG, LOAD, np.full(sent, 5.0), lasted_s=10.0)

    assert throughput_per_s([run, run]) == pytest.approx(throughput)


def test_throughput_leaves_failures_out(make_sampled):
    """Of a thousand a second, a tenth of which fails, nine hundred are served."""
    latencies_ms = np.where(np.arange(10_000) % 10 == 0, np.inf, 5.0)

    assert throughput_per_s([make_sampled(CONFIG, LOAD, latencies_ms, lasted_s=10.0)]) == 900.0


@pytest.mark.parametrize("times", [1, 2])
def test_a_void_confirmation_is_repeated_once(make_server, bounds, slo, times):
    """A void confirmation costs one more seed; a rate where both are void is given up."""
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
