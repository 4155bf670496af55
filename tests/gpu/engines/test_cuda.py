"""Device memory and copies through the driver alone, and a runner on top of them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.engines import cuda
from enginegate.engines.tensorrt.run import plan_runner

pytestmark = pytest.mark.gpu


def test_gpu_is_named():
    """The driver tells name and compute capability."""
    found = cuda.gpu()

    assert found is not None
    assert found.name.startswith("NVIDIA")
    assert found.capability.startswith("sm")
    assert int(found.capability[2:]) >= 50


def test_bytes_survive_the_round_trip():
    """What is copied to the device and back is what was sent."""
    sent = np.random.default_rng(0).random(1 << 20)
    received = np.zeros_like(sent)

    with cuda.stream() as stream:
        address = stream.allocate(sent.nbytes)
        stream.upload(address, sent)
        stream.download(received, address)
        stream.wait()

    np.testing.assert_array_equal(received, sent)


class EchoLibrary:
    """Stands in for TensorRT: its "engine" copies the input to the output on the device."""

    def __init__(self):
        self.addresses = {}
        self.shape = ()

    def Runtime(self, _logger):  # noqa: N802
        return self

    def deserialize_cuda_engine(self, _content):
        return self

    def create_execution_context(self):
        return self

    def set_tensor_address(self, name, address):
        self.addresses[name] = address

    def set_input_shape(self, _name, shape):
        self.shape = shape

    def infer_shapes(self):
        return []

    def get_tensor_shape(self, _name):
        return self.shape

    def execute_async_v3(self, stream):
        size = int(np.prod(self.shape)) * 4
        copy = cuda._driver().cuMemcpyDtoDAsync_v2
        import ctypes

        return not copy(
            ctypes.c_uint64(self.addresses["y"]),
            ctypes.c_uint64(self.addresses["x"]),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )


def test_rows_go_through_preallocated_buffers(tmp_path):
    """Ten rows through buffers of four come back whole and in order."""
    (tmp_path / "model.plan").write_bytes(b"plan")
    engine = SimpleNamespace(
        candidate="echo",
        builder="echo",
        max_batch_size=4,
        flags={},
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 3)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 3)),),
    )
    x = np.arange(30, dtype=np.float32).reshape(10, 3)

    with plan_runner(EchoLibrary(), None, engine, Path(tmp_path / "model.plan")) as runner:
        answer = runner.run({"x": x})["y"]

    np.testing.assert_array_equal(answer, x)
    assert "NVIDIA" in runner.device
