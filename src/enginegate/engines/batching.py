"""Any number of rows through a model that takes a few at a time; and one batch, many times."""

import time
from collections.abc import Callable

import numpy as np

from enginegate.candidate import TensorSpec
from enginegate.data import Array, Tensors
from enginegate.errors import DataError


def run_rows(
    inputs: Tensors,
    specs: tuple[TensorSpec, ...],
    *,
    limit: int,
    run_once: Callable[[Tensors], Tensors],
) -> Tensors:
    """Outputs of all rows, from runs of at most ``limit`` rows.

    Raises:
        DataError: an input is missing, unknown, or not what ``specs`` says, or their rows differ.
    """
    rows = check_rows(inputs, specs)
    parts = [
        run_once({n: np.ascontiguousarray(a[start : start + limit]) for n, a in inputs.items()})
        for start in range(0, rows, limit)
    ]
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_batch(inputs: Tensors, specs: tuple[TensorSpec, ...], *, limit: int) -> int:
    """How many rows the inputs of one run have.

    Raises:
        DataError: as `check_rows` does, or there are more than ``limit``.
    """
    rows = check_rows(inputs, specs)
    if rows > limit:
        raise DataError(f"One run takes at most {limit} rows, and {rows} were given.")
    return rows


def timed_repeat(
    run_once: Callable[[], object], wait: Callable[[], object] = lambda: None
) -> Callable[[int], float]:
    """Seconds that so many runs take, one queued after the other and all waited for at the end."""

    def repeat(count: int) -> float:
        started_s = time.perf_counter()
        for _ in range(count):
            run_once()
        wait()
        return time.perf_counter() - started_s

    return repeat


def check_rows(inputs: Tensors, specs: tuple[TensorSpec, ...]) -> int:
    """How many rows the inputs have.

    Raises:
        DataError: an input is missing, unknown, or not what ``specs`` says, or their rows differ.
    """
    wanted = {spec.name: spec for spec in specs}
    if set(inputs) != set(wanted):
        raise DataError(f"Given inputs {sorted(inputs)}; the model takes {sorted(wanted)}.")
    for name, array in inputs.items():
        if array.dtype.name != wanted[name].dtype or not _fits(array, wanted[name]):
            raise DataError(
                f"Input {name!r} is {array.dtype.name} of shape {array.shape}; the model takes "
                f"{wanted[name]}."
            )
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise DataError(f"Inputs need the same number of rows, at least one: {counts}.")
    return next(iter(counts.values()))


def _fits(array: Array, spec: TensorSpec) -> bool:
    return array.ndim == len(spec.shape) and all(
        axis in {-1, size} for axis, size in zip(spec.shape[1:], array.shape[1:], strict=True)
    )
