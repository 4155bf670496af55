"""Boxes are matched by pycocotools, and their average precision is COCO's."""

import contextlib
import io

import numpy as np
import pytest

pytest.importorskip("pycocotools")

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from enginegate.errors import DataError
from enginegate.policy.gates import Output
from validation.metrics.boxes import (
    AveragePrecision,
    box_agreement,
    box_column,
    boxes_of,
    labelled_boxes,
    labelled_classes,
    without_nonfinite,
)
from validation.outputs import OutputSpec
from validation.resampling import resampled_boxes

ASKED = OutputSpec(task="detection")
SAMPLES, MOST, CLASSES = 30, 4, 3


def scene(seed=0, samples=SAMPLES):
    """Labels ``(N, M, 5)``, and what a sound and a worse detector find, ``(N, D, 6)``."""
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 60, (samples, MOST, 2))
    sizes = rng.uniform(8, 30, (samples, MOST, 2))
    boxes = np.concatenate([corners, corners + sizes], axis=2)
    classes = rng.integers(0, CLASSES, (samples, MOST, 1)).astype(float)
    classes[rng.random((samples, MOST, 1)) < 0.3] = -1
    labels = np.concatenate([boxes, classes], axis=2)

    def found(noise):
        moved = boxes + rng.normal(0, noise, boxes.shape)
        scores = rng.uniform(0.1, 1.0, (samples, MOST, 1))
        named = np.where(rng.random(classes.shape) < 0.1, 0.0, classes)
        stray = np.concatenate([corners, corners + 9.0], axis=2) + 30.0
        weak = np.concatenate([stray, scores / 2, np.ones_like(scores)], axis=2)
        return np.concatenate(
            [np.concatenate([moved, scores, named], axis=2), weak], axis=1
        ).astype(np.float32)

    return labels, found(0.8), found(2.5)


def columns(labels, reference, candidate):
    pair = (boxes_of({"y": each}, "y", ASKED) for each in (reference, candidate))
    return box_column(labelled_boxes(labels, ASKED, "eval.npz"), *pair)


