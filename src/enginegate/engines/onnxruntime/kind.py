"""ONNX Runtime engines: the ONNX file at its precision, opened as Triton will open it.

Sessions use one thread each, so that throughput comes from instances, and what was validated is
what Triton runs. On a GPU a session runs a few batch sizes only, with fixed buffers
(`onnxruntime_gpu`).
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import onnx
from pydantic import Field, PositiveInt

from enginegate.atomic_io import write_file
from enginegate.candidate import Engine, Precision, PrecisionProof
from enginegate.engine_kinds import NativeBackend, QuantisedForm
from enginegate.engines import cuda
from enginegate.engines.cuda import Device
from enginegate.engines.onnxruntime import session as sessions
from enginegate.engines.onnxruntime.gpu import PROVIDER as CUDA
from enginegate.engines.onnxruntime.gpu import buckets_up_to
from enginegate.engines.onnxruntime.session import CPU, PROVIDERS, REMEDY, OpenSession
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import (
    Availability,
    DecisionObstacle,
    EngineKind,
    Runner,
    ServedFiles,
    missing,
)
from enginegate.engines.python_backend import runner_files
from enginegate.errors import BuildError, EnginegateError, ModelError, TookTooLongError
from enginegate.precision import Conversion
from enginegate.precision.opset import lowered
from enginegate.records import Record
from enginegate.serving import BackendSettings
from enginegate.sources.onnx_form import onnx_bytes, opset

ENGINE_FILE, PORTABLE_FILE = "model.onnx", "optimised.onnx"
_GPU_FILE = "onnxruntime_gpu.py"
_CONVOLUTIONS = "convolutions"
# Tried in turn where the GPU does not run the whole graph: 20 has all that 8-bit pairs and Gelu
# need; from 18 on, and no earlier, operators have the form that newer kernels are written to.
_EARLIER_OPSETS = (20, 18)
# As Triton's backend numbers the levels in ``optimization.graph.level``.
_GRAPH_LEVELS: dict[str, Literal[-1, 0, 1, 2]] = {
    "ORT_ENABLE_ALL": 0,
    "ORT_ENABLE_EXTENDED": 1,
    "ORT_ENABLE_BASIC": -1,
    "ORT_DISABLE_ALL": 2,
}
# Operators that follow layers: quantised too, their tensors stay 8 bits from layer to layer.
_BETWEEN = (
    *("Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "MaxPool"),
    *("Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze"),
)


class OnnxRuntimeTable(Record):
    """How ONNX Runtime engines are run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the GPU if ONNX Runtime and the driver show one"
    )
    batch_buckets: tuple[PositiveInt, ...] = Field(
        default=(),
        description="batch sizes that run on a GPU, others are padded; empty: powers of two",
    )
    cuda_graphs: bool = Field(
        default=True, description="replay one captured graph a bucket, where the model allows it"
    )
    threads: PositiveInt = Field(
        default=sessions.INTRA_OP_THREADS,
        description="processor threads that work on one request of an engine on the CPU; instances "
        "side by side usually serve more than threads inside of one",
    )


@dataclass(frozen=True, slots=True)
class OnnxRuntimeHere:
    """What this machine has for a policy's ONNX Runtime engines.

    Attributes:
        installed: whether ONNX Runtime is.
        device: what it is to run on under the policy.
        providers: the execution providers that the installed one has.
        gpu: the first GPU.
    """

    installed: bool
    device: Device
    providers: frozenset[str]
    gpu: cuda.Gpu | None


