"""Engines and reference models, opened to be run or served. Their bytes are checked first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginegate.candidate import ONNX_FILE, Candidate, Engine, OnnxModel, Precision
from enginegate.engine_kinds import engine_kinds
from enginegate.engines.onnxruntime.session import open_onnx
from enginegate.engines.protocol import Availability, Runner, ServedFiles, engine_kind
from enginegate.errors import ModelError

# The engine that stands for the FP32 model where the model itself has to be served.
REFERENCE = Candidate(kind="onnxruntime", precision=Precision.FP32)


@contextmanager
def open_engine(engine: Engine, folder: Path) -> Iterator[Runner]:
    """An engine of the store, ready to run.

    Raises:
        TamperedError: the file is not the one that was recorded.
        EnginegateError: no device here can run it (`runnable_here` says so beforehand).
    """
    engine.check(folder)
    path = folder / engine.filename
    with engine_kind(engine.candidate.kind).load(engine, path) as runner:
        yield runner


@contextmanager
def open_reference(onnx: OnnxModel, folder: Path) -> Iterator[Runner]:
    """The FP32 model that every candidate is compared with: on the CPU, nothing optimised.

    Raises:
        TamperedError: the file is not the one that was recorded.
    """
    path = folder / ONNX_FILE
    onnx.check(folder)
    with open_onnx(path) as runner:
        yield runner


def runnable_here(engine: Engine) -> str | None:
    """Why no device here can run the engine, or None if one can. Nothing is loaded to find out."""
    return engine_kind(engine.candidate.kind).obstacle(engine)


def serving(engine: Engine, folder: Path, *, backend: str = "") -> ServedFiles:
    """What Triton needs to serve an engine of the store.

    Args:
        engine: what is served.
        folder: where it is.
        backend: Triton backend; empty takes the kind's usual one.

    Raises:
        TamperedError: the file is not the one that was recorded.
        ModelError: Triton cannot serve this engine, or not in that backend.
    """
    engine.check(folder)
    path = folder / engine.filename
    kind = engine_kind(engine.candidate.kind)
    if backend == "python":
        runner = kind.runner_files(engine, path)
        if runner is not None:
            return runner
    usual, native = kind.serving(engine, path), kind.native
    if backend in {"", usual.backend}:
        return usual
    if native is None or backend != native.backend:
        possible = {usual.backend, *([native.backend] if native else [])}
        raise ModelError(
            f"{engine.candidate} cannot be served in Triton's {backend} backend: only in "
            f"{' or '.join(sorted(possible))}. Use a server that has it."
        )
    beside = {name: path.with_name(name) for name in engine.external}
    return ServedFiles(
        backend=native.backend,
        files={native.filename: path, **beside},
        settings=kind.native_settings(engine),
        gpu=usual.gpu,
    )


def availability() -> tuple[Availability, ...]:
    """What this machine can do, for each engine kind."""
    return tuple(engine_kind(name).availability() for name in engine_kinds())
