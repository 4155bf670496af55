"""What every engine kind can do, and what passes between the kinds and their callers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from enginegate.candidate import Engine, EngineKindName, Precision
from enginegate.data import Tensors
from enginegate.engine_kinds import KindDeclaration, kind_named
from enginegate.engines.plan import BuildPlan
from enginegate.errors import ModelError
from enginegate.serving import BackendSettings


class Runner(Protocol):
    """An opened model; closed when its context ends."""

    @property
    def device(self) -> str:
        """What really runs it, e.g. ``CPUExecutionProvider``."""
        ...

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows from 1; the first axis is the batch.

        Raises:
            DataError: an input is missing or unknown, or their rows differ.
        """
        ...

    def bound(self, inputs: Tensors) -> AbstractContextManager[Callable[[int], float]]:
        """Inputs placed where the engine computes, to run on them again and again.

        On a GPU inputs and outputs stay in device memory, and a captured graph is replayed where
        `run` replays one; so nothing but the engine is timed.

        Args:
            inputs: at most as many rows as the engine takes in one run.

        Returns:
            ``repeat(count)``: seconds that ``count`` runs back to back took, the device waited for
            at the end. A first call may include warming up.

        Raises:
            DataError: as for `run`, or there are more rows than fit one run.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What Triton needs to serve an engine, apart from how (`ServingConfig`).

    Attributes:
        backend: Triton's name of the backend, e.g. ``python``.
        files: path inside the version folder -> the file to copy there.
        settings: what the backend is given so that it runs the engine as it was validated.
        gpu: whether instances belong on GPUs.
    """

    backend: str
    files: Mapping[str, Path]
    settings: BackendSettings = field(default_factory=BackendSettings)
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Availability:
    """What one engine kind can do on this machine.

    Attributes:
        library: name and version, or None when it is not installed.
        can_build: whether engines can be built here.
        can_run: whether engines can be run here.
        why_not: what is missing; empty when nothing is.
        remedy: how to get it; empty when nothing is missing.
    """

    kind: EngineKindName
    library: str | None
    can_build: bool
    can_run: bool
    why_not: str = ""
    remedy: str = ""


def missing(kind: EngineKindName, why_not: str, remedy: str) -> Availability:
    """What a kind without its library can do: nothing."""
    return Availability(
        kind, library=None, can_build=False, can_run=False, why_not=why_not, remedy=remedy
    )


@dataclass(frozen=True, slots=True)
class DecisionObstacle:
    """Why a candidate cannot be decided here.

    Attributes:
        why: what is missing, in one sentence.
        remedy: what to do about it.
        builds: whether its engine can be built all the same, which shows its size, its precision
            and, emulated, its range.
    """

    why: str
    remedy: str
    builds: bool = False


class EngineKind(KindDeclaration, ABC):
    """One engine kind: it builds, proves, opens and serves engines.

    `tests/integration/engines/test_registry.py` adds one from outside.
    """

    @abstractmethod
    def availability(self) -> Availability:
        """What this machine can do with this kind; nothing is loaded onto a device to find out."""

    def inspect(self, table: Any, /) -> Any:
        """What this machine has of what a policy's table needs; input of `undecidable`."""
        del table

    def undecidable(
        self, precision: Precision, table: Any, here: Any, /
    ) -> DecisionObstacle | None:
        """Why candidates of a precision cannot be decided on a machine, or None if they can: pure.

        Args:
            table: the kind's table of the policy.
            here: what `inspect` found on that machine.
        """
        del precision, table, here
        return None

    def undecidable_made(
        self, precision: Precision, table: Any, here: Any, /
    ) -> DecisionObstacle | None:
        """As `undecidable`, of a candidate that something else made."""
        return self.undecidable(precision, table, here)

    @abstractmethod
    def toolchain(self, table: Any, /) -> str:
        """Library, version and device that decide an engine's bytes; ``absent`` if missing."""

    def deciding_settings(self, table: Any, /) -> Mapping[str, object]:
        """Settings of the table that decide an engine's bytes or its manifest: part of its key."""
        settings: dict[str, object] = table.model_dump(mode="json")
        return settings

    def build_limit_s(self, table: Any, /) -> float:
        """How long one build may take, by the table; others that need the engine wait so long."""
        del table
        return 0.0

    @abstractmethod
    def build(self, plan: BuildPlan, folder: Path, /) -> Engine:
        """Write the engine's file into an empty folder, and describe it, with its precision proof.

        Raises:
            BuildError: it cannot be built; says whether a library, the model or a limit is why.
            DataError: calibration data is missing or does not fit.
        """

    @abstractmethod
    def obstacle(self, engine: Engine, /) -> str | None:
        """Why this machine cannot run the engine, or None if it can."""

    @abstractmethod
    def load(self, engine: Engine, path: Path, /) -> AbstractContextManager[Runner]:
        """Load an engine whose bytes were checked; closed when the context ends."""

    @abstractmethod
    def serving(self, engine: Engine, path: Path, /) -> ServedFiles:
        """What Triton needs to serve it in the backend that is usual for this kind."""

    def runner_files(self, engine: Engine, path: Path, /) -> ServedFiles | None:
        """What Triton's Python backend needs to serve it, where that is not the usual one.

        None where this program's runner has no part for the kind.
        """
        del engine, path
        return None

    def native_settings(self, engine: Engine, /) -> BackendSettings:
        """Settings for the kind's own backend in Triton, where that is not the usual one.

        Raises:
            ModelError: that backend cannot run the engine as it was validated.
        """
        del engine
        return BackendSettings()

    def native_drawback(self, engine: Engine, /) -> str | None:
        """Why Triton's own backend is not taken unless a policy insists; None where it is."""
        del engine
        return None

    def is_emulable(self, precision: Precision, /) -> bool:
        """Whether a CPU can imitate the arithmetic's range where no device runs the engine."""
        del precision
        return False

    def onnx_graph(self, engine: Engine, folder: Path, /) -> Path | None:
        """The engine's own graph, where the engine is ONNX; its work is counted on that."""
        del engine, folder
        return None


def engine_kind(name: EngineKindName) -> EngineKind:
    """The registered kind of a name.

    Raises:
        ModelError: there is none here, or it cannot build and serve.
    """
    kind = kind_named(name)
    if not isinstance(kind, EngineKind):
        raise ModelError(
            f"The engine kind {name!r} is a {type(kind).__name__}, which does not derive from "
            "enginegate.engines.EngineKind. Mend the package that brings it."
        )
    return kind
