"""Whether an ONNX model answers as it should: for any batch size, and like its framework.

Running the model is somebody else's job: callers pass in what opens it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import ModelError

PARITY_SAMPLES = 256
BATCH_SIZES = (1, 2, 7)
_ROWS = 32


class Runs(Protocol):
    """An opened model."""

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs by name, for any number of rows."""
        ...


OpenOnnx: TypeAlias = Callable[[Path], AbstractContextManager[Runs]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far ONNX is from its framework, over real samples."""

    max_abs_error: float
    samples: int


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


def measure_parity(
    framework: Callable[[Tensors], Tensors],
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
