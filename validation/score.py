"""How well answers fit labels, sample by sample: one column a metric, ready to be judged paired.

What a column holds depends on the metric (`paired_form`):

- *right or wrong* (top1, topk, recall): candidate minus reference, -1, 0 or 1;
- *macro F1*: label, FP32's class and the candidate's class, 21 bits each;
- *numbers* (mae, rmse, r2, cosine, MODULE:CALLABLE): a complex number, FP32's score as its real
  part and the candidate's as its imaginary part, so that both travel in one column. Of r2 it is the
  squared error until all samples are together (`in_variances`);
- *counts* (miou, dice, label_f1, micro_f1): counts by class, see `validation.metrics.class_counts`;
- *boxes* (map, map50): matched boxes, see `validation.metrics.boxes`.
"""

import importlib
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, DataSet
from enginegate.errors import DataError, PolicyError
from enginegate.policy.gates import Metric
from validation.outputs import OutputSpec, flat, labels_of_output

GALLERY = 1024  # samples that one is ranked among; blocks of them start at multiples of it
BITS = 21
NONE = (1 << BITS) - 1  # the class of a sample that has none
ACCURACY = "accuracy"  # what no metric may be called: whether the top class is the label
PairedForm = Literal["binary", "classes", "numbers", "counts", "boxes"]
_COUNTED = frozenset({"miou", "dice", "label_f1", "micro_f1"})
# Labels of these are never the one class of each sample that the data's array ``label`` holds.
_OWN_LABELS = frozenset({"mae", "rmse", "r2", "cosine", "exact_match", "map", "map50"}) | _COUNTED


def paired_form(kind: str) -> PairedForm:
    """What a metric's column holds; the top of this file says what each means."""
    if kind in {"top1", "topk", "recall", "exact_match"}:
        return "binary"
    if kind in _COUNTED:
        return "counts"
    if kind in {"map", "map50"}:
        return "boxes"
    return "classes" if kind == "macro_f1" else "numbers"


def labels_for(data: DataSet, output: str, kind: str, *, alone: bool = False) -> Array | None:
    """The labels a metric needs: the output's own, else the data's classes; None without any.

    Args:
        alone: whether the model has other outputs, whose labels these classes may be.
    """
    own = labels_of_output(data, output, alone=alone)
    if own is not None:
        return own
    counts = kind in {"mae", "rmse", "r2"} and not alone  # whole numbers are numbers
    return data.labels if counts or kind not in _OWN_LABELS else None


def labels_by_measure(data: DataSet, output: str, asked: OutputSpec) -> dict[str, Array]:
    """The labels of each metric, and of `ACCURACY` where the output has classes; by name."""
    kinds = {name: metric.kind for name, metric in asked.metrics.items()}
    if asked.task == "classification":
        kinds[ACCURACY] = "top1"
    found = (
        (name, labels_for(data, output, kind, alone=asked.alone)) for name, kind in kinds.items()
    )
    return {name: labels for name, labels in found if labels is not None}


def own_score(metric: Metric, reference: Array, labels: Array) -> NDArray[np.bool_] | None:
    """Whether FP32 is right, shape ``(N,)``; None where the metric's column holds it."""
    if paired_form(metric.kind) != "binary":
        return None
    return _scorer(metric)(reference, labels).astype(np.bool_)


def score(
    metric: Metric,
    reference: Array,
    candidate: Array,
    labels: Array,
    nonfinite: NDArray[np.bool_],
    *,
    own: NDArray[np.bool_] | None = None,
) -> Array:
    """The metric's column, shape ``(N,)``. A nonfinite sample has the worst score there is.

    Args:
        metric: what is measured.
        reference: FP32's output, shape ``(N, ...)``.
        candidate: the same shape.
        labels: shape ``(N, ...)``.
        nonfinite: samples where the candidate gave NaN or Inf.
        own: what `own_score` gave for FP32, where that is known already.

    Raises:
        PolicyError: a MODULE:CALLABLE cannot be imported, or does not give one score a sample.
    """
    form = paired_form(metric.kind)
    safe = np.where(_like(nonfinite, candidate), 0, candidate)
    if form == "classes":
        picked = np.where(nonfinite, NONE, safe.argmax(axis=1)).astype(np.int64)
        label = labels.astype(np.int64) << 2 * BITS
        return np.asarray(label | (reference.argmax(axis=1) << BITS) | picked)
    one = _scorer(metric)
    expected = one(reference, labels) if own is None else own
    found = one(safe, labels)
    if form == "binary":
        right = found.astype(np.bool_) & ~nonfinite
        return right.astype(np.int8) - expected.astype(np.bool_).astype(np.int8)
    worst = np.inf if metric.kind in {"mae", "rmse", "r2"} else -np.inf
    paired = np.empty(len(labels), dtype=np.complex128)
    paired.real = expected
    paired.imag = np.where(nonfinite, worst, found)
    return paired


