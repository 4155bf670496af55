"""Parts of the data that nobody named: by FP32's confidence, the input's norm, sequence length.

Traits are noted sample by sample while the data streams by, and cut into parts at the end. They
come from the input and from FP32 only, so every candidate is judged on the same parts.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp  # type: ignore[import-untyped]

from enginegate.data import Array, DataSet
from enginegate.errors import DataError, PolicyError
from validation.output_spec import Trait
from validation.shape_checks import flat

_CONFIDENCES = (0.5, 0.9, 0.99)
_QUARTERS = (0.25, 0.5, 0.75)


def traits_of(wanted: tuple[Trait, ...], data: DataSet, logits: Array | None) -> dict[str, Array]:
    """Each trait of N samples, shape ``(N,)``.

    Args:
        wanted: traits by name.
        data: the samples.
        logits: FP32's class logits, shape ``(N, C)``; None if the output has none.

    Raises:
        PolicyError: confidence was asked of an output without classes.
        DataError: the length was asked, and no input is a sequence.
    """
    found: dict[str, Array] = {}
    if "confidence" in wanted:
        if logits is None:
            raise PolicyError(
                "slices.discover names confidence, and this output has no classes. Leave it out."
            )
        wide = logits.astype(np.float64)
        found["confidence"] = np.exp(wide.max(axis=1) - logsumexp(wide, axis=1))
    if "input_norm" in wanted:
        found["input_norm"] = _norms(data)
    if "length" in wanted:
        found["length"] = _lengths(data)
    return found


def parts_of(traits: Mapping[str, Array], taken: Iterable[str]) -> dict[str, NDArray[np.str_]]:
    """A slice column for each trait, by its name.

    Raises:
        DataError: a name is among those ``taken`` by the data's own slice columns.
    """
    if clash := sorted(traits.keys() & set(taken)):
        raise DataError(
            f"The data has slice columns {clash}, which slices.discover would make too. Rename the "
            "columns, or leave those names out of slices.discover."
        )
    return {name: _cut(name, values) for name, values in traits.items()}


def _norms(data: DataSet) -> NDArray[np.float64]:
    squares = np.zeros(len(data))
    for array in data.inputs.values():
        if array.dtype.kind == "f":
            wide = flat(array)
            squares += np.einsum("nv,nv->n", wide, wide)
    return np.sqrt(squares)


def _lengths(data: DataSet) -> NDArray[np.int64]:
    sequences = {n: a for n, a in data.inputs.items() if a.ndim == 2 and a.dtype.kind in "iub"}  # noqa: PLR2004 - (samples, positions)
    if not sequences:
        raise DataError(
            f"{data.origin}: slices.discover names length, and no input holds sequences (whole "
            f"numbers, shape (samples, positions)); inputs: {sorted(data.inputs)}. Leave it out."
        )
    array = sequences.get("attention_mask", next(iter(sequences.values())))
    return np.asarray((array != 0).sum(axis=1), dtype=np.int64)


def _cut(name: str, values: Array) -> NDArray[np.str_]:
    if name == "confidence":
        return _named(values, np.array(_CONFIDENCES), "below {:g}", "{:g} and up")
    if name == "length":
        ends = 2 ** np.arange(0, int(values.max(initial=1)).bit_length() + 1)
        return np.array([f"up to {ends[i]}" for i in np.searchsorted(ends, values)], dtype=np.str_)
    edges = np.quantile(values, _QUARTERS) if len(values) else np.array(_QUARTERS)
    names = np.array(["lowest quarter", "second quarter", "third quarter", "highest quarter"])
    return np.asarray(names[np.searchsorted(edges, values, side="right")])


def _named(values: Array, edges: Array, first: str, last: str) -> NDArray[np.str_]:
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    names = np.array([first.format(edges[0]), *between, last.format(edges[-1])])
    return np.asarray(names[np.searchsorted(edges, values, side="right")])
