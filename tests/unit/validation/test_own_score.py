"""FP32's own score: near chance, or right on nothing, it makes a gate inconclusive."""

from dataclasses import replace

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.evidence import Finding, Outcome, contradictions
from enginegate.policy.gates import Metric
from tests.fakes.evidence import scorecard, verdict
from tests.fakes.judged import find
from validation.agreement import compare
from validation.expectations import judge_comparison
from validation.outputs import OutputSpec
from validation.own_score import held_back, own_scores

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED
CLASSES, EACH = 10, 90
SAMPLES = CLASSES * EACH


def a_half(scores, _labels):
    """A user's metric: nobody knows what chance would score in it."""
    return scores[:, 0] * 0.0 + 0.5


def classified(right_share=0.98, **changes):
    """FP32 against itself on ten classes, right on a share of them; ``labels`` may be changed."""
    rng = np.random.default_rng(0)
    truth = np.arange(SAMPLES) % CLASSES
    answers = np.where(rng.random(SAMPLES) < right_share, truth, rng.integers(0, CLASSES, SAMPLES))
    logits = np.eye(CLASSES, dtype=np.float32)[answers]
    labels = changes.get("labels", lambda labels: labels)(truth.copy())
    data = _data(labels, {"digit": truth.astype(np.str_)} if changes.get("sliced", True) else {})
    asked = OutputSpec(metrics=changes.get("metrics", {}))
    return compare({"y": logits}, {"y": logits}, data, "evaluation", asked=asked), asked


def scored(task, kind, outputs, targets):
    data = replace(
        _data(targets if targets.ndim == 1 and kind == "recall" else None),
        targets={} if kind == "recall" else {"y": targets},
    )
    asked = OutputSpec(task=task, metrics={"m": Metric(kind=kind, k=5)})
    return compare({"y": outputs}, {"y": outputs}, data, "evaluation", asked=asked), asked


def _data(labels, slices=None):
    return DataSet(
        origin="eval.npz",
        inputs={"x": np.zeros((SAMPLES, 1), np.float32)},
        labels=None if labels is None else labels.astype(np.int64),
        ids=np.arange(SAMPLES).astype(np.str_),
        slices=slices or {},
    )


def permuted(labels):
    return np.random.default_rng(1).permutation(labels)


def one_class_as_another(labels):
    return np.where(labels == 3, 5, labels)


def one_class_shuffled(labels):
    """Label 3 on nothing, its samples spread over the other nine."""
    others = np.array([c for c in range(CLASSES) if c != 3])
    return np.where(labels == 3, np.resize(others, SAMPLES), labels)


def two_classes_swapped(labels):
    return np.select([labels == 3, labels == 5], [5, 3], labels)


