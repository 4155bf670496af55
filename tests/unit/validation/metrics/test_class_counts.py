"""Labels and pixels are counted by class, and scored as scikit-learn scores them."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import f1_score, jaccard_score

from enginegate.policy.gates import Output
from validation.metrics.class_counts import (
    best_guess,
    class_score,
    classes_of,
    count_labels,
    count_pixels,
    decision_agreement,
    decisions_of,
    exact_match,
    of_classes,
)
from validation.outputs import OutputSpec

SAMPLES, CLASSES, SIDE = 40, 4, 6
PIXELS = OutputSpec(task="segmentation")
LABELS = OutputSpec(task="multi-label")
FINE = np.zeros(SAMPLES, dtype=bool)


@pytest.fixture
def pixels():
    """Labels, FP32's logits and a candidate's, of which more are wrong."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, CLASSES, (SAMPLES, SIDE, SIDE))
    shown = np.eye(CLASSES)[truth].transpose(0, 3, 1, 2)
    reference = (shown + rng.normal(0, 0.5, shown.shape)).astype(np.float32)
    candidate = (shown + rng.normal(0, 0.9, shown.shape)).astype(np.float32)
    return truth, reference, candidate


@pytest.fixture
def labels():
    rng = np.random.default_rng(1)
    truth = rng.random((SAMPLES, CLASSES)) < np.array([0.5, 0.3, 0.2, 0.4])
    flips = rng.random((2, *truth.shape)) < np.array([0.1, 0.25])[:, None, None]
    return truth, truth ^ flips[0], truth ^ flips[1]


def totals(column, kind="label_f1"):
    return of_classes(column, kind).astype(float).sum(axis=0)[None, :]


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        pytest.param("miou", lambda t, p: jaccard_score(t, p, average="macro"), id="miou"),
        pytest.param("dice", lambda t, p: f1_score(t, p, average="macro"), id="dice"),
    ],
)
def test_segmentation_scores_are_those_of_scikit_learn(pixels, kind, score):
    truth, reference, candidate = pixels
    pair = decisions_of(reference, PIXELS), decisions_of(candidate, PIXELS)

    column = count_pixels(truth, pair, FINE, reference, PIXELS)
    found = class_score(kind, totals(column, kind))

    for each, decided in zip(found, pair, strict=True):
        assert each[0] == pytest.approx(score(truth.ravel(), decided.ravel()))
    assert found[0] > found[1]


@pytest.mark.parametrize(("kind", "average"), [("label_f1", "macro"), ("micro_f1", "micro")])
def test_multi_label_scores_are_those_of_scikit_learn(labels, kind, average):
    truth, reference, candidate = labels

    column = count_labels(truth, reference, candidate, FINE)
    found = class_score(kind, totals(column, kind))

    for each, decided in zip(found, (reference, candidate), strict=True):
        assert each[0] == pytest.approx(f1_score(truth, decided, average=average))


def test_pixels_with_the_ignored_label_are_not_scored(pixels):
    """Whatever is answered there, the counts are those of the other pixels."""
    truth, reference, candidate = pixels
    asked = OutputSpec(task="segmentation", declared=Output(task="segmentation", ignore_label=255))
    hidden = truth.copy()
    hidden[:, :2] = 255
    pair = decisions_of(reference, asked), decisions_of(candidate, asked)

    whole = count_pixels(hidden, pair, FINE, reference, asked)
    rest = count_pixels(truth[:, 2:], tuple(p[:, 2:] for p in pair), FINE, reference, asked)

    np.testing.assert_array_equal(whole, rest)


def test_classes_may_be_the_last_axis_a_single_one_or_a_map(pixels):
    """Each form of output gives the same decisions."""
    truth, reference, _ = pixels
    first = decisions_of(reference, PIXELS)
    last = OutputSpec(task="segmentation", declared=Output(task="segmentation", class_axis=-1))

    np.testing.assert_array_equal(decisions_of(np.moveaxis(reference, 1, -1), last), first)
    np.testing.assert_array_equal(decisions_of(first.astype(np.uint8), PIXELS), first)
    single = decisions_of(reference[:, :1], PIXELS)
    np.testing.assert_array_equal(single, reference[:, 0] > 0)
    assert truth.shape == single.shape


def test_nonfinite_sample_has_nothing_right(pixels, labels):
    bad = np.arange(SAMPLES) == 3
    truth, reference, _ = pixels
    decided = decisions_of(reference, PIXELS)

    of_pixels = count_pixels(truth, (decided, decided), bad, reference, PIXELS)
    of_labels = count_labels(labels[0], labels[1], labels[1], bad)

    for column in (of_pixels, of_labels):
        right = column.reshape(SAMPLES, 5, -1)[:, 3]
        assert right[3].sum() == 0
        assert (right[~bad].sum(axis=1) > 0).any()
    assert decision_agreement(decided, decided, bad)[3] == 0.0


def test_class_without_labels_is_no_part_of_the_mean(labels):
    """One that is only answered costs nothing; one that is labelled and missed costs all."""
    truth, reference, candidate = labels
    truth = truth.copy()
    truth[:, 2] = False

    column = count_labels(truth, reference, candidate, FINE)

    assert set(classes_of(column)) == {0, 1, 3}
    expected = f1_score(truth[:, [0, 1, 3]], reference[:, [0, 1, 3]], average="macro")
    assert class_score("label_f1", totals(column))[0][0] == pytest.approx(expected)


def test_one_class_alone(labels):
    truth, reference, candidate = labels
    column = count_labels(truth, reference, candidate, FINE)

    sums = of_classes(column, "label_f1", only=2).astype(float).sum(axis=0)[None, :]

    expected = f1_score(truth[:, 2], candidate[:, 2])
    assert class_score("label_f1", sums)[1][0] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["label_f1", "micro_f1"])
def test_best_guess_is_the_best_that_a_constant_answer_scores(labels, kind):
    truth = labels[0]

    def constant(answer):
        answers = np.broadcast_to(np.array(answer), truth.shape)
        column = count_labels(truth, answers, answers, FINE)
        return column, class_score(kind, totals(column, kind))[0][0]

    found = [constant(answer) for answer in itertools.product([False, True], repeat=CLASSES)]

    assert best_guess(kind, found[0][0]) == pytest.approx(max(score for _, score in found))


def test_exact_match_needs_every_label(labels):
    truth, reference, _ = labels

    found = exact_match(truth, reference)

    np.testing.assert_array_equal(
        found, [(t == r).all() for t, r in zip(truth, reference, strict=True)]
    )
