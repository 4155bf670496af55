"""What a policy's gates may say: tasks, metrics, standard tolerances, advisory names."""

from itertools import pairwise

import pytest

from enginegate.candidate import Precision
from enginegate.policy.gates import (
    CLASSIFICATION_LIMITS,
    DISTANCE_LIMITS,
    Gates,
    Metric,
    Output,
    check_gates,
    check_outputs,
    gates_for,
    output_task,
)
from enginegate.policy.tolerances import STANDARD, complete_gates, complete_metrics

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


class TestStandardMetrics:
    """A policy that asks for the standard, and has no [metrics], is scored by its task's own."""

    @staticmethod
    def completed(task, **tables):
        raw = {"task": task, "gates": {"default": STANDARDS}, **tables}
        raw["metrics"] = complete_metrics(raw)
        tasks = frozenset({task, *(o["task"] for o in raw.get("outputs", {}).values())})
        gates = complete_gates(raw["gates"], tasks, raw["metrics"])
        return raw["metrics"], {name: Gates(**table) for name, table in gates.items()}

    @pytest.mark.parametrize(
        ("task", "kind"),
        [
            ("multi-label", "label_f1"),
            ("regression", "r2"),
            ("segmentation", "miou"),
            ("detection", "map"),
        ],
    )
    def test_score_of_the_task_has_the_margins_of_accuracy(self, task, kind):
        metrics, gates = self.completed(task)

        int8 = gates_for(gates, Precision.INT8)
        assert metrics == {kind: {"kind": kind, "output": ""}}
        assert int8.max_metric_loss == {kind: STANDARD[Precision.INT8]["max_accuracy_loss"]}
        assert int8.max_slice_metric_loss == {
            kind: STANDARD[Precision.INT8]["max_slice_accuracy_loss"]
        }
        assert int8.max_accuracy_loss is None
        declared = {name: Metric(**table) for name, table in metrics.items()}
        check_gates("gates.int8", int8, declared, frozenset({task}))

    @pytest.mark.parametrize("task", ["classification", "embedding"])
    def test_other_tasks_have_none(self, task):
        assert self.completed(task)[0] == {}

    def test_each_output_has_its_own(self):
        outputs = {"Price.eur": {"task": "regression"}, "mask": {"task": "segmentation"}}

        metrics, _ = self.completed("multi-output", outputs=outputs)

        assert metrics == {
            "r2_price_eur": {"kind": "r2", "output": "Price.eur"},
            "miou_mask": {"kind": "miou", "output": "mask"},
        }

    def test_stated_metrics_and_margins_are_kept(self):
        """An error's margin is stated; a share's need not be."""
        stated = {**STANDARDS, "max_metric_loss": {"price": 3.0}}
        metrics = {"price": {"kind": "mae"}, "fit": {"kind": "r2"}}

        found, gates = self.completed(
            "regression", metrics=metrics, gates={"default": stated, "int8": {}}
        )

        assert found == metrics
        assert gates["int8"].max_metric_loss == {"price": 3.0, "fit": 0.01}
        assert gates["int8"].max_slice_metric_loss == {"fit": 0.08}

    def test_completing_again_changes_nothing(self):
        raw = {"task": "segmentation", "gates": {"default": STANDARDS}}
        tasks, metrics = frozenset({"segmentation"}), complete_metrics(raw)
        once = complete_gates(raw["gates"], tasks, metrics)

        assert complete_metrics({**raw, "metrics": metrics, "gates": once}) == metrics
        assert complete_gates(once, tasks, metrics) == once

    def test_boxes_and_labels_have_no_distances(self):
        """Boxes change places, and few labels near their threshold are a short vector."""
        of_boxes, of_labels = (self.completed(t)[1]["int8"] for t in ("detection", "multi-label"))

        assert all(getattr(of_boxes, key) is None for key in DISTANCE_LIMITS)
        assert (of_labels.min_cosine_p1, of_labels.min_sqnr_db) == (None, 20.0)
        assert of_boxes.min_decision_agreement == of_labels.min_decision_agreement == 0.9


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param({"task": "regression", "threshold": 0.5}, "threshold: is for", id="threshold"),
        pytest.param({"task": "detection", "class_axis": -1}, "class_axis: is for", id="axis"),
        pytest.param({"task": "detection", "scores": "s"}, "both scores and classes", id="scores"),
    ],
)
def test_keys_of_an_output_are_of_its_task(output, message):
    with pytest.raises(ValueError, match=message):
        check_outputs(output["task"], {"y": Output(**output)}, {})


def test_metric_of_ones_own_needs_permission():
    """A policy comes from another team; its Python is run only where it says so."""
    own = Metric(kind="mine:score")

    with pytest.raises(ValueError, match=r"metrics\.own: mine:score is Python.*allow_code = true"):
        check_outputs("regression", {}, {"own": own})
    check_outputs("regression", {}, {"own": own.model_copy(update={"allow_code": True})})


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
