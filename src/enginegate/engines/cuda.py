"""The NVIDIA driver's C interface, as far as running one engine needs it: no package required."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from enginegate.data import Array
from enginegate.errors import EnginegateError

Device = Literal["cpu", "cuda"]
AMPERE = 80  # the first compute capability with TF32 and BF16 arithmetic
ADA = 89  # the first with FP8 arithmetic
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NON_BLOCKING = 1
_NO_TIMING = 2
_CAPTURE_THREAD_LOCAL = 1


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


@dataclass(frozen=True, slots=True)
class Stream:
    """Device and pinned memory, copies in order, events and captured graphs of one stream.

    What it made is freed when it closes; ``undo`` holds how.
    """

    driver: ctypes.CDLL
    context: ctypes.c_void_p
    handle: ctypes.c_void_p
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def address(self) -> int:
        """The stream's handle as TensorRT takes it."""
        return int(self.handle.value or 0)

    def allocate(self, size_bytes: int) -> int:
        """Address of new device memory, freed when the stream closes."""
        pointer = ctypes.c_uint64()
        _check(self.driver, self.driver.cuMemAlloc_v2(ctypes.byref(pointer), max(size_bytes, 1)))
        self.undo.append(lambda: self.driver.cuMemFree_v2(pointer))
        return pointer.value

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A host array that the device copies from and to while the host goes on."""
        count, pointer = int(np.prod(shape)), ctypes.c_void_p()
        size, allocate = max(count, 1) * np.dtype(dtype).itemsize, self.driver.cuMemAllocHost_v2
        _check(self.driver, allocate(ctypes.byref(pointer), ctypes.c_size_t(size)))
        self.undo.append(lambda: self.driver.cuMemFreeHost(pointer))
        memory = (ctypes.c_byte * size).from_address(pointer.value or 0)
        array: Array = np.ctypeslib.as_array(memory).view(dtype)[:count].reshape(shape)
        return array

    def event(self) -> ctypes.c_void_p:
        """Something to record and wait for."""
        event = ctypes.c_void_p()
        _check(self.driver, self.driver.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        self.undo.append(lambda: self.driver.cuEventDestroy_v2(event))
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        """Mark the event when everything queued so far is done."""
        _check(self.driver, self.driver.cuEventRecord(event, self.handle))

    def wait_for(self, event: ctypes.c_void_p) -> None:
        """Return when the event's last mark was reached."""
        _check(self.driver, self.driver.cuEventSynchronize(event))

    def capture(self, queue: Callable[[], None]) -> Callable[[], None]:
        """What ``queue`` puts on the stream, as one graph to launch again and again."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        begin = self.driver.cuStreamBeginCapture_v2
        _check(self.driver, begin(self.handle, _CAPTURE_THREAD_LOCAL))
        try:
            queue()
        finally:
            ended = self.driver.cuStreamEndCapture(self.handle, ctypes.byref(graph))
        _check(self.driver, ended)
        self.undo.append(lambda: self.driver.cuGraphDestroy(graph))
        instantiate = self.driver.cuGraphInstantiateWithFlags
        _check(self.driver, instantiate(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)))
        self.undo.append(lambda: self.driver.cuGraphExecDestroy(ready))
        return lambda: _check(self.driver, self.driver.cuGraphLaunch(ready, self.handle))

    def bind(self) -> None:
        """Make this stream's context the calling thread's."""
        _check(self.driver, self.driver.cuCtxSetCurrent(self.context))

    def upload(self, address: int, array: Array) -> None:
        """Queue a copy of a contiguous array to the device."""
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        copy = self.driver.cuMemcpyHtoDAsync_v2
        _check(self.driver, copy(ctypes.c_uint64(address), source, size, self.handle))

    def download(self, array: Array, address: int) -> None:
        """Queue a copy from the device into a contiguous array."""
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        copy = self.driver.cuMemcpyDtoHAsync_v2
        _check(self.driver, copy(target, ctypes.c_uint64(address), size, self.handle))

    def wait(self) -> None:
        """Return when everything queued so far is done."""
        _check(self.driver, self.driver.cuStreamSynchronize(self.handle))


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
def stream() -> Iterator[Stream]:
    """A stream on the first GPU; its memory is freed when the block ends.

    Raises:
        EnginegateError: the driver refuses.
    """
    driver = _driver()
    if driver is None:
        raise EnginegateError("There is no NVIDIA driver here, so nothing can run on a GPU.")
    device, context, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), 0))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _check(driver, driver.cuCtxSetCurrent(context))
        _check(driver, driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
        opened = Stream(driver, context, handle)
        try:
            yield opened
        finally:
            driver.cuCtxSetCurrent(context)
            driver.cuStreamSynchronize(handle)
            for undo in reversed(opened.undo):
                undo()
            driver.cuStreamDestroy_v2(handle)
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


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
