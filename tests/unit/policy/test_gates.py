"""What a policy's gates may say: tasks, metrics, standard tolerances, advisory names."""

from itertools import pairwise

import pytest

from enginegate.candidate import Precision
from enginegate.policy.gates import (
    CLASSIFICATION_LIMITS,
    Gates,
    Metric,
    Output,
    check_gates,
    check_outputs,
    gates_for,
    output_task,
)
from enginegate.policy.tolerances import STANDARD, complete_gates

BASICS = {"confidence": 0.95, "min_samples": 400, "min_slice_samples": 60}
STANDARDS = {**BASICS, "tolerances": "standard"}
CLASSES, NUMBERS = frozenset({"classification"}), frozenset({"regression"})
UNLIMITED = dict.fromkeys((*CLASSIFICATION_LIMITS, "max_abs_error"))


def completed(tasks=CLASSES, **tables):
    return {name: Gates(**table) for name, table in complete_gates(tables, tasks).items()}


def metrics_of(**kinds):
    return {name: Metric(kind=kind) for name, kind in kinds.items()}


class TestStandardTolerances:
    def test_fill_what_is_not_stated(self):
        """Every precision gets its own row; the two numbers about samples are stated anyway."""
        tables = completed(default=STANDARDS)

        for precision in Precision:
            gates = gates_for(tables, precision)
            expected = {**STANDARD[precision], "min_decision_agreement": None}
            assert {key: getattr(gates, key) for key in expected} == expected
            assert gates.max_abs_error is None

    def test_stated_tolerance_takes_precedence(self):
        """A precision's own table first, then [gates.default], then the standard."""
        stated = {**STANDARDS, "max_accuracy_loss": 0.002}
        tables = completed(default=stated, int8={"min_sqnr_db": 30.0})

        int8 = gates_for(tables, Precision.INT8)
        assert (int8.max_accuracy_loss, int8.min_sqnr_db) == (0.002, 30.0)
        assert int8.max_kl_p99_nats == STANDARD[Precision.INT8]["max_kl_p99_nats"]
        assert gates_for(tables, Precision.FP16).min_sqnr_db == 50.0

    def test_must_be_asked_for(self):
        """Without the word, a limit that is missing is an error, as ever."""
        with pytest.raises(ValueError, match="max_kl_p99_nats"):
            completed(default={**BASICS, "max_accuracy_loss": 0.01})

    def test_survive_another_completion(self):
        """Completing a completed policy changes nothing, so its digest can be trusted."""
        once = complete_gates({"default": STANDARDS}, CLASSES)

        assert complete_gates(once, CLASSES) == once

    def test_loosen_with_the_bits(self):
        """Fewer bits never have a stricter limit."""
        order = [Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8]
        rows = [STANDARD[precision] for precision in order]

        for tighter, looser in pairwise(rows):
            assert tighter["min_sqnr_db"] >= looser["min_sqnr_db"]
            assert tighter["max_kl_p99_nats"] <= looser["max_kl_p99_nats"]
            assert tighter["max_accuracy_loss"] <= looser["max_accuracy_loss"]


def test_regression_needs_no_limits_of_classes():
    """Limits that the task has no number for are absent."""
    tables = completed(NUMBERS, default={**BASICS, "max_abs_error": 0.1})

    assert all(getattr(tables["default"], key) is None for key in CLASSIFICATION_LIMITS)


def test_outputs_say_what_they_are():
    """A multi-output model declares each output; a metric names the one it scores."""
    outputs = {"boxes": Output(task="regression"), "kinds": Output(task="classification")}

    check_outputs("multi-output", outputs, {"price": Metric(kind="rmse", output="boxes")})

    assert output_task("multi-output", outputs, "boxes") == "regression"
    assert output_task("multi-output", outputs, "") == "regression"
    assert output_task("multi-output", outputs, "kinds") == "classification"


@pytest.mark.parametrize(
    ("task", "outputs", "metrics", "message"),
    [
        pytest.param("multi-output", {}, {}, "two or more", id="outputs-missing"),
        pytest.param(
            "classification",
            {"logits": Output(task="regression")},
            {},
            "takes one output",
            id="other-task",
        ),
        pytest.param(
            "classification", {}, metrics_of(f1="mae"), "scores a regression", id="metric-task"
        ),
        pytest.param(
            "classification",
            {},
            {"f1": Metric(kind="macro_f1", output="x")},
            r"outputs\.x",
            id="output",
        ),
        pytest.param(
            "classification", {}, metrics_of(accuracy="topk"), "another name", id="name-taken"
        ),
    ],
)
def test_metrics_fit_their_outputs(task, outputs, metrics, message):
    """A metric of another task is no gate that is silently off."""
    with pytest.raises(ValueError, match=message):
        check_outputs(task, outputs, metrics)


def test_unknown_metric_kind_is_refused():
    with pytest.raises(ValueError, match="kind"):
        Metric(kind="f2")


@pytest.mark.parametrize(
    ("limits", "metrics", "tasks", "message"),
    [
        pytest.param({}, metrics_of(f1="macro_f1"), CLASSES, "max_metric_loss", id="no-margin"),
        pytest.param(
            {"max_slice_metric_loss": {"f1": 0.1}}, {}, CLASSES, "are no .metrics", id="no-metric"
        ),
        pytest.param(
            {"min_top1_agreement": 0.9},
            {},
            NUMBERS,
            "are for classification outputs only",
            id="of-classes",
        ),
        pytest.param(
            {"advisory": {"acuracy_loss"}},
            {},
            CLASSES,
            r"'acuracy_loss'.*known: .*accuracy_loss",
            id="misspelt-advisory",
        ),
    ],
)
def test_limits_that_mean_nothing_are_refused(limits, metrics, tasks, message):
    """A typo would leave a gate deciding, or another one not."""
    with pytest.raises(ValueError, match=message):
        check_gates("gates.default", Gates(**BASICS, **(UNLIMITED | limits)), metrics, tasks)


@pytest.mark.parametrize("name", ["sqnr", "slice_accuracy_loss", "f1_loss", "slice_f1_loss"])
def test_advisory_gates_are_known(name):
    """Any gate of the policy can be on trial, those of its metrics too."""
    limits = UNLIMITED | {"advisory": {name}, "max_metric_loss": {"f1": 0.02}}

    check_gates("gates.default", Gates(**BASICS, **limits), metrics_of(f1="macro_f1"), CLASSES)
