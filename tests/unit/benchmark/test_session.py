"""What a benchmark tells the search about an engine before anything was served."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.benchmark.deployment import ServedModel
from enginegate.benchmark.session import BenchmarkSession, BenchmarkTarget
from enginegate.policy.benchmarking import Search
from enginegate.serving import ServingConfig, ServingOptions

BOUNDS = Search(
    max_batch_sizes=(128,),
    queue_delays_us=(0,),
    instances=(1,),
    min_rate_per_s=10.0,
    max_rate_per_s=20_000.0,
    measurement_s=1.0,
    budget_s=10.0,
)


@pytest.fixture
def session():
    """Of eight rows a request; the engine alone computes 80 000 rows a second on a GPU."""

    def run(shared_memory="system"):
        speeds = [
            SimpleNamespace(batch_size=size, batch_ms=size / 80, samples_per_s=80_000.0)
            for size in (8, 128)
        ]
        return BenchmarkSession(
            tables=SimpleNamespace(
                search=BOUNDS, load=SimpleNamespace(shared_memory=shared_memory)
            ),
            install=None,
            paths=None,
            traffic=None,
            traffic_sha256="0" * 64,
            batch_sizes=(8,),
            alone=SimpleNamespace(batches=speeds, inputs_on="device"),
        )

    return run


def target(backend, *, gpu):
    model = ServedModel("m", backend, (), (), {"model": Path("model")}, gpu=gpu)
    return BenchmarkTarget(model, {}, ServingOptions())


@pytest.mark.parametrize(
    ("backend", "gpu", "expected"),
    [("python", True, (1, 2, 3, 4)), ("python", False, (1,)), ("tensorrt", True, (1,))],
)
def test_processes_are_chosen_for_our_runner_on_a_gpu_alone(session, backend, gpu, expected):
    """Elsewhere Triton's instances are all there is to choose."""
    assert session()._bounds(target(backend, gpu=gpu)).processes == expected


def test_first_rate_is_what_our_runner_takes_of_that_transport(session):
    """Natively it is near the engine's own; through our runner a request has its price."""
    config = ServingConfig(max_batch_size=128, max_queue_delay_us=0, instances=1)

    def first(shared_memory, backend):
        times = session(shared_memory)._engine_times(target(backend, gpu=True))
        return times.expected_per_s(config, 50.0)

    assert first("cuda", "tensorrt") == pytest.approx(9500.0, rel=0.01)
    assert 4500.0 < first("system", "python") <= 5000.0
    assert 1500.0 < first("cuda", "python") <= 2000.0
