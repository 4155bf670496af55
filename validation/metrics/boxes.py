"""Detection: boxes matched to labelled ones by pycocotools, and their average precision.

pycocotools decides which box finds which label (`COCOeval.evaluateImg`: by score, of one class, at
ten overlaps from 0.5 to 0.95). That concerns one sample at a time, so it is done while the data
streams by. What is left is summed here with a weight for each sample, which `COCOeval.accumulate`
does not have and a bootstrap needs; a test holds both to one number.

A column has shape ``(N, 1 + M + 6 D)`` for M labels and D boxes a sample: M; the labels' classes;
then class, score and a bit for each overlap that it is matched at, of FP32's boxes and of the
candidate's. -1 is the class of nothing.

Lin et al. 2014, "Microsoft COCO: Common Objects in Context", ECCV.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, Tensors
from enginegate.errors import DataError, PolicyError
from validation.outputs import OutputSpec

Floats: TypeAlias = NDArray[np.float64]

MOST_BOXES = 1000  # a sample: detectors give 100 to 300 after suppression, tens of thousands before
MOST_RANKED = 100  # of one class and sample, as COCO counts them
_OVERLAPS: Mapping[str, range] = MappingProxyType({"map": range(10), "map50": range(1)})
_STEPS = 100  # precision is read at recalls of 0, 0.01, ... 1
_ROUNDING = 1e-9  # a recall of 29 in 100 reaches 0.29
_FIRST = np.array([0.5])
_COLUMNS = 6  # x1, y1, x2, y2, score, class
_LABEL = 5  # four numbers and a class
_ANY_AREA = (0.0, float("inf"))
_BLOCK_VALUES = 200_000  # weights held at a time: with what is made of them, about a cache


class Boxes(NamedTuple):
    """Boxes of N samples, up to D each.

    Attributes:
        corners: left, top, width, height, shape ``(N, D, 4)``.
        scores: shape ``(N, D)``.
        classes: shape ``(N, D)``; -1 where there is no box.
    """

    corners: Floats
    scores: Floats
    classes: NDArray[np.int64]


def boxes_of(outputs: Tensors, name: str, asked: OutputSpec) -> Boxes:
    """Boxes that an engine gave; those without score, extent or class are none.

    Raises:
        DataError: the outputs are not of the shapes that the policy declares.
    """
    form, array = asked.form, np.asarray(outputs[name], np.float64)
    if form.scores:
        _check_there(outputs, name, asked)
        scores, classes = (
            np.asarray(outputs[each], np.float64) for each in (form.scores, form.classes)
        )
        wanted = scores.ndim == 2 and array.shape == (*scores.shape, 4)  # noqa: PLR2004 - (samples, boxes)
        if not wanted or classes.shape != scores.shape:
            raise DataError(
                f"Outputs {name!r}, {form.scores!r} and {form.classes!r} should have the shapes "
                f"(samples, boxes, 4), (samples, boxes) and (samples, boxes); they have "
                f"{array.shape}, {scores.shape} and {classes.shape}."
            )
    elif array.ndim != 3 or array.shape[2] != _COLUMNS:  # noqa: PLR2004 - (samples, boxes, 6)
        raise DataError(
            f"Output {name!r} should hold boxes of shape (samples, boxes, 6): x1, y1, x2, y2, "
            f"score, class; it has {array.shape}. Name the outputs with scores and classes as "
            f"scores and classes under [outputs.{name}], and let the model suppress overlaps."
        )
    else:
        array, scores, classes = array[..., :4], array[..., 4], array[..., 5]
    if array.shape[1] > MOST_BOXES:
        raise DataError(
            f"Output {name!r} has {array.shape[1]} boxes a sample, more than {MOST_BOXES}. Let the "
            "model suppress overlapping boxes (NMS) and keep the best."
        )
    return _clean(array, scores, classes, asked)


def labelled_boxes(labels: Array, asked: OutputSpec, origin: str) -> Boxes:
    """Labels of shape ``(N, M, 5)``: four numbers as the output has them, and the class.

    Raises:
        DataError: they are of another shape.
    """
    if labels.ndim != 3 or labels.shape[2] != _LABEL:  # noqa: PLR2004 - (samples, boxes, 5)
        raise DataError(
            f"{origin}: labels of boxes have the shape (samples, boxes, 5), which are four numbers "
            f"of the box ({asked.form.box_format}) and its class, -1 for no box; they have "
            f"{labels.shape}."
        )
    wide = np.asarray(labels, np.float64)
    return _clean(wide[..., :4], np.ones(wide.shape[:2]), wide[..., 4], asked)


def box_column(labels: Boxes, reference: Boxes, candidate: Boxes) -> Floats:
    """The column of N samples; see the top of this file."""
    most = np.full((len(labels.classes), 1), labels.classes.shape[1])
    return np.concatenate(
        [most, labels.classes, *_matched(labels, reference), *_matched(labels, candidate)], axis=1
    ).astype(np.float64)


def box_agreement(
    reference: Boxes, candidate: Boxes, nonfinite: NDArray[np.bool_], threshold: float
) -> Floats:
    """Share of each sample's boxes that both engines found, shape ``(N,)``; 0 where nonfinite.

    A box is found by both where classes are equal and the overlap is 0.5 or more: twice those over
    all boxes of both (Dice); 1 where neither has any. Boxes below the threshold are not counted.
    """
    first, second = (_above(each, threshold) for each in (reference, candidate))
    bits = _matched(first, second, _FIRST)[2].astype(np.int64)
    both = 2.0 * (bits & 1).sum(axis=1)
    every = (first.classes >= 0).sum(axis=1) + (second.classes >= 0).sum(axis=1)
    shares = np.divide(both, every, out=np.ones(len(both)), where=every > 0)
    return np.where(nonfinite, 0.0, shares)


def without_nonfinite(boxes: Boxes, nonfinite: NDArray[np.bool_]) -> Boxes:
    """The same without any box in samples where the engine gave NaN or Inf."""
    return boxes._replace(classes=np.where(nonfinite[:, None], -1, boxes.classes))


def labelled_classes(column: Floats) -> dict[int, int]:
    """Samples that hold each class among their labels."""
    labels = _labels(column)
    found = np.unique(labels[labels >= 0]).astype(np.int64)
    return {int(each): int((labels == each).any(axis=1).sum()) for each in found}


class AveragePrecision:
    """mAP of FP32 and of the candidate on N samples, for any weights of them.

    Args:
        column: of these samples.
        kind: map or map50.
        only: the class that counts; None: the mean over all that have labels.
    """

    def __init__(self, column: Floats, kind: str, only: int | None = None) -> None:
        self.classes = sorted(labelled_classes(column))
        if only is not None:
            self.classes = [each for each in self.classes if each == only]
        overlaps, labels = _OVERLAPS[kind], _labels(column)
        boxes = (column.shape[1] - 1 - labels.shape[1]) // 6
        engines = [
            column[:, 1 + labels.shape[1] + 3 * boxes * engine :][:, : 3 * boxes]
            for engine in range(2)
        ]
        self._labelled = [(labels == each).sum(axis=1).astype(float) for each in self.classes]
        self._ranked = [
            [_Ranked.of(found, each, overlaps) for each in self.classes] for found in engines
        ]
        # What one evaluation costs: a ranking of the boxes, and of the right ones at each overlap.
        self.work = 1 + sum(each.size for engine in self._ranked for each in engine)

    def score(self, engine: int, weights: Floats) -> Floats:
        """The mAP of FP32 (0) or the candidate (1), shape ``(R,)``; NaN without a label.

        Args:
            engine: 0 or 1.
            weights: how often each sample is there, shape ``(R, N)``.
        """
        total, counted = np.zeros(len(weights)), np.zeros(len(weights))
        for labelled, ranked in zip(self._labelled, self._ranked[engine], strict=True):
            wanted = weights @ labelled
            there = wanted > 0.0
            total += np.where(there, ranked.average_precision(weights, wanted), 0.0)
            counted += there
        empty = np.full(len(total), np.nan)
        return np.asarray(np.divide(total, counted, out=empty, where=counted > 0.0))


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Boxes of one class and engine, best score first.

    Attributes:
        samples: whose box it is, shape ``(n,)``.
        right: places of those that found a label, for each overlap.
    """

    samples: NDArray[np.int64]
    right: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, found: Floats, wanted: int, overlaps: range) -> "_Ranked":
        classes, scores, bits = np.split(found, 3, axis=1)
        rows, places = np.nonzero(classes == wanted)
        order = np.argsort(-scores[rows, places], kind="stable")
        matched = bits[rows, places][order].astype(np.int64)
        right = tuple(np.flatnonzero(matched >> overlap & 1) for overlap in overlaps)
        return cls(rows[order], right)

    @property
    def size(self) -> int:
        return len(self.samples) + sum(len(places) for places in self.right)

    def average_precision(self, weights: Floats, wanted: Floats) -> Floats:
        """Mean over the overlaps of the precision at 101 recalls, shape ``(R,)``."""
        drawn = weights[:, self.samples]
        so_far = drawn.cumsum(axis=1)
        total, before, last = np.zeros(len(weights)), np.zeros(len(weights)), None
        for places in self.right:  # at a larger overlap often the same boxes are right
            if last is None or not np.array_equal(places, last):
                before, last = _at_overlap(drawn[:, places], so_far[:, places], wanted), places
            total += before
        return total / len(self.right)


