"""Whether a 16-bit or FP8 form of a model stays within range on real samples: run, then judged."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from enginegate.candidate import Candidate, Precision, Sha256
from enginegate.data import DataSet, Tensors
from enginegate.errors import BuildError
from enginegate.evidence import Finding, Outcome
from enginegate.messages import counted
from enginegate.policy import CalibrationTable
from enginegate.precision.convert import convert
from enginegate.precision.deadline import run_in_time
from enginegate.precision.emulation import Emulation, emulation
from enginegate.precision.session import open_session
from enginegate.records import Record, sha256_bytes

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

EMULATED = frozenset({Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8})
_HALVES = frozenset({Precision.FP16, Precision.BF16})
_ROWS = 32
_NAMED = 5


class Peak(Record):
    """A node whose result left the range of its type."""

    node: str
    magnitude: float | None = None


class RangeReport(Record):
    """What magnitudes occurred.

    Attributes:
        finite_max: largest value the type holds; None for FP8 and INT8, which saturate.
        peak: largest magnitude of any result, None if Inf or NaN.
        overflowing: nodes beyond it, in the order they run; the first is where it began.
        nonfinite: samples with NaN or Inf in an output.
    """

    samples: int
    finite_max: float | None
    peak: float | None
    overflowing: tuple[Peak, ...]
    nonfinite: int


@dataclass(slots=True)
class EmulatedRunner:
    """A candidate's arithmetic on a CPU; has what a runner has, and knows what range it saw."""

    session: "InferenceSession"
    emulation: Emulation | None
    outputs: tuple[str, ...]
    peaks: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    nonfinite: int = 0

    @property
    def device(self) -> str:
        """Never a device that the candidate is for."""
        return "emulated on CPUExecutionProvider"

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows from 1."""
        rows = len(next(iter(inputs.values())))
        parts = [
            self._once({name: array[start : start + _ROWS] for name, array in inputs.items()})
            for start in range(0, rows, _ROWS)
        ]
        answers = {name: np.concatenate([part[name] for part in parts]) for name in self.outputs}
        self.samples += rows
        self.nonfinite += _nonfinite_rows(answers, rows)
        return answers

    def report(self) -> RangeReport:
        """What was seen in all runs so far."""
        found = self.emulation
        beyond = [
            Peak(node=node, magnitude=peak if math.isfinite(peak) else None)
            for node, peak in self.peaks.items()
            if found is not None and not peak < found.overflows_at
        ]
        highest = max(self.peaks.values(), default=0.0)
        return RangeReport(
            samples=self.samples,
            finite_max=found.finite_max if found else None,
            peak=highest if math.isfinite(highest) else None,
            overflowing=tuple(beyond),
            nonfinite=self.nonfinite,
        )

    def _once(self, inputs: Tensors) -> Tensors:
        watched = self.emulation.watched if self.emulation else {}
        names = [*self.outputs, *watched]
        answers = dict(zip(names, run_in_time(self.session, names, inputs), strict=True))
        for name, node in watched.items():
            peak = float(answers.pop(name))
            seen = self.peaks.get(node, 0.0)
            self.peaks[node] = math.inf if math.isnan(peak) else max(seen, peak)
        return answers


@contextmanager
def emulated(
    source: Path,
    candidate: Candidate,
    *,
    data: DataSet | None,
    rules: CalibrationTable,
    keep: tuple[str, ...] = (),
    converted_sha256: Sha256 | None = None,
) -> Iterator[EmulatedRunner]:
    """A candidate of TensorRT, run on this machine's CPU with its own range and rounding.

    FP16 and BF16 through pairs of casts; INT8 and FP8 through their Quantize/Dequantize pairs,
    which saturate. It says nothing about a GPU's kernels, order of additions or speed.

    Args:
        source: the FP32 ONNX file of the store.
        data: calibration samples, as for `convert`.
        rules: how they are read.
        keep: nodes that stay FP32: the engine's ``kept_nodes``.
        converted_sha256: the engine's; refuses to emulate anything but what was compiled.

    Raises:
        BuildError: the model cannot be converted or emulated, or converts to something else.
        DataError: INT8 or FP8 without calibration data.
    """
    what = f"{candidate} of {source}"
    content = convert(source, candidate, data=data, rules=rules, keep=keep).onnx
    if converted_sha256 not in {None, sha256_bytes(content)}:
        raise BuildError(
            f"{what} converts to {sha256_bytes(content)[:12]} now, and {converted_sha256} was "
            "compiled: the tools or the calibration data changed since. Build it again."
        )
    model = onnx.load_from_string(content)
    outputs = tuple(value.name for value in model.graph.output)
    found = emulation(model, what=what) if candidate.precision in _HALVES else None
    runnable = found.model if found else model
    yield EmulatedRunner(open_session(runnable.SerializeToString(), what=what), found, outputs)


def judge_range(report: RangeReport, scope: str) -> Finding:
    """Failed if anything left the range of its type; no samples is inconclusive."""
    outcome, reason = _decided(report)
    return Finding(
        gate="emulated_range",
        scope=scope,
        outcome=outcome,
        reason=reason,
        value=_kept_peak(report),
        limit=report.finite_max,
        relation="<=" if report.finite_max is not None else None,
        samples=report.samples,
        remedy=""
        if outcome is Outcome.PASSED
        else "Keep those nodes at fp32 (repair does), use bf16, or scale that layer down.",
    )


def _kept_peak(report: RangeReport) -> float | None:
    """The largest value as its type holds it: what does not overflow is rounded to what it has."""
    if report.peak is None or report.finite_max is None or report.overflowing:
        return report.peak
    return min(report.peak, report.finite_max)


def _decided(report: RangeReport) -> tuple[Outcome, str]:
    if report.samples == 0:
        return Outcome.INCONCLUSIVE, "nothing was run, so no range is known"
    if report.overflowing:
        first, count = report.overflowing[0], len(report.overflowing)
        reached = "Inf" if first.magnitude is None else f"{first.magnitude:.4g}"
        named = ", ".join(peak.node for peak in report.overflowing[1:_NAMED])
        more = f"; then {named}{' and more' if count > _NAMED else ''}" if count > 1 else ""
        reason = (
            f"{counted(count, 'node overflows', 'nodes overflow')} on {report.samples} "
            f"samples: {first.node} reaches {reached} "
            f"> {report.finite_max:.5g}{more}"
        )
        return Outcome.FAILED, reason
    if report.nonfinite:
        reason = f"{report.nonfinite} of {report.samples} samples give NaN or Inf"
        return Outcome.FAILED, reason
    if report.finite_max is None:
        return Outcome.PASSED, f"values saturate; {report.samples} samples give finite outputs"
    peak = _kept_peak(report)
    reason = f"largest value {peak:.4g} <= {report.finite_max:.5g}; {report.samples} samples"
    return Outcome.PASSED, reason


def _nonfinite_rows(answers: Tensors, rows: int) -> int:
    bad = np.zeros(rows, dtype=np.bool_)
    for array in answers.values():
        if array.dtype.kind == "f":
            bad |= ~np.isfinite(array).reshape(rows, -1).all(axis=1)
    return int(bad.sum())
