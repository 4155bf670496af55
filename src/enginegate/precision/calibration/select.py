"""Which calibration method suits a model: each is tried, and judged on samples it has not seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from enginegate.policy import CalibrationTable
from enginegate.precision.calibration.methods import METHODS, ActivationRange, Histogram
from enginegate.precision.quantise import Prepared, with_pairs
from enginegate.precision.sample import CalibrationSample
from enginegate.precision.session import open_session, outputs_of, relative_error

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

_HELD_OUT = 4  # one sample in this many
_FOR_FP8 = ("max", "percentile")


@dataclass(frozen=True, slots=True)
class Ranges:
    """The range of every activation, and how it was found.

    Attributes:
        by_tensor: ranges by tensor name.
        method: one of `ranges.METHODS`.
        how: the method and, if it was chosen, what each one's error was.
    """

    by_tensor: Mapping[str, ActivationRange]
    method: str
    how: str


def ranges_for(
    prepared: Prepared, sample: CalibrationSample, rules: CalibrationTable, scratch: Path
) -> Ranges:
    """Ranges by the policy's method; ``auto`` takes the one of least error on held-out samples.

    The error is the outputs' root mean square error against FP32, over their spread. The chosen
    method's ranges are then taken from all samples. FP8's levels are not equal steps, so entropy
    does not apply to it and means ``max``.
    """
    method = "max" if prepared.form.is_fp8 and rules.method == "entropy" else rules.method
    if method != "auto":
        seen = prepared.histograms(sample, scratch)
        return Ranges(prepared.ranges(seen, METHODS[method]), method, method)
    fitted, held = sample.split(_HELD_OUT)
    seen = prepared.histograms(fitted, scratch)
    errors = _errors(prepared, seen, held)
    best = min(errors, key=lambda name: errors[name])
    if held is not sample:
        rest = prepared.histograms(held, scratch)
        seen = {name: seen[name].merge(rest[name]) for name in seen}
    shown = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    how = f"{best}, the best of {shown} on {len(held)} held-out samples"
    return Ranges(prepared.ranges(seen, METHODS[best]), best, how)


def _errors(
    prepared: Prepared, seen: Mapping[str, Histogram], held: CalibrationSample
) -> dict[str, float]:
    exact = outputs_of(_session(prepared.model, prepared), held)
    names = _FOR_FP8 if prepared.form.is_fp8 else tuple(METHODS)
    found = {}
    for name in names:
        tried = with_pairs(prepared, prepared.ranges(seen, METHODS[name]))
        found[name] = relative_error(exact, outputs_of(_session(tried, prepared), held))
    return found


def _session(model: ModelProto, prepared: Prepared) -> "InferenceSession":
    return open_session(model.SerializeToString(), what=f"A form of {prepared.origin}")
