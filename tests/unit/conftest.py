"""Simulated servers for searches."""

import pytest

from enginegate.policy.benchmarking import Search, Slo
from tests.fakes.simulated_triton import SimulatedServer, sampled


@pytest.fixture
def simulated():
    """A simulated server."""
    return SimulatedServer()


@pytest.fixture
def make_server():
    """Makes a simulated server with other service times."""
    return SimulatedServer


@pytest.fixture
def make_sampled():
    """Makes a measurement from latencies."""
    return sampled


@pytest.fixture
def bounds():
    """A search space of eight configurations."""
    return Search(
        max_batch_sizes=(1, 16),
        queue_delays_us=(0, 2000),
        instances=(1, 2),
        min_rate_per_s=100,
        max_rate_per_s=6000,
        measurement_s=3.0,
        budget_s=600.0,
    )


@pytest.fixture
def slo():
    """Twenty milliseconds at the 99th percentile."""
    return Slo(
        p99_ms=20.0,
        min_throughput_per_s=800.0,
        confidence=0.99,
        confirmations=3,
        confirm_requests=3000,
    )
