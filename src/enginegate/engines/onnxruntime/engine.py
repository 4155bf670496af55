"""ONNX Runtime engines; the only door to ONNX Runtime for running models.

An engine is the ONNX file at its precision. Sessions use one thread each, so that throughput comes
from instances, and what was validated is what Triton runs. On a GPU a session runs a few batch
sizes only, with fixed buffers (`onnxruntime_gpu`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import onnx

from enginegate.atomic_io import write_file
from enginegate.candidate import (
    Candidate,
    Engine,
    EngineKind,
    FileDigest,
    Precision,
    PrecisionProof,
)
from enginegate.engines import cuda
from enginegate.engines.onnxruntime import session as sessions
from enginegate.engines.onnxruntime.gpu import PROVIDER as CUDA
from enginegate.engines.onnxruntime.gpu import buckets_up_to
from enginegate.engines.onnxruntime.run import GpuRunner, SessionRunner, warm
from enginegate.engines.onnxruntime.session import CPU, PROVIDERS, REMEDY, OpenSession
from enginegate.engines.plan import BuildPlan
from enginegate.engines.precision_check import check_precision_proof
from enginegate.engines.protocol import Availability, Runner, ServedFiles, missing
from enginegate.engines.typed import typed_census
from enginegate.errors import BuildError, EnginegateError, ModelError, TookTooLongError
from enginegate.policy.building import Building, Device
from enginegate.precision import Conversion, convert
from enginegate.records import sha256_bytes
from enginegate.serving import BackendSettings

ENGINE_FILE, PORTABLE_FILE = "model.onnx", "optimised.onnx"
_GPU_FILE = "onnxruntime_gpu.py"
# As Triton's backend numbers the levels in ``optimization.graph.level``.
_GRAPH_LEVELS: dict[str, Literal[-1, 0, 1, 2]] = {
    "ORT_ENABLE_ALL": 0,
    "ORT_ENABLE_EXTENDED": 1,
    "ORT_ENABLE_BASIC": -1,
    "ORT_DISABLE_ALL": 2,
}


def toolchain(building: Building) -> str:
    """Library and version, and the GPU where one is used; on a CPU the engine is portable."""
    found = sessions.version()
    if found is None:
        return "absent"
    device = sessions.device_of(building.onnxruntime)
    return f"onnxruntime {found}" + (
        f", CUDA on {cuda.gpu() or 'no GPU'}" if device == "cuda" else ""
    )


def build(plan: BuildPlan, folder: Path) -> Engine:
    """Convert, load once as proof, and write ``model.onnx``.

    Raises:
        BuildError: the provider has no such precision, or ONNX Runtime refuses the model.
        DataError: int8 without calibration data, or with data that does not fit.
    """
    if plan.toolchain == "absent":
        raise BuildError(f"ONNX Runtime is not installed here. Run: {REMEDY}")
    device = sessions.device_of(plan.building.onnxruntime)
    sessions.check_precision(plan.candidate.precision, device)
    started = time.monotonic()
    converted = convert(
        plan.onnx_path,
        plan.candidate,
        data=plan.calibration,
        rules=plan.calibrating,
        keep=plan.keep,
    )
    path = folder / ENGINE_FILE
    external = plan.bring_weights(folder)
    write_file(path, converted.onnx)
    opened = _opened(plan, path, device)
    beside = [each for each in [folder / PORTABLE_FILE] if each.is_file()]
    return Engine(
        candidate=plan.candidate,
        filename=ENGINE_FILE,
        file=FileDigest.of(path),
        onnx_sha256=plan.onnx.file.sha256,
        source_sha256=plan.onnx.source_sha256,
        converted_sha256=sha256_bytes(converted.onnx),
        converter=converted.converter,
        calibration_sha256=plan.calibration_sha256,
        kept_nodes=plan.keep,
        builder=plan.toolchain,
        target="cpu" if device == "cpu" else f"cuda {cuda.gpu() or 'no GPU'}",
        inputs=plan.onnx.inputs,
        outputs=plan.onnx.outputs,
        max_batch_size=plan.max_batch_size,
        flags=_flags(plan, device, opened),
        profiles=plan.known_profiles,
        beside={each.name: FileDigest.of(each) for each in beside},
        external=external,
        build_s=round(time.monotonic() - started, 3),
        proof=_proof(plan, converted, opened, device),
    )


def obstacle(engine: Engine) -> str | None:
    """Why this machine cannot run the engine: the library or the GPU is missing; or None."""
    if sessions.version() is None:
        return f"ONNX Runtime is not installed here. Run: {REMEDY}"
    if _device(engine) == "cuda" and cuda.gpu() is None:
        return f"it is for {engine.target}; there is no NVIDIA GPU with a driver here."
    return None


@contextmanager
def load(engine: Engine, path: Path) -> Iterator[Runner]:
    """Load the engine as Triton will: every optimisation, one thread; on a GPU, warm.

    Raises:
        EnginegateError: ONNX Runtime fell back to another provider than the engine is for.
    """
    device = _device(engine)
    graphs = engine.flags.get("cuda_graphs") == "on"

    def open_one() -> OpenSession:
        return sessions.open_session(path, engine.candidate.precision, device, graphs=graphs)

    opened = open_one()
    if opened.provider != PROVIDERS[device]:
        raise EnginegateError(
            f"{engine.candidate} is for {engine.target}: {_fallback(device, opened)} Its numbers "
            "would not be those of a GPU. Install the CUDA libraries that ONNX Runtime names."
        )
    specs = sessions.specs(opened.session)
    if device == "cpu":
        yield SessionRunner(opened.session, specs, engine.max_batch_size)
        return
    yield GpuRunner(warm(opened, open_one, buckets(engine), engine.profiles), specs)


def buckets(engine: Engine) -> tuple[int, ...]:
    """The batch sizes that an engine for a GPU runs."""
    told = engine.flags.get("batch_buckets", "").split()
    return buckets_up_to(engine.max_batch_size, tuple(int(size) for size in told))


@contextmanager
def open_onnx(path: Path) -> Iterator[Runner]:
    """Load an FP32 ONNX file to compare others with: no optimisation, any batch up to 64 rows.

    Raises:
        ModelError: ONNX Runtime cannot load it.
    """
    session = sessions.open_plain(path)
    yield SessionRunner(session, sessions.specs(session), limit=64)


def serving(engine: Engine, path: Path) -> ServedFiles:
    """Triton's Python backend: this room's model file, the engine, and what it must be.

    The engine's digest travels in the version folder, because versions of a model share one
    configuration.
    """
    here, device = Path(__file__), _device(engine)
    files = {
        "model.py": here.with_name("serve.py"),
        "engine.json": path.with_name("manifest.json"),
        engine.filename: path,
        **{name: path.with_name(name) for name in engine.external},
    }
    parameters = {"provider": PROVIDERS[device], "intra_op_threads": _threads(engine)}
    if device == "cuda":
        files[_GPU_FILE] = here.with_name("gpu.py")
    settings = BackendSettings(parameters=parameters)
    return ServedFiles(backend="python", files=files, settings=settings, gpu=device == "cuda")


def native_settings(engine: Engine) -> BackendSettings:
    """What Triton's own ``onnxruntime`` backend is told to open the session that was validated.

    Left to itself it takes every core for each instance, and TF32 for FP32 on a GPU. How many
    threads run nodes side by side needs no word: nodes run one after the other, in both.

    Raises:
        ModelError: the engine was validated at an optimisation level that the backend cannot be
            told.
    """
    level = engine.flags.get("optimisation", "ORT_ENABLE_ALL")
    if level not in _GRAPH_LEVELS:
        raise ModelError(
            f"{engine.candidate} was validated at optimisation level {level}, which Triton's "
            f"onnxruntime backend cannot be told ({', '.join(_GRAPH_LEVELS)}). Serve it with "
            'serving.backend = "python".'
        )
    on_gpu = _device(engine) == "cuda"
    return BackendSettings(
        parameters={"intra_op_thread_count": _threads(engine)},
        graph_level=_GRAPH_LEVELS[level],
        cuda_provider={"use_tf32": engine.flags.get("use_tf32", "0")} if on_gpu else {},
    )


def availability() -> Availability:
    """Whether the library is here; a CPU can do the rest."""
    found = sessions.version()
    if found is None:
        return missing(EngineKind.ONNXRUNTIME, "onnxruntime is not installed", REMEDY)
    return Availability(
        EngineKind.ONNXRUNTIME, f"onnxruntime {found}", can_build=True, can_run=True
    )


def _form(candidate: Candidate, device: Device) -> Candidate:
    """The CUDA provider has kernels for pairs as TensorRT takes them, not for integer biases."""
    if device == "cpu":
        return candidate
    return candidate.model_copy(update={"kind": EngineKind.TENSORRT})


def _opened(plan: BuildPlan, path: Path, device: Device) -> OpenSession:
    precision, wishes = plan.candidate.precision, plan.building.onnxruntime
    try:
        opened = sessions.open_session(
            path, precision, device, graphs=wishes.cuda_graphs, inspect=True
        )
        if opened.provider == CPU == PROVIDERS[device] and not plan.onnx.external:
            sessions.write_portable(path, path.with_name(PORTABLE_FILE))
        if opened.graphs and not _captures(opened, plan):
            opened = sessions.open_session(path, precision, device, inspect=True)
    except TookTooLongError:
        raise  # nothing was found out about the engine
    except ModelError as error:
        raise BuildError(f"{plan.candidate}: {error}") from error
    return opened


def _captures(opened: OpenSession, plan: BuildPlan) -> bool:
    """Whether a graph of this model can really be captured; opening a session does not tell."""
    try:
        warm(opened, lambda: opened, (1,), plan.known_profiles)
    except Exception:  # noqa: BLE001 - ONNX Runtime's errors share no base class of their own
        return False
    return True


def _proof(
    plan: BuildPlan, converted: Conversion, opened: OpenSession, device: Device
) -> PrecisionProof:
    doubts = [] if opened.provider == PROVIDERS[device] else [_fallback(device, opened)]
    if opened.elsewhere:
        doubts.append(f"{opened.elsewhere} layers were left to another provider.")
    told = opened.session.get_provider_options().get(CUDA, {})
    tf32, told_tf32 = plan.candidate.precision is Precision.TF32, told.get("use_tf32")
    if opened.provider == CUDA and told_tf32 and sessions.is_on(told_tf32) != tf32:
        doubts.append(f"The provider's use_tf32 is {told_tf32}.")
    shapes = {name: shape.best for name, shape in plan.known_profiles.items()}
    return check_precision_proof(
        plan.candidate,
        converted.census,
        device=opened.provider,
        doubts=tuple(doubts),
        typed=typed_census(onnx.load_from_string(converted.onnx), shapes),
        executed=opened.layers,
    )


def _fallback(device: Device, opened: OpenSession) -> str:
    return f"Asked for {PROVIDERS[device]}, got {opened.provider}."


def _flags(plan: BuildPlan, device: Device, opened: OpenSession) -> dict[str, str]:
    told = {
        "provider": PROVIDERS[device],
        "optimisation": sessions.level_for(plan.candidate.precision),
        "intra_op_threads": str(sessions.INTRA_OP_THREADS),
    }
    if device == "cpu":
        return told
    sizes = buckets_up_to(plan.max_batch_size, plan.building.onnxruntime.batch_buckets)
    return told | {
        "use_tf32": "1" if plan.candidate.precision is Precision.TF32 else "0",
        "cuda_graphs": "on" if opened.graphs else "off",
        "batch_buckets": " ".join(str(size) for size in sizes),
        "copies_in_graph": str(opened.copies),
    }


def _threads(engine: Engine) -> str:
    """How many threads work inside one node: those that the engine was validated with."""
    return engine.flags.get("intra_op_threads", str(sessions.INTRA_OP_THREADS))


def _device(engine: Engine) -> Device:
    return "cuda" if engine.target.startswith("cuda") else "cpu"
