"""The driver's figures of this machine's GPU, which a promotion compares a release with."""

from pathlib import Path

import pytest

from enginegate.contract.server_versions import _loaded_driver
from enginegate.engines.python_backend.device import GpuDevice
from enginegate.triton.gpu_memory import GpuDriver

pytestmark = pytest.mark.gpu
TAKEN = 1 << 30


@pytest.fixture
def driver():
    pytest.importorskip("pynvml")
    return GpuDriver.open((0,))


def test_memory_that_somebody_takes_is_not_free(driver):
    """A gibibyte on the first GPU shows whole, whoever else uses the GPU meanwhile."""
    device = GpuDevice()
    (before,) = driver.memory()
    address = device.allocate(TAKEN)
    (during,) = driver.memory()
    device.free(address)

    assert 0 < before.used_bytes < before.total_bytes
    assert before.total_bytes == during.total_bytes
    assert during.used_bytes - before.used_bytes >= TAKEN * 0.9


def test_kernel_and_library_name_the_same_driver(driver):
    """The file that an upgrade is seen by says what NVML says, while nothing was upgraded."""
    assert driver.version() == _loaded_driver(Path("/"))
