import numpy as np
import pytest

from enginegate.measurement import Load
from enginegate.policy.benchmarking import Slo
from enginegate.search.confirmed_point import pooled_throughput_per_s
from enginegate.search.search import search
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
LOAD = Load(rate_per_s=1000.0, duration_s=10.0, seed=0)
SLO = Slo(p99_ms=20.0, min_throughput_per_s=1.0, confidence=0.99)


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

    assert pooled_throughput_per_s([run, run]) == pytest.approx(throughput)


def test_throughput_leaves_failures_out(make_sampled):
    """Of a thousand a second, a tenth of which fails, nine hundred are served."""
    latencies_ms = np.where(np.arange(10_000) % 10 == 0, np.inf, 5.0)

    assert (
        pooled_throughput_per_s([make_sampled(CONFIG, LOAD, latencies_ms, lasted_s=10.0)]) == 900.0
    )


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
