"""TensorRT plans, by ``tensorrt`` or, where that is absent, ``tensorrt_rtx``; their only door.

With TensorRT 10, 11 and RTX precision lives in the ONNX: networks are strongly typed, and TF32
alone is a flag. TensorRT 8.6 is told by flags what it may use, and its plan is read for what it
does use.
TensorRT-RTX builds ahead of time without a GPU, for the targets of the policy; the full library
builds on the GPU that the plan will run on. The library is only ever loaded in other processes.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import onnx

from enginegate.candidate import Engine, Precision, TensorSpec
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
from enginegate.engines.python_backend import runner_files as files_of_runner
from enginegate.engines.tensorrt.layers import (
    PlanLayer,
    executed_types,
    node_types,
    plan_layers,
    time_by_type,
    wider_layers,
)
from enginegate.engines.tensorrt.library import FULL, RTX, TensorRtLibrary, find_library
from enginegate.engines.tensorrt.parser_gaps import without_parser_gaps
from enginegate.engines.tensorrt.plan_header import plan_info
from enginegate.engines.tensorrt.process import (
    LAYERS_FILE,
    LOG_FILE,
    TIMES_FILE,
    BuildReport,
    PlanReport,
    compile_plan,
    inspect_plan,
)
from enginegate.engines.tensorrt.run import plan_runner
from enginegate.engines.tensorrt.table import TensorRtTable
from enginegate.errors import BuildError, EnginegateError, ModelError
from enginegate.precision import Conversion
from enginegate.precision.onnx_checks import name_nodes
from enginegate.precision.opset import lowered
from enginegate.sources.onnx_form import onnx_bytes, opset

ENGINE_FILE = "model.plan"
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
_NOT_IN_8 = frozenset({Precision.BF16, Precision.FP8})
_NARROW = {Precision.FP16: ("fp16",), Precision.INT8: ("int8", "fp16")}
# Weights of a plan that computes in 16 bits take half of FP32's bytes, and kernels and constants
# some more; a plan of FP32 weights takes all of them.
_HALVED = 0.75


@dataclass(frozen=True, slots=True)
class TensorRtHere:
    """What this machine has for a policy's plans.

    Attributes:
        library: the TensorRT library that the policy gets, or None.
        obstacle: why nothing can be built with it for the policy; empty when it can.
        gpu: the first GPU.
    """

    library: TensorRtLibrary | None
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
    packages = (FULL, "tensorrt-rtx-cu13")

    def availability(self) -> Availability:
        """Which library is here, and whether this machine's GPU can run its plans."""
        try:
            library = find_library()
        except BuildError as error:
            return missing(self.name, str(error), str(error))
        if library is None:
            reason = "neither tensorrt nor tensorrt_rtx is installed"
            return missing(self.name, reason, REMEDY)
        found = cuda.gpu()
        if library.is_rtx:
            runs = found is not None and found.capability in library.targets
            reason = f"TensorRT-RTX runs on {', '.join(sorted(library.targets))}"
        else:
            runs, reason = found is not None, "TensorRT builds and runs on an NVIDIA GPU"
        where = "" if library.python == sys.executable else f" in {library.python}"
        return Availability(
            self.name,
            f"{library}{where}",
            can_build=library.is_rtx or runs,
            can_run=runs,
            why_not="" if runs else f"{reason}; this machine has {found or 'no GPU'}",
            remedy="" if runs else "run this stage on a machine with such a GPU",
        )

    def inspect(self, table: TensorRtTable, /) -> TensorRtHere:
        library = None
        try:
            library = find_library(table.library)
            target(library, table)
            obstacle = ""
        except BuildError as error:
            obstacle = str(error).rstrip(".")
        return TensorRtHere(library, obstacle, cuda.gpu())

    def undecidable(
        self, precision: Precision, table: TensorRtTable, here: TensorRtHere, /
    ) -> DecisionObstacle | None:
        if here.library is not None and here.library.is_weakly_typed and precision in _NOT_IN_8:
            return DecisionObstacle(
                f"{precision} is not in this version: {here.library}",
                f"Qualify with TensorRT 10 or later, or drop {precision} from tensorrt under "
                "[candidates].",
            )
        if here.obstacle:
            return DecisionObstacle(
                here.obstacle, "Mend that, or qualify on a machine that has it."
            )
        if here.library is not None and here.library.is_rtx:
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
        try:
            library = find_library(table.library)
        except BuildError:
            return "absent"
        if library is None:
            return "absent"
        kernels = " without cuDNN and cuBLAS" if library.lacks_kernels else ""
        on_gpu = "" if library.is_rtx else f"{kernels} on {cuda.gpu() or 'no GPU'}"
        return f"{library}{on_gpu}"

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
        assert library is not None  # noqa: S101 - `target` refuses
        plan.check_profiles()
        path = folder / ENGINE_FILE
        converted = _converted(plan, library)
        targets = table.targets if library.is_rtx else ()
        report = compile_plan(plan, converted.onnx, path, library=library, targets=targets)
        builder = plan_info(path)
        inspected = None
        if not targets:
            inspected = inspect_plan(
                path,
                library=library,
                host_code=table.version_compatible,
                shapes=_typical_shapes(plan),
            )
        layers = _layers(folder, inspected)
        types, doubts = _executed(plan, library, converted, inspected, layers, path)
        specs = {} if inspected is None else inspected.specs
        return plan.engine(
            path,
            converted,
            builder=builder,
            target=wanted,
            flags={**report.flags, **_told_by_plan(plan.candidate.precision, inspected, layers)},
            beside=[folder / name for name in (LOG_FILE, LAYERS_FILE, TIMES_FILE)],
            inputs=_as_built(plan.onnx.inputs, specs),
            outputs=_as_built(plan.onnx.outputs, specs),
            proof=plan.proof(
                converted,
                device="none here" if no_device(builder, wanted, report.flags) else str(cuda.gpu()),
                doubts=(*_doubts(plan.candidate.precision, report, typed=types is None), *doubts),
                executed=_shown(layers) if library.is_weakly_typed else report.weighted,
                types=types,
            ),
            started_s=started,
        )

    def obstacle(self, engine: Engine, /) -> str | None:
        """Why no device can run the plan here; decided without loading it, which may crash."""
        return no_device(engine.builder, engine.target, engine.flags)

    @contextmanager
    def load(self, engine: Engine, path: Path, /) -> Iterator[Runner]:
        """Load a plan onto the first GPU, in a process of its own.

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
        assert library is not None  # noqa: S101 - `obstacle` says so
        with plan_runner(library, engine, path, gpu=str(cuda.gpu())) as runner:
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

    def runner_files(self, engine: Engine, path: Path, /) -> ServedFiles | None:
        """Triton's Python backend, whose Python needs the bindings that built the plan."""
        here = Path(__file__)
        files = {
            **files_of_runner(self.name, here.with_name("serve.py"), gpu=True),
            "tensorrt_contexts.py": here.with_name("worker") / "contexts.py",
            "engine.json": path.with_name("manifest.json"),
            engine.filename: path,
        }
        return ServedFiles(backend="python", files=files, gpu=True)

    def is_emulable(self, precision: Precision, /) -> bool:
        return not precision.is_as_exported


