"""How far ONNX is from its framework at each number, and what to tell about the worst one.

Most outputs are compared as they are. The logarithm of a probability is not: 1 - 0.999998 computed
in float32 is wrong by up to a unit of float32's last place at 1, which is nothing for a probability
and 0.06 for its logarithm. So the smaller of two probabilities is raised by what float32 cannot
resolve near 1 before their logarithms are compared.
"""

from dataclasses import dataclass

import numpy as np

from enginegate.data import Array

_UNIT = float(np.finfo(np.float32).eps)  # of float32's last place at 1
_UNRESOLVED = 4 * _UNIT  # of a probability: a sum, a subtraction, a division and two roundings
_ROUNDING = 64  # units of the last place that sums in another order may differ by
_NEAR = 10  # times the limit


@dataclass(frozen=True, slots=True)
class Worst:
    """The number at which two answers are farthest apart.

    Attributes:
        error: how far, as the limit is meant; infinite for another shape, NaN or infinity.
        place: indices within the sample's output; empty for a single number or another shape.
        expected: the framework's number, or its shape.
        given: ONNX's.
        logarithm: whether both are logarithms of probabilities.
    """

    error: float
    place: tuple[int, ...]
    expected: float | tuple[int, ...]
    given: float | tuple[int, ...]
    logarithm: bool

    def __str__(self) -> str:
        if isinstance(self.expected, tuple) or isinstance(self.given, tuple):
            return f"the framework's has the shape {self.expected}, ONNX's {self.given}"
        shown = f"{self.expected:.9g} in the framework, {self.given:.9g} in ONNX"
        if not self.logarithm:
            return shown
        chances = f"{np.exp(self.expected):.4g} and {np.exp(self.given):.4g}"
        return f"{shown}; as probabilities {chances}"

    def advice(self, limit: float) -> str:
        """What to do next, one or two sentences."""
        if isinstance(self.expected, tuple) or isinstance(self.given, tuple):
            return "The export changed the output's shape: find the operation that does."
        if not np.isfinite(self.given) or not np.isfinite(self.expected):
            side = "ONNX" if np.isfinite(self.expected) else "The framework itself"
            return f"{side} gives no finite number there; no limit mends that. Find the operation."
        units = self.error / (_UNIT * max(abs(self.expected), 1e-30))
        if not self.logarithm and units <= _ROUNDING:
            return (
                f"That is about {units:.2g} of float32's last places at this value, so it is "
                "rounding, not the export: set parity_max_abs_error under [model] to what is small "
                f"for such outputs, for example {2 * self.error:.1g}."
            )
        if self.error <= _NEAR * limit:
            return (
                "That is near the limit, as rounding in another order is: if it is harmless, raise "
                "parity_max_abs_error under [model]; else find the operation."
            )
        if self.logarithm:
            return (
                "Some step of the pipeline computes otherwise in ONNX: compare them one by one. "
                "Trees differ where a feature lies at a threshold, because ONNX keeps thresholds "
                "in float32: fit them on float32 features."
            )
        return "The export changed the model: find the operation."


def worst_of(expected: Array, given: Array, *, logarithm: bool = False) -> Worst:
    """Where two answers to one sample are farthest apart; equal numbers differ by 0.

    Args:
        expected: the framework's.
        given: ONNX's; the same shape, or it is infinitely far.
        logarithm: whether both are logarithms of probabilities.
    """
    if expected.shape != given.shape:
        return Worst(float("inf"), (), expected.shape, given.shape, logarithm)
    if expected.size == 0:
        return Worst(0.0, (), 0.0, 0.0, logarithm)
    left, right = expected.astype(np.float64), given.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = _of_logarithms(left, right) if logarithm else np.abs(left - right)
    apart = np.where(left == right, 0.0, apart)
    ranked = np.where(np.isnan(apart), np.inf, apart)
    place = tuple(int(index) for index in np.unravel_index(int(ranked.argmax()), ranked.shape))
    at = float(left[place]), float(right[place])
    return Worst(float(ranked[place]), place, *at, logarithm)


def _of_logarithms(left: Array, right: Array) -> Array:
    """Of the logarithms, with the smaller probability raised by what float32 does not resolve."""
    first, second = np.exp(left), np.exp(right)
    larger, smaller = np.maximum(first, second), np.minimum(first, second) + _UNRESOLVED
    found: Array = np.maximum(np.log(larger / smaller), 0.0)
    return found
