"""The GPU that the driver shows."""

import pytest

from enginegate.engines import cuda

pytestmark = pytest.mark.gpu


def test_gpu_is_named():
    """The driver tells name and compute capability."""
    found = cuda.gpu()

    assert found is not None
    assert found.name.startswith("NVIDIA")
    assert found.capability.startswith("sm")
    assert int(found.capability[2:]) >= 50


def test_memory_can_be_opened_by_another_process():
    """As Triton does it, by its handle; whatever was written is there, and nothing else."""
    with cuda.shared_gpu_memory(1000) as memory:
        memory.write(64, b"abc")

        assert memory.read(60, 8) == bytes(4) + b"abc" + bytes(1)
        assert len(memory.handle) == 64
        assert any(memory.handle)
