"""TensorRT plans, by ``tensorrt`` or, where that is absent, ``tensorrt_rtx``; their only door.

Precision lives in the ONNX: networks are strongly typed. TF32 alone is a flag. TensorRT-RTX builds
ahead of time without a GPU, for the targets of the policy; the full library builds on the GPU that
the plan will run on.
"""

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from enginegate.candidate import Engine, EngineKind, FileDigest, Precision
from enginegate.canonical import sha256_bytes
from enginegate.engines import cuda
from enginegate.engines.plan import BuildPlan
from enginegate.engines.plan_header import plan_info
from enginegate.engines.proof import prove
from enginegate.engines.protocol import Availability, Runner, Served, missing
from enginegate.engines.tensorrt_job import Report
from enginegate.engines.tensorrt_process import compile_plan
from enginegate.engines.tensorrt_run import plan_runner
from enginegate.errors import BuildError, EnginegateError, ModelError
from enginegate.precision import convert

ENGINE_FILE = "model.plan"
_NO_DEVICE = "none here"
_RTX = "tensorrt_rtx"
_REMEDY = (
    "pip install 'enginegate[rtx]' for TensorRT-RTX (x86-64 Linux, builds without a GPU), or "
    "'enginegate[tensorrt]' beside an NVIDIA GPU"
)


def toolchain() -> str:
    """Library and version; with the full library also the GPU, which its plans depend on."""
    library = find_library()
    if library is None:
        return "absent"
    if library.__name__ == _RTX:
        return _name(library)
    return f"{_name(library)} on {cuda.gpu() or 'no GPU'}"


def build(plan: BuildPlan, folder: Path) -> Engine:
    """Convert, then compile ``model.plan`` in a process of its own; its log is kept beside it.

    Raises:
        BuildError: a library or GPU is missing, the model cannot be compiled at this precision for
            these targets, or the process crashed or went over its time or memory.
        DataError: int8 or fp8 without calibration data, or with data that does not fit.
    """
    started = time.monotonic()
    target = _target(plan)
    _check_shapes(plan)
    converted = convert(
        plan.onnx_path, plan.candidate, data=plan.calibration, rules=plan.calibrating
    )
    path = folder / ENGINE_FILE
    name = find_library().__name__
    targets = plan.tensorrt.targets if name == _RTX else ()
    report = compile_plan(plan, converted.onnx, path, library=name, targets=targets)
    builder = plan_info(path)
    return Engine(
        candidate=plan.candidate,
        filename=ENGINE_FILE,
        file=FileDigest.of(path),
        onnx_sha256=plan.onnx.file.sha256,
        converted_sha256=sha256_bytes(converted.onnx),
        converter=converted.converter,
        calibration_sha256=plan.calibration_sha256,
        builder=builder,
        target=target,
        inputs=plan.onnx.inputs,
        outputs=plan.onnx.outputs,
        max_batch_size=plan.max_batch_size,
        build_s=round(time.monotonic() - started, 3),
        proof=prove(
            plan.candidate,
            converted.census,
            device=_NO_DEVICE if _no_device(builder, target) else str(cuda.gpu()),
            doubts=_doubts(plan.candidate.precision, report),
        ),
    )


def obstacle(engine: Engine) -> str | None:
    """Why no device can run the plan here; decided without loading it, which may crash."""
    return _no_device(engine.builder, engine.target)


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
    with plan_runner(find_library(), _logger(), engine, path) as runner:
        yield runner


def serving(engine: Engine, path: Path) -> Served:
    """Triton's own TensorRT backend, for plans of the full library.

    Raises:
        ModelError: TensorRT-RTX built it; that backend loads the full library's plans only.
    """
    if engine.builder.startswith(_RTX):
        raise ModelError(
            f"{engine.candidate} was built by {engine.builder}. Triton's TensorRT backend loads "
            "plans of the full TensorRT only: build it with 'enginegate[tensorrt]' on the GPU "
            "that serves."
        )
    return Served(backend="tensorrt", files={ENGINE_FILE: path})


def availability() -> Availability:
    """Which library is here, and whether this machine's GPU can run its plans."""
    library = find_library()
    if library is None:
        reason = "neither tensorrt nor tensorrt_rtx is installed"
        return missing(EngineKind.TENSORRT, reason, _REMEDY)
    found = cuda.gpu()
    if library.__name__ == _RTX:
        supported = {name.lower() for name in library.ComputeCapability.__members__}
        runs = found is not None and found.capability in supported
        reason = f"TensorRT-RTX runs on {', '.join(sorted(s for s in supported if s[:2] == 'sm'))}"
    else:
        runs, reason = found is not None, "TensorRT builds and runs on an NVIDIA GPU"
    return Availability(
        EngineKind.TENSORRT,
        _name(library),
        can_build=library.__name__ == _RTX or runs,
        can_run=runs,
        why_not="" if runs else f"{reason}; this machine has {found or 'no GPU'}",
        remedy="" if runs else "run this stage on a machine with such a GPU",
    )


@cache
def find_library() -> Any:
    """The full library if it is here, else RTX, else None."""
    for name in ("tensorrt", _RTX):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(library, "Builder"):
            return library
    return None


@cache
def _logger() -> Any:
    """The first logger a process gives TensorRT stays the active one."""
    library = find_library()
    return library.Logger(library.Logger.ERROR)


def _name(library: Any) -> str:
    return f"{library.__name__} {library.__version__}"


def _target(plan: BuildPlan) -> str:
    library = find_library()
    if library is None:
        raise BuildError(f"Neither tensorrt nor tensorrt_rtx is installed here. Run: {_REMEDY}.")
    if library.__name__ == _RTX:
        return "+".join(plan.tensorrt.targets)
    found = cuda.gpu()
    if found is None:
        raise BuildError(
            f"{_name(library)} builds on the GPU a plan will run on, and there is none here. Build "
            "on a GPU machine, or install 'enginegate[rtx]' alone to build ahead of time."
        )
    return str(found)


def _check_shapes(plan: BuildPlan) -> None:
    for spec in plan.onnx.inputs:
        if -1 in spec.shape[1:]:
            raise BuildError(
                f"{spec} has dynamic axes besides the batch; TensorRT plans are built for fixed "
                "ones here. Export the model with those axes fixed."
            )


def _no_device(builder: str, target: str) -> str | None:
    library = find_library()
    if library is None:
        return f"it was built by {builder}, and no TensorRT is installed here. Run: {_REMEDY}."
    if _name(library) != builder:
        return f"it was built by {builder}; {_name(library)} here cannot load it."
    found = cuda.gpu()
    if found is None:
        return f"it needs {target}; there is no NVIDIA GPU with a driver here."
    fits = (
        found.capability in target.split("+") if library.__name__ == _RTX else str(found) == target
    )
    return None if fits else f"it was built for {target}; the GPU here is {found}."


def _doubts(precision: Precision, report: Report) -> tuple[str, ...]:
    """Where the parser's types contradict the name."""
    found = []
    if precision.needs_calibration and not report.quantise.get(precision.value):
        found.append(f"TensorRT's parser saw no {precision} quantisation.")
    if precision in {Precision.FP16, Precision.BF16} and not report.weighted.get(precision.value):
        found.append(f"TensorRT's parser typed no layer {precision}.")
    if (precision is Precision.TF32) != report.tf32:
        found.append(f"The builder's TF32 flag was {'on' if report.tf32 else 'off'}.")
    return tuple(found)
