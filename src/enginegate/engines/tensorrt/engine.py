"""TensorRT plans, by ``tensorrt`` or, where that is absent, ``tensorrt_rtx``; their only door.

Precision lives in the ONNX: networks are strongly typed. TF32 alone is a flag. TensorRT-RTX builds
ahead of time without a GPU, for the targets of the policy; the full library builds on the GPU that
the plan will run on.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from enginegate.candidate import Engine, EngineKind, FileDigest, Precision, PrecisionProof
from enginegate.engines import cuda
from enginegate.engines.plan import BuildPlan
from enginegate.engines.precision_check import check_precision_proof
from enginegate.engines.protocol import Availability, Runner, ServedFiles, missing
from enginegate.engines.tensorrt import library as library_here
from enginegate.engines.tensorrt.job import BuildReport
from enginegate.engines.tensorrt.library import REMEDY, RTX, find_library, library_name, no_device
from enginegate.engines.tensorrt.plan_header import plan_info
from enginegate.engines.tensorrt.process import LAYERS_FILE, LOG_FILE, compile_plan
from enginegate.engines.tensorrt.run import plan_runner
from enginegate.engines.typed import typed_census
from enginegate.errors import EnginegateError, ModelError
from enginegate.policy.building import Building
from enginegate.precision import Conversion, convert
from enginegate.records import sha256_bytes

ENGINE_FILE = "model.plan"
_NO_DEVICE = "none here"


def toolchain(building: Building) -> str:
    """Library and version; with the full library also the GPU, which its plans depend on."""
    return library_here.toolchain(find_library(building.tensorrt.library))


def build(plan: BuildPlan, folder: Path) -> Engine:
    """Convert, then compile ``model.plan`` in a process of its own; its log is kept beside it.

    Raises:
        BuildError: a library or GPU is missing, the model cannot be compiled at this precision for
            these targets, or the process crashed or went over its time or memory.
        DataError: int8 or fp8 without calibration data, or with data that does not fit.
    """
    started, rules = time.monotonic(), plan.building.tensorrt
    library = find_library(rules.library)
    target, profiles = library_here.target(library, rules), plan.profiles
    converted = convert(
        plan.onnx_path,
        plan.candidate,
        data=plan.calibration,
        rules=plan.calibrating,
        keep=plan.keep,
    )
    path = folder / ENGINE_FILE
    targets = rules.targets if library.__name__ == RTX else ()
    report = compile_plan(plan, converted.onnx, path, library=library.__name__, targets=targets)
    builder = plan_info(path)
    beside = [folder / name for name in (LOG_FILE, LAYERS_FILE)]
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
        builder=builder,
        target=target,
        inputs=plan.onnx.inputs,
        outputs=plan.onnx.outputs,
        max_batch_size=plan.max_batch_size,
        flags=report.flags,
        profiles=profiles,
        beside={each.name: FileDigest.of(each) for each in beside if each.is_file()},
        build_s=round(time.monotonic() - started, 3),
        proof=_proof(plan, converted, report, no_device(builder, target)),
    )


def obstacle(engine: Engine) -> str | None:
    """Why no device can run the plan here; decided without loading it, which may crash."""
    return no_device(engine.builder, engine.target)


@contextmanager
def load(engine: Engine, path: Path) -> Iterator[Runner]:
    """Load a plan onto the first GPU.

    Raises:
        EnginegateError: no device here can run it, or the library refuses it.
    """
    reason = obstacle(engine)
    if reason:
        raise EnginegateError(f"{engine.candidate} cannot run: {reason}")
    if plan_info(path) != engine.builder:
        raise ModelError(
            f"{path} was built by {plan_info(path)}, its manifest says {engine.builder}."
        )
    library = find_library(engine.builder.split(" ", maxsplit=1)[0])
    with plan_runner(library, library_here.logger(library), engine, path) as runner:
        yield runner


def serving(engine: Engine, path: Path) -> ServedFiles:
    """Triton's own TensorRT backend, for plans of the full library.

    Raises:
        ModelError: TensorRT-RTX built it; that backend loads the full library's plans only.
    """
    if engine.builder.startswith(RTX):
        raise ModelError(
            f"{engine.candidate} was built by {engine.builder}. Triton's TensorRT backend loads "
            "plans of the full TensorRT only: build it with 'enginegate[tensorrt]' on the GPU "
            "that serves."
        )
    return ServedFiles(backend="tensorrt", files={ENGINE_FILE: path}, gpu=True)


def availability() -> Availability:
    """Which library is here, and whether this machine's GPU can run its plans."""
    library = find_library()
    if library is None:
        reason = "neither tensorrt nor tensorrt_rtx is installed"
        return missing(EngineKind.TENSORRT, reason, REMEDY)
    found = cuda.gpu()
    if library.__name__ == RTX:
        supported = {name.lower() for name in library.ComputeCapability.__members__}
        runs = found is not None and found.capability in supported
        reason = f"TensorRT-RTX runs on {', '.join(sorted(s for s in supported if s[:2] == 'sm'))}"
    else:
        runs, reason = found is not None, "TensorRT builds and runs on an NVIDIA GPU"
    return Availability(
        EngineKind.TENSORRT,
        library_name(library),
        can_build=library.__name__ == RTX or runs,
        can_run=runs,
        why_not="" if runs else f"{reason}; this machine has {found or 'no GPU'}",
        remedy="" if runs else "run this stage on a machine with such a GPU",
    )


def _proof(
    plan: BuildPlan, converted: Conversion, report: BuildReport, obstacle: str | None
) -> PrecisionProof:
    shapes = {name: shape.best for name, shape in plan.profiles.items()}
    return check_precision_proof(
        plan.candidate,
        converted.census,
        device=_NO_DEVICE if obstacle else str(cuda.gpu()),
        doubts=_doubts(plan.candidate.precision, report),
        typed=typed_census(onnx.load_from_string(converted.onnx), shapes),
        executed=report.weighted,
    )


def _doubts(precision: Precision, report: BuildReport) -> tuple[str, ...]:
    """Where the parser's types contradict the name."""
    found = []
    if precision.needs_calibration and not report.quantise.get(precision.value):
        found.append(f"TensorRT's parser saw no {precision} quantisation.")
    if (precision is Precision.TF32) != report.tf32:
        found.append(f"The builder's TF32 flag was {'on' if report.tf32 else 'off'}.")
    return tuple(found)
