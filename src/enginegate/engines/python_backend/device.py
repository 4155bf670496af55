"""A GPU as a runner in Triton's Python backend needs it: memory, streams, events, graphs.

Through the driver's C interface, so that no package is required. Triton's Python backend runs this
same file beside its model file; therefore it needs NumPy only, and imports nothing of this package.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NON_BLOCKING = 1
# A waiting thread sleeps: the processor belongs to the threads that copy and answer.
_SLEEPING_WITHOUT_TIMING = 1 | 2
_CAPTURE_THREAD_LOCAL = 1
_PORTABLE = 1


class GpuDevice:
    """One GPU, in the context that every library of the process shares.

    Raises:
        RuntimeError: there is no driver, or it refuses; so do all methods.
    """

    def __init__(self, number: int = 0) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(
                "There is no NVIDIA driver here, so this engine for a GPU cannot run. Serve it on "
                "a machine with one."
            ) from error
        self.number = number
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), number)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.bind()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; it lets other Python threads run meanwhile."""
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise RuntimeError(f"The CUDA driver refused {name}: {reason} (error {code}).")

    def bind(self) -> None:
        """Make this GPU's context the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    def allocate(self, size_bytes: int) -> int:
        """Address of new device memory."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size_bytes, 1)))
        return pointer.value

    def free(self, address: int) -> None:
        """Give device memory back; waits for what uses it."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from and to while the host goes on."""
        pointer, size = ctypes.c_void_p(), max(size_bytes, 1)
        self.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), _PORTABLE)
        memory = (ctypes.c_uint8 * size).from_address(pointer.value or 0)
        return np.ctypeslib.as_array(memory)

    def free_pinned(self, memory: NDArray[np.uint8]) -> None:
        """Give pinned memory back."""
        self.call("cuMemFreeHost", ctypes.c_void_p(memory.ctypes.data))

    def stream(self) -> "GpuStream":
        """A queue of work on this GPU."""
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        return GpuStream(self, handle)

    def event(self) -> "GpuEvent":
        """A mark in a stream."""
        handle = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(handle), _SLEEPING_WITHOUT_TIMING)
        return GpuEvent(self, handle)


class GpuEvent:
    """A mark in a stream, to wait for."""

    def __init__(self, device: GpuDevice, handle: ctypes.c_void_p) -> None:
        self._device, self.handle = device, handle

    def wait(self) -> None:
        """Return when the last mark was reached."""
        self._device.call("cuEventSynchronize", self.handle)


class GpuStream:
    """Work that one GPU does in the order of the calls, while the host goes on."""

    def __init__(self, device: GpuDevice, handle: ctypes.c_void_p) -> None:
        self._device, self._handle = device, handle
        self.address = int(handle.value or 0)

    def allocate(self, size_bytes: int) -> int:
        """Address of new device memory, for what runs on this stream alone."""
        return self._device.allocate(size_bytes)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Queue a copy of a contiguous array to the device."""
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        target = ctypes.c_uint64(address)
        self._device.call("cuMemcpyHtoDAsync_v2", target, source, size, self._handle)

    def download(self, array: NDArray[Any], address: int) -> None:
        """Queue a copy from the device into a contiguous array."""
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        source = ctypes.c_uint64(address)
        self._device.call("cuMemcpyDtoHAsync_v2", target, source, size, self._handle)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy from one place of the device to another."""
        self._device.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size_bytes),
            self._handle,
        )

    def record(self, event: GpuEvent) -> None:
        """Mark the event when everything queued so far is done."""
        self._device.call("cuEventRecord", event.handle, self._handle)

    def wait_for(self, event: GpuEvent) -> None:
        """Hold what is queued from now on until the event's last mark is reached."""
        self._device.call("cuStreamWaitEvent", self._handle, event.handle, 0)

    def wait(self) -> None:
        """Return when everything queued so far is done."""
        self._device.call("cuStreamSynchronize", self._handle)

    def capture(self, queue: Callable[[], None]) -> Callable[[], None]:
        """Everything that ``queue`` puts on this stream, as one graph to launch again and again.

        Graphs live as long as the process, as the buffers in them do.
        """
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self._device.call("cuStreamBeginCapture_v2", self._handle, _CAPTURE_THREAD_LOCAL)
        try:
            queue()
        finally:
            self._device.call("cuStreamEndCapture", self._handle, ctypes.byref(graph))
        flags = ctypes.c_ulonglong(0)
        self._device.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, flags)
        return lambda: self._device.call("cuGraphLaunch", ready, self._handle)
