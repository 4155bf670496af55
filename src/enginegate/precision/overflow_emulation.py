"""Whether a 16-bit or FP8 form of a model stays within range on real samples, without its device.

ONNX Runtime on a CPU computes most 16-bit nodes in FP32 and drops the casts between them, so a
model that overflows looks sound there (measured: relative error 0.0003 where ONNX's reference
evaluator gives 0.70), and it has no BF16 kernels. It keeps a Cast to 16 bits that is followed by a
Cast back. So every 16-bit tensor becomes FP32 and passes such a pair: the true range and rounding.
Products are summed in FP32, as tensor cores do. Peaks before each pair become outputs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from enginegate.candidate import Candidate, Sha256
from enginegate.data import DataSet, Tensors
from enginegate.errors import BuildError
from enginegate.evidence import Finding, Outcome
from enginegate.messages import counted
from enginegate.policy import CalibrationTable
from enginegate.precision.convert import convert
from enginegate.precision.deadline import run_in_time
from enginegate.precision.onnx_checks import with_opset
from enginegate.precision.session import open_cpu_session
from enginegate.records import Record, sha256_bytes
from enginegate.sources.onnx_form import graphs

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

# The largest finite value, and the smallest that rounds to infinity: half a step above it.
_HALVES: dict[int, tuple[float, float]] = {
    TensorProto.FLOAT16: (65504.0, 65520.0),
    TensorProto.BFLOAT16: ((2 - 2**-7) * 2.0**127, (2 - 2**-8) * 2.0**127),
}
_REDUCE_OPSET = 18  # from here ReduceMax without axes has one form
_PEAK = "enginegate.peak."
_ROWS = 32  # of one run: more fill memory with the peaks' tensors, fewer cost calls
_NAMED = 5  # overflowing nodes that a finding names; the rest follow from them


@dataclass(frozen=True, slots=True)
class Emulation:
    """A model that can be run anywhere, and where it is watched.

    Attributes:
        model: FP32, with the real model's inputs and outputs first.
        watched: extra output -> node of the 16-bit model whose result it is the peak magnitude of.
        finite_max: the largest finite value of the 16-bit type.
        overflows_at: the smallest magnitude that rounds to infinity.
    """

    model: ModelProto
    watched: dict[str, str]
    finite_max: float
    overflows_at: float


def emulate_16_bit(converted: ModelProto, *, what: str) -> Emulation:
    """The emulation of a 16-bit model.

    Args:
        converted: the very model that is compiled; its inputs and outputs are FP32.
        what: the model, for messages.

    Raises:
        BuildError: it has control flow, or holds no 16-bit tensor.
    """
    if len(list(graphs(converted.graph))) > 1:
        raise BuildError(
            f"{what} has control flow (If, Loop or Scan), whose ranges are not emulated. Judge it "
            "on a GPU."
        )
    typed = onnx.shape_inference.infer_shapes(with_opset(converted, _REDUCE_OPSET, what=what))
    kinds = _halves(typed)
    if not kinds:
        raise BuildError(f"{what} computes nothing in 16 bits, so there is nothing to emulate.")
    watched: dict[str, str] = {}
    nodes = [part for node in typed.graph.node for part in _emulated(node, kinds, watched)]
    del typed.graph.node[:], typed.graph.value_info[:]
    typed.graph.node.extend(nodes)
    for tensor in typed.graph.initializer:
        _widen(tensor)
    typed.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in watched
    )
    finite_max, overflows_at = min(_HALVES[kind] for kind in set(kinds.values()))
    return Emulation(typed, watched, finite_max, overflows_at)


def _halves(model: ModelProto) -> dict[str, int]:
    """16-bit tensors by name."""
    graph = model.graph
    values: Iterator[ValueInfoProto] = iter((*graph.input, *graph.value_info, *graph.output))
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    return {name: kind for name, kind in kinds.items() if kind in _HALVES}


def _emulated(
    node: NodeProto, kinds: dict[str, int], watched: dict[str, str]
) -> Iterator[NodeProto]:
    """The node in FP32, then for each 16-bit output its peak and its pair of casts."""
    wide = NodeProto()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen(attribute.t)
        if attribute.name in {"to", "dtype"} and attribute.i in _HALVES:
            attribute.i = TensorProto.FLOAT
    narrow = [index for index, name in enumerate(node.output) if name in kinds]
    for index in narrow:
        wide.output[index] = f"{node.output[index]}.wide"
    yield wide
    for index in narrow:
        yield from _rounded(node, node.output[index], kinds[node.output[index]], watched)


def _rounded(node: NodeProto, name: str, kind: int, watched: dict[str, str]) -> Iterator[NodeProto]:
    peak = f"{_PEAK}{name}"
    watched[peak] = node.name or name
    yield helper.make_node("Abs", [f"{name}.wide"], [f"{name}.magnitude"])
    yield helper.make_node("ReduceMax", [f"{name}.magnitude"], [peak], keepdims=0)
    yield helper.make_node("Cast", [f"{name}.wide"], [f"{name}.narrow"], to=kind)
    yield helper.make_node("Cast", [f"{name}.narrow"], [name], to=TensorProto.FLOAT)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _HALVES:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


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
def open_emulated(
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
    found = emulate_16_bit(model, what=what) if candidate.precision.is_16_bit else None
    runnable = found.model if found else model
    yield EmulatedRunner(open_cpu_session(runnable.SerializeToString(), what=what), found, outputs)


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
