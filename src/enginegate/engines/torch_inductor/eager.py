"""The model's torch program, run as it is: the speed that every engine must beat.

Nothing is compiled, and the sweep is the one that engines get. It runs in a process of its own
(``python -m …torch_inductor.eager JOB REPORT``), so that PyTorch's memory on the device is given
back before an engine is served.
"""

import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from enginegate.candidate import PROGRAM_FILE, OnnxModel, Precision
from enginegate.data import Tensors
from enginegate.engines.cuda import AMPERE, Device, gpu
from enginegate.engines.engine_sweep import sweep_batches
from enginegate.engines.torch_inductor.library import package_device, torch_version
from enginegate.engines.torch_inductor.run import BucketedPackage
from enginegate.engines.torch_inductor.typed_program import typed_module
from enginegate.errors import EnginegateError, told_by
from enginegate.evidence import BatchSpeed, EagerSpeed
from enginegate.records import Record
from enginegate.redact import environment_for_others

_DIE_WITH_PARENT = 1
# PyTorch's import and the program's reading, on a slow disk.
_START_S = 180.0
_LOG_LINES = 8
_ON_GPU = (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16)
_SAMPLES = "samples.npz"


class EagerJob(Record):
    """What one process measures."""

    program: Path
    samples: Path = Field(description="NumPy archive with as many rows as the largest batch")
    inputs: tuple[str, ...]
    precisions: tuple[Precision, ...]
    device: Device
    sizes: tuple[int, ...]
    limit_s: float = Field(description="for each precision")


class EagerSweep(Record):
    """One precision."""

    precision: Precision
    batches: tuple[BatchSpeed, ...]
    unmeasured: str = ""


class EagerReport(Record):
    """What the process found; ``error`` says why it found nothing."""

    sweeps: tuple[EagerSweep, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class EagerBaseline:
    """How a source's PyTorch model is measured.

    Attributes:
        rows: so many real samples.
        sizes: ascending batch sizes.
        limit_s: for each precision.
    """

    rows: Callable[[int], Tensors]
    sizes: tuple[int, ...]
    limit_s: float

    def measure(
        self, onnx: OnnxModel, folder: Path, wanted: Sequence[Precision]
    ) -> tuple[EagerSpeed, ...]:
        """FP32, and on a GPU the wanted precisions too; nothing where there is no program or torch.

        Raises:
            EnginegateError: the process died, or PyTorch cannot run the program.
            TamperedError: the program is not the one that was recorded.
        """
        library = torch_version()
        if onnx.program is None or library is None:
            return ()
        onnx.program.file.check(folder / PROGRAM_FILE)
        device = package_device("auto")
        with tempfile.TemporaryDirectory(prefix="enginegate-eager-") as scratch:
            samples = Path(scratch) / _SAMPLES
            arrays: dict[str, Any] = dict(self.rows(max(self.sizes)))
            np.savez(samples, **arrays)
            job = EagerJob(
                program=folder / PROGRAM_FILE,
                samples=samples,
                inputs=onnx.program.inputs,
                precisions=eager_precisions(device, wanted),
                device=device,
                sizes=self.sizes,
                limit_s=self.limit_s,
            )
            report = _report(job, Path(scratch))
        return tuple(
            EagerSpeed(
                device=str(gpu()) if device == "cuda" else "CPU",
                inputs_on="device" if device == "cuda" else "host",
                graphs=False,
                batches=each.batches,
                unmeasured=each.unmeasured,
                precision=each.precision,
                library=f"torch {library}",
            )
            for each in report.sweeps
        )


def eager_precisions(device: Device, wanted: Sequence[Precision]) -> tuple[Precision, ...]:
    """On a processor FP32 only: PyTorch emulates 16-bit arithmetic there."""
    found = gpu()
    modern = found is not None and found.capability_number >= AMPERE
    possible = {Precision.FP32}
    if device == "cuda":
        possible |= set(wanted) - (set() if modern else {Precision.TF32, Precision.BF16})
    return tuple(precision for precision in _ON_GPU if precision in possible)


def _report(job: EagerJob, scratch: Path) -> EagerReport:
    job_path, report_path, log = scratch / "job.json", scratch / "report.json", scratch / "log"
    job_path.write_bytes(job.canonical_json())
    command = [sys.executable, "-P", "-m", __name__, str(job_path), str(report_path)]
    limit_s = _START_S + 2.0 * job.limit_s * len(job.precisions)
    with log.open("wb") as output:
        try:
            ended = subprocess.run(  # noqa: S603 - our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=limit_s,
                env=environment_for_others(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EnginegateError(
                f"PyTorch's own model was not measured within {limit_s:g} s and was stopped."
            ) from error
    if not report_path.is_file():
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        raise EnginegateError(
            f"The process that measured PyTorch's own model ended with {ended.returncode}:\n"
            + "\n".join(lines)
        )
    report = EagerReport.read(report_path)
    if report.error:
        raise EnginegateError(f"PyTorch's own model cannot be measured: {report.error}")
    return report


def main(job_path: Path, report_path: Path) -> None:
    """Measure, and write the report; without a report the process died."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = EagerJob.read(job_path)
    try:
        report = EagerReport(sweeps=tuple(_swept(job, each) for each in job.precisions))
    except (EnginegateError, RuntimeError, TypeError, ValueError) as error:
        report = EagerReport(error=told_by(error))
    report_path.write_bytes(report.canonical_json())


def _swept(job: EagerJob, precision: Precision) -> EagerSweep:
    import torch  # noqa: PLC0415

    with np.load(job.samples, allow_pickle=False) as archive:
        samples = {name: archive[name] for name in job.inputs}
    dtypes = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
    module = typed_module(
        torch.export.load(job.program),
        dtype=dtypes.get(precision, torch.float32),
        device=job.device,
    )

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves: list[torch.Tensor] = torch.utils._pytree.tree_leaves(module(*inputs))  # noqa: SLF001
        return leaves

    runner = BucketedPackage(
        dict.fromkeys(job.sizes, call),
        inputs=job.inputs,
        outputs=(),
        device_id=0 if job.device == "cuda" else -1,
        tf32=precision is Precision.TF32,
    )
    found = sweep_batches(
        runner.bound,
        lambda count: {name: array[:count] for name, array in samples.items()},
        job.sizes,
        limit_s=job.limit_s,
    )
    return EagerSweep(precision=precision, batches=found.batches, unmeasured=found.unmeasured)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
