"""How much memory a server's GPUs have, and how much of it is used: by the driver, else by Triton.

The driver (NVML, package ``nvidia-ml-py``) is asked about a server on this machine. Triton's own
metrics are renewed every two seconds unless told otherwise, and do not say which GPU has which
number.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from enginegate.errors import ServerError
from enginegate.machine import runs
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.metrics import Metrics, read_metrics

USED, TOTAL = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
# Names of this machine in an address.
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
_ANSWER_S = 2.0


class GpuMemory(NamedTuple):
    """One GPU's memory now.

    Attributes:
        number: as CUDA counts it; None where only Triton's metrics tell of it.
    """

    number: int | None
    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What nobody uses, whoever that is."""
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """The driver's own figures.

    Attributes:
        library: ``pynvml``.
        numbers: of the GPUs, as CUDA counts them.
        handles: of the same GPUs.
    """

    library: Any
    numbers: tuple[int, ...]
    handles: tuple[Any, ...]

    @classmethod
    def open(cls, gpus: tuple[int, ...] = ()) -> "GpuDriver | None":
        """The GPUs with these numbers, or all; None without a driver or the package."""
        try:
            import pynvml  # noqa: PLC0415
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            wanted = gpus or tuple(range(_shown() or pynvml.nvmlDeviceGetCount()))
            handles = tuple(pynvml.nvmlDeviceGetHandleByIndex(_physical(gpu)) for gpu in wanted)
        except pynvml.NVMLError:
            return None
        return cls(pynvml, wanted, handles) if handles else None

    def each(self, question: str) -> list[Any]:
        """Every GPU's answer; none at all when one of them cannot say."""
        try:
            return [getattr(self.library, question)(handle) for handle in self.handles]
        except self.library.NVMLError:
            return []

    def memory(self) -> tuple[GpuMemory, ...]:
        """Every GPU's memory; empty when one of them cannot say."""
        answers = self.each("nvmlDeviceGetMemoryInfo")
        return tuple(
            GpuMemory(number, int(info.total), int(info.used))
            for number, info in zip(self.numbers, answers, strict=False)
        )

    def version(self) -> str:
        """The driver's version, e.g. ``580.82.07``; empty when it does not say."""
        try:
            told = self.library.nvmlSystemGetDriverVersion()
        except self.library.NVMLError:
            return ""
        return told.decode() if isinstance(told, bytes) else str(told)


def memory_in(metrics: Metrics) -> tuple[GpuMemory, ...]:
    """What Triton says of its GPUs' memory, in one reading of its endpoint."""
    found = []
    for total in metrics.matching(TOTAL):
        used = metrics.value(USED, **total.labels)
        # A GPU that cannot tell is NaN there.
        if used is not None and 0.0 <= used < math.inf and 1.0 <= total.value < math.inf:
            found.append(GpuMemory(None, round(total.value), round(used)))
    return tuple(found)


def server_memory(addresses: LiveAddresses | None) -> tuple[GpuMemory, ...]:
    """The memory of a server's GPUs now; empty: not known.

    Args:
        addresses: with the number of its process where it was started here; else its own metrics
            are asked before the driver of this machine, which has the server only if its address
            is local. None: not known.
    """
    if addresses is None:
        return ()
    ours = addresses.pid is not None and runs(addresses.pid)
    found = _driver_memory() if ours else ()
    if not found and addresses.metrics is not None:
        with suppress(ServerError):
            found = memory_in(read_metrics(addresses.metrics, timeout_s=_ANSWER_S))
    if not found and not ours and addresses.grpc.rpartition(":")[0] in LOCAL:
        found = _driver_memory()
    return found


def _driver_memory() -> tuple[GpuMemory, ...]:
    driver = GpuDriver.open()
    return driver.memory() if driver is not None else ()


def _shown() -> int:
    """How many GPUs CUDA is shown; 0: all there are."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([part for part in shown.split(",") if part.strip().isdigit()])


def _physical(gpu: int) -> int:
    """The driver's number of a GPU: CUDA counts only those that it is shown."""
    shown = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return int(shown[gpu]) if gpu < len(shown) and shown[gpu].isdigit() else gpu
