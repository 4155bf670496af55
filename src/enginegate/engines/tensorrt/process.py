"""The process that builds a plan: started, kept within its time and memory, and its ending read."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from enginegate.atomic_io import write_file
from enginegate.candidate import Precision, ShapeRange
from enginegate.engines.plan import BuildPlan
from enginegate.errors import BuildError
from enginegate.messages import matching
from enginegate.records import Record

LOG_FILE, LAYERS_FILE = "build.log", "layers.json"
_TAIL_LINES = 12
_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "Resource temporarily unavailable", "OutOfMemory")
_POLL_S, _GRACE_S, _QUIET_S = 0.05, 5.0, 2.0
_log = logging.getLogger("enginegate.build")


class TensorRtTable(Record):
    """How TensorRT plans are built."""

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        default="auto", description="auto: the full library where it is installed, else RTX"
    )
    targets: tuple[
        Annotated[str, matching(r"^sm[0-9]{2,3}$", "sm and two or three digits, e.g. sm90")], ...
    ] = Field(
        default=("sm89",), description="compute capabilities to build for ahead of time (RTX only)"
    )
    workspace_mib: PositiveInt = Field(default=1024, description="builder workspace limit")
    timeout_s: PositiveFloat = Field(
        default=900.0, description="a build is stopped after this long"
    )
    memory_mib: PositiveInt = Field(
        default=16384, description="address space the builder may use beyond what it starts with"
    )
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = Field(
        default="none", description="on which other GPUs a plan may run (full library only)"
    )
    version_compatible: bool = Field(
        default=False,
        description="plans that newer TensorRT versions load too; they carry code that the loader "
        "must be allowed to trust (full library only)",
    )
    timing_cache: bool = Field(
        default=True,
        description="keep kernel timings, one file a version and GPU (full library only)",
    )


class BuildJob(Record):
    """One plan to build. The precision is in the ONNX, except TF32, a flag.

    Files beside ``onnx`` in a scratch folder: the process appends one `BuildStep` a line to
    ``progress``, stops when ``cancel`` appears, and reads and writes ``timing_cache``.
    """

    library: str
    onnx: Path
    plan: Path
    profiles: dict[str, ShapeRange]
    tf32: bool
    targets: tuple[str, ...]
    workspace_mib: PositiveInt
    memory_mib: PositiveInt
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    keep_timings: bool = True
    layers: Path | None = Field(default=None, description="where to write the inspector's JSON")

    @property
    def progress(self) -> Path:
        """Steps so far, one JSON a line."""
        return self.onnx.with_name("progress.jsonl")

    @property
    def cancel(self) -> Path:
        """The builder stops at its next step when this file exists."""
        return self.onnx.with_name("cancel")

    @property
    def timing_cache(self) -> Path:
        """Kernel timings: of earlier builds before, of this one too after."""
        return self.onnx.with_name("timing.cache")


class BuildStep(Record):
    """How far the builder is."""

    phase: str
    step: NonNegativeInt
    steps: NonNegativeInt


class BuildReport(Record):
    """What the process did: an error a person can read, or what the parser saw."""

    error: str = ""
    cancelled: bool = False
    weighted: dict[str, NonNegativeInt] = Field(default={}, description="layers by type")
    quantise: dict[str, NonNegativeInt] = Field(default={}, description="Quantize by type")
    tf32: bool = False
    flags: dict[str, str] = Field(default={}, description="what the builder was given")


def compile_plan(
    plan: BuildPlan, onnx: bytes, path: Path, *, library: str, targets: tuple[str, ...]
) -> BuildReport:
    """Build a plan file from converted ONNX, with its log beside it.

    Args:
        path: where the plan is written.
        library: ``tensorrt`` or ``tensorrt_rtx``.
        targets: compute capabilities to build for; empty means the GPU here, and then the layers
            that this GPU will run are written beside the plan, too.

    Raises:
        BuildError: the library refused, or the process died or went over a limit.
    """
    rules = plan.table_as(TensorRtTable)
    with tempfile.TemporaryDirectory(prefix="enginegate-plan-") as scratch:
        job = BuildJob(
            library=library,
            onnx=Path(scratch) / "model.onnx",
            plan=path,
            profiles=plan.profiles,
            tf32=plan.candidate.precision is Precision.TF32,
            targets=targets,
            workspace_mib=rules.workspace_mib,
            memory_mib=rules.memory_mib,
            hardware_compatibility=rules.hardware_compatibility,
            version_compatible=rules.version_compatible,
            keep_timings=rules.timing_cache and not targets,  # RTX measures on the user's GPU
            layers=None if targets else path.with_name(LAYERS_FILE),
        )
        plan.bring_weights(job.onnx.parent)
        job.onnx.write_bytes(onnx)
        with _timings(job, _timing_file(plan, path)):
            return _run(plan, job, log=path.with_name(LOG_FILE))


def builder_command(job: Path, report: Path) -> list[str]:
    """How the process is started; its working folder is not on its import path."""
    module = "enginegate.engines.tensorrt.build"
    return [sys.executable, "-P", "-m", module, str(job), str(report)]


def log_progress(plan: BuildPlan) -> Callable[[BuildStep], None]:
    """Tells the logger ``enginegate.build`` where a build is, every two seconds at most."""
    told_at = time.monotonic()

    def tell(step: BuildStep) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _QUIET_S:
            told_at = time.monotonic()
            _log.info("%s: %s, step %d of %d", plan.candidate, step.phase, step.step, step.steps)

    return tell


def _timing_file(plan: BuildPlan, path: Path) -> Path:
    """One file a version and GPU, beside the store's engines."""
    name = "".join(c if c.isalnum() else "-" for c in plan.toolchain)
    return path.parent.parent / f".timing-{name}.cache"


