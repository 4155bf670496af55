"""What a server's GPUs hold is read from the driver where it is here, else from its metrics."""

import os
import sys
from types import SimpleNamespace

import pytest

from enginegate.errors import ServerError
from enginegate.triton import gpu_memory
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.gpu_memory import GpuDriver, GpuMemory, memory_in, server_memory
from enginegate.triton.metrics import Metrics

TEXT = """
nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 1000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 400
nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"} 1000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} NaN
"""
BY_METRICS = (GpuMemory(None, 1000, 400),)


class FaultError(Exception):
    """Stands for NVMLError."""


def library(*used, fails=False):
    """A driver with a GPU for each figure."""

    def memory(gpu):
        if fails:
            raise FaultError
        return SimpleNamespace(total=2000, used=used[gpu])

    return SimpleNamespace(
        NVMLError=FaultError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetDriverVersion=lambda: b"580.82.07",
    )


@pytest.fixture(autouse=True)
def metrics(monkeypatch):
    monkeypatch.setattr(gpu_memory, "read_metrics", lambda *_, **__: Metrics.parse(TEXT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpu_that_cannot_tell_is_left_out():
    """Triton writes NaN for it."""
    assert memory_in(Metrics.parse(TEXT)) == BY_METRICS
    assert BY_METRICS[0].free_bytes == 600


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("", (GpuMemory(0, 2000, 10), GpuMemory(1, 2000, 20))),
        ("1", (GpuMemory(0, 2000, 20),)),
    ],
)
def test_gpus_are_numbered_as_cuda_is_shown_them(monkeypatch, shown, expected):
    """The same numbers as in a configuration's instance groups."""
    monkeypatch.setitem(sys.modules, "pynvml", library(10, 20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)

    driver = GpuDriver.open()

    assert driver.memory() == expected
    assert driver.version() == "580.82.07"


@pytest.mark.parametrize(
    ("addresses", "driver", "expected"),
    [
        pytest.param({"pid": os.getpid()}, library(10), (GpuMemory(0, 2000, 10),), id="ours"),
        pytest.param({"pid": os.getpid()}, library(10, fails=True), BY_METRICS, id="driver-mute"),
        pytest.param({"pid": os.getpid()}, None, BY_METRICS, id="no-package"),
        pytest.param({}, library(10), BY_METRICS, id="somebody-elses"),
        pytest.param({"metrics": None}, library(10), (GpuMemory(0, 2000, 10),), id="local-address"),
        pytest.param({"metrics": None, "grpc": "gpu-7:1"}, library(10), (), id="elsewhere"),
    ],
)
def test_whoever_knows_best_is_asked(monkeypatch, addresses, driver, expected):
    """This machine's driver says nothing about a server on another one."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    given = {"grpc": "127.0.0.1:1", "metrics": "127.0.0.1:3", **addresses}

    assert server_memory(LiveAddresses(**given)) == expected


def test_metrics_that_do_not_answer_leave_it_unknown(monkeypatch):
    """Nothing is known then, which is said where it is compared."""

    def silent(*_, **__):
        raise ServerError("no answer")

    monkeypatch.setattr(gpu_memory, "read_metrics", silent)
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert server_memory(LiveAddresses(grpc="gpu-7:1", metrics="gpu-7:3")) == ()
    assert server_memory(None) == ()
