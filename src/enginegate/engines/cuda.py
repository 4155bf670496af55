"""The first GPU, asked of the NVIDIA driver: no package required."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from enginegate.errors import EnginegateError

Device = Literal["cpu", "cuda"]
AMPERE = 80  # the first compute capability with TF32 and BF16 arithmetic
ADA = 89  # the first with FP8 arithmetic
_GPU_PAGE, _HANDLE_BYTES = 2 << 20, 64
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU.

    Attributes:
        name: the vendor's name, e.g. ``NVIDIA L4``.
        capability: compute capability, e.g. ``sm89``.
    """

    name: str
    capability: str

    def __str__(self) -> str:
        return f"{self.capability} {self.name}"

    @property
    def capability_number(self) -> int:
        """Its compute capability as one number, e.g. 89."""
        return int(self.capability.removeprefix("sm"))


def gpu() -> Gpu | None:
    """The first GPU that the driver shows, or None."""
    driver = _driver()
    if driver is None:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetName(name, len(name), device)
    parts = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(str(value.value))
    return Gpu(name.value.decode(), f"sm{''.join(parts)}")


@contextmanager
def used_memory() -> Iterator[Callable[[], float | None]]:
    """Reads how many MiB of the first GPU are in use, by everybody; None without a driver.

    The process's context is there from the start, so a difference of two readings is free of it.
    """
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        yield lambda: None
        return
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:

        def read() -> float | None:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            _check(driver, driver.cuCtxSetCurrent(context))
            _check(driver, driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
            return (total.value - free.value) / (1 << 20)

        yield read
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


class SharedGpuMemory(NamedTuple):
    """Memory of the first GPU that another process on this machine can open.

    Attributes:
        handle: CUDA's interprocess handle of it, 64 bytes.
        write: copies bytes to an offset; returns once they are there.
        read: so many bytes from an offset.
    """

    handle: bytes
    write: Callable[[int, bytes], None]
    read: Callable[[int, int], bytes]


@contextmanager
def shared_gpu_memory(size: int) -> Iterator[SharedGpuMemory]:
    """Memory of the first GPU, all zeros, for as long as the block runs.

    Raises:
        EnginegateError: there is no GPU or no driver, or it has no such memory.
    """
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None:
        raise EnginegateError("This machine has no NVIDIA driver, or no GPU that it can use.")
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), 0))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    # Whole pages of their own: a handle opens the allocation that the memory is a part of.
    whole = -(-max(size, 1) // _GPU_PAGE) * _GPU_PAGE
    memory = ctypes.c_uint64()

    def run(name: str, *arguments: object) -> None:
        """Call the driver with the GPU's context, and leave this thread's own in place."""
        _check(driver, driver.cuCtxPushCurrent_v2(context))
        try:
            _check(driver, getattr(driver, name)(*arguments))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def write(offset: int, content: bytes) -> None:
        place, count = ctypes.c_uint64(memory.value + offset), ctypes.c_size_t(len(content))
        run("cuMemcpyHtoD_v2", place, content, count)

    def read(offset: int, count: int) -> bytes:
        content = ctypes.create_string_buffer(count)
        place = ctypes.c_uint64(memory.value + offset)
        run("cuMemcpyDtoH_v2", content, place, ctypes.c_size_t(count))
        return content.raw

    try:
        run("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(whole))
        try:
            run("cuMemsetD8_v2", memory, ctypes.c_ubyte(0), ctypes.c_size_t(whole))
            handle = ctypes.create_string_buffer(_HANDLE_BYTES)
            run("cuIpcGetMemHandle", handle, memory)
            yield SharedGpuMemory(handle.raw, write, read)
        finally:
            run("cuMemFree_v2", memory)
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise EnginegateError(f"The CUDA driver refused: {reason} (error {code}).")