def in_variances(column: Array, targets: Array) -> Array:
    """Columns of squared errors as r2: one less the error in variances of the targets.

    The variance is that of all the targets, also where a slice is judged: a slice of targets that
    hardly differ has a variance of its own that says nothing. Several values a sample count
    together, weighted by their variance (`sklearn.metrics.r2_score`, ``variance_weighted``).

    Args:
        column: squared errors of FP32 and of the candidate, complex, shape ``(N,)``.
        targets: of all samples, shape ``(N, ...)``.
    """
    variance = target_variance(targets)
    scaled = np.empty_like(column)
    scaled.real = 1.0 - column.real / variance
    scaled.imag = 1.0 - column.imag / variance
    return scaled


def target_variance(targets: Array) -> float:
    """Mean over the values of a sample of their variance; 1 where nothing varies."""
    return float(flat(targets).var(axis=0).mean()) or 1.0


def _scorer(metric: Metric) -> Callable[[Array, Array], Array]:
    k = 1 if metric.kind == "top1" else metric.k
    known: dict[str, Callable[[Array, Array], Array]] = {
        "top1": lambda output, labels: _in_top(output, labels, 1),
        "topk": lambda output, labels: _in_top(output, labels, k),
        "recall": lambda output, labels: _recalled(output, labels, k),
        "mae": lambda output, labels: np.abs(_errors(output, labels)).mean(axis=1),
        "rmse": lambda output, labels: np.square(_errors(output, labels)).mean(axis=1),
        "r2": lambda output, labels: np.square(_errors(output, labels)).mean(axis=1),
        "cosine": _cosines,
    }
    return known.get(metric.kind) or _own(metric.kind)


def _in_top(logits: Array, labels: Array, k: int) -> NDArray[np.bool_]:
    """Whether fewer than k classes beat the label's. Ties go to the lower index, as in argmax."""
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    ahead = (logits > own).sum(axis=1)
    ahead += ((logits == own) & (np.arange(logits.shape[1]) < labels[:, None])).sum(axis=1)
    return np.asarray(ahead < k)


def _errors(output: Array, targets: Array) -> NDArray[np.float64]:
    """Differences, shape ``(N, values)``."""
    if math.prod(output.shape[1:]) != math.prod(targets.shape[1:]):
        raise DataError(
            f"The labels have shape {targets.shape} where the output has {output.shape}; they must "
            "hold one number for each that is predicted."
        )
    return np.asarray(flat(output) - flat(targets))


def _cosines(output: Array, targets: Array) -> NDArray[np.float64]:
    return np.asarray((_unit(output) * _unit(targets)).sum(axis=1))


def _recalled(vectors: Array, labels: Array, k: int) -> NDArray[np.bool_]:
    """Whether one of a sample's k nearest others, by cosine, in its block has its label."""
    found = np.zeros(len(labels), dtype=np.bool_)
    for start in range(0, len(labels), GALLERY):
        block = slice(start, start + GALLERY)
        unit = _unit(vectors[block])
        near = unit @ unit.T
        np.fill_diagonal(near, -np.inf)
        count = min(k, len(unit) - 1)
        nearest = np.argpartition(-near, count - 1, axis=1)[:, :count] if count > 0 else None
        if nearest is not None:
            own = labels[block]
            found[block] = (own[nearest] == own[:, None]).any(axis=1)
    return found


def _unit(vectors: Array) -> NDArray[np.float64]:
    wide = flat(vectors)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(wide, length, out=np.zeros_like(wide), where=length > 0.0)
    return unit


def _own(name: str) -> Callable[[Array, Array], Array]:
    module, _, attribute = name.partition(":")
    try:
        scorer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"The metric {name!r} cannot be loaded: {error}. It is MODULE:CALLABLE, and the module "
            "must be importable where candidates are judged."
        ) from error

    def checked(output: Array, labels: Array) -> Array:
        scores = np.asarray(scorer(output, labels), dtype=np.float64)
        if scores.shape != (len(labels),) or not np.isfinite(scores).all():
            raise PolicyError(
                f"The metric {name!r} must give one finite score a sample, shape ({len(labels)},); "
                f"it gave shape {scores.shape}."
            )
        return scores

    return checked


def _like(flags: NDArray[np.bool_], array: Array) -> NDArray[np.bool_]:
    return flags.reshape(len(flags), *([1] * (array.ndim - 1)))
