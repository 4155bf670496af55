"""Whether an ONNX model answers as it should: for any size of its axes, and like its framework.

Running the model is somebody else's job: callers pass in what opens it.

Most outputs are compared as they are. The logarithm of a probability is not: 1 - 0.999998 computed
in float32 is wrong by up to a unit of float32's last place at 1, which is nothing for a probability
and 0.06 for its logarithm. So the smaller of two probabilities is raised by what float32 cannot
resolve near 1 before their logarithms are compared.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import InputError, ModelError, TookTooLongError
from enginegate.messages import first_line
from enginegate.sources.types import Framework

PARITY_SAMPLES = 256
BATCH_SIZES = (1, 2, 7)  # one, even and odd: enough to show an axis that was fixed
_ROWS = 32  # a batch of the comparison: small enough for detectors' outputs
_LENGTH_ROWS = 4  # rows do not matter where lengths are proven
_UNIT = float(np.finfo(np.float32).eps)  # of float32's last place at 1
_UNRESOLVED = 4 * _UNIT  # of a probability: a sum, a subtraction, a division and two roundings
_ROUNDING = 64  # units of the last place that sums in another order may differ by
_NEAR = 10  # times the limit


class RunnableModel(Protocol):
    """An opened model."""

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows."""
        ...


OpenOnnx: TypeAlias = Callable[[Path], AbstractContextManager[RunnableModel]]


class Parity(NamedTuple):
    """How far ONNX is from its framework, over real samples."""

    max_abs_error: float
    samples: int


@dataclass(frozen=True, slots=True)
class Difference:
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
        """The next step, in one or two sentences."""
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


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """An ONNX model that runs, and what its answers are compared with.

    Attributes:
        framework: the model's own answers; None if the source is ONNX itself.
        limit: largest difference allowed, in units of the outputs.
        origin: what the model is called in messages.
        logarithms: outputs that are logarithms of probabilities.
    """

    model: RunnableModel
    data: DataSet
    framework: Framework | None
    limit: float
    origin: str
    logarithms: frozenset[str] = frozenset()

    def difference(self, output: str, expected: Array, given: Array) -> Difference:
        """How far two answers are apart in this output."""
        return largest_difference(expected, given, logarithm=output in self.logarithms)


def prove_batch_sizes(tested: ModelUnderTest) -> tuple[int, ...]:
    """Run several batch sizes; a sample's answer may not depend on its company."""
    inputs, limit, origin = tested.data.inputs, tested.limit, tested.origin
    rows = np.arange(max(BATCH_SIZES)) % len(tested.data)
    together = tested.model.run({name: array[rows] for name, array in inputs.items()})
    for size in BATCH_SIZES:
        answers = tested.model.run({name: array[rows[:size]] for name, array in inputs.items()})
        for name, values in answers.items():
            if len(values) != size:
                raise ModelError(
                    f"{origin}: output {name!r} has {len(values)} rows for {size} samples, so "
                    "requests cannot be batched. Its first axis must be the batch."
                )
            worst = tested.difference(name, together[name][:size], values)
            if not worst.error <= limit:
                raise ModelError(
                    f"{origin}: output {name!r} of the same samples differs by {worst.error:.3g} "
                    f"between batches of {size} and {len(rows)} (limit {limit:g}). Samples "
                    "influence one another, as batch normalisation in training mode makes them do."
                )
    return BATCH_SIZES