KIND = TensorRtKind()


def target(library: TensorRtLibrary | None, rules: TensorRtTable) -> str:
    """What a plan built here is for: compute capabilities (RTX), or the GPU here.

    Raises:
        BuildError: the library is missing, cannot do what the policy asks, or needs a GPU.
    """
    if library is None:
        wanted = "Neither tensorrt nor tensorrt_rtx" if rules.library == "auto" else rules.library
        verb = "is installed" if rules.library == "auto" else "(library in [tensorrt]) is missing"
        raise BuildError(f"{wanted} {verb} here. Run: {REMEDY}.")
    if library.is_rtx:
        asked = {
            f"hardware_compatibility = {rules.hardware_compatibility!r}": (
                rules.hardware_compatibility != "none"
            ),
            "version_compatible = true": rules.version_compatible,
            f"builder_optimization_level = {rules.builder_optimization_level}": (
                rules.builder_optimization_level is not None
            ),
            f"tactic_sources = {list(rules.tactic_sources)}": bool(rules.tactic_sources),
        }
        for setting in (name for name, is_asked in asked.items() if is_asked):
            raise BuildError(
                f"{library} has no {setting}: its plans run on every target they "
                "were built for, with that version only. Remove it from [tensorrt], or build with "
                "the full TensorRT."
            )
        return "+".join(rules.targets)
    found = cuda.gpu()
    if found is None:
        raise BuildError(
            f"{library} builds on the GPU a plan will run on, and there is none "
            'here. Build on a GPU machine, or set library = "tensorrt_rtx" in [tensorrt] to '
            "build ahead of time."
        )
    return str(found)


def no_device(builder: str, wanted: str, flags: Mapping[str, str]) -> str | None:
    """Why no device here can run a plan of ``builder`` for target ``wanted``, or None.

    Args:
        flags: how the plan was built; it may be meant for other GPUs, too.
    """
    try:
        library = find_library(builder.split(" ", maxsplit=1)[0])
    except BuildError as error:
        return f"it was built by {builder}. {error}"
    if library is None:
        return f"it was built by {builder}, and no such TensorRT is installed here. Run: {REMEDY}."
    if not library.wrote(builder):
        return f"it was built by {builder}; {library} here cannot load it."
    found = cuda.gpu()
    if found is None:
        return f"it needs {wanted}; there is no NVIDIA GPU with a driver here."
    level = flags.get("hardware_compatibility", "none")
    if library.is_rtx:
        fits = found.capability in wanted.split("+")
    elif level == "ampere_plus":
        fits = found.capability_number >= cuda.AMPERE
    elif level == "same_compute_capability":
        fits = found.capability == wanted.split(" ", maxsplit=1)[0]
    else:
        fits = str(found) == wanted
    return None if fits else f"it was built for {wanted}; the GPU here is {found}."


