import numpy as np
import pytest

from enginegate.errors import InputError, TamperedError
from enginegate.evidence import Load, ServingConfig
from enginegate.triton.answers import Statistics
from enginegate.triton.measure import (
    allowed_lateness_ms,
    measure,
    order_statistics,
    percentiles,
    read_latencies,
)
from enginegate.triton.traffic import LoadResult

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


def _result(latency_s, late_s=0.0, duration_s=10.0):
    count = len(latency_s)
    due_s = np.arange(count) * duration_s / count
    return LoadResult(
        load=Load(rate_per_s=count / duration_s, duration_s=duration_s, seed=0),
        due_s=due_s,
        sent_s=due_s + late_s,
        latency_s=np.array(latency_s, np.float64),
        samples=np.zeros(count, np.int64),
        versions=np.array(["1"] * count),
        errors={},
        cpu_share=0.1,
    )


def _measure(result, folder, counted=None):
    return measure(result, CONFIG, counted=counted, folder=folder, late_limit_ms=5.0)


def test_warm_up_is_left_out(tmp_path):
    """The first tenth of the load's time is in no number but the count of what was sent."""
    latency_s = np.full(1000, 0.010)
    latency_s[:100] = 5.0

    found = _measure(_result(latency_s), tmp_path)

    measurement = found.measurement
    assert (measurement.sent, measurement.completed, measurement.failed) == (1000, 900, 0)
    assert measurement.percentile(0.99).value_ms == pytest.approx(10.0)
    assert measurement.throughput_per_s == pytest.approx(100.0, rel=0.01)
    assert measurement.invalid == ()
    assert found.over(10.5) == 0


def test_failures_are_over_every_limit(tmp_path):
    """A failed request is over the limit, and a percentile that falls on one has no value."""
    latency_s = np.full(1000, 0.010)
    latency_s[::20] = np.inf

    found = _measure(_result(latency_s), tmp_path)

    assert found.measurement.failed == found.over(1e9) == 45
    assert found.measurement.percentile(0.9).value_ms == pytest.approx(10.0)
    assert found.measurement.percentile(0.95).high_ms is None
    assert found.measurement.percentile(0.99) is None
    assert found.measurement.canonical_json()


@pytest.mark.parametrize(
    ("latency_s", "late_s", "counted", "said"),
    [
        pytest.param(np.full(1000, 0.01), 0.020, None, "generator was 20 ms late", id="late"),
        pytest.param(
            np.full(1000, 0.01), np.linspace(0, 0.5, 1000), None, "sent at 95.2% of", id="too-slow"
        ),
        pytest.param(np.full(20, 0.01), 0.0, None, "18 requests after the warm-up", id="few"),
        pytest.param(
            np.full(1000, 0.01), 0.0, Statistics(requests=-3), "went backwards", id="restarted"
        ),
    ],
)
def test_what_makes_a_measurement_void(tmp_path, latency_s, late_s, counted, said):
    """A generator that could not keep up, too few requests, or a restart void the numbers."""
    found = _measure(_result(latency_s, late_s), tmp_path, counted)

    assert any(said in reason for reason in found.measurement.invalid)


def test_a_slow_server_is_not_void(tmp_path):
    """Overload is the server's: with a generator on time the measurement stays valid."""
    found = _measure(_result(np.linspace(0.01, 8.0, 2000)), tmp_path)

    assert found.measurement.invalid == ()
    assert found.measurement.throughput_per_s < 200


def test_stages_are_means_of_a_request(tmp_path):
    """Cumulative nanoseconds become milliseconds a request, samples a batch."""
    counted = Statistics(
        requests=100,
        inferences=200,
        executions=50,
        queue_ns=500_000_000,
        compute_infer_ns=300_000_000,
        compute_input_ns=10_000_000,
        compute_output_ns=20_000_000,
    )

    stages = _measure(_result(np.full(1000, 0.01)), tmp_path, counted).measurement.stages

    assert (stages.queue_ms, stages.compute_infer_ms) == (5.0, 3.0)
    assert (stages.compute_input_ms, stages.compute_output_ms) == (0.1, 0.2)
    assert stages.mean_batch_size == 4.0


def test_raw_latencies_are_kept_by_digest(tmp_path):
    """The judged latencies can be read back by digest; a changed or missing file is refused."""
    latency_s = np.random.default_rng(0).exponential(0.01, 1000)
    latency_s[500] = np.inf

    found = _measure(_result(latency_s), tmp_path)
    sha256 = found.measurement.latencies_sha256

    np.testing.assert_array_equal(read_latencies(tmp_path, sha256), found.latencies_ms)
    with pytest.raises(InputError, match="measure again"):
        read_latencies(tmp_path, "f" * 64)
    (tmp_path / f"{sha256}.npz").write_bytes(b"changed")
    with pytest.raises(TamperedError, match="was changed"):
        read_latencies(tmp_path, sha256)


def test_the_same_run_has_the_same_digest(tmp_path):
    """The digest depends on the numbers only."""
    first, second = (_measure(_result(np.full(500, 0.01)), tmp_path) for _ in range(2))

    assert first.measurement == second.measurement


@pytest.mark.parametrize(("count", "quantile"), [(200, 0.5), (1000, 0.9), (1000, 0.99)])
def test_intervals_cover_the_true_percentile(count, quantile):
    """Over 2,000 trials the interval holds the true percentile at least 95 % of the time."""
    source = np.random.default_rng(3)
    ranks = order_statistics(count, quantile, confidence=0.95)
    true = -np.log(1 - quantile)

    draws = np.sort(source.exponential(size=(2000, count)), axis=1)
    covered = (draws[:, ranks.low - 1] <= true) & (true <= draws[:, ranks.high - 1])

    assert covered.mean() >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 2000)
    assert covered.mean() < 0.985


def test_few_samples_have_no_bound():
    """Fifty samples cannot bound a 99th percentile from above, and say so."""
    found = percentiles(np.arange(1.0, 51.0))

    p99 = next(percentile for percentile in found if percentile.quantile == 0.99)
    assert (p99.value_ms, p99.high_ms, p99.samples) == (50.0, None, 50)
    assert p99.low_ms is not None
    assert percentiles(np.array([])) == ()


@pytest.mark.parametrize(("slo_ms", "expected"), [(2.0, 5.0), (20.0, 5.0), (100.0, 25.0)])
def test_late_limit(slo_ms, expected):
    """A quarter of the SLO, never below what timers of a busy machine do."""
    assert allowed_lateness_ms(slo_ms) == expected
