import pytest

from enginegate.benchmark.deployment import DeployedBenchmark, deploy
from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import Traffic
from enginegate.measuring.raw_requests import read_raw_requests
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.search import search
from enginegate.serving import ServingConfig

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


def test_batching_configuration_wins(server, scale_model, samples, tmp_path):
    """For a model that takes 10 ms a batch, only batching meets the SLO at 250/s."""
    bounds = Search(
        max_batch_sizes=(1, 16),
        queue_delays_us=(0,),
        instances=(1,),
        min_rate_per_s=40,
        max_rate_per_s=250,
        measurement_s=1.5,
        budget_s=300.0,
    )
    slo = Slo(
        p99_ms=300.0,
        min_throughput_per_s=200.0,
        confidence=0.99,
        confirmations=2,
        confirm_requests=600,
    )

    with deploy(server, scale_model("searched", sleep_ms=10)) as deployment:
        bench = DeployedBenchmark(deployment, Traffic.of("searched", samples), tmp_path, slo.p99_ms)
        result = search(bench.measure, bounds, slo)

    gates = {finding.gate: finding.outcome for finding in result.findings}
    assert result.chosen == ServingConfig(max_batch_size=16, max_queue_delay_us=0, instances=1)
    assert result.throughput_at_slo_per_s == 250.0
    assert gates["p99_ms"] is gates["throughput"] is Outcome.PASSED
    last = result.measurements[-1]
    assert last.stages.compute_infer_ms > 10
    assert len(read_raw_requests(tmp_path, last.latencies_sha256).latencies_ms) == last.completed


def test_slo_that_cannot_be_met_is_failed(server, scale_model, samples, tmp_path):
    """A hundredth of a millisecond: measured validly, and too short for the server alone."""
    bounds = Search(
        max_batch_sizes=(1, 8),
        queue_delays_us=(0,),
        instances=(1, 2),
        min_rate_per_s=100,
        max_rate_per_s=400,
        measurement_s=5.0,
        budget_s=120.0,
    )
    slo = Slo(p99_ms=0.01, min_throughput_per_s=1.0, confidence=0.99)

    with deploy(server, scale_model("impossible", sleep_ms=5)) as deployment:
        bench = DeployedBenchmark(
            deployment, Traffic.of("impossible", samples), tmp_path, slo.p99_ms
        )
        result = search(bench.measure, bounds, slo)

    latency = next(finding for finding in result.findings if finding.gate == "p99_ms")
    assert latency.outcome is Outcome.FAILED, latency.reason
    assert "a request alone takes" in latency.reason
    assert any(not measured.invalid for measured in result.measurements)
