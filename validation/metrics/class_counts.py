"""Labels and pixels: many decisions a sample, counted by class.

A column holds five counts for each of C classes, shape ``(N, 5 C)``: how often the class is the
label, how often FP32 was right on it, how often FP32 chose it, then both of the candidate. What is
made of them (Everingham et al. 2010, "The Pascal Visual Object Classes (VOC) Challenge",
International Journal of Computer Vision 88:303-338, for the intersection over union):

- *miou*: right / (labelled + chosen - right), mean over classes;
- *dice*, *label_f1*: 2 right / (labelled + chosen), mean over classes;
- *micro_f1*: the same of all classes together.

Classes without a label in the data are left out of a mean over classes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array
from validation.outputs import OutputSpec, pixel_classes

Floats: TypeAlias = NDArray[np.float64]
_COUNTS = 5


def decisions_of(output: Array, asked: OutputSpec) -> Array:
    """What an engine decided: labels as truth values ``(N, C)``, or each pixel's class."""
    if asked.task == "multi-label":
        return np.asarray(output > asked.threshold)
    if output.dtype.kind in "iub":
        return output
    axis = asked.form.class_axis
    if output.shape[axis] == 1:
        return np.asarray(output.take(0, axis=axis) > asked.threshold).astype(np.int64)
    return np.asarray(output.argmax(axis=axis))


def decision_agreement(reference: Array, candidate: Array, nonfinite: NDArray[np.bool_]) -> Floats:
    """Share of each sample's decisions that are equal, shape ``(N,)``; 0 where nonfinite."""
    beyond_first = tuple(range(1, reference.ndim))
    shares = np.equal(reference, candidate).mean(axis=beyond_first)
    return np.where(nonfinite, 0.0, shares)


def count_labels(
    truth: Array, reference: Array, candidate: Array, nonfinite: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """The column of multi-label answers; all three are truth values of shape ``(N, C)``.

    A nonfinite sample has every label wrong.
    """
    true = truth.astype(np.bool_)
    found = np.where(nonfinite[:, None], ~true, candidate)
    parts = (true, true & reference, reference, true & found, found)
    return np.concatenate([part.astype(np.int32) for part in parts], axis=1)


def count_pixels(
    truth: Array,
    pair: tuple[Array, Array],
    nonfinite: NDArray[np.bool_],
    output: Array,
    asked: OutputSpec,
) -> NDArray[np.int32]:
    """The column of a segmentation; pixels with the label that is ignored are not counted.

    A nonfinite sample has no pixel right.

    Args:
        truth: classes, shape ``(N, ...)``.
        pair: FP32's and the candidate's classes, of that shape.
        nonfinite: samples where the candidate gave NaN or Inf, shape ``(N,)``.
        output: FP32's output, for the number of classes.
        asked: how it is read.
    """
    classes, samples = pixel_classes(output, asked), len(truth)
    labels = truth.reshape(samples, -1)
    scored = labels != asked.form.ignore_label
    rows = np.broadcast_to(np.arange(samples)[:, None], labels.shape)

    def count(chosen: Array, flags: NDArray[np.bool_]) -> NDArray[np.int32]:
        inside = flags & (chosen >= 0) & (chosen < classes)
        cells = rows[inside] * classes + chosen[inside]
        counted = np.bincount(cells, minlength=samples * classes)
        return counted.reshape(samples, classes).astype(np.int32)

    parts = [count(labels, scored)]
    for found, usable in zip(pair, (np.ones_like(nonfinite), ~nonfinite), strict=True):
        chosen = found.reshape(samples, -1)
        known = scored & usable[:, None]
        parts += [count(chosen, known & (chosen == labels)), count(chosen, known)]
    return np.concatenate(parts, axis=1)


def exact_match(truth: Array, decided: Array) -> NDArray[np.bool_]:
    """Whether all labels of a sample are right, shape ``(N,)``."""
    return np.asarray((truth.astype(np.bool_) == decided).all(axis=1))


def classes_of(column: Array) -> dict[int, int]:
    """Samples that hold each class among their labels; classes without a label are absent."""
    labelled = np.count_nonzero(column[:, : column.shape[1] // _COUNTS], axis=0)
    return {int(place): int(labelled[place]) for place in np.flatnonzero(labelled)}


def of_classes(column: Array, kind: str, only: int | None = None) -> Array:
    """The counts of the classes that count, or of a single one, shape ``(N, 5 C')``."""
    if only is None and kind == "micro_f1":  # of all decisions, whatever class they are about
        return column
    wide = column.reshape(len(column), _COUNTS, -1)
    chosen = [only] if only is not None else sorted(classes_of(column))
    return wide[:, :, chosen].reshape(len(column), -1)


def class_score(kind: str, sums: Floats) -> tuple[Floats, Floats]:
    """FP32's and the candidate's score from sums of counts, shape ``(R, 5 C)``; ``(R,)`` each."""
    labels, *rest = np.split(sums, _COUNTS, axis=1)
    first, second = (_SCORES[kind](labels, *pair) for pair in (rest[:2], rest[2:]))
    return first, second


def best_guess(kind: str, column: Array) -> float:
    """The best score of an answer that is one and the same for every sample."""
    labels = column[:, : column.shape[1] // _COUNTS].astype(np.float64)
    total = labels.sum(axis=0)
    total = total[total > 0.0]
    if not len(total):
        return 0.0
    if kind in {"miou", "dice"}:  # every pixel is called the most frequent class
        share = float(total.max() / total.sum())
        return (share if kind == "miou" else 2.0 * share / (1.0 + share)) / len(total)
    named = np.sort(total)[::-1]  # labels are named from the most frequent on, for every sample
    if kind == "label_f1":
        return float((2.0 * named / (named + len(labels))).mean())
    chosen = len(labels) * np.arange(1, len(named) + 1)
    return float((2.0 * named.cumsum() / (named.sum() + chosen)).max())


def _mean_over_classes(shares: Callable[..., Floats]) -> Callable[..., Floats]:
    def score(labels: Floats, right: Floats, chosen: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            by_class = np.where(labels > 0.0, shares(labels, right, chosen), np.nan)
        present = ~np.isnan(by_class)
        counted = present.sum(axis=1)
        total = np.where(present, by_class, 0.0).sum(axis=1)
        empty = np.full(len(total), np.nan)
        return np.asarray(np.divide(total, counted, out=empty, where=counted > 0))

    return score


def _f1_of_all(labels: Floats, right: Floats, chosen: Floats) -> Floats:
    both = (labels + chosen).sum(axis=1)
    right_ones = 2.0 * right.sum(axis=1)
    empty = np.full(len(both), np.nan)
    return np.asarray(np.divide(right_ones, both, out=empty, where=both > 0.0))


_F1 = _mean_over_classes(lambda labels, right, chosen: 2.0 * right / (labels + chosen))
_SCORES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "miou": _mean_over_classes(lambda labels, right, chosen: right / (labels + chosen - right)),
        "dice": _F1,
        "label_f1": _F1,
        "micro_f1": _f1_of_all,
    }
)