def _at_overlap(right: Floats, so_far: Floats, wanted: Floats) -> Floats:
    """Average precision at one overlap, shape ``(R,)``.

    Precision is largest, and recall grows, only at boxes that are right: nothing else is looked at.

    Args:
        right: weights of those boxes, best score first, shape ``(R, m)``.
        so_far: of all boxes down to each of them.
        wanted: of all labels, shape ``(R,)``.
    """
    if not right.shape[1]:
        return np.zeros(len(right))
    found = right.cumsum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = np.where(wanted[:, None] > 0.0, found / wanted[:, None], 0.0)
        precision = np.where(found > 0.0, found / so_far, 0.0)
    highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    # How many of the recalls are reached by each box, and not by the one before.
    reached = np.where(found > 0.0, np.floor(_STEPS * recall + _ROUNDING) + 1.0, 0.0)
    new = np.diff(reached, axis=1, prepend=0.0)
    return np.asarray((new * highest).sum(axis=1) / (_STEPS + 1))


def weight_blocks(weights_rows: int, samples: int) -> Iterator[slice]:
    """Rows of weights that are held in memory together."""
    step = max(1, _BLOCK_VALUES // max(1, samples))
    for start in range(0, weights_rows, step):
        yield slice(start, start + step)


def _labels(column: Floats) -> Floats:
    most = int(column[0, 0]) if len(column) else 0
    return column[:, 1 : 1 + most]


def _check_there(outputs: Tensors, name: str, asked: OutputSpec) -> None:
    for each in (asked.form.scores, asked.form.classes):
        if each not in outputs:
            raise DataError(
                f"The model gives outputs {sorted(outputs)}, not {each!r}, which the policy's "
                f"[outputs.{name}] names."
            )


def _clean(corners: Floats, scores: Floats, classes: Floats, asked: OutputSpec) -> Boxes:
    one, two, three, four = (corners[..., axis] for axis in range(4))
    form = asked.form.box_format
    if form == "xyxy":
        three, four = three - one, four - two
    elif form == "cxcywh":
        one, two = one - three / 2.0, two - four / 2.0
    placed = np.stack([one, two, three, four], axis=-1)
    with np.errstate(invalid="ignore"):
        there = (
            np.isfinite(placed).all(axis=-1)
            & np.isfinite(scores)
            & (scores > 0.0)
            & (three > 0.0)
            & (four > 0.0)
            & (classes >= 0)
        )
    named = np.where(there, classes, -1.0)
    return Boxes(placed, scores, np.rint(named).astype(np.int64))


def _above(boxes: Boxes, threshold: float) -> Boxes:
    return boxes._replace(classes=np.where(boxes.scores > threshold, boxes.classes, -1))


def _matched(
    labels: Boxes, found: Boxes, overlaps: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Class, score and matches of each box, shape ``(N, D)``; only ranked boxes have a class."""
    classes = np.full(found.classes.shape, -1.0)
    bits = np.zeros(found.classes.shape)
    evaluation = _evaluation(overlaps)
    for row in range(len(classes)):
        for each in np.unique(found.classes[row][found.classes[row] >= 0]):
            wanted = np.flatnonzero(labels.classes[row] == each)
            places = np.flatnonzero(found.classes[row] == each)
            kept, matches = _match_class(evaluation, labels, found, row, wanted, places)
            classes[row, kept] = each
            bits[row, kept] = matches
    return classes, np.where(classes >= 0, found.scores, 0.0), bits


def _match_class(
    evaluation: Any,
    labels: Boxes,
    found: Boxes,
    row: int,
    wanted: NDArray[np.int64],
    places: NDArray[np.int64],
) -> tuple[NDArray[np.int64], Floats]:
    """The ranked boxes of one class in one sample, and the overlaps that they are matched at."""
    key = (0, 0)
    evaluation._gts = {  # noqa: SLF001 - what COCOeval's own reader of files fills
        key: [
            _entry(number, labels.corners[row, place]) | {"ignore": 0, "_ignore": 0, "iscrowd": 0}
            for number, place in enumerate(wanted, start=1)
        ]
    }
    evaluation._dts = {  # noqa: SLF001
        key: [
            _entry(int(place), found.corners[row, place])
            | {"score": float(found.scores[row, place])}
            for place in places
        ]
    }
    evaluation.ious = {key: evaluation.computeIoU(*key)}
    result = evaluation.evaluateImg(*key, _ANY_AREA, MOST_RANKED)
    matches = np.asarray(result["dtMatches"]) > 0
    powers = 2.0 ** np.arange(len(matches))
    return np.asarray(result["dtIds"], np.int64), np.asarray(powers @ matches)


def _entry(number: int, corners: Floats) -> dict[str, Any]:
    return {"id": number, "bbox": corners.tolist(), "area": float(corners[2] * corners[3])}


def _evaluation(overlaps: Floats | None) -> Any:
    evaluation = _library().COCOeval(iouType="bbox")
    evaluation.params.maxDets = [MOST_RANKED]
    if overlaps is not None:
        evaluation.params.iouThrs = overlaps
    return evaluation


@functools.cache
def _library() -> Any:
    try:
        from pycocotools import cocoeval  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise PolicyError(
            "task detection needs pycocotools, which is not installed. "
            "Run: pip install 'enginegate[detection]'."
        ) from error
    return cocoeval
