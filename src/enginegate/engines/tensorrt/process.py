"""The processes that build and inspect a plan: started, kept within limits, their ends read."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from enginegate.atomic_io import write_file
from enginegate.candidate import TensorSpec
from enginegate.engines.plan import BuildPlan
from enginegate.engines.tensorrt.library import (
    TensorRtLibrary,
    ending,
    read_report,
    worker_command,
    worker_environment,
)
from enginegate.engines.tensorrt.table import (
    FIRST_ATTEMPT,
    BuilderSettings,
    TensorRtTable,
    builder_settings,
)
from enginegate.errors import BuildError
from enginegate.records import Record

LOG_FILE, LAYERS_FILE, TIMES_FILE = "build.log", "layers.json", "layer_times.json"
_TAIL_LINES = 12
_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "Resource temporarily unavailable", "OutOfMemory")
_POLL_S, _GRACE_S, _QUIET_S = 0.05, 5.0, 2.0
_INSPECT_S = 300.0  # loading the largest plans takes a minute; it is given up only if it hangs
_MEASURED = {False: "measured", True: "measured; the library refused those of earlier builds"}
_log = logging.getLogger("enginegate.build")


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
    builder_flags: tuple[str, ...] = Field(default=(), description="those that were on, by name")
    shares_profile: bool = Field(default=False, description="several contexts may run the plan")
    timings_read: NonNegativeInt = Field(default=0, description="bytes of kernel timings known")
    timings_refused: bool = Field(default=False, description="they were there, and not readable")
    flags: dict[str, str] = Field(default={}, description="how the plan was built")


class PlanReport(Record):
    """What a plan is on the device that runs it, or why it could not be loaded."""

    error: str = ""
    specs: dict[str, TensorSpec] = Field(default={}, description="inputs and outputs by name")
    device_bytes: NonNegativeInt = 0
    cuda_driver: str = Field(default="", description="newest CUDA that the driver serves")
    layer_ms: dict[str, NonNegativeFloat] = Field(default={}, description="of one run, by layer")


class _OutOfTimeError(Exception):
    """The builder was stopped at its deadline."""


class _OutOfMemoryError(Exception):
    """The builder was stopped because it held more memory than it may."""


def compile_plan(
    plan: BuildPlan,
    onnx: bytes,
    path: Path,
    *,
    library: TensorRtLibrary,
    targets: tuple[str, ...],
) -> BuildReport:
    """Build a plan file from converted ONNX, with its log beside it.

    Args:
        path: where the plan is written.
        targets: compute capabilities to build for; empty means the GPU here.

    Raises:
        BuildError: the library refused, or the process died or went over a limit.
    """
    table = plan.table_as(TensorRtTable)
    settings = builder_settings(library, plan.candidate.precision, table)
    with tempfile.TemporaryDirectory(prefix="enginegate-plan-") as name:
        scratch = Path(name)
        model = scratch / "model.onnx"
        plan.bring_weights(scratch)
        model.write_bytes(onnx)
        keeps_timings = table.timing_cache and not targets  # RTX measures on the user's GPU
        job = build_job(plan, library, settings, model, path, targets=targets)
        job["timing_cache"] = str(scratch / "timing.cache") if keeps_timings else ""
        build = _Build(plan, library, job, scratch, path.with_name(LOG_FILE))
        with _timings(job["timing_cache"], _timing_file(plan, path)):
            report, level = _attempts(build, table, settings)
    flags = {
        "builder_flags": " ".join(report.builder_flags),
        "typing": "strong" if settings.strong else "weak",
        "optimization_level": "default" if level is None else str(level),
        "workspace_mib": str(table.workspace_mib),
        "hardware_compatibility": table.hardware_compatibility,
        "version_compatible": str(table.version_compatible).lower(),
        "timings": "reused" if report.timings_read else _MEASURED[report.timings_refused],
        "cuda_graphs": "on" if table.cuda_graphs else "off",
        "shares_profile": str(report.shares_profile).lower(),
    }
    if library.cuda:
        flags["cuda"] = library.cuda
    if settings.tactic_sources is not None:
        flags["tactic_sources"] = " ".join(settings.tactic_sources)
    if library.lacks_kernels:
        missing = (f"{name} {state}" for name, state in library.kernels.items() if state != "here")
        flags["without"] = ", ".join(missing)
    return report.model_copy(update={"flags": flags})


def build_job(
    plan: BuildPlan,
    library: TensorRtLibrary,
    settings: BuilderSettings,
    model: Path,
    path: Path,
    *,
    targets: tuple[str, ...],
) -> dict[str, Any]:
    """One build as the worker takes it (``worker.build.write_plan``).

    On a GPU the memory limit is kept by watching: CUDA reserves more addresses than any limit.
    """
    table = plan.table_as(TensorRtTable)
    shapes = {name: each.model_dump(mode="json") for name, each in plan.profiles.items()}
    return {
        "command": "build",
        "parent": os.getpid(),
        "module": library.module,
        "onnx": str(model),
        "plan": str(path),
        "profiles": shapes,
        "set_flags": list(settings.set_flags),
        "clear_flags": list(settings.clear_flags),
        "strong": settings.strong,
        "keep": [] if settings.strong else list(plan.keep),
        "tactic_sources": settings.tactic_sources and list(settings.tactic_sources),
        "optimization_level": settings.optimization_level,
        "hardware_compatibility": table.hardware_compatibility,
        "targets": list(targets),
        "workspace_mib": table.workspace_mib,
        "memory_mib": table.memory_mib if targets else 0,
        "timing_cache": "",
        "progress": str(model.with_name("progress.jsonl")),
        "cancel": str(model.with_name("cancel")),
    }


def inspect_plan(
    path: Path,
    *,
    library: TensorRtLibrary,
    host_code: bool,
    shapes: Mapping[str, tuple[int, ...]],
) -> PlanReport:
    """What a plan is on the GPU here; its layers and their times are written beside it.

    In a process of its own, after the build's, because loading a plan may crash.

    Args:
        host_code: whether the plan may bring code of its own (version-compatible plans do).
        shapes: of all inputs, that layers are timed at.
    """
    with tempfile.TemporaryDirectory(prefix="enginegate-inspect-") as name:
        report_path = Path(name) / "report.json"
        job = {
            "command": "inspect",
            "parent": os.getpid(),
            "report": str(report_path),
            "module": library.module,
            "plan": str(path),
            "host_code": host_code,
            "layers": str(path.with_name(LAYERS_FILE)),
            "shapes": {name: list(shape) for name, shape in shapes.items()},
        }
        (Path(name) / "job.json").write_text(json.dumps(job))
        with path.with_name(LOG_FILE).open("ab") as log:
            process = _started(library, Path(name) / "job.json", log)
            with _ended(process):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_INSPECT_S)
                hangs = process.poll() is None
        found = read_report(report_path)
    if found is None:
        why = f"took more than {_INSPECT_S:g} s" if hangs else ending(process.returncode)
        return PlanReport(error=f"The process that loaded the plan {why}.")
    if found.get("error"):
        return PlanReport(error=str(found["error"]))
    tensors, times = found["tensors"], found["layer_ms"]
    assert isinstance(tensors, list)  # noqa: S101 - our own program wrote it
    assert isinstance(times, dict)  # noqa: S101
    if times:
        write_file(path.with_name(TIMES_FILE), json.dumps(times, indent=1).encode() + b"\n")
    specs = {
        each["name"]: TensorSpec(name=each["name"], dtype=each["dtype"], shape=each["shape"])
        for each in tensors
    }
    return PlanReport(
        specs=specs,
        device_bytes=found["device_bytes"],
        layer_ms=times,
        cuda_driver=found.get("cuda_driver", ""),
    )


def log_progress(plan: BuildPlan) -> Callable[[BuildStep], None]:
    """Tells the logger ``enginegate.build`` where a build is, every two seconds at most."""
    told_at = time.monotonic()

    def tell(step: BuildStep) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _QUIET_S:
            told_at = time.monotonic()
            _log.info("%s: %s, step %d of %d", plan.candidate, step.phase, step.step, step.steps)

    return tell


class _Build:
    """One plan's build, of one attempt or two."""

    def __init__(
        self,
        plan: BuildPlan,
        library: TensorRtLibrary,
        job: dict[str, Any],
        scratch: Path,
        log: Path,
    ) -> None:
        self.plan, self.library, self.job = plan, library, job
        self.scratch, self.log = scratch, log
        self.table = plan.table_as(TensorRtTable)

    def attempt(self, level: int | None, budget_s: float) -> BuildReport:
        """Build at a level.

        Raises:
            BuildError: the library refused, or the process died.
            _OutOfTimeError: it was not done in time.
        """
        report_path = self.scratch / "report.json"
        job = {**self.job, "optimization_level": level, "report": str(report_path)}
        (self.scratch / "job.json").write_text(json.dumps(job))
        with self.log.open("ab") as log:
            process = _started(self.library, self.scratch / "job.json", log)
            with _ended(process):
                try:
                    self._watch(process, time.monotonic() + budget_s)
                except _OutOfMemoryError:
                    raise self._failed("went over its limit") from None
        found = read_report(report_path)
        if found is None:
            raise self._failed(ending(process.returncode), process.returncode)
        return self._accepted(BuildReport.model_validate(found))

    def _watch(self, process: "subprocess.Popen[bytes]", deadline: float) -> None:
        """Forward steps until the process ends.

        The builder is asked to stop through its progress monitor first, so that it ends in order.
        """
        tell, position = log_progress(self.plan), 0
        progress, limit = Path(self.job["progress"]), self.table.memory_mib * 2**20
        base = _held_bytes(process.pid)
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            for line in (steps := _steps(progress, position)).splitlines():
                tell(BuildStep.model_validate_json(line))
            position += len(steps)
            if not self.job["memory_mib"] and _held_bytes(process.pid) - base > limit:
                raise _OutOfMemoryError
            if process.poll() is None and time.monotonic() > deadline:
                if self.library.tells_progress:
                    Path(self.job["cancel"]).touch()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_S)
                raise _OutOfTimeError

    def out_of_time(self, spent: str) -> BuildError:
        """Why a build that was stopped is an error, and what makes the next one quicker."""
        remedy = "Raise it under [tensorrt]."
        if not self.library.is_rtx:
            remedy = (
                "Raise it under [tensorrt], lower builder_optimization_level there (0 to 5; the "
                'library\'s own choice is 3), or set when_slow = "lower".'
            )
        if self.job["timing_cache"]:
            remedy += " Kernel timings of a build that was stopped are not kept."
        return BuildError(
            f"Building {self.plan.candidate} took longer than timeout_s = "
            f"{self.table.timeout_s:g} and was stopped{spent}. {remedy}\n{_tail(self.log)}"
        )

    def _accepted(self, report: BuildReport) -> BuildReport:
        if report.error:
            raise BuildError(
                f"{self.plan.toolchain} cannot build {self.plan.candidate} for "
                f"{'+'.join(self.job['targets']) or 'this GPU'} from opset "
                f"{self.plan.onnx.opset}: {report.error}{self._memory_hint()}\n{_tail(self.log)}"
            )
        return report

    def _failed(self, how: str, code: int = 0) -> BuildError:
        return BuildError(
            f"The process that built {self.plan.candidate} {how}."
            f"{self._memory_hint(code, over=not code)}\n{_tail(self.log)}"
        )

    def _memory_hint(self, code: int = 0, *, over: bool = False) -> str:
        text, limit = self.log.read_text(errors="replace"), self.table.memory_mib
        if over or any(sign in text for sign in _OUT_OF_MEMORY):
            return f" It ran out of memory: raise memory_mib = {limit} in [tensorrt]."
        if code == -signal.SIGKILL:
            return (
                " The kernel kills so when the machine's memory is used up: lower memory_mib = "
                f"{limit} in [tensorrt], or build on a larger machine."
            )
        return ""


