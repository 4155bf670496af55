"""TensorRT plans, by ``tensorrt`` or, where that is absent, ``tensorrt_rtx``; their only door.

Precision lives in the ONNX: networks are strongly typed. TF32 alone is a flag. TensorRT-RTX builds
ahead of time without a GPU, for the targets of the policy; the full library builds on the GPU that
the plan will run on.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from enginegate.candidate import Engine, Precision
from enginegate.engine_kinds import NativeBackend, QuantisedForm
from enginegate.engines import cuda
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import (
    Availability,
    DecisionObstacle,
    EngineKind,
    Runner,
    ServedFiles,
    missing,
)
from enginegate.engines.tensorrt.plan_header import plan_info
from enginegate.engines.tensorrt.process import (
    LAYERS_FILE,
    LOG_FILE,
    BuildReport,
    TensorRtTable,
    compile_plan,
)
from enginegate.engines.tensorrt.run import plan_runner
from enginegate.errors import BuildError, EnginegateError, ModelError

ENGINE_FILE = "model.plan"
RTX = "tensorrt_rtx"
NAMES = ("tensorrt", RTX)
REMEDY = (
    "pip install 'enginegate[rtx]' for TensorRT-RTX (x86-64 Linux, builds without a GPU), or "
    "'enginegate[tensorrt]' beside an NVIDIA GPU"
)
_FP8 = "QFLOAT8E4M3FN"
# Pairs where layers read, not where they write: a pair between Conv and ReLU would round twice, and
# keep TensorRT from fusing the two. It takes symmetric scales and float biases only.
_PAIRS: dict[str, bool | str | list[str]] = {
    "QuantizeBias": False,
    "AddQDQPairToWeight": True,
    "OpTypesToExcludeOutputQuantization": ["Conv", "Gemm", "MatMul"],
}
_NEEDED = {Precision.TF32: cuda.AMPERE, Precision.BF16: cuda.AMPERE, Precision.FP8: cuda.ADA}
_LIMITS = {"timeout_s", "memory_mib", "timing_cache"}  # these stop a build, or hasten it


@dataclass(frozen=True, slots=True)
class TensorRtHere:
    """What this machine has for a policy's plans.

    Attributes:
        library: import name of the TensorRT library that the policy gets, or None.
        obstacle: why nothing can be built with it for the policy; empty when it can.
        gpu: the first GPU.
    """

    library: str | None
    obstacle: str
    gpu: cuda.Gpu | None


class TensorRtKind(EngineKind):
    """Plans that TensorRT or TensorRT-RTX compiles for GPUs, each in a process of its own."""

    name = "tensorrt"
    title = "TensorRT or TensorRT-RTX"
    table = TensorRtTable
    largest: ClassVar = {"timeout_s": (604_800.0, "that is a week")}
    quantised: ClassVar = {
        Precision.INT8: QuantisedForm("QInt8", "QInt8", options=_PAIRS),
        Precision.FP8: QuantisedForm(_FP8, _FP8, options={"scenario": "same", **_PAIRS}),
    }
    takes_modelopt = True
    native = NativeBackend("tensorrt", ENGINE_FILE, platform="tensorrt_plan", fixed_batch=True)
    packages = ("tensorrt", "tensorrt-rtx-cu13")

    def availability(self) -> Availability:
        """Which library is here, and whether this machine's GPU can run its plans."""
        library = find_library()
        if library is None:
            reason = "neither tensorrt nor tensorrt_rtx is installed"
            return missing(self.name, reason, REMEDY)
        found = cuda.gpu()
        if library.__name__ == RTX:
            supported = {name.lower() for name in library.ComputeCapability.__members__}
            runs = found is not None and found.capability in supported
            reason = (
                f"TensorRT-RTX runs on {', '.join(sorted(s for s in supported if s[:2] == 'sm'))}"
            )
        else:
            runs, reason = found is not None, "TensorRT builds and runs on an NVIDIA GPU"
        return Availability(
            self.name,
            library_name(library),
            can_build=library.__name__ == RTX or runs,
            can_run=runs,
            why_not="" if runs else f"{reason}; this machine has {found or 'no GPU'}",
            remedy="" if runs else "run this stage on a machine with such a GPU",
        )

    def inspect(self, table: TensorRtTable, /) -> TensorRtHere:
        library = find_library(table.library)
        try:
            target(library, table)
            obstacle = ""
        except BuildError as error:
            obstacle = str(error).rstrip(".")
        name = None if library is None else str(library.__name__)
        return TensorRtHere(name, obstacle, cuda.gpu())

    def undecidable(
        self, precision: Precision, table: TensorRtTable, here: TensorRtHere, /
    ) -> DecisionObstacle | None:
        if here.obstacle:
            return DecisionObstacle(
                here.obstacle, "Mend that, or qualify on a machine that has it."
            )
        if here.library == RTX:
            if here.gpu is not None and here.gpu.capability in table.targets:
                return None
            targets = "+".join(table.targets)
            return DecisionObstacle(
                f"its plan is for {targets}, and this machine has "
                f"{here.gpu or 'no NVIDIA GPU with a driver'}",
                f"Qualify on a machine with a GPU of {targets}.",
                builds=True,
            )
        needed = _NEEDED.get(precision, 0)
        if here.gpu is None or here.gpu.capability_number >= needed:
            return None
        return DecisionObstacle(
            f"{precision} needs compute capability {needed / 10:.1f}, and the GPU here is "
            f"{here.gpu}",
            f"Qualify on a newer GPU, or drop {precision} from tensorrt under [candidates].",
        )

    def toolchain(self, table: TensorRtTable, /) -> str:
        """Library and version; with the full library also the GPU, which its plans depend on."""
        library = find_library(table.library)
        if library is None:
            return "absent"
        on_gpu = "" if library.__name__ == RTX else f" on {cuda.gpu() or 'no GPU'}"
        return f"{library_name(library)}{on_gpu}"

    def deciding_settings(self, table: TensorRtTable, /) -> Mapping[str, object]:
        return table.model_dump(mode="json", exclude=_LIMITS)

    def build_limit_s(self, table: TensorRtTable, /) -> float:
        return table.timeout_s

    def build(self, plan: BuildPlan, folder: Path, /) -> Engine:
        """Convert, then compile ``model.plan`` in a process of its own; its log is kept beside it.

        Raises:
            BuildError: a library or GPU is missing, the model cannot be compiled at this precision
                for these targets, or the process crashed or went over its time or memory.
            DataError: int8 or fp8 without calibration data, or with data that does not fit.
        """
        started, table = time.monotonic(), plan.table_as(TensorRtTable)
        library = find_library(table.library)
        wanted = target(library, table)
        plan.check_profiles()
        converted = plan.convert()
        path = folder / ENGINE_FILE
        targets = table.targets if library.__name__ == RTX else ()
        report = compile_plan(plan, converted.onnx, path, library=library.__name__, targets=targets)
        builder = plan_info(path)
        return plan.engine(
            path,
            converted,
            builder=builder,
            target=wanted,
            flags=report.flags,
            beside=[folder / name for name in (LOG_FILE, LAYERS_FILE)],
            proof=plan.proof(
                converted,
                device="none here" if no_device(builder, wanted) else str(cuda.gpu()),
                doubts=_doubts(plan.candidate.precision, report),
                executed=report.weighted,
            ),
            started_s=started,
        )

    def obstacle(self, engine: Engine, /) -> str | None:
        """Why no device can run the plan here; decided without loading it, which may crash."""
        return no_device(engine.builder, engine.target)

    @contextmanager
    def load(self, engine: Engine, path: Path, /) -> Iterator[Runner]:
        """Load a plan onto the first GPU.

        Raises:
            EnginegateError: no device here can run it, or the library refuses it.
        """
        reason = self.obstacle(engine)
        if reason:
            raise EnginegateError(f"{engine.candidate} cannot run: {reason}")
        if plan_info(path) != engine.builder:
            raise ModelError(
                f"{path} was built by {plan_info(path)}, its manifest says {engine.builder}."
            )
        library = find_library(engine.builder.split(" ", maxsplit=1)[0])
        with plan_runner(library, logger(library), engine, path) as runner:
            yield runner

    def serving(self, engine: Engine, path: Path, /) -> ServedFiles:
        """Triton's own TensorRT backend, for plans of the full library.

        Raises:
            ModelError: TensorRT-RTX built it; that backend loads the full library's plans only.
        """
        if engine.builder.startswith(RTX):
            raise ModelError(
                f"{engine.candidate} was built by {engine.builder}. Triton's TensorRT backend "
                "loads plans of the full TensorRT only: build it with 'enginegate[tensorrt]' on "
                "the GPU that serves."
            )
        return ServedFiles(backend="tensorrt", files={ENGINE_FILE: path}, gpu=True)

    def is_emulable(self, precision: Precision, /) -> bool:
        return not precision.is_as_exported


