"""How a candidate's outputs differ from FP32's, sample by sample: arrays in, numbers out.

Shape suffixes: N samples, C classes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax  # type: ignore[import-untyped]

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

NO_CLASS = -1
_SHOWN_IDS = 5
_SLICE_NAME = re.compile(r"[\w][\w .:+-]*")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Reference and candidate on the same N samples. Arrays have shape ``(N,)``, in data order.

    A sample with NaN or Inf in any of the candidate's outputs counts as the worst possible: no
    class, wrong, infinite divergence and error.

    Attributes:
        scope: which samples, e.g. evaluation or shadow.
        ids: text, unique.
        slices: by column name, text.
        top1_reference: class index.
        top1_candidate: class index; NO_CLASS where nonfinite.
        correct_reference: None without labels.
        correct_candidate: None without labels; False where nonfinite.
        kl_nats: KL(reference || candidate) of the softmax; ``inf`` where nonfinite.
        max_abs_error: largest difference over all output values; ``inf`` where nonfinite.
        nonfinite: whether the candidate gave NaN or Inf.
    """

    scope: str
    ids: NDArray[np.str_]
    slices: Mapping[str, NDArray[np.str_]]
    top1_reference: NDArray[np.int64]
    top1_candidate: NDArray[np.int64]
    correct_reference: NDArray[np.bool_] | None
    correct_candidate: NDArray[np.bool_] | None
    kl_nats: NDArray[np.float64]
    max_abs_error: NDArray[np.float64]
    nonfinite: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def top1_match(self) -> NDArray[np.bool_]:
        """Whether both name the same class."""
        return np.equal(self.top1_reference, self.top1_candidate)

    @property
    def accuracy_delta(self) -> NDArray[np.int8] | None:
        """Candidate minus reference correctness: -1 lost, 0 same, 1 gained; None without labels."""
        if self.correct_reference is None or self.correct_candidate is None:
            return None
        return self.correct_candidate.astype(np.int8) - self.correct_reference.astype(np.int8)

    def frame(self) -> "pd.DataFrame":
        """One row a sample: its id, each measurement, and ``slice.NAME`` for each slice column."""
        import pandas as pd  # noqa: PLC0415 - slow to import, needed only when judging

        columns: dict[str, Array] = {
            "sample_id": self.ids,
            "top1_reference": self.top1_reference,
            "top1_candidate": self.top1_candidate,
            "top1_match": self.top1_match,
            "kl_nats": self.kl_nats,
            "max_abs_error": self.max_abs_error,
            "nonfinite": self.nonfinite,
        }
        delta = self.accuracy_delta
        if delta is not None:
            columns["accuracy_delta"] = delta
        columns |= {f"slice.{name}": values for name, values in self.slices.items()}
        return pd.DataFrame(columns)


def compare(
    reference: Tensors, candidate: Tensors, data: DataSet, scope: str, *, logits: str = ""
) -> Comparison:
    """Compare the outputs of two engines on the same samples.

    Args:
        reference: FP32 outputs by name, each of shape ``(N, ...)``.
        candidate: outputs of the same names, types and shapes.
        data: the N samples they were computed from.
        scope: which samples these are, e.g. evaluation or shadow.
        logits: name of the output that holds class logits ``(N, C)``; the first if empty.

    Raises:
        DataError: outputs differ in name, type or shape, or do not have one row a sample; there are
            no logits; a label is no class; or the reference itself gave NaN or Inf.
    """
    _check_same_form(reference, candidate, data)
    name = logits or next(iter(reference))
    _check_logits(reference, name)
    _check_reference_finite(reference, data)
    _check_labels(data, reference[name].shape[1], name)
    _check_slice_names(data)
    nonfinite = _nonfinite_rows(candidate, len(data))
    top1_reference = reference[name].argmax(axis=1)
    top1_candidate = np.where(nonfinite, NO_CLASS, candidate[name].argmax(axis=1))
    return Comparison(
        scope=scope,
        ids=data.ids,
        slices=data.slices,
        top1_reference=top1_reference,
        top1_candidate=top1_candidate,
        correct_reference=None if data.labels is None else top1_reference == data.labels,
        correct_candidate=None if data.labels is None else top1_candidate == data.labels,
        kl_nats=np.where(nonfinite, np.inf, kl_divergence(reference[name], candidate[name])),
        max_abs_error=np.where(nonfinite, np.inf, _max_abs_error(reference, candidate, len(data))),
        nonfinite=nonfinite,
    )


def concatenate(parts: Sequence[Comparison]) -> Comparison:
    """One comparison of the samples of several, in order; for data that is run in pieces.

    Raises:
        DataError: there are none, or they differ in scope, slice columns or in having labels.
    """
    forms = {(part.scope, tuple(part.slices), part.correct_reference is None) for part in parts}
    if len(forms) != 1:
        raise DataError(
            f"Only comparisons of one scope, with the same slice columns and all with or all "
            f"without labels, make one comparison; {len(parts)} were given, of {len(forms)} kinds."
        )
    joined: dict[str, Array | None] = {}
    for field in fields(Comparison):
        columns = [getattr(part, field.name) for part in parts]
        if field.name not in {"scope", "slices"}:
            joined[field.name] = None if columns[0] is None else np.concatenate(columns)
    slices = {name: np.concatenate([p.slices[name] for p in parts]) for name in parts[0].slices}
    return Comparison(scope=parts[0].scope, slices=slices, **joined)  # type: ignore[arg-type]


