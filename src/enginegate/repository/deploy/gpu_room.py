"""The room that a release finds on the GPUs of one server, and what a policy does without."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from enginegate.errors import RepositoryError
from enginegate.repository.deploy.memory import (
    MemoryDemand,
    Room,
    RoomDecision,
    WhenShort,
    decide_room,
)
from enginegate.repository.store.layout import Current, Layout, part_config, published_config
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.triton.config import is_loaded_anew
from enginegate.triton.gpu_memory import GpuMemory

_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """The memory of one server's GPUs, and what a policy does where it is short.

    Attributes:
        when_short: refuse a promotion, or unload the live release before the new one is loaded.
        read: the memory of the server's GPUs now; empty: not known.
    """

    when_short: WhenShort = "refuse"
    read: Callable[[], tuple[GpuMemory, ...]] = tuple

    def check(self, layout: Layout, demand: MemoryDemand, where: str) -> RoomDecision:
        """How a new release can be loaded beside what serves.

        Args:
            layout: of its model.
            demand: what it takes.
            where: the server, for the message.

        Raises:
            RepositoryError: there is no room, or only if the live release is unloaded first, which
                the policy does not allow.
        """
        decision = self.decide(layout, demand)
        alone = decision.room is Room.ALONE
        if decision.room is not Room.NONE and not (alone and self.when_short == "refuse"):
            return decision
        instead = (
            'Or let it be unloaded first: when_memory_is_short = "replace" under [target] in the '
            f"policy. Nobody is answered then {demand.downtime}."
            if alone
            else "It would not fit in place of the live release either."
        )
        raise RepositoryError(
            f"The next release of {layout.model} does not fit on the server at {where} beside what "
            f"is loaded there: {decision.words}. Nothing was changed. Free memory there (unload a "
            f"neighbour), or qualify with fewer instances on a GPU or a smaller engine. {instead}"
        )

    def decide(
        self, layout: Layout, demand: MemoryDemand, *, version: int | None = None
    ) -> RoomDecision:
        """How a release can be loaded, by what the server's GPUs have free now.

        Args:
            layout: of its model.
            demand: what it takes.
            version: its number, where it may be loaded already.
        """
        current = layout.current()
        if current is not None and version in current.served:
            return RoomDecision(Room.BESIDE, "it is loaded already")
        live, standby = (
            MemoryDemand.of(layout.release(number).engine) if number else None
            for number in ((current.version, current.standby) if current else (None, None))
        )
        twice = current is not None and _is_loaded_anew(layout, current.version)
        decision = decide_room(demand, self._gpus(demand), live=live, standby=standby, twice=twice)
        _log.info("room for a release of %s: %s", layout.model, decision.words)
        return decision

    def decide_restore(self, layout: Layout, loaded: Collection[int], current: Current) -> Room:
        """What a server that serves something else has to unload before it serves ``current``.

        A server is never kept from what is live: where the policy does not let anything be
        unloaded, or even that is too little, it is loaded beside, and a load that fails says so.

        Args:
            layout: of its model.
            loaded: versions that answer there.
            current: what is to serve.
        """
        others = sorted(set(loaded) - {current.version}, reverse=True)
        known = [number for number in others if layout.release_file(number).exists()]
        if not known or current.version in loaded:
            return Room.BESIDE
        demand = MemoryDemand.of(layout.release(current.version).engine)
        live = MemoryDemand.of(layout.release(known[0]).engine)
        twice = _is_loaded_anew(layout, known[0])
        decision = decide_room(demand, self._gpus(demand), live=live, standby=None, twice=twice)
        if decision.room is not Room.BESIDE:
            _log.warning("release %d of %s: %s", current.version, layout.model, decision.words)
        alone = decision.room is Room.ALONE and self.when_short == "replace"
        return Room.ALONE if alone else Room.BESIDE

    def _gpus(self, demand: MemoryDemand) -> tuple[GpuMemory, ...]:
        return self.read() if demand.gpu_bytes else ()


def _is_loaded_anew(layout: Layout, version: int) -> bool:
    """Whether a release that serves, or any part of it, is loaded once more by a change."""
    release = layout.release(version)
    parts = [part_config(layout, version, part) for part in release.engine.parts]
    return any(map(is_loaded_anew, (published_config(layout, release), *parts)))


def demand_of(package: Package | ImportedRelease, device: str = "") -> MemoryDemand:
    """The GPU memory that a release will take on a kind of device, as it was benchmarked there."""
    if isinstance(package, ImportedRelease):
        return MemoryDemand.of(package.release.engine)
    package = next((each for each in package.further if each.device == device), package)
    known = package.gpu_bytes if package.gpu_bytes is not None or package.gpu else 0
    serving = package.serving
    return MemoryDemand(known, serving.gpus, package.cold_start_s, serving.processes)