@contextmanager
def _timings(job: BuildJob, kept: Path) -> Iterator[None]:
    """Lend the builder the timings of earlier builds, and keep its own when it ends well."""
    if job.keep_timings and kept.is_file():
        job.timing_cache.write_bytes(kept.read_bytes())
    yield
    if job.keep_timings and job.timing_cache.is_file():
        write_file(kept, job.timing_cache.read_bytes())


def _run(plan: BuildPlan, job: BuildJob, *, log: Path) -> BuildReport:
    job_path, report_path = job.onnx.with_name("job.json"), job.onnx.with_name("report.json")
    job_path.write_bytes(job.canonical_json())
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module
            builder_command(job_path, report_path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
        try:
            in_time = _watch(process, job, plan=plan, tell=log_progress(plan))
        finally:
            process.kill()
            process.wait()
    if not in_time:
        raise BuildError(
            f"Building {plan.candidate} took longer than timeout_s = "
            f"{plan.table_as(TensorRtTable).timeout_s:g} and was stopped. Raise it under "
            f"[tensorrt].\n"
            f"{_tail(log)}"
        )
    if not report_path.is_file():
        raise BuildError(
            f"The process that built {plan.candidate} {_ending(process.returncode)}."
            f"{_memory_hint(plan, log, process.returncode)}\n{_tail(log)}"
        )
    return _accepted(plan, job, BuildReport.read(report_path), log=log)


def _watch(
    process: "subprocess.Popen[bytes]",
    job: BuildJob,
    *,
    plan: BuildPlan,
    tell: Callable[[BuildStep], None],
) -> bool:
    """Forward steps until the process ends; False if its time was up before.

    The builder is asked to stop through its progress monitor first, so that it ends in order.
    """
    deadline, position = time.monotonic() + plan.table_as(TensorRtTable).timeout_s, 0
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        for line in (steps := _steps(job.progress, position)).splitlines():
            tell(BuildStep.model_validate_json(line))
        position += len(steps)
        if process.poll() is None and time.monotonic() > deadline:
            job.cancel.touch()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            return False
    return True


def _steps(path: Path, position: int) -> bytes:
    """Whole lines written since."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(position)
        new = file.read()
    return new[: new.rfind(b"\n") + 1]


def _accepted(plan: BuildPlan, job: BuildJob, report: BuildReport, *, log: Path) -> BuildReport:
    if report.error:
        raise BuildError(
            f"{plan.toolchain} cannot build {plan.candidate} for "
            f"{'+'.join(job.targets) or 'this GPU'} from opset {plan.onnx.opset}: {report.error}"
            f"{_memory_hint(plan, log)}\n{_tail(log)}"
        )
    return report


def _ending(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )


def _memory_hint(plan: BuildPlan, log: Path, code: int = 0) -> str:
    text, limit = log.read_text(errors="replace"), plan.table_as(TensorRtTable).memory_mib
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return f" It ran out of memory: raise memory_mib = {limit} in [tensorrt]."
    if code == -signal.SIGKILL:
        return (
            " The kernel kills so when the machine's memory is used up: lower memory_mib = "
            f"{limit} in [tensorrt], or build on a larger machine."
        )
    return ""


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "[TRT] [I]" not in line]
    ending = "\n".join(f"  {line}" for line in told[-_TAIL_LINES:])
    return f"The builder's log ends:\n{ending}" if ending else ""
