"""Whether an ONNX model answers as it should: for any size of its axes, and like its framework.

Running the model is somebody else's job: callers pass in what opens it.

Most outputs are compared as they are. The logarithm of a probability is not: 1 - 0.999998 computed
in float32 is wrong by up to a unit of float32's last place at 1, which is nothing for a probability
and 0.06 for its logarithm. So the smaller of two probabilities is raised by what float32 cannot
resolve near 1 before their logarithms are compared.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import InputError, ModelError, TookTooLongError
from enginegate.sources.types import Framework

PARITY_SAMPLES = 256
BATCH_SIZES = (1, 2, 7)
_ROWS = 32
_LENGTH_ROWS = 4
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


class Runs(Protocol):
    """An opened model."""

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows."""
        ...


OpenOnnx: TypeAlias = Callable[[Path], AbstractContextManager[Runs]]


Axes: TypeAlias = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far ONNX is from its framework, over real samples (`differences`)."""

    max_abs_error: float
    samples: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an ONNX model was seen to do.

    Attributes:
        batch_sizes: sizes that were run.
        lengths: sizes that were run of every other dynamic axis, by the axis's name.
        parity: None if there is no framework to compare with.
    """

    batch_sizes: tuple[int, ...]
    lengths: dict[str, tuple[int, ...]]
    parity: Parity | None


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """What is examined, on what, and against what.

    Attributes:
        framework: the model's own answers; None if the source is ONNX itself.
        limit: largest difference allowed, in units of the outputs.
        origin: what the model is called in messages.
        logarithms: outputs that are logarithms of probabilities.
    """

    model: Runs
    data: DataSet
    framework: Framework | None
    limit: float
    origin: str
    logarithms: frozenset[str] = frozenset()


def examine(trial: BatchTrial, axes: Axes) -> Evidence:
    """Everything that must hold of an ONNX model with these dynamic axes; see the functions below.

    Raises:
        ModelError: something does not hold.
    """
    sizes = prove_batch_sizes(trial)
    compared = measure_parity(trial, trial.framework) if trial.framework is not None else None
    lengths = {name: prove_lengths(trial, name, places) for name, places in axes.items()}
    return Evidence(sizes, lengths, compared)


def prove_batch_sizes(trial: BatchTrial) -> tuple[int, ...]:
    """Run several batch sizes; a sample's answer may not depend on its company.

    Returns:
        The batch sizes that were run.

    Raises:
        ModelError: a batch size cannot be run, or changes a sample's answer.
    """
    model, data, limit, origin = trial.model, trial.data, trial.limit, trial.origin
    rows = np.arange(max(BATCH_SIZES)) % len(data)
    together = model.run({name: array[rows] for name, array in data.inputs.items()})
    for size in BATCH_SIZES:
        inputs = {name: array[rows[:size]] for name, array in data.inputs.items()}
        for name, values in model.run(inputs).items():
            if len(values) != size:
                raise ModelError(
                    f"{origin}: output {name!r} has {len(values)} rows for {size} samples, so "
                    "requests cannot be batched. Its first axis must be the batch."
                )
            logarithm = name in trial.logarithms
            worst = worst_of(together[name][:size], values, logarithm=logarithm)
            if not worst.error <= limit:
                raise ModelError(
                    f"{origin}: output {name!r} of the same samples differs by {worst.error:.3g} "
                    f"between batches of {size} and {len(rows)} (limit {limit:g}). Samples "
                    "influence one another, as batch normalisation in training mode makes them do."
                )
    return BATCH_SIZES


