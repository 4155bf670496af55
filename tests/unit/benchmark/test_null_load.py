import numpy as np
import pytest

from enginegate.benchmark.null_load import _highest
from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import Load


def _probe(capacity_per_s, *, answered=True):
    """A generator that sends up to a rate, and falls behind above it."""

    def probe(rate_per_s, duration_s):
        due_s = np.arange(0.0, duration_s, 1 / rate_per_s)
        return LoadResult(
            load=Load(rate_per_s=rate_per_s, duration_s=duration_s, seed=0),
            due_s=due_s,
            sent_s=due_s * max(1.0, rate_per_s / capacity_per_s),
            latency_s=np.full(len(due_s), 0.001 if answered else np.inf),
            samples=np.zeros(len(due_s), np.int64),
            versions=np.full(len(due_s), "1"),
            errors={},
            cpu_share=0.5,
            lasted_s=duration_s,
        )

    return probe


@pytest.mark.parametrize(
    ("capacity_per_s", "trusted_per_s"),
    [
        pytest.param(5000.0, 4000.0, id="all-that-was-asked"),
        pytest.param(3000.0, 2400.0, id="less"),
        pytest.param(20.0, 0.0, id="nothing"),
    ],
)
def test_the_highest_rate_that_was_kept_up_with(capacity_per_s, trusted_per_s):
    """A rate that is not kept up with is lowered until one is; none at all is 0."""
    found = _highest(_probe(capacity_per_s), 4000.0, budget_s=60.0)

    assert found.trusted_per_s == pytest.approx(trusted_per_s)
    assert (found.null_p50_ms, found.null_p99_ms) == (pytest.approx(1.0), pytest.approx(1.0))


def test_failures_are_no_calibration():
    """A model that fails says nothing about the generator."""
    found = _highest(_probe(5000.0, answered=False), 4000.0, budget_s=60.0)

    assert (found.trusted_per_s, found.null_p50_ms) == (0.0, None)


def test_the_time_is_kept():
    """Without time for another try the first one is the answer."""
    assert _highest(_probe(3000.0), 4000.0, budget_s=0.0).trusted_per_s == 0.0
