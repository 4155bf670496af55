"""Engines and reference models, opened to be run or served. Their bytes are checked first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginegate.candidate import ONNX_FILE, Engine, OnnxModel
from enginegate.engines import onnxruntime
from enginegate.engines.kinds import KINDS
from enginegate.engines.protocol import Availability, Runner, Served


@contextmanager
def open_engine(engine: Engine, folder: Path) -> Iterator[Runner]:
    """An engine of the store, ready to run.

    Raises:
        TamperedError: the file is not the one that was recorded.
        EnginegateError: no device here can run it (`runnable_here` says so beforehand).
    """
    engine.check(folder)
    path = folder / engine.filename
    with KINDS[engine.candidate.kind].load(engine, path) as runner:
        yield runner


@contextmanager
def open_reference(onnx: OnnxModel, folder: Path) -> Iterator[Runner]:
    """The FP32 model that every candidate is compared with: on the CPU, nothing optimised.

    Raises:
        TamperedError: the file is not the one that was recorded.
    """
    path = folder / ONNX_FILE
    onnx.check(folder)
    with onnxruntime.open_onnx(path) as runner:
        yield runner


def runnable_here(engine: Engine) -> str | None:
    """Why no device here can run the engine, or None if one can. Nothing is loaded to find out."""
    return KINDS[engine.candidate.kind].obstacle(engine)


def serving(engine: Engine, folder: Path) -> Served:
    """What Triton needs to serve an engine of the store.

    Raises:
        TamperedError: the file is not the one that was recorded.
        ModelError: Triton cannot serve this engine.
    """
    engine.check(folder)
    path = folder / engine.filename
    return KINDS[engine.candidate.kind].serving(engine, path)


def availability() -> tuple[Availability, ...]:
    """What this machine can do, for each engine kind."""
    return tuple(kind.availability() for kind in KINDS.values())