class TestClasses:
    def test_sound_model_score_has_interval_and_chance_level(self, gates):
        """The number is shown overall and in each slice, with what a guess would score."""
        own = own_scores(*_with(classified(), gates))

        whole = find(own, "accuracy_fp32")
        assert whole.outcome is PASSED
        assert whole.advisory
        assert whole.value == pytest.approx(0.98, abs=0.02)
        assert whole.low < whole.value < whole.high
        assert whole.limit == pytest.approx(0.1)
        assert "chance is 10 % (always naming the most frequent class)" in whole.reason
        assert len([f for f in own if f.gate == "slice_accuracy_fp32"]) == CLASSES
        assert {f.outcome for f in own} == {PASSED}

    @pytest.mark.parametrize(
        ("right_share", "change"),
        [
            pytest.param(0.98, permuted, id="all-labels-permuted"),
            pytest.param(0.0, lambda labels: labels, id="answers-at-random"),
            pytest.param(0.98, lambda labels: (labels + 1) % CLASSES, id="off-by-one"),
            pytest.param(0.98, lambda labels: labels * 0 + 7, id="one-label-for-all"),
        ],
    )
    def test_near_chance_nothing_is_decided(self, right_share, change, gates):
        """An interval that does not lie above chance says so, and what to look at."""
        own = own_scores(*_with(classified(right_share, labels=change), gates))

        whole = find(own, "accuracy_fp32")
        assert whole.outcome is INCONCLUSIVE
        assert "labels or outputs are probably permuted" in whole.reason
        assert whole.remedy.startswith("Look at the labels")

    @pytest.mark.parametrize(
        "change", [lambda labels: labels, permuted, one_class_as_another, two_classes_swapped]
    )
    def test_own_score_keeps_the_scorecard_readable(self, change, gates):
        """Reading refuses findings that passed beyond their limit; a gate that is held back has
        no number, and what a score passed with is beyond chance.
        """
        comparison, asked = classified(0.98, labels=change)
        findings = judge_comparison(comparison, gates, asked).findings
        card = scorecard(verdicts=(verdict(*findings),), benchmarks=(), winner=None)

        assert tuple(contradictions(card)) == ()

    def test_chance_is_the_most_frequent_class(self, gates):
        """With nine tenths of one class, 85 % right is worse than never looking."""

        def mostly_zero(labels):
            return np.where(np.arange(SAMPLES) % 10 < 9, 0, labels)

        own = own_scores(*_with(classified(0.98, labels=mostly_zero), gates))

        assert find(own, "accuracy_fp32").limit == pytest.approx(0.9)
        assert find(own, "accuracy_fp32").outcome is INCONCLUSIVE

    def test_slice_without_correct_answers_is_named(self, gates):
        """No candidate can be worse there: the slice is named; others are not touched."""
        own = own_scores(*_with(classified(1.0, labels=one_class_as_another), gates))

        three = find(own, "slice_accuracy_fp32", "evaluation/digit=3")
        assert three.outcome is INCONCLUSIVE
        assert "FP32 itself scores 0 % (0 to 4.09) on 90 samples" in three.reason
        assert "10 % may be lost" in three.reason
        assert find(own, "slice_accuracy_fp32", "evaluation/digit=5").outcome is PASSED

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            pytest.param(
                one_class_as_another, "90 that it calls 3; they are mostly labelled 5", id="as"
            ),
            pytest.param(one_class_shuffled, "90 that it calls 3", id="shuffled"),
            pytest.param(
                two_classes_swapped, "90 labelled 3; it mostly calls them 5", id="swapped"
            ),
        ],
    )
    def test_permuted_class_is_found_without_slices(self, change, told, gates):
        """It hides in the mean, and the data need not be cut by class."""
        own = own_scores(*_with(classified(1.0, labels=change, sliced=False), gates))

        (whole,) = own
        assert whole.value > 0.7
        assert whole.outcome is INCONCLUSIVE
        assert told in whole.reason

    def test_absent_class_is_no_permutation(self, gates):
        """A sound model names an absent class now and then."""

        def without_labels_of_three(labels):
            return np.where((labels == 3) & (np.arange(SAMPLES) % 3 == 0), 5, labels)

        rare = classified(1.0, labels=without_labels_of_three, sliced=False)

        assert find(own_scores(*_with(rare, gates)), "accuracy_fp32").outcome is PASSED

    def test_other_metrics_of_classes(self, gates):
        """Top-k and macro F1 have chances of their own."""
        metrics = {"top3": Metric(kind="topk", k=3), "f1": Metric(kind="macro_f1")}
        sound = own_scores(*_with(classified(metrics=metrics), gates))
        wrong = own_scores(*_with(classified(metrics=metrics, labels=permuted), gates))

        assert find(sound, "top3_fp32").limit == pytest.approx(0.3)
        assert find(sound, "f1_fp32").limit == pytest.approx(0.1)
        assert find(sound, "f1_fp32").value == pytest.approx(0.98, abs=0.02)
        for name in ("top3_fp32", "f1_fp32"):
            assert find(sound, name).outcome is PASSED
            assert find(wrong, name).outcome is INCONCLUSIVE


