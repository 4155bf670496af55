import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from enginegate.measurement import Resources
from enginegate.measuring.resources import GpuReading, Usage, gpus_of, monitor_resources
from enginegate.triton.metrics import Metrics
from enginegate.triton.server import Server
from enginegate.triton.supervised_process import cores, processor_s

TWO_GPUS = """
nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-b"} 1
nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 1000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 3000
nv_gpu_power_usage{gpu_uuid="GPU-a"} 100.5
nv_gpu_power_usage{gpu_uuid="GPU-b"} 200
nv_energy_consumption{gpu_uuid="GPU-a"} 7000
nv_energy_consumption{gpu_uuid="GPU-b"} 9000
"""
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def _resources(usage, **fields):
    given = {"completed": 100, "throughput_per_s": 50.0, "price_per_hour": None, **fields}
    return usage.resources(**given)


def _reading(power_w=None, energy_j=None, gpus=1):
    return GpuReading(gpus, 0.5, 1000.0, power_w, energy_j)


def test_triton_tells_of_its_gpus():
    """Memory, power and energy add up over GPUs; utilisation is their mean."""
    assert gpus_of(Metrics.parse(TWO_GPUS)) == GpuReading(2, 0.75, 4000, 300.5, 16000)


def test_gpu_that_cannot_tell_its_power():
    """A figure that is no number is not known; the others are."""
    text = 'nv_gpu_memory_used_bytes{gpu_uuid="a"} 5\nnv_gpu_power_usage{gpu_uuid="a"} NaN'

    assert gpus_of(Metrics.parse(text)) == GpuReading(1, None, 5.0, None, None)


def test_server_without_gpus_tells_none():
    """No GPU series is not a GPU at rest."""
    assert gpus_of(Metrics.parse("nv_cpu_utilization 0.5")) is None


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([_reading(100, 5000), _reading(300, 5400)], 4.0, id="counter"),
        pytest.param([_reading(100), _reading(300)], 4.0, id="power-times-time"),
        pytest.param([_reading(100, 5000), _reading(300, 10)], 4.0, id="counter-was-reset"),
        pytest.param([_reading()], None, id="neither"),
        pytest.param([], None, id="no-gpu"),
    ],
)
def test_energy_of_a_request(readings, expected):
    """Joules are the counter's difference, or mean power times time, over answers."""
    found = _resources(Usage(readings, lasted_s=2.0))

    assert found.joules_per_request == expected


@pytest.mark.parametrize(
    ("gpus", "throughput", "expected"), [(0, 50.0, 20.0), (2, 50.0, 40.0), (1, 0.0, None)]
)
def test_cost_of_a_million(gpus, throughput, expected):
    """A price of 3.6 an hour is a thousandth a second, for each GPU or for the machine."""
    usage = Usage([_reading(gpus=gpus)] if gpus else [])

    found = _resources(usage, throughput_per_s=throughput, price_per_hour=3.6)

    assert found.cost_per_million == (expected and pytest.approx(expected))


def test_unknown_resources_are_none():
    """Without any reading nothing is zero."""
    assert _resources(Usage()) == Resources()


def test_processor_time_of_a_process_and_those_below_it():
    """What a child of a child burns counts, and a process that is gone has no time."""
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        before = processor_s(process.pid)
        process.stdout.readline()
        after = processor_s(process.pid)
        process.communicate(b"\n")

    assert len(after) == 2
    assert cores(before, after, 1.0) >= 0.2
    assert processor_s(process.pid) == processor_s(None) == {}
    assert cores(before, {}, 1.0) is None


def _driver(gpus, mute=None):
    """Stands in for ``pynvml`` where there is no GPU; GPU ``mute`` cannot tell its power."""

    def refuse_without_gpus():
        if not gpus:
            raise RuntimeError("no driver")

    def power(gpu):
        if gpu == mute:
            raise RuntimeError("not supported")
        return 100_000

    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=refuse_without_gpus,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=25 + 50 * gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=1000 * (1 + gpu)),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 7_000 + 500 * gpu,
    )


@pytest.mark.parametrize(
    ("driver", "gpus", "shown", "expected"),
    [
        pytest.param(_driver(2), (), "", GpuReading(2, 0.5, 3000, 200, 14.5), id="all"),
        pytest.param(_driver(2), (1,), "", GpuReading(1, 0.75, 2000, 100, 7.5), id="one"),
        pytest.param(_driver(2), (0,), "1", GpuReading(1, 0.75, 2000, 100, 7.5), id="shown"),
        pytest.param(_driver(2, 1), (), "", GpuReading(2, 0.5, 3000, None, 14.5), id="mute"),
    ],
)
def test_driver_tells_of_gpus_here(monkeypatch, driver, gpus, shown, expected):
    """A local server's GPUs are read from the driver, at the start and at the end at least."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    server = Server(grpc="127.0.0.1:1", version="2.51.0", pid=os.getpid())

    with monitor_resources(server, gpu=True, gpus=gpus) as usage:
        pass

    assert usage.readings == [expected, expected]


@pytest.mark.parametrize("driver", [None, _driver(0)], ids=["no-package", "no-driver"])
def test_without_a_driver_nothing_is_known(monkeypatch, driver):
    """A machine that cannot tell leaves GPU figures out, also when its metrics do not answer."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    server = Server(grpc="127.0.0.1:1", version="2.51.0", pid=os.getpid(), metrics="127.0.0.1:1")

    with monitor_resources(server, gpu=True) as usage:
        pass

    assert usage.readings == []


def test_server_on_the_processor_is_watched():
    """Where the process is known its cores are measured, without a GPU and without a thread."""
    server = Server(grpc="127.0.0.1:1", version="2.51.0", pid=os.getpid())

    with monitor_resources(server, gpu=False) as usage:
        sum(range(300_000))

    assert usage.readings == []
    assert usage.cores >= 0.0
    assert usage.lasted_s > 0.0