def prove_lengths(
    tested: ModelUnderTest, name: str, places: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    """Run real samples cut to several sizes of one dynamic axis, and compare with the framework.

    A size that the framework itself refuses (an image smaller than a kernel) proves nothing and is
    left out.

    Args:
        name: the axis's name.
        places: the inputs and axes that have this size.
    """
    samples = tested.data.head(_LENGTH_ROWS).inputs
    longest = min(samples[given].shape[axis] for given, axis in places)
    sizes = sorted(
        {max(1, longest // 2), max(1, longest - 1), longest, *([1] if tested.framework else [])}
    )
    run = []
    for size in sizes:
        cut = dict(samples)
        for given, axis in places:
            cut[given] = np.ascontiguousarray(np.take(cut[given], range(size), axis=axis))
        if _runs(tested, cut, f"{name} = {size}"):
            run.append(size)
    if len(run) < min(2, longest):
        raise ModelError(
            f"{tested.origin}: {name} is dynamic, but of the sizes {sizes} the model takes "
            f"only {run}, so nothing shows that it may vary. Export it with that axis fixed, "
            "or give longer samples."
        )
    return tuple(run)


def measure_parity(tested: ModelUnderTest) -> Parity | None:
    """Compare outputs over the first samples of the data; None without a framework.

    Raises:
        ModelError: a difference is over the limit or not a number; names the worst sample, both
            numbers, and how many samples are over the limit.
    """
    if tested.framework is None:
        return None
    worst: tuple[Difference, str, str] | None = None
    samples, over = tested.data.head(PARITY_SAMPLES), set[str]()
    for start, inputs in zip(range(0, len(samples), _ROWS), samples.batches(_ROWS), strict=True):
        answers = tested.model.run(inputs)
        for name, expected in tested.framework(inputs).items():
            for row, (left, right) in enumerate(zip(expected, answers[name], strict=True)):
                sample = str(samples.ids[start + row])
                apart = tested.difference(name, np.asarray(left), np.asarray(right))
                if not apart.error <= tested.limit:
                    over.add(sample)
                if worst is None or apart.error > worst[0].error:
                    worst = apart, name, sample
    if worst is None:
        return Parity(0.0, len(samples))
    apart, output, sample = worst
    if over:
        place = f"{output}{list(apart.place)}" if apart.place else output
        raise ModelError(
            f"{tested.origin}: ONNX and the framework differ by up to {apart.error:.3g} (limit "
            f"parity_max_abs_error = {tested.limit:g}), in {len(over)} of {len(samples)} samples "
            f"of {tested.data.origin} by more than that. The worst is {place} of sample {sample}: "
            f"{apart}.\n{apart.advice(tested.limit)}"
        )
    return Parity(apart.error, len(samples))


def largest_difference(expected: Array, given: Array, *, logarithm: bool = False) -> Difference:
    """Where two answers to one sample are farthest apart; equal numbers differ by 0."""
    if expected.shape != given.shape:
        return Difference(float("inf"), (), expected.shape, given.shape, logarithm)
    if expected.size == 0:
        return Difference(0.0, (), 0.0, 0.0, logarithm)
    left, right = expected.astype(np.float64), given.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if logarithm:
            larger = np.exp(np.maximum(left, right))
            smaller = np.exp(np.minimum(left, right)) + _UNRESOLVED
            apart = np.maximum(np.log(larger / smaller), 0.0)
        else:
            apart = np.abs(left - right)
    apart = np.where(left == right, 0.0, apart)
    ranked = np.where(np.isnan(apart), np.inf, apart)
    place = tuple(int(index) for index in np.unravel_index(int(ranked.argmax()), ranked.shape))
    at = float(left[place]), float(right[place])
    return Difference(float(ranked[place]), place, *at, logarithm)


def _runs(tested: ModelUnderTest, inputs: Tensors, case: str) -> bool:
    """Whether a size was run and answered alike; False if the framework itself refuses it."""
    expected: Tensors = {}
    if tested.framework is not None:
        try:
            expected = tested.framework(inputs)
        except InputError:
            return False
    try:
        answers = tested.model.run(inputs)
    except TookTooLongError:
        raise
    except Exception as error:
        raise ModelError(
            f"{tested.origin}: {case} cannot be run: {first_line(error)}\n"
            "The model says that this axis is dynamic. Export it again so that it is, or with the "
            "axis fixed."
        ) from error
    rows = max(len(array) for array in inputs.values())
    for output, values in answers.items():
        if len(values) != rows:
            raise ModelError(
                f"{tested.origin}: {case}: output {output!r} has {len(values)} rows for {rows} "
                "samples."
            )
    for output, values in expected.items():
        worst = tested.difference(output, values, answers[output])
        if not worst.error <= tested.limit:
            raise ModelError(
                f"{tested.origin}: with {case}, ONNX and the framework differ by "
                f"{worst.error:.3g} in output {output!r} (limit {tested.limit:g}). The export "
                "fixed a size that varies: export it again with that axis dynamic."
            )
    return True
