"""Room for two: whether a server's GPUs can hold a release beside what serves there now.

A load that runs out of memory fails at best; at worst neighbours on the GPU fail with it. So free
memory, which neighbouring models have reduced already, is compared with what the release took when
it was benchmarked as it is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from enginegate.decision import ReleasedEngine
from enginegate.triton.gpu_memory import GpuMemory

WhenShort = Literal["refuse", "replace"]
# Loading takes more than serving does afterwards (weights are held twice for a moment), and a GPU's
# memory is never handed out to the last byte. More refuses promotions that would have fitted.
_SPARE = 1.1
_MIB = 1 << 20


class Room(Enum):
    """How a release can be loaded: each needs less memory than the one before."""

    BESIDE = "beside"
    """Beside all that is loaded."""
    WITHOUT_STANDBY = "standby"
    """Once the older release that stands by is unloaded; the live one goes on serving."""
    ALONE = "all"
    """Once the live one is unloaded too: until the new one has loaded nobody is answered."""
    NONE = "none"
    """Not even then."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What a release takes of each GPU that it is placed on.

    Attributes:
        gpu_bytes: None: not measured; 0 of one that runs on the processor.
        gpus: numbers of the GPUs, as CUDA counts them; empty: every one there is.
        cold_start_s: from the load call to the first answer; None: not measured.
        processes: that share each GPU, and are in ``gpu_bytes`` together.
    """

    gpu_bytes: int | None
    gpus: tuple[int, ...] = ()
    cold_start_s: float | None = None
    processes: int = 1

    @classmethod
    def of(cls, engine: ReleasedEngine) -> "MemoryDemand":
        """What a published engine takes."""
        known = engine.gpu_bytes if engine.gpu_bytes is not None or engine.gpu else 0
        serving = engine.serving
        return cls(known, serving.gpus, engine.cold_start_s, serving.processes)

    @property
    def taken(self) -> str:
        """How much it takes, for people; of how many processes, where there are several."""
        shared = f" in {self.processes} processes" if self.processes > 1 else ""
        return f"{_mib(self.gpu_bytes or 0)} of each GPU{shared}"

    @property
    def downtime(self) -> str:
        """How long nobody is answered if it is loaded alone, for people."""
        if self.cold_start_s is None:
            return "for as long as it takes to load, which was not measured"
        return f"for about {max(self.cold_start_s, 0.1):.2g} s, the cold start of its benchmark"


@dataclass(frozen=True, slots=True)
class RoomDecision:
    """Whether there is room, and the figures.

    Attributes:
        words: one sentence; says also where something is not known.
    """

    room: Room
    words: str


def decide_room(
    new: MemoryDemand,
    gpus: Sequence[GpuMemory],
    *,
    live: MemoryDemand | None,
    standby: MemoryDemand | None,
    twice: bool = False,
) -> RoomDecision:
    """Decide by free memory how a release can be loaded; what is not known refuses nothing.

    Args:
        new: what is to be loaded.
        gpus: the server's; none: not known.
        live: what serves and could be unloaded; None: nothing does.
        standby: what stands by, likewise.
        twice: whether what stays loaded is loaded once more beside itself meanwhile.
    """
    if new.gpu_bytes == 0:
        return RoomDecision(Room.BESIDE, "it runs on the processor")
    if new.gpu_bytes is None:
        return RoomDecision(
            Room.BESIDE, "how much GPU memory it takes was not measured, so none was compared"
        )
    meant = _placed_on(new.gpus, gpus)
    if not meant:
        return RoomDecision(
            Room.BESIDE,
            f"it takes {new.taken}, and what the server's GPUs have free is "
            "not known (target.metrics in the policy names its metrics)",
        )
    fullest = min(meant, key=lambda gpu: gpu.free_bytes)
    needed = round(new.gpu_bytes * _SPARE)
    words = (
        f"it takes {new.taken} by its benchmark, {_mib(needed)} with the "
        f"tenth to spare for loading, and {_named(fullest)} has {_mib(fullest.free_bytes)} of "
        f"{_mib(fullest.total_bytes)} free"
    )
    again = [_known(each) if twice else 0 for each in (live, standby)]
    if any(again):
        words += (
            f"; Triton loads the TensorRT releases that serve there once more meanwhile, "
            f"{_mib(sum(again))}"
        )
    step = _smallest_step(needed, fullest.free_bytes, live, standby, (again[0], again[1]))
    return RoomDecision(step, words)


def _known(demand: MemoryDemand | None) -> int:
    return demand.gpu_bytes or 0 if demand else 0


def _smallest_step(
    needed: int,
    free: int,
    live: MemoryDemand | None,
    standby: MemoryDemand | None,
    again: tuple[int, int],
) -> Room:
    """The first way that frees enough; one whose gain was never measured is tried.

    Args:
        again: bytes that the live release and the standby take once more if they stay.
    """
    if needed + sum(again) <= free:
        return Room.BESIDE
    if standby is not None:
        # The live release is loaded once more while the standby is still there.
        fits_again = again[0] <= free
        if standby.gpu_bytes is not None:
            free += standby.gpu_bytes
        if fits_again and needed + again[0] <= free:
            return Room.WITHOUT_STANDBY
    if live is None:
        return Room.NONE
    unknown = live.gpu_bytes is None or (standby is not None and standby.gpu_bytes is None)
    return Room.ALONE if unknown or needed <= free + (live.gpu_bytes or 0) else Room.NONE


def _placed_on(wanted: tuple[int, ...], gpus: Sequence[GpuMemory]) -> list[GpuMemory]:
    """The GPUs that instances go to; none where they cannot be told from the others.

    Triton's metrics do not number GPUs, so some of several are known from the driver only.
    """
    if not wanted:
        return list(gpus)
    numbered = [gpu for gpu in gpus if gpu.number in wanted]
    if len(numbered) == len(wanted):
        return numbered
    return list(gpus) if len(wanted) == len(gpus) else []


def _named(gpu: GpuMemory) -> str:
    return "the fullest GPU" if gpu.number is None else f"GPU {gpu.number}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