def coco_score(labels, found):
    """mAP and mAP at 0.5, as COCO's own evaluation gives them."""
    truth, answers = [], []
    for row in range(len(labels)):
        for x1, y1, x2, y2, each in labels[row]:
            if each >= 0:
                truth.append(
                    {"id": len(truth) + 1, "image_id": row, "category_id": int(each)}
                    | {"bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
                    | {"area": (x2 - x1) * (y2 - y1)}
                )
        for x1, y1, x2, y2, score, each in found[row].astype(float):
            if each >= 0:
                answers.append(
                    {"image_id": row, "category_id": int(each), "score": score}
                    | {"bbox": [x1, y1, x2 - x1, y2 - y1]}
                )
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = {
            "images": [{"id": row} for row in range(len(labels))],
            "annotations": truth,
            "categories": [{"id": each} for each in range(CLASSES)],
        }
        known.createIndex()
        evaluation = COCOeval(known, known.loadRes(answers), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:2]


def test_average_precision_is_cocos():
    """Of both engines, at all overlaps and at 0.5."""
    labels, *found = scene()
    column = columns(labels, *found)

    for place, kind in enumerate(("map", "map50")):
        judged = AveragePrecision(column, kind)
        for engine, answers in enumerate(found):
            ours = judged.score(engine, np.ones((1, SAMPLES)))
            assert ours[0] == pytest.approx(coco_score(labels, answers)[place], abs=1e-9)


def test_weight_is_how_often_a_sample_is_there():
    labels, *found = scene()
    rng = np.random.default_rng(3)
    weights = rng.integers(0, 3, SAMPLES)
    drawn = np.repeat(np.arange(SAMPLES), weights)

    judged = AveragePrecision(columns(labels, *found), "map")
    weighted = judged.score(0, weights[None, :].astype(float))

    assert weighted[0] == pytest.approx(coco_score(labels[drawn], found[0][drawn])[0], abs=1e-9)


def test_one_class_alone_is_its_part_of_the_mean():
    labels, *found = scene()
    column = columns(labels, *found)
    once = np.ones((1, SAMPLES))

    alone = [AveragePrecision(column, "map", each).score(0, once)[0] for each in range(CLASSES)]

    assert np.mean(alone) == pytest.approx(AveragePrecision(column, "map").score(0, once)[0])
    assert set(labelled_classes(column)) == set(range(CLASSES))


def test_loss_has_an_interval_around_it():
    """The worse detector surely loses; one compared with itself loses nothing, for sure."""
    labels, good, bad = scene(samples=60)

    worse = resampled_boxes(columns(labels, good, bad), "map", 0.95).estimate
    equal = resampled_boxes(columns(labels, good, good), "map", 0.95).estimate

    assert 0.0 < worse.low < worse.value < worse.high
    assert (equal.low, equal.value, equal.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("form", ["xywh", "cxcywh"])
def test_boxes_may_be_written_in_other_ways(form):
    labels, good, _ = scene()
    asked = OutputSpec(task="detection", declared=Output(task="detection", box_format=form))

    def turned(array):
        array = array.copy()
        size = array[..., 2:4] - array[..., :2]
        if form == "cxcywh":
            array[..., :2] += size / 2
        array[..., 2:4] = size
        return array

    other = boxes_of({"y": turned(good)}, "y", asked)

    np.testing.assert_allclose(other.corners, boxes_of({"y": good}, "y", ASKED).corners, atol=1e-4)
    np.testing.assert_allclose(
        labelled_boxes(turned(labels), asked, "eval.npz").corners,
        labelled_boxes(labels, ASKED, "eval.npz").corners,
    )


def test_scores_and_classes_may_be_outputs_of_their_own():
    _, good, _ = scene()
    declared = Output(task="detection", scores="s", classes="c")
    apart = {"b": good[..., :4], "s": good[..., 4], "c": good[..., 5].astype(np.int64)}

    found = boxes_of(apart, "b", OutputSpec("b", "detection", declared=declared))

    for one, other in zip(found, boxes_of({"y": good}, "y", ASKED), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_without_score_or_extent_are_no_boxes():
    """Exports pad with zeros."""
    padded = np.zeros((1, 3, 6), np.float32)
    padded[0, 0] = [1, 1, 5, 5, 0.9, 2]
    padded[0, 1] = [1, 1, 5, 5, 0.0, 2]

    assert boxes_of({"y": padded}, "y", ASKED).classes.tolist() == [[2, -1, -1]]


def test_agreement_is_the_share_of_boxes_that_both_find():
    """One of two boxes moved away: one is shared, of four; NaN agrees with nothing."""
    one = np.array([[[0, 0, 9, 9, 0.9, 1], [20, 20, 29, 29, 0.8, 1]]], np.float32)
    other = one.copy()
    other[0, 1, :4] += 40
    first, second = (boxes_of({"y": each}, "y", ASKED) for each in (one, other))
    bad = np.array([True])

    assert box_agreement(first, second, ~bad, 0.5).tolist() == [0.5]
    assert box_agreement(first, first, ~bad, 0.5).tolist() == [1.0]
    assert box_agreement(first, second, ~bad, 0.95).tolist() == [1.0]
    assert box_agreement(first, without_nonfinite(first, bad), bad, 0.5).tolist() == [0.0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param((2, 5), r"\(samples, boxes, 6\)", id="no-boxes"),
        pytest.param((2, 8400, 6), "NMS", id="not-suppressed"),
    ],
)
def test_output_of_another_form_is_refused(shape, message):
    with pytest.raises(DataError, match=message):
        boxes_of({"y": np.zeros(shape, np.float32)}, "y", ASKED)


def test_labels_of_another_form_are_refused():
    with pytest.raises(DataError, match=r"eval\.npz.*\(samples, boxes, 5\)"):
        labelled_boxes(np.zeros((2, 4)), ASKED, "eval.npz")
