"""Whether an ONNX model answers as it should: for any size of its axes, and like its framework.

Running the model is somebody else's job: callers pass in what opens it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import InputError, ModelError, TookTooLongError
from enginegate.sources.form import Framework

PARITY_SAMPLES = 256
BATCH_SIZES = (1, 2, 7)
_ROWS = 32
_LENGTH_ROWS = 4


class Runs(Protocol):
    """An opened model."""

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows."""
        ...


OpenOnnx: TypeAlias = Callable[[Path], AbstractContextManager[Runs]]
Axes: TypeAlias = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far ONNX is from its framework, over real samples."""

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
class Trial:
    """What is examined, on what, and against what.

    Attributes:
        framework: the model's own answers; None if the source is ONNX itself.
        limit: largest difference allowed, in units of the outputs.
        origin: what the model is called in messages.
    """

    model: Runs
    data: DataSet
    framework: Framework | None
    limit: float
    origin: str


def examine(trial: Trial, axes: Axes) -> Evidence:
    """Everything that must hold of an ONNX model with these dynamic axes; see the functions below.

    Raises:
        ModelError: something does not hold.
    """
    model, data, limit, origin = trial.model, trial.data, trial.limit, trial.origin
    sizes = prove_batch_sizes(model, data, limit=limit, origin=origin)
    compared = None
    if trial.framework is not None:
        compared = measure_parity(trial.framework, model, data, limit=limit, origin=origin)
    lengths = {name: prove_lengths(trial, name, places) for name, places in axes.items()}
    return Evidence(sizes, lengths, compared)


def prove_batch_sizes(model: Runs, data: DataSet, *, limit: float, origin: str) -> tuple[int, ...]:
    """Run several batch sizes; a sample's answer may not depend on its company.

    Args:
        limit: largest difference allowed, in units of the outputs.

    Returns:
        The batch sizes that were run.

    Raises:
        ModelError: a batch size cannot be run, or changes a sample's answer.
    """
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
            error = max_abs_error(values, together[name][:size])
            if not error <= limit:
                raise ModelError(
                    f"{origin}: output {name!r} of the same samples differs by {error:.3g} between "
                    f"batches of {size} and {len(rows)} (limit {limit:g}). Samples influence one "
                    "another, as batch normalisation in training mode makes them do."
                )
    return BATCH_SIZES


def prove_lengths(trial: Trial, name: str, places: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
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


def measure_parity(
    framework: Framework,
    model: Runs,
    data: DataSet,
    *,
    limit: float,
    origin: str,
) -> Parity:
    """Compare outputs over the first samples of the data.

    Raises:
        ModelError: a difference is over the limit or not a number; names the sample.
    """
    worst = 0.0
    samples = data.head(PARITY_SAMPLES)
    for start, inputs in zip(range(0, len(samples), _ROWS), samples.batches(_ROWS), strict=True):
        answers = model.run(inputs)
        for name, expected in framework(inputs).items():
            for row, (left, right) in enumerate(zip(expected, answers[name], strict=True)):
                error = max_abs_error(left, right)
                if not error <= limit:
                    raise ModelError(
                        f"{origin}: ONNX and the framework differ by {error:.3g} in output "
                        f"{name!r} of sample {samples.ids[start + row]} (limit "
                        "parity_max_abs_error = "
                        f"{limit:g}, {data.origin}). The export changed the model: find the "
                        "operation, or raise the limit under [model] if that error is harmless."
                    )
                worst = max(worst, error)
    return Parity(worst, len(samples))


def max_abs_error(left: Array, right: Array) -> float:
    """Largest absolute difference in float64; NaN if either holds NaN, Inf if shapes differ.

    Equal values differ by 0, infinities included.
    """
    if left.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float(np.where(left == right, 0.0, difference).max(initial=0.0))


def _cut(inputs: Mapping[str, Array], places: tuple[tuple[str, int], ...], length: int) -> Tensors:
    cut = dict(inputs)
    for name, axis in places:
        cut[name] = np.ascontiguousarray(np.take(cut[name], range(length), axis=axis))
    return cut


def _holds(trial: Trial, inputs: Tensors, name: str, size: int) -> bool:
    """Whether the size was run; False if the framework itself refuses it."""
    expected: Tensors = {}
    if trial.framework is not None:
        try:
            expected = trial.framework(inputs)
        except InputError:
            return False
    answers = _answers(trial.model, inputs, f"{trial.origin}: {name} = {size}")
    for output, values in expected.items():
        error = max_abs_error(values, answers[output])
        if not error <= trial.limit:
            raise ModelError(
                f"{trial.origin}: with {name} = {size}, ONNX and the framework differ by "
                f"{error:.3g} in output {output!r} (limit {trial.limit:g}). The export fixed a "
                "size that varies: export it again with that axis dynamic."
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
