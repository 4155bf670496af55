"""What a rejected rate says of the next one to try."""

import numpy as np
import pytest

from enginegate.measurement import Load
from enginegate.policy.benchmarking import Slo
from enginegate.search.space import Grid
from enginegate.search.trial_history import CapacityEstimate, Guess, TrialHistory, next_rate
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
SLO = Slo(p99_ms=20.0, min_throughput_per_s=1.0, confidence=0.95)
GRID = Grid(10.0, 10_000.0, 0.02)


def _rejected(make_sampled, *, offered, served, p99_ms):
    history = TrialHistory(SLO)
    load = Load(rate_per_s=offered, duration_s=2.0, seed=0)
    latencies_ms = np.full(int(0.9 * offered * load.duration_s), p99_ms)
    history.add(make_sampled(CONFIG, load, latencies_ms, throughput_per_s=served))
    return history


@pytest.mark.parametrize(
    ("offered", "served", "p99_ms", "rate", "saturated"),
    [(4600.0, 4580.0, 36.0, 3780.0, False), (3000.0, 1560.0, 450.0, 1540.0, True)],
    ids=["kept up", "saturated"],
)
def test_rejected_rate_tells_where_capacity_may_be(
    make_sampled, offered, served, p99_ms, rate, saturated
):
    """Below what was answered, or by the cube root of p99 below what was offered."""
    history = _rejected(make_sampled, offered=offered, served=served, p99_ms=p99_ms)

    guess = history.below_rejected(CONFIG)

    assert guess.saturated is saturated
    assert guess.rate_per_s == pytest.approx(rate, rel=0.05)


def test_sustained_rate_needs_no_guess(make_sampled):
    """What was sustained says more."""
    history = _rejected(make_sampled, offered=4600.0, served=4580.0, p99_ms=5.0)

    assert history.below_rejected(CONFIG) is None


@pytest.mark.parametrize(
    ("estimate", "guess", "expected"),
    [
        pytest.param((100, 800, 4000), Guess(3700.0, saturated=False), 3700, id="wide"),
        pytest.param((3900, 4000, 4100), Guess(3000.0, saturated=False), 3940, id="model knows"),
        pytest.param((2800, 2900, 2950), Guess(1500.0, saturated=True), 1500, id="saturated"),
        pytest.param((900, 1000, 1100), Guess(1500.0, saturated=True), 985, id="model is lower"),
        pytest.param((100, 800, 4000), None, 632, id="nothing rejected"),
    ],
)
def test_next_rate_believes_a_rejected_one_where_the_model_is_unsure(estimate, guess, expected):
    """And never goes above what a saturated server answered."""
    rate = next_rate(GRID, None, 4600.0, CapacityEstimate(*estimate), guess=guess)

    assert rate == pytest.approx(expected, rel=0.03)
