"""The process that compiles a package: started, kept within its time and memory, its ending read.

AOTInductor leaks, may crash, and runs a C++ compiler; a build that is stopped leaves nothing.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from enginegate.candidate import ShapeRange, TensorSpec
from enginegate.engines.plan import BuildPlan
from enginegate.errors import BuildError
from enginegate.records import Record
from enginegate.redact import environment_for_others

LOG_FILE = "build.log"
PROGRAM_FILE = "program.pt2"
_TAIL_LINES = 12
_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory")


class TorchInductorTable(Record):
    """How AOTInductor packages are compiled and run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the GPU if PyTorch sees one"
    )
    working_batch: PositiveInt | None = Field(
        default=None,
        description="batch that kernels are chosen for; none: the best batch of [shapes]",
    )
    packages: Literal["dynamic", "per_bucket"] = Field(
        default="dynamic",
        description="one package for every batch, or one a bucket: faster small batches, and the "
        "weights once a bucket",
    )
    batch_buckets: tuple[PositiveInt, ...] = Field(
        default=(), description="batch sizes that run, others are padded; empty: powers of two"
    )
    cuda_graphs: bool = Field(
        default=True, description="replay one captured graph a bucket, where the model allows it"
    )
    autotune: bool = Field(
        default=False,
        description="measure Triton's matrix products against the library's; minutes, not seconds",
    )
    timeout_s: PositiveFloat = Field(
        default=900.0, description="a build is stopped after this long"
    )
    memory_mib: PositiveInt = Field(
        default=16384, description="memory the compiler may use, beyond what CUDA reserves"
    )


class PackageJob(Record):
    """One package to compile, or only to try.

    Attributes:
        program: a torch.export program: FP32, for the CPU; None: the package is there, made by
            something else.
        package: where it is written, or is.
        inputs: names, in the order that the program takes them.
        buckets: batch sizes with a package of their own; empty: one package for 1 to the largest.
        graphs: whether to see if a CUDA graph can be captured.
        profiles: sizes of the inputs with dynamic axes.
        stamp: written into the package's metadata.
        specs: what a package that is there must take, in its order.
        answers: what it must answer, in its order.
    """

    program: Path | None
    package: Path
    precision: str
    device: Literal["cpu", "cuda"]
    inputs: tuple[str, ...]
    max_batch_size: PositiveInt
    working_batch: PositiveInt
    buckets: tuple[PositiveInt, ...]
    profiles: dict[str, ShapeRange]
    autotune: bool
    graphs: bool
    memory_mib: PositiveInt
    stamp: dict[str, str]
    specs: tuple[TensorSpec, ...] = ()
    answers: tuple[TensorSpec, ...] = ()


class PackageReport(Record):
    """What the process did: an error a person can read, or what the program holds."""

    error: str = ""
    weights: NonNegativeInt = Field(default=0, description="weights of layers that multiply")
    statistics: tuple[str, ...] = Field(default=(), description="running means and variances")
    graph_refusal: str = Field(default="", description="why no CUDA graph could be captured")
    tried: dict[str, float] = Field(
        default={}, description="largest difference from eager, relative to the outputs, by batch"
    )


def compile_package(plan: BuildPlan, job: PackageJob) -> PackageReport:
    """Compile a package, or try one that is there, with its log beside it.

    Raises:
        BuildError: torch refused, or the process died or went over a limit.
    """
    log = job.package.with_name(LOG_FILE)
    with tempfile.TemporaryDirectory(prefix="enginegate-package-") as scratch:
        job_path, report_path = Path(scratch) / "job.json", Path(scratch) / "report.json"
        job_path.write_bytes(job.canonical_json())
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own module
                compiler_command(job_path, report_path),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(Path(scratch)),
                start_new_session=True,
            )
            try:
                process.wait(plan.table_as(TorchInductorTable).timeout_s)
            except subprocess.TimeoutExpired:
                limit_s = plan.table_as(TorchInductorTable).timeout_s
                raise BuildError(
                    f"The process that was to {_verb(job)} {plan.candidate} took longer than "
                    f"timeout_s = {limit_s:g} and was stopped. Raise it under [torch_inductor].\n"
                    f"{_tail(log)}"
                ) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it started
                process.wait()
        if not report_path.is_file():
            raise BuildError(
                f"The process that was to {_verb(job)} {plan.candidate} "
                f"{_ending(process.returncode)}."
                f"{_memory_hint(job, log, process.returncode)}\n{_tail(log)}"
            )
        report = PackageReport.read(report_path)
    if report.error:
        raise BuildError(
            f"{plan.toolchain} cannot {_verb(job)} {plan.candidate}: {report.error}"
            f"{_memory_hint(job, log)}\n{_tail(log)}"
        )
    return report


def _verb(job: PackageJob) -> str:
    return "run" if job.program is None else "compile"


def compiler_command(job: Path, report: Path) -> list[str]:
    """How the process is started; its working folder is not on its import path."""
    return [
        sys.executable,
        "-P",
        "-m",
        "enginegate.engines.torch_inductor.build",
        str(job),
        str(report),
    ]


def _environment(scratch: Path) -> dict[str, str]:
    """Inductor's and Triton's caches are the build's own: weights would pile up in shared ones."""
    return environment_for_others() | {
        "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TMPDIR": str(scratch),
        "AOTI_RUNTIME_CHECK_INPUTS": "1",
    }


def _ending(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )


def _memory_hint(job: PackageJob, log: Path, code: int = 0) -> str:
    text = log.read_text(errors="replace")
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return f" It ran out of memory: raise memory_mib = {job.memory_mib} in [torch_inductor]."
    if code == -signal.SIGKILL:
        return (
            " The kernel kills so when the machine's memory is used up: lower memory_mib = "
            f"{job.memory_mib} in [torch_inductor], or build on a larger machine."
        )
    return ""


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ending = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"The compiler's log ends:\n{ending}" if ending else ""
