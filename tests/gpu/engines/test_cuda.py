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