KIND = TensorRtKind()


@cache
def find_library(asked: str = "auto") -> Any:
    """The library asked for; with ``auto`` the full one if it is here, else RTX. Or None."""
    for name in NAMES if asked == "auto" else (asked,):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(library, "Builder"):
            return library
    return None


@cache
def logger(library: Any) -> Any:
    """The first logger a process gives a library stays the active one."""
    return library.Logger(library.Logger.ERROR)


def library_name(library: Any) -> str:
    """Import name and version, as plans are labelled."""
    return f"{library.__name__} {library.__version__}"


def target(library: Any, rules: TensorRtTable) -> str:
    """What a plan built here is for: compute capabilities (RTX), or the GPU here.

    Raises:
        BuildError: the library is missing, cannot do what the policy asks, or needs a GPU.
    """
    if library is None:
        wanted = "Neither tensorrt nor tensorrt_rtx" if rules.library == "auto" else rules.library
        verb = "is installed" if rules.library == "auto" else "(library in [tensorrt]) is missing"
        raise BuildError(f"{wanted} {verb} here. Run: {REMEDY}.")
    if library.__name__ == RTX:
        asked = {
            f"hardware_compatibility = {rules.hardware_compatibility!r}": (
                rules.hardware_compatibility != "none"
            ),
            "version_compatible = true": rules.version_compatible,
        }
        for setting in (name for name, is_asked in asked.items() if is_asked):
            raise BuildError(
                f"{library_name(library)} has no {setting}: its plans run on every target they "
                "were built for, with that version only. Remove it from [tensorrt], or build with "
                "the full TensorRT."
            )
        return "+".join(rules.targets)
    found = cuda.gpu()
    if found is None:
        raise BuildError(
            f"{library_name(library)} builds on the GPU a plan will run on, and there is none "
            'here. Build on a GPU machine, or set library = "tensorrt_rtx" in [tensorrt] to '
            "build ahead of time."
        )
    return str(found)


def no_device(builder: str, wanted: str) -> str | None:
    """Why no device here can run a plan of ``builder`` for target ``wanted``, or None."""
    library = find_library(builder.split(" ", maxsplit=1)[0])
    if library is None:
        return f"it was built by {builder}, and no such TensorRT is installed here. Run: {REMEDY}."
    if library_name(library) != builder:
        return f"it was built by {builder}; {library_name(library)} here cannot load it."
    found = cuda.gpu()
    if found is None:
        return f"it needs {wanted}; there is no NVIDIA GPU with a driver here."
    fits = (
        found.capability in wanted.split("+") if library.__name__ == RTX else str(found) == wanted
    )
    return None if fits else f"it was built for {wanted}; the GPU here is {found}."


def _doubts(precision: Precision, report: BuildReport) -> tuple[str, ...]:
    """Where the parser's types contradict the name."""
    found = []
    if precision.needs_calibration and not report.quantise.get(precision.value):
        found.append(f"TensorRT's parser saw no {precision} quantisation.")
    if (precision is Precision.TF32) != report.tf32:
        found.append(f"The builder's TF32 flag was {'on' if report.tf32 else 'off'}.")
    return tuple(found)
