"""What each measured point shows, by the one rule that also decides the gate p99_ms."""

import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Load
from enginegate.measuring.cluster_adjusted import decisions
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
SLOW_MS, REQUESTS = 50.0, 4000


def load(rate_per_s):
    return Load(rate_per_s=rate_per_s, duration_s=10, seed=0)


def slow_at(places):
    latencies_ms = np.full(REQUESTS, 5.0)
    latencies_ms[places] = SLOW_MS
    return latencies_ms


SPREAD = slow_at(np.arange(0, REQUESTS, 66))  # 61 of 4000, 1.5 %
ONE_BURST = slow_at(np.arange(1000, 1061))  # the same number, one after another


@pytest.mark.parametrize(
    ("latencies_ms", "confidence", "outcome"),
    [
        pytest.param(SPREAD, 0.99, Outcome.FAILED, id="independent"),
        pytest.param(ONE_BURST, 0.99, Outcome.INCONCLUSIVE, id="one-cluster-is-one-event"),
        pytest.param(SPREAD, 0.9999, Outcome.INCONCLUSIVE, id="the-policys-confidence"),
        pytest.param(slow_at([]), 0.99, Outcome.PASSED, id="holds"),
    ],
)
def test_a_point_is_decided_as_the_gate_is(make_sampled, slo, latencies_ms, confidence, outcome):
    """At the policy's confidence, at what clustered requests are worth."""
    run = make_sampled(CONFIG, load(400.0), latencies_ms)

    (decided,) = decisions([run], slo.model_copy(update={"confidence": confidence}))

    assert decided.outcome is outcome
    assert (decided.config, decided.rate_per_s) == (CONFIG, 400.0)
    assert decided.requests == REQUESTS


def test_runs_of_one_point_count_together_and_void_ones_not_at_all(make_sampled, slo):
    """Points are told apart by configuration and rate."""
    runs = [make_sampled(CONFIG, load(rate), slow_at([])) for rate in (400.0, 400.0, 420.0)]
    void = make_sampled(CONFIG, load(500.0), slow_at([]), invalid=("late",))

    found = decisions([*runs, void], slo)

    assert [(point.rate_per_s, point.requests) for point in found] == [
        (400.0, 2 * REQUESTS),
        (420.0, REQUESTS),
    ]
