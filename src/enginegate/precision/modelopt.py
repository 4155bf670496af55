"""NVIDIA ModelOpt, where it is installed: conversions for TensorRT, each in a process of its own.

It is found in this environment, or in the one whose Python ENGINEGATE_MODELOPT names, because it
pins ONNX Runtime's GPU build and changes ONNX Runtime while it runs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from enginegate.candidate import Candidate
from enginegate.engine_kinds import kind_named
from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.precision.calibration import HELD_OUT, CalibrationSample, least_error
from enginegate.precision.onnx_checks import clean_converted
from enginegate.precision.session import open_cpu_session, outputs_of, relative_error

_METHODS = ("max", "entropy")
_TIMEOUT_S = 1800.0
_MAX_BYTES = 2**31 - 1  # of one ONNX file
_SHOWN_CHARACTERS = 2000
_VARIABLE = "ENGINEGATE_MODELOPT"
_JOB = Path(__file__).with_name("modelopt_job.py")
_ASK_VERSION = "from importlib.metadata import version; print(version('nvidia-modelopt'))"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """An interpreter that has ModelOpt."""

    python: str
    version: str


def modelopt_for(candidate: Candidate, rules: CalibrationTable) -> ModelOpt | None:
    """ModelOpt, if it is to convert this candidate; not every kind takes its placement of pairs.

    Raises:
        BuildError: the policy asks for it, and it is not here; or it has no such method.
    """
    if not kind_named(candidate.kind).takes_modelopt or rules.tool == "onnxruntime":
        return None
    found = _find(os.environ.get(_VARIABLE, ""))
    if found is None and rules.tool == "modelopt":
        raise BuildError(
            f"The policy's [calibration] tool is modelopt, and it is not installed here. Run: pip "
            f"install 'enginegate[modelopt]' in an environment of its own and set {_VARIABLE} to "
            'its Python, or set tool = "onnxruntime".'
        )
    if rules.method == "percentile" and candidate.precision.needs_calibration:
        if rules.tool == "modelopt":
            raise BuildError(
                "ModelOpt has no percentile method. Set method to auto, max or entropy, or tool to "
                "onnxruntime, under [calibration]."
            )
        return None
    return found


@cache
def _find(python: str) -> ModelOpt | None:
    if not python and importlib.util.find_spec("modelopt") is None:
        return None
    command = [python or sys.executable, "-c", _ASK_VERSION]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - the user's own interpreter
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{_VARIABLE}={python} cannot be run: {error}.") from error
    if answer.returncode:
        raise BuildError(
            f"{_VARIABLE}={python} has no nvidia-modelopt: {answer.stderr.strip()[-200:]}\n"
            "Install it there, or unset the variable."
        )
    return ModelOpt(command[0], answer.stdout.strip())


def by_modelopt(
    job: "ModelOptJob", sample: CalibrationSample, method: str
) -> tuple[ModelProto, str]:
    """The model at the candidate's precision, and its calibration method (empty for 16 bits).

    Always on real samples: without, ModelOpt makes some up.

    Args:
        sample: what it is calibrated on; read into memory and a file of the scratch folder.
        method: max, entropy, or auto for the one of least error on held-out samples.

    Raises:
        BuildError: ModelOpt fails or takes too long; the log's end is in the message.
    """
    if not job.candidate.precision.needs_calibration:
        return job.run(sample, ""), ""
    if method != "auto":
        return job.run(sample, method), method
    fitted, held = sample.split(HELD_OUT)
    exact = outputs_of(open_cpu_session(job.source, what=str(job.source)), held)
    errors = {}
    for name in _METHODS:
        tried = job.run(fitted, name).SerializeToString()
        session = open_cpu_session(tried, what=f"{job.candidate} by {name}")
        errors[name] = relative_error(exact, outputs_of(session, held))
    best, how = least_error(errors, held)
    return job.run(sample, best), how


@dataclass(frozen=True, slots=True)
class ModelOptJob:
    """One conversion.

    Attributes:
        tool: what runs it.
        source: the FP32 ONNX file.
        batch: samples it reads at a time.
        keep: nodes that stay FP32.
        scratch: a folder for its files.
    """

    tool: ModelOpt
    source: Path
    candidate: Candidate
    batch: int
    keep: tuple[str, ...]
    scratch: Path

    def run(self, sample: CalibrationSample, method: str) -> ModelProto:
        """Convert in a process of its own."""
        data, target = self.scratch / "calibration.npz", self.scratch / "converted.onnx"
        parts = list(sample.batches())
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        np.savez(data, allow_pickle=False, **arrays)
        target.unlink(missing_ok=True)
        described = {
            "source": str(self._copy()),
            "target": str(target),
            "data": str(data),
            "precision": self.candidate.precision.value,
            "method": method,
            "batch": min(self.batch, len(sample)),
            "inputs": {name: array.shape[1:] for name, array in arrays.items()},
            "keep": list(self.keep),
        }
        (self.scratch / "job.json").write_text(json.dumps(described))
        self._process()
        return clean_converted(onnx.load(target), what=f"{self.candidate} by ModelOpt")

    def _copy(self) -> Path:
        """ModelOpt writes into the file that it is given; the store's must stay as it is."""
        path = self.scratch / "source.onnx"
        model = onnx.load(self.source)
        onnx.save(model, path, save_as_external_data=model.ByteSize() > _MAX_BYTES)
        return path

    def _process(self) -> None:
        command = [self.tool.python, "-I", str(_JOB), str(self.scratch / "job.json")]
        log = self.scratch / "modelopt.log"
        with log.open("w") as output:
            try:
                code = subprocess.run(  # noqa: S603 - the user's own interpreter
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.scratch,
                    timeout=_TIMEOUT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise self._failed(f"took more than {_TIMEOUT_S:g} s", log) from error
        if code or not (self.scratch / "converted.onnx").is_file():
            raise self._failed(f"ended with status {code}", log)

    def _failed(self, what: str, log: Path) -> BuildError:
        return BuildError(
            f"ModelOpt {self.tool.version} {what} on {self.candidate} of {self.source}. The end of "
            f"its log:\n{log.read_text(errors='replace')[-_SHOWN_CHARACTERS:]}\n"
            'Set tool = "onnxruntime" under [calibration] to convert without it.'
        )
