"""What every engine kind can do, and what passes between the kinds and their callers."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from enginegate.candidate import Engine, EngineKind
from enginegate.data import Tensors
from enginegate.engines.plan import BuildPlan
from enginegate.policy.building import Building
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


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What Triton needs to serve an engine, apart from how (`ServingConfig`).

    Attributes:
        backend: Triton's name of the backend, e.g. ``python``.
        files: path inside the version folder -> the file to copy there.
        settings: what the backend is told so that it runs the engine as it was validated.
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

    kind: EngineKind
    library: str | None
    can_build: bool
    can_run: bool
    why_not: str = ""
    remedy: str = ""


def missing(kind: EngineKind, why_not: str, remedy: str) -> Availability:
    """What a kind without its library can do: nothing."""
    return Availability(
        kind, library=None, can_build=False, can_run=False, why_not=why_not, remedy=remedy
    )


class Kind(Protocol):
    """One engine kind. The modules ``onnxruntime`` and ``tensorrt`` of this room are such."""

    def toolchain(self, building: Building, /) -> str:
        """Library, version and device that decide an engine's bytes; ``absent`` if missing."""
        ...

    def build(self, plan: BuildPlan, folder: Path, /) -> Engine:
        """Write the engine's file into an empty folder, and describe it.

        Raises:
            BuildError: it cannot be built; says whether a library, the model or a limit is why.
            DataError: calibration data is missing or does not fit.
        """
        ...

    def obstacle(self, engine: Engine, /) -> str | None:
        """Why this machine cannot run the engine, or None if it can."""
        ...

    def load(self, engine: Engine, path: Path, /) -> AbstractContextManager[Runner]:
        """Load an engine whose bytes were checked; closed when the context ends."""
        ...

    def serving(self, engine: Engine, path: Path, /) -> ServedFiles:
        """What Triton needs to serve it."""
        ...

    def availability(self) -> Availability:
        """What this machine can do with this kind."""
        ...
