"""The process that builds a plan: started, kept within its time and memory, and its ending read."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from enginegate.candidate import Precision
from enginegate.engines.plan import BuildPlan
from enginegate.engines.tensorrt_job import Job, Report
from enginegate.errors import BuildError

LOG_FILE = "build.log"
_TAIL_LINES = 12
_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "Resource temporarily unavailable", "OutOfMemory")


def compile_plan(
    plan: BuildPlan, onnx: bytes, path: Path, *, library: str, targets: tuple[str, ...]
) -> Report:
    """Build a plan file from converted ONNX, with its log beside it.

    Args:
        path: where the plan is written.
        library: ``tensorrt`` or ``tensorrt_rtx``.
        targets: compute capabilities to build for; empty means the GPU here.

    Raises:
        BuildError: the library refused, or the process died or went over a limit.
    """
    with tempfile.TemporaryDirectory(prefix="enginegate-plan-") as scratch:
        job = Job(
            library=library,
            onnx=Path(scratch) / "model.onnx",
            plan=path,
            inputs=plan.onnx.inputs,
            max_batch_size=plan.max_batch_size,
            tf32=plan.candidate.precision is Precision.TF32,
            targets=targets,
            workspace_mib=plan.tensorrt.workspace_mib,
            memory_mib=plan.tensorrt.memory_mib,
        )
        job.onnx.write_bytes(onnx)
        return _run(plan, job, log=path.with_name(LOG_FILE))


def builder_command(job: Path, report: Path) -> list[str]:
    """How the process is started; its working folder is not on its import path."""
    module = "enginegate.engines.tensorrt_build"
    return [sys.executable, "-P", "-m", module, str(job), str(report)]


def _run(plan: BuildPlan, job: Job, *, log: Path) -> Report:
    job_path, report_path = job.onnx.with_name("job.json"), job.onnx.with_name("report.json")
    job_path.write_bytes(job.canonical_json())
    with log.open("wb") as output:
        try:
            ended = subprocess.run(  # noqa: S603 - our own module
                builder_command(job_path, report_path),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=plan.tensorrt.timeout_s,
                check=False,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"Building {plan.candidate} took longer than timeout_s = "
                f"{plan.tensorrt.timeout_s:g} and was stopped. Raise it under [tensorrt].\n"
                f"{_tail(log)}"
            ) from error
    if not report_path.is_file():
        raise BuildError(
            f"The process that built {plan.candidate} {_ending(ended.returncode)}."
            f"{_memory_hint(plan, log)}\n{_tail(log)}"
        )
    report = Report.read(report_path)
    if report.error:
        raise BuildError(
            f"{plan.toolchain} cannot build {plan.candidate} for "
            f"{'+'.join(job.targets) or 'this GPU'}: {report.error}{_memory_hint(plan, log)}\n"
            f"{_tail(log)}"
        )
    return report


def _ending(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )


def _memory_hint(plan: BuildPlan, log: Path) -> str:
    text = log.read_text(errors="replace")
    if not any(sign in text for sign in _OUT_OF_MEMORY):
        return ""
    return f" It ran out of memory: raise memory_mib = {plan.tensorrt.memory_mib} in [tensorrt]."


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "[TRT] [I]" not in line]
    ending = "\n".join(f"  {line}" for line in told[-_TAIL_LINES:])
    return f"The builder's log ends:\n{ending}" if ending else ""