def kl_divergence(reference_NC: Array, candidate_NC: Array) -> NDArray[np.float64]:
    """KL(reference || candidate) of the softmax of two logit arrays, per sample.

    Both are promoted to float64 first, so FP16 logits cannot overflow. A candidate row with NaN or
    Inf gives NaN or Inf; the caller says what that means.

    Args:
        reference_NC: finite logits, shape ``(N, C)``.
        candidate_NC: the same shape and class order.

    Returns:
        Shape ``(N,)``, in nats, never negative.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        log_p_NC = log_softmax(reference_NC.astype(np.float64), axis=1)
        log_q_NC = log_softmax(candidate_NC.astype(np.float64), axis=1)
        p_NC = np.exp(log_p_NC)
        terms_NC = np.where(p_NC > 0.0, p_NC * (log_p_NC - log_q_NC), 0.0)
        # Rounding can give -1e-17 where the distributions are equal.
        return np.asarray(np.maximum(terms_NC.sum(axis=1), 0.0))


def _max_abs_error(reference: Tensors, candidate: Tensors, samples: int) -> NDArray[np.float64]:
    worst = np.zeros(samples)
    with np.errstate(invalid="ignore", over="ignore"):
        for name, expected in reference.items():
            difference = candidate[name].astype(np.float64) - expected.astype(np.float64)
            worst = np.maximum(
                worst, np.abs(difference).max(axis=_beyond_first(difference), initial=0)
            )
    return worst


def _nonfinite_rows(outputs: Tensors, samples: int) -> NDArray[np.bool_]:
    bad = np.zeros(samples, dtype=np.bool_)
    for array in outputs.values():
        if array.dtype.kind == "f":
            bad |= ~np.isfinite(array).all(axis=_beyond_first(array))
    return bad


def _beyond_first(array: Array) -> tuple[int, ...]:
    return tuple(range(1, array.ndim))


def _check_same_form(reference: Tensors, candidate: Tensors, data: DataSet) -> None:
    if not reference or set(reference) != set(candidate):
        raise DataError(
            f"The reference gives outputs {sorted(reference)}, the candidate {sorted(candidate)}. "
            "A candidate must keep the model's outputs: build it again from the same ONNX model."
        )
    for name, expected in reference.items():
        given = candidate[name]
        if (expected.dtype, expected.shape) != (given.dtype, given.shape):
            raise DataError(
                f"Output {name!r} is {expected.dtype}{list(expected.shape)} from the reference and "
                f"{given.dtype}{list(given.shape)} from the candidate. They must have one type and "
                "shape: build the candidate again from the same ONNX model, with its output types."
            )
        if expected.ndim == 0 or len(expected) != len(data):
            raise DataError(
                f"Output {name!r} has shape {expected.shape} for {len(data)} samples of "
                f"{data.origin}; its first axis must be the sample."
            )
        if expected.dtype.kind not in "fiub":
            raise DataError(f"Output {name!r} is {expected.dtype}; only numbers can be compared.")


def _check_logits(reference: Tensors, name: str) -> None:
    array = reference.get(name)
    if array is None or array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind != "f":  # noqa: PLR2004 - (samples, classes), two classes at least
        found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise DataError(
            f"Output {name!r} should hold class logits, floating point of shape (samples, classes "
            f">= 2); it is {found}. Make the logits the model's first output."
        )


def _check_reference_finite(reference: Tensors, data: DataSet) -> None:
    bad = np.flatnonzero(_nonfinite_rows(reference, len(data)))
    if len(bad):
        shown = ", ".join(str(data.ids[row]) for row in bad[:_SHOWN_IDS])
        raise DataError(
            f"The FP32 reference itself gives NaN or Inf on {len(bad)} of {len(data)} samples of "
            f"{data.origin} (first ids: {shown}), so there is nothing to compare with. Remove "
            "those samples, or repair the model."
        )


def _check_labels(data: DataSet, classes: int, name: str) -> None:
    if data.labels is None or len(data.labels) == 0:
        return
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{data.origin}: labels run from {low} to {high}, but output {name!r} has {classes} "
            f"classes (0 to {classes - 1}). The data or the model is of another set of classes."
        )


def _check_slice_names(data: DataSet) -> None:
    bad = [name for name in data.slices if not _SLICE_NAME.fullmatch(name)]
    if bad:
        raise DataError(
            f"{data.origin}: slice column names may hold letters, digits, space and _ . : + - "
            f"only; rename {', '.join(map(repr, bad))}."
        )
