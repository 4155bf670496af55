"""How the tail moves under a heavier mix."""

import numpy as np
import pytest

from enginegate.benchmark.stress_mixes import largest_requests, measure_mixes
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import LatencySample, Load, Measurement
from enginegate.measuring.p99 import percentiles
from enginegate.serving import ServingConfig
from tests.fakes.evidence import sha

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
LOAD = Load(rate_per_s=200.0, duration_s=1.0, seed=1, arrivals="constant")


def answering(latency_ms, *, failed=0, invalid=()):
    """A bench with that latency; remembers what it was asked for."""
    asked = []

    def measure(config, load, *, ends=None):
        del ends
        asked.append((config, load))
        latencies_ms = np.full(200, latency_ms)
        made = Measurement(
            config=config,
            load=load,
            invalid=invalid,
            sent=200,
            completed=200 - failed,
            failed=failed,
            throughput_per_s=200.0,
            percentiles=percentiles(latencies_ms),
            late_p99_ms=0.1,
            stages=None,
            latencies_sha256=sha("a"),
        )
        return LatencySample(made, latencies_ms)

    measure.asked = asked
    return measure


def test_three_mixes_at_one_configuration_and_rate():
    """Bursts are the recorded requests in other time; large ones come from a bench of their own."""
    recorded, large = answering(5.0), answering(9.0, failed=2)

    found = measure_mixes({"recorded": recorded, "large together": large}, CONFIG, LOAD)

    assert [pattern.name for pattern in found] == ["recorded", "bursts", "large together"]
    assert [load.arrivals for _, load in recorded.asked] == ["constant", "bursts"]
    assert [load.arrivals for _, load in large.asked] == ["constant"]
    assert {load.rate_per_s for _, load in recorded.asked + large.asked} == {200.0}
    assert [pattern.failed_share for pattern in found] == [0.0, 0.0, 0.01]
    assert found[2].percentiles[0].value_ms == 9.0


def test_invalid_measurements_and_missing_mixes_are_left_out():
    """What could not be measured is not reported as if it had been."""
    invalid = answering(5.0, invalid=("the generator was late",))

    assert measure_mixes({"recorded": invalid}, CONFIG, LOAD) == ()
    assert [p.name for p in measure_mixes({"recorded": answering(5.0)}, CONFIG, LOAD)] == [
        "recorded",
        "bursts",
    ]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        pytest.param([10] * 18 + [90, 99], [90, 99], id="a-tenth"),
        pytest.param([10, 11, 50], [50], id="one-at-least"),
        pytest.param([100] * 19 + [104], None, id="all-alike"),
    ],
)
def test_largest_requests(sizes, kept):
    """A tenth of the traffic; none when the sizes hardly differ."""
    found = largest_requests(Traffic(tuple(bytes(size) for size in sizes), order_seed=3))

    assert (found and [len(request) for request in found.requests]) == kept
    assert found is None or found.order_seed == 3