def _attempts(
    build: _Build, table: TensorRtTable, settings: BuilderSettings
) -> tuple[BuildReport, int | None]:
    """Build within ``timeout_s``: once, or a second time at a lower level where the policy says so.

    Returns:
        The report, and the level that the plan was built at; None is the library's own.
    """
    level, lowered = settings.optimization_level, settings.lowered
    if table.when_slow == "fail" or lowered is None or build.library.is_rtx:
        try:
            return build.attempt(level, table.timeout_s), level
        except _OutOfTimeError:
            raise build.out_of_time("") from None
    began = time.monotonic()
    try:
        return build.attempt(level, FIRST_ATTEMPT * table.timeout_s), level
    except _OutOfTimeError:
        _log.warning(
            "%s: not built after %.0f s, so once more at builder_optimization_level = %d",
            build.plan.candidate,
            time.monotonic() - began,
            lowered,
        )
    Path(build.job["cancel"]).unlink(missing_ok=True)
    try:
        return build.attempt(lowered, table.timeout_s - (time.monotonic() - began)), lowered
    except _OutOfTimeError:
        tried = f", at builder_optimization_level {lowered} too"
        raise build.out_of_time(tried) from None


def _started(library: TensorRtLibrary, job: Path, log: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own program, in the user's own interpreter
        worker_command(library.python, job),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=worker_environment(library.python),
    )


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """The process is over when the block ends, however it ends."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _held_bytes(pid: int) -> int:
    """Memory that a process holds for itself, without files that it maps; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _timing_file(plan: BuildPlan, path: Path) -> Path:
    """One file a version and GPU, beside the store's engines."""
    name = "".join(c if c.isalnum() else "-" for c in plan.toolchain)
    return path.parent.parent / f".timing-{name}.cache"


@contextmanager
def _timings(lent: str, kept: Path) -> Iterator[None]:
    """Lend the builder the timings of earlier builds, and keep its own when it ends well."""
    if lent and kept.is_file():
        Path(lent).write_bytes(kept.read_bytes())
    yield
    if lent and Path(lent).is_file():
        write_file(kept, Path(lent).read_bytes())


def _steps(path: Path, position: int) -> bytes:
    """Whole lines written since."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(position)
        new = file.read()
    return new[: new.rfind(b"\n") + 1]


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "[TRT] [I]" not in line]
    shown = "\n".join(f"  {line}" for line in told[-_TAIL_LINES:])
    return f"The builder's log ends:\n{shown}" if shown else ""
