"""The NVIDIA driver's C interface, as far as running one plan needs it: no package required."""

import ctypes
from collections.abc import Callable
from typing import Any

_NON_BLOCKING = 1
_NO_TIMING = 2
_CAPTURE_THREAD_LOCAL = 1
_PORTABLE = 1


class CudaError(Exception):
    """The driver is missing, or refused a call."""


class CudaDevice:
    """The first GPU's primary context, current in the thread that opened it."""

    def __init__(self) -> None:
        try:
            self.driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(
                "There is no NVIDIA driver here, so nothing can run on a GPU."
            ) from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """One call of the driver.

        Raises:
            CudaError: it refused; names the call and the reason.
        """
        code = getattr(self.driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise CudaError(f"The CUDA driver refused {name}: {reason} (error {code}).")

    def cuda_version(self) -> str:
        """The newest CUDA that the driver serves, e.g. ``13.0``."""
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size: int) -> int:
        """Address of new device memory, filled with zeros."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(max(size, 1)))
        self.call("cuCtxSynchronize")  # streams here do not wait for the default one
        return pointer.value

    def free(self, address: int) -> None:
        """Give device memory back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def pin(self, address: int, size: int) -> None:
        """Let the device read and write host memory directly."""
        pointer, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
        self.call("cuMemHostRegister_v2", pointer, count, ctypes.c_uint(_PORTABLE))

    def unpin(self, address: int) -> None:
        """End what `pin` began."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))


class DeviceEvent:
    """A mark on a stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.handle = device, ctypes.c_void_p()
        device.call("cuEventCreate", ctypes.byref(self.handle), ctypes.c_uint(_NO_TIMING))

    def wait(self) -> None:
        """Return when the last mark was reached."""
        self.device.call("cuEventSynchronize", self.handle)


class DeviceStream:
    """Work of the device that is done in order."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.handle = device, ctypes.c_void_p()
        device.call("cuStreamCreate", ctypes.byref(self.handle), ctypes.c_uint(_NON_BLOCKING))

    @property
    def address(self) -> int:
        """The handle as TensorRT takes it."""
        return int(self.handle.value or 0)

    def upload(self, target: int, source: int, size: int) -> None:
        """Queue a copy from a host address to a device address."""
        to, at, count = ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        self.device.call("cuMemcpyHtoDAsync_v2", to, at, count, self.handle)

    def download(self, target: int, source: int, size: int) -> None:
        """Queue a copy from a device address to a host address."""
        to, at, count = ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
        self.device.call("cuMemcpyDtoHAsync_v2", to, at, count, self.handle)

    def record(self, event: DeviceEvent) -> None:
        """Mark the event when everything queued so far is done."""
        self.device.call("cuEventRecord", event.handle, self.handle)

    def wait_for(self, event: DeviceEvent) -> None:
        """What is queued from now on waits for the event's last mark; the caller does not."""
        self.device.call("cuStreamWaitEvent", self.handle, event.handle, ctypes.c_uint(0))

    def wait(self) -> None:
        """Return when everything queued so far is done."""
        self.device.call("cuStreamSynchronize", self.handle)

    def capture(self, queue: Callable[[], None]) -> "CudaGraph":
        """The work that ``queue`` puts on the stream, as a graph to launch again and again."""
        graph = ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        self.device.call("cuStreamBeginCapture_v2", self.handle, mode)
        try:
            queue()
        except BaseException:
            self.device.driver.cuStreamEndCapture(self.handle, ctypes.byref(graph))
            raise
        self.device.call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        return CudaGraph(self, graph)


class CudaGraph:
    """Captured work."""

    def __init__(self, stream: DeviceStream, captured: ctypes.c_void_p) -> None:
        self._stream, self._ready = stream, ctypes.c_void_p()
        device, flags = stream.device, ctypes.c_ulonglong(0)
        try:
            device.call("cuGraphInstantiateWithFlags", ctypes.byref(self._ready), captured, flags)
        finally:
            device.driver.cuGraphDestroy(captured)

    def launch(self) -> None:
        """Queue the work once more."""
        self._stream.device.call("cuGraphLaunch", self._ready, self._stream.handle)

    def destroy(self) -> None:
        """Give its memory back."""
        self._stream.device.call("cuGraphExecDestroy", self._ready)