def _converted(plan: BuildPlan, library: TensorRtLibrary) -> Conversion:
    """The ONNX that is compiled: a weakly typed network gets its 16 bits by a flag."""
    if plan.made is None and library.is_weakly_typed and plan.candidate.precision.is_16_bit:
        named = name_nodes(onnx.load(plan.onnx_path)).SerializeToString()
        converted = Conversion(named, "none")
    else:
        converted = plan.convert()
    most = library.highest_opset
    if most is None:
        return converted
    if plan.onnx.external and plan.made is None:
        if plan.onnx.opset <= most:
            return converted
        raise BuildError(
            f"{library} takes ONNX opset {most}, {plan.candidate} is of opset {plan.onnx.opset} "
            "with weights in files of their own, which cannot be rewritten here. Export the model "
            f"at opset {most}, or build with TensorRT 10 or later."
        )
    model = onnx.load_from_string(converted.onnx)
    shapes = {name: shape.best for name, shape in plan.profiles.items()}
    found = lowered(
        model, most, what=str(plan.candidate), shapes=shapes, rewrite=without_parser_gaps
    )
    if found is model:
        return converted
    how = f"{converted.converter}, opset {opset(model)} written at {opset(found)}"
    content = onnx_bytes(found, origin=str(plan.candidate))
    return Conversion(content, how.removeprefix("none, "))


def _typical_shapes(plan: BuildPlan) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs at the batch that the plan is tuned for."""
    best = {name: shape.best for name, shape in plan.profiles.items()}
    return {spec.name: best.get(spec.name, spec.shape) for spec in plan.onnx.inputs}


def _as_built(
    specs: tuple[TensorSpec, ...], built: Mapping[str, TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Inputs or outputs in the types that the plan really has: TensorRT 8 has no INT64."""
    found = ((spec, built.get(spec.name, spec)) for spec in specs)
    return tuple(spec.model_copy(update={"dtype": plan.dtype}) for spec, plan in found)


def _layers(folder: Path, inspected: PlanReport | None) -> tuple[PlanLayer, ...]:
    path = folder / LAYERS_FILE
    if inspected is None or not path.is_file():
        return ()
    return plan_layers(path.read_text(errors="replace"), inspected.layer_ms)


def _executed(
    plan: BuildPlan,
    library: TensorRtLibrary,
    converted: Conversion,
    inspected: PlanReport | None,
    layers: tuple[PlanLayer, ...],
    path: Path,
) -> tuple[Mapping[str, str] | None, tuple[str, ...]]:
    """The types that the plan's layers compute in, by ONNX node, and why they may be wrong.

    Nodes inside a fused region are not shown. Of those of an FP16 plan the stored weights are the
    evidence: 16 bits of each number. All others have the type that the network gave them.
    """
    if inspected is not None and inspected.error:
        return None, (f"The plan could not be loaded: {inspected.error}",)
    if not library.is_weakly_typed:
        return None, ()
    types = node_types(layers)
    if any(each.is_fused for each in layers) and plan.candidate.precision is Precision.FP16:
        numbers = converted.stats().weights.get("fp32", 0)
        halved = path.stat().st_size < _HALVED * 4 * numbers
        word = "fp16" if halved else "fp32"
        nodes = {node.name for node in onnx.load_from_string(converted.onnx).graph.node}
        types = {**dict.fromkeys(nodes, word), **types}
    return types, ()


def _shown(layers: tuple[PlanLayer, ...]) -> dict[str, int] | None:
    """Layers by type, or None where regions hide some of them."""
    hidden = not layers or any(each.is_fused for each in layers)
    return None if hidden else executed_types(layers)


def _told_by_plan(
    precision: Precision, inspected: PlanReport | None, layers: tuple[PlanLayer, ...]
) -> dict[str, str]:
    """Lines for the manifest: layers by type, those kept wider, the time by type, the memory."""
    if inspected is None or inspected.error:
        return {}
    told = {
        "layers": ", ".join(f"{count} {word}" for word, count in executed_types(layers).items()),
        "time_by_type": time_by_type(layers),
        "wider_layers": wider_layers(layers, _NARROW[precision]) if precision in _NARROW else "",
        "cuda_driver": inspected.cuda_driver,
        "device_mib": str(-(-inspected.device_bytes // 2**20)),
    }
    return {name: text for name, text in told.items() if text}


def _doubts(precision: Precision, report: BuildReport, *, typed: bool) -> tuple[str, ...]:
    """Where the parser's types contradict the name, where they decide what layers compute in."""
    found = []
    if typed and precision.needs_calibration and not report.quantise.get(precision.value):
        found.append(f"TensorRT's parser saw no {precision} quantisation.")
    if (precision is Precision.TF32) != report.tf32:
        found.append(f"The builder's TF32 flag was {'on' if report.tf32 else 'off'}.")
    return tuple(found)
