"""Engines and reference models, opened to be run or served. Their bytes are checked first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginegate.candidate import ONNX_FILE, Engine, EngineKind, OnnxModel
from enginegate.engines.onnxruntime import engine as onnxruntime
from enginegate.engines.protocol import Availability, Runner, ServedFiles
from enginegate.engines.registry import KINDS, NATIVE, NATIVE_SETTINGS
from enginegate.errors import ModelError


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


def native_drawback(engine: Engine) -> str | None:
    """Why Triton's own backend is not taken unless a policy insists; None where it is."""
    on_gpu = engine.target.startswith("cuda")
    if engine.candidate.kind is not EngineKind.ONNXRUNTIME or not on_gpu:
        return None
    return (
        "on a GPU it takes neither this engine's batch buckets nor its CUDA graphs, so a "
        "convolution is planned anew for every batch size that comes."
    )


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
    usual = KINDS[engine.candidate.kind].serving(engine, path)
    if backend in {"", usual.backend}:
        return usual
    native, filename = NATIVE[engine.candidate.kind]
    if backend != native:
        raise ModelError(
            f"{engine.candidate} cannot be served in Triton's {backend} backend: only in "
            f"{' or '.join(sorted({usual.backend, native}))}. Use a server that has it."
        )
    beside = {name: path.with_name(name) for name in engine.external}
    return ServedFiles(
        backend=native,
        files={filename: path, **beside},
        settings=NATIVE_SETTINGS[engine.candidate.kind](engine),
        gpu=usual.gpu,
    )


def availability() -> tuple[Availability, ...]:
    """What this machine can do, for each engine kind."""
    return tuple(kind.availability() for kind in KINDS.values())
