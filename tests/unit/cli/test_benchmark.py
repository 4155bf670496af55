"""What one load on a running server shows."""

import numpy as np
import pytest

from enginegate.cli.benchmark import slo_sentence
from enginegate.errors import ExitCode
from enginegate.measurement import ClosedLoad, LatencySample, Load, Measurement
from enginegate.measuring.p99 import percentiles
from enginegate.policy.benchmarking import Slo
from enginegate.serving import ServingConfig
from tests.fakes.evidence import sha

SLO = Slo(p99_ms=20, min_throughput_per_s=1, confidence=0.99)
OPEN = Load(rate_per_s=300, duration_s=10, seed=0)
EVEN = np.full(3000, 5.0)
SLOW = np.full(3000, 50.0)
# Twelve of 3,000 over the limit are few enough, unless they come together.
SPREAD = np.where(np.arange(3000) % 250 == 0, 50.0, 5.0)
TOGETHER = np.where(np.arange(3000) < 12, 50.0, 5.0)


def measured(latencies_ms, load=OPEN, invalid=()):
    made = Measurement(
        config=ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1),
        load=load,
        invalid=invalid,
        sent=len(latencies_ms),
        completed=len(latencies_ms),
        failed=0,
        throughput_per_s=300,
        percentiles=percentiles(latencies_ms),
        late_p99_ms=0.0,
        stages=None,
        latencies_sha256=sha("7"),
        lasted_s=10.0,
    )
    return LatencySample(made, latencies_ms)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        pytest.param(measured(EVEN), ExitCode.OK, "20 ms is met (0 of 3000", id="met"),
        pytest.param(measured(SLOW), ExitCode.GATES_FAILED, "20 ms is not met", id="fails"),
        pytest.param(measured(SPREAD), ExitCode.OK, "is met (12 of 3000", id="few-and-spread"),
        pytest.param(measured(TOGETHER), ExitCode.INCONCLUSIVE, "is open", id="all-at-once"),
        pytest.param(
            measured(EVEN, ClosedLoad(clients=4, duration_s=10, seed=0)),
            ExitCode.OK,
            "Not judged against p99 <= 20 ms: a closed loop",
            id="closed-loop",
        ),
        pytest.param(
            measured(EVEN, invalid=("late",)), ExitCode.INCONCLUSIVE, "not valid", id="invalid"
        ),
    ],
)
def test_report_of_one_load(found, code, said):
    """An open loop is judged, its clusters counted for less; a closed one hides its tail."""
    ended, words = slo_sentence(found, SLO)

    assert ended is code
    assert said in words