class TestNumbers:
    @pytest.mark.parametrize("kind", ["mae", "rmse"])
    @pytest.mark.parametrize(
        ("change", "outcome"),
        [
            pytest.param(lambda targets: targets, PASSED, id="sound"),
            pytest.param(permuted, INCONCLUSIVE, id="permuted"),
            pytest.param(lambda targets: targets / 100.0, INCONCLUSIVE, id="other-unit"),
        ],
    )
    def test_regression_must_beat_the_mean(self, kind, change, outcome, gates):
        """Errors no smaller than those of always answering the mean say nothing."""
        rng = np.random.default_rng(0)
        truth = rng.normal(size=(SAMPLES, 1)).astype(np.float32)
        answers = truth + rng.normal(scale=0.3, size=truth.shape).astype(np.float32)
        targets = change(truth)

        (own,) = own_scores(*_with(scored("regression", kind, answers, targets), gates))

        assert own.outcome is outcome
        assert own.relation == "<="
        assert "always answering the mean" in own.reason
        spread = float(targets.std())
        assert own.limit == pytest.approx(spread * (1.0 if kind == "rmse" else 0.8), rel=0.05)

    def test_vectors_must_beat_the_mean_direction(self, gates):
        """A cosine that any constant vector reaches says nothing."""
        rng = np.random.default_rng(0)
        truth = (rng.normal(size=(SAMPLES, 8)) + 1.0).astype(np.float32)

        (sound,) = own_scores(*_with(scored("embedding", "cosine", truth, truth), gates))
        (wrong,) = own_scores(*_with(scored("embedding", "cosine", truth, truth[::-1]), gates))

        assert sound.outcome is PASSED
        assert wrong.outcome is INCONCLUSIVE
        assert wrong.limit > 0.5

    def test_retrieval_must_beat_a_random_order(self, gates):
        """Five random neighbours of ten classes hold one of the same class 41 % of the time."""
        rng = np.random.default_rng(0)
        labels = np.arange(SAMPLES) % CLASSES
        vectors = rng.normal(size=(SAMPLES, 8)).astype(np.float32)
        near = vectors * 0.1 + 3.0 * np.eye(CLASSES, 8, dtype=np.float32)[labels]

        (sound,) = own_scores(*_with(scored("embedding", "recall", near, labels), gates))
        (wrong,) = own_scores(*_with(scored("embedding", "recall", vectors, labels), gates))

        assert sound.limit == pytest.approx(1.0 - 0.9**5, abs=0.01)
        assert sound.outcome is PASSED
        assert wrong.outcome is INCONCLUSIVE

    def test_user_metric_is_shown_not_judged(self, gates):
        """No chance level is known, so it never holds a gate back."""
        kind = f"{__name__}:a_half"
        outputs = np.ones((SAMPLES, 2), np.float32)
        found = scored("regression", kind, outputs, outputs)

        (own,) = own_scores(*_with(found, gates))

        assert own.value == pytest.approx(0.5)
        assert own.limit is None
        assert "no chance level" in own.reason
        assert held_back([_loss("m_loss")], [own], gates)[0].outcome is PASSED


class TestHeldBack:
    @pytest.mark.parametrize(
        ("outcome", "expected"),
        [
            pytest.param(PASSED, INCONCLUSIVE, id="passed"),
            pytest.param(INCONCLUSIVE, INCONCLUSIVE, id="inconclusive"),
            pytest.param(FAILED, FAILED, id="failed"),
            pytest.param(Outcome.ERRORED, Outcome.ERRORED, id="errored"),
        ],
    )
    def test_loss_against_chance_is_undecided(self, outcome, expected, gates):
        """It does not pass, says why and has no number; a sure loss stays one."""
        own = own_scores(*_with(classified(0.0, sliced=False), gates))

        (held,) = held_back([_loss("accuracy_loss", outcome)], own, gates)

        assert held.outcome is expected
        assert (held.value is None) is (expected is INCONCLUSIVE)
        assert held.reason.startswith("FP32 itself") is (expected is INCONCLUSIVE)

    def test_policy_may_accept_chance_level_fp32(self, gates):
        """Then the gate decides as if FP32 were, and its score is still shown."""
        trusting = gates.model_copy(update={"advisory": frozenset({"accuracy_fp32"})})
        own = own_scores(*_with(classified(0.0, sliced=False), trusting))

        assert find(own, "accuracy_fp32").outcome is INCONCLUSIVE
        assert held_back([_loss("accuracy_loss")], own, trusting)[0].outcome is PASSED

    def test_other_gates_are_not_touched(self, gates):
        """Agreement with FP32 needs no label."""
        own = own_scores(*_with(classified(0.0, sliced=False), gates))

        assert held_back([_loss("top1_agreement")], own, gates)[0].outcome is PASSED


def test_no_samples_and_no_labels_have_no_score(gates, comparison_of):
    """Nothing is told of FP32 where nothing is known of it."""
    assert own_scores(comparison_of([]), gates, OutputSpec()) == ()
    assert own_scores(comparison_of([False], labelled=False), gates, OutputSpec()) == ()


def _with(found, gates):
    comparison, asked = found
    return comparison, gates, asked


def _loss(gate, outcome=PASSED):
    return Finding(
        gate=gate, scope="evaluation", outcome=outcome, reason="loss", value=0.0, limit=0.01
    )