class OnnxRuntimeKind(EngineKind):
    """Engines that ONNX Runtime runs, on a processor or a GPU."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    table = OnnxRuntimeTable
    largest: ClassVar = {
        "batch_buckets": (65_536, "rows are held in memory together"),
        "threads": (1024, "no processor has more"),
    }
    # On a processor fastest with unsigned activations, integer biases and every operator between
    # the layers quantised too (measured: batch 32, one thread, a CNN of 64 channels: 2.2 times
    # FP32, against 1.8 with TensorRT's form). Signed activations it turns into unsigned ones when
    # it loads, and fails at that for some graphs of opset 21 and later.
    quantised: ClassVar = {
        Precision.INT8: QuantisedForm("QInt8", "QUInt8", between=_BETWEEN, symmetric=False)
    }
    native = NativeBackend("onnxruntime", "model.onnx", platform="onnxruntime_onnx")
    packages = ("onnxruntime",)

    def availability(self) -> Availability:
        """Whether the library is here; a CPU can do the rest."""
        found = sessions.version()
        if found is None:
            return missing(self.name, "onnxruntime is not installed", REMEDY)
        return Availability(self.name, f"onnxruntime {found}", can_build=True, can_run=True)

    def inspect(self, table: OnnxRuntimeTable, /) -> OnnxRuntimeHere:
        return OnnxRuntimeHere(
            installed=sessions.version() is not None,
            device=sessions.device_for(table.device),
            providers=sessions.providers(),
            gpu=cuda.gpu(),
        )

    def undecidable(
        self, precision: Precision, table: OnnxRuntimeTable, here: OnnxRuntimeHere, /
    ) -> DecisionObstacle | None:
        del table
        if not here.installed:
            return DecisionObstacle("ONNX Runtime is not installed here", f"Run: {REMEDY}")
        if here.device == "cuda" and here.gpu is None:
            return DecisionObstacle(
                'it is for device = "cuda", and there is no NVIDIA GPU with a driver here',
                'Qualify on a machine with a GPU, or set device = "auto" under [onnxruntime].',
            )
        provider = PROVIDERS[here.device]
        if provider not in here.providers:
            return DecisionObstacle(
                f"the ONNX Runtime that is installed here has no {provider}",
                "Install onnxruntime-gpu on this machine.",
            )
        why = sessions.lacks(precision, here.device, here.gpu)
        if not why:
            return None
        remedy = (
            "Move it to tensorrt under [candidates]."
            if precision is Precision.FP8
            else "Qualify on a machine with such a GPU, or drop it from onnxruntime under "
            "[candidates]."
        )
        return DecisionObstacle(why, remedy)

    def toolchain(self, table: OnnxRuntimeTable, /) -> str:
        """Library and version, and the GPU where one is used; on a CPU the engine is portable."""
        found = sessions.version()
        if found is None:
            return "absent"
        device = sessions.device_for(table.device)
        return f"onnxruntime {found}" + (
            f", CUDA on {cuda.gpu() or 'no GPU'}" if device == "cuda" else ""
        )

    def deciding_settings(self, table: OnnxRuntimeTable, /) -> Mapping[str, object]:
        """On a processor, threads but for one; on a GPU, how its session is run.

        Both are part of the manifest.
        """
        if sessions.device_for(table.device) == "cpu":
            usual = table.threads == sessions.INTRA_OP_THREADS
            return {} if usual else {"threads": table.threads}
        return table.model_dump(mode="json", exclude={"device", "threads"})

    def build(self, plan: BuildPlan, folder: Path, /) -> Engine:
        """Convert, load once as proof, and write ``model.onnx``.

        Raises:
            BuildError: the provider has no such precision, or ONNX Runtime refuses the model.
            DataError: int8 without calibration data, or with data that does not fit.
        """
        if plan.toolchain == "absent":
            raise BuildError(f"ONNX Runtime is not installed here. Run: {REMEDY}")
        table = plan.table_as(OnnxRuntimeTable)
        device = sessions.device_for(table.device)
        sessions.check_precision(plan.candidate.precision, device)
        started = time.monotonic()
        converted = plan.convert()
        path = folder / ENGINE_FILE
        external = plan.bring_weights(folder)
        write_file(path, converted.onnx)
        if device == "cpu" and table.threads != sessions.INTRA_OP_THREADS:
            write_file(path, _with_threads(converted.onnx, table.threads))
        opened = _opened(plan, path, device, graphs=table.cuda_graphs)
        if opened.copies and not plan.onnx.external:
            converted, opened = _with_kernels(plan, converted, opened, path, table)
        return plan.engine(
            path,
            converted,
            builder=plan.toolchain,
            target="cpu" if device == "cpu" else f"cuda {cuda.gpu() or 'no GPU'}",
            flags=_flags(plan, table, device, opened, converted.convolutions),
            beside=[folder / PORTABLE_FILE],
            external=external,
            proof=_proof(plan, converted, opened, device),
            started_s=started,
        )

    def obstacle(self, engine: Engine, /) -> str | None:
        """Why this machine cannot run the engine: the library or the GPU is missing; or None."""
        if sessions.version() is None:
            return f"ONNX Runtime is not installed here. Run: {REMEDY}"
        if _device(engine) == "cuda" and cuda.gpu() is None:
            return f"it is for {engine.target}; there is no NVIDIA GPU with a driver here."
        return None

    @contextmanager
    def load(self, engine: Engine, path: Path, /) -> Iterator[Runner]:
        """Load the engine as Triton will: every optimisation, its threads; on a GPU, warm.

        Raises:
            EnginegateError: ONNX Runtime fell back to another provider than the engine is for.
        """
        device = _device(engine)
        graphs = engine.flags.get("cuda_graphs") == "on"

        threads = int(_threads(engine))

        def open_one() -> OpenSession:
            return sessions.open_session(
                path, engine.candidate.precision, device, graphs=graphs, threads=threads
            )

        opened = open_one()
        if opened.provider != PROVIDERS[device]:
            raise EnginegateError(
                f"{engine.candidate} is for {engine.target}: {_fallback(device, opened)} Its "
                "numbers would not be those of a GPU. Install the CUDA libraries that ONNX Runtime "
                "names."
            )
        specs = sessions.specs(opened.session)
        if device == "cpu":
            yield sessions.SessionRunner(opened.session, specs, engine.max_batch_size)
            return
        warm = sessions.warm(opened, open_one, buckets(engine), engine.profiles)
        yield sessions.GpuRunner(warm, specs)

    def serving(self, engine: Engine, path: Path, /) -> ServedFiles:
        """Triton's Python backend: this room's model file, the engine, and what it must be.

        The engine's digest travels in the version folder, because versions of a model share one
        configuration.
        """
        here, device = Path(__file__), _device(engine)
        files = {
            **runner_files(self.name, here.with_name("serve.py"), gpu=device == "cuda"),
            "engine.json": path.with_name("manifest.json"),
            engine.filename: path,
            **{name: path.with_name(name) for name in engine.external},
        }
        parameters = {"provider": PROVIDERS[device], "intra_op_threads": _threads(engine)}
        if device == "cuda":
            files[_GPU_FILE] = here.with_name("gpu.py")
        settings = BackendSettings(parameters=parameters)
        return ServedFiles(backend="python", files=files, settings=settings, gpu=device == "cuda")

    def native_settings(self, engine: Engine, /) -> BackendSettings:
        """Settings with which Triton's own ``onnxruntime`` backend opens the validated session.

        Left to itself it takes every core for each instance, and TF32 for FP32 on a GPU. How many
        threads run nodes side by side needs no word: nodes run one after the other, in both.

        Raises:
            ModelError: the engine was validated at an optimisation level that the backend does not
                offer.
        """
        level = engine.flags.get("optimisation", "ORT_ENABLE_ALL")
        if level not in _GRAPH_LEVELS:
            raise ModelError(
                f"{engine.candidate} was validated at optimisation level {level}, which Triton's "
                f"onnxruntime backend does not offer ({', '.join(_GRAPH_LEVELS)}). Serve it with "
                'serving.backend = "python".'
            )
        on_gpu = _device(engine) == "cuda"
        return BackendSettings(
            parameters={"intra_op_thread_count": _threads(engine)},
            graph_level=_GRAPH_LEVELS[level],
            cuda_provider={"use_tf32": engine.flags.get("use_tf32", "0")} if on_gpu else {},
        )

    def native_drawback(self, engine: Engine, /) -> str | None:
        """Convolutions on a GPU: they are planned anew whenever the batch size changes.

        ONNX Runtime's CUDA provider keeps the plan of the last size alone, which costs tens of
        milliseconds a change, and a dynamic batcher changes it with every batch; this program's
        runner pads to a few sizes instead. A network without them loses its CUDA graphs at most.
        """
        if _device(engine) == "cpu" or engine.flags.get(_CONVOLUTIONS) == "0":
            return None
        return (
            "on a GPU it does not take this engine's batch buckets, so its convolutions are "
            "planned anew whenever the batch size changes."
        )

    def onnx_graph(self, engine: Engine, folder: Path, /) -> Path | None:
        return folder / engine.filename


KIND = OnnxRuntimeKind()


def buckets(engine: Engine) -> tuple[int, ...]:
    """The batch sizes that an engine for a GPU runs."""
    told = engine.flags.get("batch_buckets", "").split()
    return buckets_up_to(engine.max_batch_size, tuple(int(size) for size in told))


def _opened(plan: BuildPlan, path: Path, device: Device, *, graphs: bool) -> OpenSession:
    precision, threads = plan.candidate.precision, plan.table_as(OnnxRuntimeTable).threads
    try:
        opened = sessions.open_session(
            path, precision, device, graphs=graphs, inspect=True, threads=threads
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


def _with_kernels(
    plan: BuildPlan,
    converted: Conversion,
    opened: OpenSession,
    path: Path,
    table: OnnxRuntimeTable,
) -> tuple[Conversion, OpenSession]:
    """The model at an earlier opset, if ONNX Runtime then copies less between CPU and GPU.

    Its CUDA provider lacks kernels for the newest version of some operators (MaxPool of opset 22,
    in ONNX Runtime 1.31), runs these on the CPU, and captures no graph: a ResNet-50 is then less
    than a tenth as fast.
    """
    model = onnx.load_from_string(converted.onnx)
    shapes = {name: shape.best for name, shape in plan.profiles.items()}
    best = converted, opened
    for version in _EARLIER_OPSETS:
        if version >= opset(model) or not best[1].copies:
            continue
        try:
            found = lowered(model, version, what=str(plan.candidate), shapes=shapes)
            content = onnx_bytes(found, origin=str(plan.candidate))
            write_file(path, content)
            again = _opened(plan, path, "cuda", graphs=table.cuda_graphs)
        except BuildError:  # it uses what that opset does not have: the GPU runs what it can
            continue
        how = f"{converted.converter}, opset {opset(model)} written at {version}"
        if again.copies < best[1].copies:
            earlier = replace(converted, onnx=content, converter=how.removeprefix("none, "))
            best = earlier, again
    write_file(path, best[0].onnx)
    return best


def _captures(opened: OpenSession, plan: BuildPlan) -> bool:
    """Whether a graph of this model can really be captured; opening a session does not tell."""
    try:
        sessions.warm(opened, lambda: opened, (1,), plan.profiles)
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
    return plan.proof(
        converted, device=opened.provider, doubts=tuple(doubts), executed=opened.layers
    )


def _fallback(device: Device, opened: OpenSession) -> str:
    return f"Asked for {PROVIDERS[device]}, got {opened.provider}."


def _flags(
    plan: BuildPlan,
    table: OnnxRuntimeTable,
    device: Device,
    opened: OpenSession,
    convolutions: int,
) -> dict[str, str]:
    told = {
        "provider": PROVIDERS[device],
        "optimisation": sessions.level_for(plan.candidate.precision),
        "intra_op_threads": str(table.threads if device == "cpu" else sessions.INTRA_OP_THREADS),
    }
    if device == "cpu":
        return told
    sizes = buckets_up_to(plan.max_batch_size, table.batch_buckets)
    return told | {
        "use_tf32": "1" if plan.candidate.precision is Precision.TF32 else "0",
        "cuda_graphs": "on" if opened.graphs else "off",
        "batch_buckets": " ".join(str(size) for size in sizes),
        "copies_in_graph": str(opened.copies),
        **({"left_to_the_cpu": " ".join(opened.on_cpu)} if opened.on_cpu else {}),
        _CONVOLUTIONS: str(convolutions),
    }


def _with_threads(content: bytes, threads: int) -> bytes:
    """The model with its threads in it: engines that run otherwise must have other digests."""
    model = onnx.load_from_string(content)
    model.metadata_props.add(key="enginegate.intra_op_threads", value=str(threads))
    found: bytes = model.SerializeToString(deterministic=True)
    return found


def _threads(engine: Engine) -> str:
    """How many threads work inside one node: those that the engine was validated with."""
    return engine.flags.get("intra_op_threads", str(sessions.INTRA_OP_THREADS))


def _device(engine: Engine) -> Device:
    return "cuda" if engine.target.startswith("cuda") else "cpu"
