"""Which calibration method suits a model: each is tried, and judged on samples it has not seen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from onnx import ModelProto

from enginegate.engine_kinds import QuantisedForm
from enginegate.policy import CalibrationTable
from enginegate.precision.calibration.histograms import histograms
from enginegate.precision.calibration.methods import METHODS, ActivationRange, Histogram, whole
from enginegate.precision.calibration.sample import CalibrationSample
from enginegate.precision.session import (
    ON_CPU,
    CalibrationProvider,
    open_measuring_session,
    outputs_of,
    relative_error,
)

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

# One sample in this many judges the methods; the rest fits them. More judges better and fits worse.
HELD_OUT = 4
_FOR_FP8 = ("max", "percentile")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model ready to be calibrated and quantised.

    Attributes:
        model: shapes inferred, constants folded, every node with a name.
        form: how its runtime wants it.
        operators: types of the nodes that get pairs.
        origin: the file, for messages.
        note: what could not be inferred of it; empty if all could.
        provider: what runs it on the samples.
    """

    model: ModelProto
    form: QuantisedForm
    operators: tuple[str, ...]
    origin: str
    note: str = ""
    provider: CalibrationProvider = ON_CPU

    def histograms(self, sample: CalibrationSample, scratch: Path) -> dict[str, Histogram]:
        """What its activations are on the sample."""
        return histograms(
            self.model,
            scratch,
            operators=self.operators,
            sample=sample,
            provider=self.provider.name,
        )

    def ranges(self, seen: Mapping[str, Histogram], method: str) -> dict[str, ActivationRange]:
        """A range for each activation, by one of `METHODS`.

        Callers see the outputs: their largest values decide, so outputs are never clipped.
        """
        outputs = {value.name for value in self.model.graph.output}
        return {
            name: whole(histogram) if name in outputs else METHODS[method](histogram)
            for name, histogram in seen.items()
        }


Quantise: TypeAlias = Callable[[Prepared, Mapping[str, ActivationRange]], ModelProto]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The range of every activation, and how it was found.

    Attributes:
        by_tensor: ranges by tensor name.
        method: one of `METHODS`.
        how: the method and, if it was chosen, what each one's error was.
    """

    by_tensor: Mapping[str, ActivationRange]
    method: str
    how: str


def ranges_for(
    prepared: Prepared,
    quantise: Quantise,
    sample: CalibrationSample,
    rules: CalibrationTable,
    scratch: Path,
) -> Ranges:
    """Ranges by the policy's method; ``auto`` takes the one of least error on held-out samples.

    The error is the outputs' root mean square error against FP32, over their spread. The chosen
    method's ranges are then taken from all samples. FP8's levels are not equal steps, so entropy
    does not apply to it and means ``max``.
    """
    method = "max" if prepared.form.is_fp8 and rules.method == "entropy" else rules.method
    if method != "auto":
        seen = prepared.histograms(sample, scratch)
        return Ranges(prepared.ranges(seen, method), method, method)
    fitted, held = sample.split(HELD_OUT)
    seen = prepared.histograms(fitted, scratch)
    errors = _errors(prepared, quantise, seen, held)
    best, how = least_error(errors, held)
    if held is not sample:
        rest = prepared.histograms(held, scratch)
        seen = {name: seen[name].merge(rest[name]) for name in seen}
    return Ranges(prepared.ranges(seen, best), best, how)


def least_error(errors: Mapping[str, float], held: CalibrationSample) -> tuple[str, str]:
    """The method of least error on held-out samples, and a clause that says so."""
    best = min(errors, key=lambda name: errors[name])
    shown = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    return best, f"{best}, the best of {shown} on {len(held)} held-out samples"


def _errors(
    prepared: Prepared,
    quantise: Quantise,
    seen: Mapping[str, Histogram],
    held: CalibrationSample,
) -> dict[str, float]:
    exact = outputs_of(_session(prepared.model, prepared), held)
    names = _FOR_FP8 if prepared.form.is_fp8 else tuple(METHODS)
    found = {}
    for name in names:
        tried = quantise(prepared, prepared.ranges(seen, name))
        found[name] = relative_error(exact, outputs_of(_session(tried, prepared), held))
    return found


def _session(model: ModelProto, prepared: Prepared) -> "InferenceSession":
    return open_measuring_session(
        model.SerializeToString(),
        what=f"A form of {prepared.origin}",
        provider=prepared.provider.name,
    )
