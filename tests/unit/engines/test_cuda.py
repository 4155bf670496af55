"""Memory of a GPU, with a driver that is an array and a list of what it was asked."""

import ctypes

import pytest

from enginegate.engines import cuda
from enginegate.errors import EnginegateError

BASE = 0x7F00_0000_0000


class _Driver:
    """Keeps its one allocation in an array; refuses the call that it was told to refuse."""

    def __init__(self, refused=""):
        self.refused, self.called, self.depth, self.memory = refused, [], 0, bytearray()

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
                return 0
            self.called.append(name)
            if name == self.refused:
                return 2
            own = getattr(type(self), f"_{name}", None)
            return own(self, *arguments) if own else 0

        return call

    def _cuCtxPushCurrent_v2(self, _context):  # noqa: N802 - the driver's own name
        self.depth += 1
        return 0

    def _cuCtxPopCurrent_v2(self, _context):  # noqa: N802 - the driver's own name
        self.depth -= 1
        return 0

    def _cuMemAlloc_v2(self, pointer, size):  # noqa: N802 - the driver's own name
        self.memory = bytearray(b"\xff" * size.value)
        pointer._obj.value = BASE
        return 0

    def _cuMemsetD8_v2(self, place, value, size):  # noqa: N802 - the driver's own name
        assert place.value == BASE
        self.memory[:] = bytes([value.value]) * size.value
        return 0

    def _cuMemcpyHtoD_v2(self, place, content, size):  # noqa: N802 - the driver's own name
        at = place.value - BASE
        self.memory[at : at + size.value] = content[: size.value]
        return 0

    def _cuMemcpyDtoH_v2(self, content, place, size):  # noqa: N802 - the driver's own name
        at = place.value - BASE
        ctypes.memmove(content, bytes(self.memory[at : at + size.value]), size.value)
        return 0

    def _cuIpcGetMemHandle(self, handle, place):  # noqa: N802 - the driver's own name
        assert place.value == BASE
        ctypes.memmove(handle, b"h" * 64, 64)
        return 0


@pytest.fixture
def driver(monkeypatch):
    def use(refused=""):
        fake = _Driver(refused)
        monkeypatch.setattr(cuda, "_driver", lambda: fake)
        return fake

    return use


def test_memory_holds_what_was_written(driver):
    """Zeros elsewhere; whole pages, so that its handle opens nothing else; all is given back."""
    fake = driver()
    with cuda.shared_gpu_memory(1000) as memory:
        memory.write(64, b"abc")

        assert memory.read(62, 7) == b"\x00\x00abc\x00\x00"
        assert memory.handle == b"h" * 64
        assert len(fake.memory) == 2 << 20

    assert fake.called.count("cuMemFree_v2") == 1
    assert fake.called[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert fake.depth == 0


@pytest.mark.parametrize(
    ("refused", "freed"),
    [("cuMemAlloc_v2", 0), ("cuIpcGetMemHandle", 1), ("cuMemsetD8_v2", 1)],
)
def test_refusal_of_the_driver_gives_everything_back(driver, refused, freed):
    """The error says what the driver said."""
    fake = driver(refused)

    with pytest.raises(EnginegateError, match="out of memory"), cuda.shared_gpu_memory(10):
        pass

    assert fake.called.count("cuMemFree_v2") == freed
    assert fake.called[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert fake.depth == 0


def test_machine_without_a_driver(monkeypatch):
    """It says so."""
    monkeypatch.setattr(cuda, "_driver", lambda: None)

    with pytest.raises(EnginegateError, match="no NVIDIA driver"), cuda.shared_gpu_memory(10):
        pass