def prove_lengths(
    trial: BatchTrial, name: str, places: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    """Run real samples cut to several sizes of one dynamic axis, and compare with the framework.

    A size that the framework itself refuses (an image smaller than a kernel) proves nothing and is
    left out.

    Args:
        name: the axis's name.
        places: the inputs and axes that have this size.

    Returns:
        The sizes that were run, ascending.

    Raises:
        ModelError: a size cannot be run, or is answered unlike the framework.
    """
    samples = trial.data.head(_LENGTH_ROWS).inputs
    longest = min(samples[given].shape[axis] for given, axis in places)
    sizes = {max(1, longest // 2), max(1, longest - 1), longest} | (
        {1} if trial.framework else set()
    )
    run = tuple(
        size for size in sorted(sizes) if _holds(trial, _cut(samples, places, size), name, size)
    )
    if len(run) < min(2, longest):
        raise ModelError(
            f"{trial.origin}: {name} is dynamic, but of the sizes {sorted(sizes)} the model takes "
            f"only {list(run)}, so nothing shows that it may vary. Export it with that axis fixed, "
            "or give longer samples."
        )
    return run


def measure_parity(trial: BatchTrial, framework: Framework) -> Parity:
    """Compare outputs over the first samples of the data.

    Raises:
        ModelError: a difference is over the limit or not a number; names the worst sample, both
            numbers, and how many samples are over the limit.
    """
    found: tuple[Worst, str, str] | None = None
    samples, over = trial.data.head(PARITY_SAMPLES), set[str]()
    for start, inputs in zip(range(0, len(samples), _ROWS), samples.batches(_ROWS), strict=True):
        answers = trial.model.run(inputs)
        for name, expected in framework(inputs).items():
            logarithm = name in trial.logarithms
            for row, (left, right) in enumerate(zip(expected, answers[name], strict=True)):
                sample = str(samples.ids[start + row])
                worst = worst_of(np.asarray(left), np.asarray(right), logarithm=logarithm)
                over |= set() if worst.error <= trial.limit else {sample}
                if found is None or worst.error > found[0].error:
                    found = worst, name, sample
    if found is not None and over:
        raise _unlike(trial, *found, over=len(over), samples=len(samples))
    return Parity(found[0].error if found else 0.0, len(samples))


def _unlike(
    trial: BatchTrial, worst: Worst, output: str, sample: str, *, over: int, samples: int
) -> ModelError:
    place = f"{output}{list(worst.place)}" if worst.place else output
    return ModelError(
        f"{trial.origin}: ONNX and the framework differ by up to {worst.error:.3g} (limit "
        f"parity_max_abs_error = {trial.limit:g}), in {over} of {samples} samples of "
        f"{trial.data.origin} by more than that. The worst is {place} of sample {sample}: "
        f"{worst}.\n{worst.advice(trial.limit)}"
    )


def _cut(inputs: Mapping[str, Array], places: tuple[tuple[str, int], ...], length: int) -> Tensors:
    cut = dict(inputs)
    for name, axis in places:
        cut[name] = np.ascontiguousarray(np.take(cut[name], range(length), axis=axis))
    return cut


def _holds(trial: BatchTrial, inputs: Tensors, name: str, size: int) -> bool:
    """Whether the size was run; False if the framework itself refuses it."""
    expected: Tensors = {}
    if trial.framework is not None:
        try:
            expected = trial.framework(inputs)
        except InputError:
            return False
    answers = _answers(trial.model, inputs, f"{trial.origin}: {name} = {size}")
    for output, values in expected.items():
        logarithm = output in trial.logarithms
        worst = worst_of(values, answers[output], logarithm=logarithm)
        if not worst.error <= trial.limit:
            raise ModelError(
                f"{trial.origin}: with {name} = {size}, ONNX and the framework differ by "
                f"{worst.error:.3g} in output {output!r} (limit {trial.limit:g}). The export "
                "fixed a size that varies: export it again with that axis dynamic."
            )
    return True


def _answers(model: Runs, inputs: Tensors, what: str) -> Tensors:
    try:
        answers = model.run(inputs)
    except TookTooLongError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{what} cannot be run: {first_line}\n"
            "The model says that this axis is dynamic. Export it again so that it is, or with the "
            "axis fixed."
        ) from error
    rows = {len(array) for array in inputs.values()}
    for name, values in answers.items():
        if {len(values)} != rows:
            raise ModelError(
                f"{what}: output {name!r} has {len(values)} rows for {max(rows)} samples."
            )
    return answers
