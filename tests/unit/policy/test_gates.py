"""What a policy's gates may say: tasks, metrics, standard tolerances, advisory names."""

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from enginegate.candidate import Precision
from enginegate.errors import PolicyError
from enginegate.policy import gates_for, parse_policy
from enginegate.policy.gates import STANDARD

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"
BASICS = {"confidence": 0.95, "min_samples": 400, "min_slice_samples": 60}
REGRESSION = {**BASICS, "max_abs_error": 0.1, "max_metric_loss": {"price": 0.02}}


@pytest.fixture
def policy():
    """The example policy with some of its top-level keys replaced."""

    def make(**changes):
        raw = tomllib.loads(DIGITS.read_text())
        return parse_policy({**raw, **changes}, "test")

    return make


class TestStandardTolerances:
    def test_fill_what_is_not_stated(self, policy):
        """Every precision gets its own row; the two numbers about samples are stated anyway."""
        rules = policy(gates={"default": {**BASICS, "tolerances": "standard"}})

        for precision in Precision:
            gates = gates_for(rules.gates, precision)
            assert {key: getattr(gates, key) for key in STANDARD[precision]} == STANDARD[precision]
            assert gates.max_abs_error is None

    def test_what_is_stated_wins(self, policy):
        """A precision's own table first, then [gates.default], then the standard."""
        stated = {**BASICS, "tolerances": "standard", "max_accuracy_loss": 0.002}
        rules = policy(gates={"default": stated, "int8": {"min_sqnr_db": 30.0}})

        int8 = gates_for(rules.gates, Precision.INT8)
        assert (int8.max_accuracy_loss, int8.min_sqnr_db) == (0.002, 30.0)
        assert int8.max_kl_p99_nats == STANDARD[Precision.INT8]["max_kl_p99_nats"]
        assert gates_for(rules.gates, Precision.FP16).min_sqnr_db == 50.0

    def test_must_be_asked_for(self, policy):
        """Without the word, a limit that is missing is an error, as ever."""
        with pytest.raises(PolicyError, match="max_kl_p99_nats: is missing"):
            policy(gates={"default": {**BASICS, "max_accuracy_loss": 0.01}})

    def test_survive_another_version(self, policy):
        """Completing a completed policy changes nothing, so its digest can be trusted."""
        rules = policy(gates={"default": {**BASICS, "tolerances": "standard"}})

        assert rules.with_model("models:/digits/7").gates == rules.gates

    def test_loosen_with_the_bits(self):
        """Fewer bits never have a stricter limit."""
        order = [Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8]
        rows = [STANDARD[precision] for precision in order]

        for tighter, looser in pairwise(rows):
            assert tighter["min_sqnr_db"] >= looser["min_sqnr_db"]
            assert tighter["max_kl_p99_nats"] <= looser["max_kl_p99_nats"]
            assert tighter["max_accuracy_loss"] <= looser["max_accuracy_loss"]


class TestTasks:
    def test_regression_needs_no_limits_of_classes(self, policy):
        """Limits that the task has no number for are absent, and may not be given."""
        metrics = {"price": {"kind": "mae"}}
        rules = policy(task="regression", metrics=metrics, gates={"default": REGRESSION})

        assert rules.gates["default"].max_accuracy_loss is None
        with pytest.raises(PolicyError, match="are for classification outputs only"):
            policy(
                task="regression",
                metrics=metrics,
                gates={"default": {**REGRESSION, "min_top1_agreement": 0.9}},
            )

    def test_outputs_say_what_they_are(self, policy):
        """A multi-output model declares each output; a metric names the one it scores."""
        rules = policy(
            task="multi-output",
            outputs={"boxes": {"task": "regression"}, "kinds": {"task": "classification"}},
            metrics={"price": {"kind": "rmse", "output": "boxes"}},
            gates={
                "default": {
                    **tomllib.loads(DIGITS.read_text())["gates"]["default"],
                    "max_metric_loss": {"price": 0.1},
                }
            },
        )

        assert rules.output_task("boxes") == rules.output_task() == "regression"
        assert rules.output_task("kinds") == "classification"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            pytest.param({"task": "segmentation"}, "task", id="unknown-task"),
            pytest.param({"task": "multi-output"}, "two or more", id="outputs-missing"),
            pytest.param(
                {"outputs": {"logits": {"task": "regression"}}}, "takes one output", id="other-task"
            ),
            pytest.param({"metrics": {"f1": {"kind": "f2"}}}, "metrics.f1.kind", id="kind"),
            pytest.param({"metrics": {"f1": {"kind": "mae"}}}, "scores a regression", id="task"),
            pytest.param(
                {"metrics": {"f1": {"kind": "macro_f1", "output": "x"}}}, "outputs.x", id="output"
            ),
            pytest.param({"metrics": {"F1!": {"kind": "macro_f1"}}}, "F1!", id="name"),
            pytest.param({"metrics": {"accuracy": {"kind": "topk"}}}, "another name", id="taken"),
            pytest.param({"metrics": {"f1": {"kind": "macro_f1"}}}, "max_metric_loss", id="margin"),
            pytest.param(
                {
                    "task": "regression",
                    "slices": {"discover": ["confidence"]},
                    "gates": {"default": {**BASICS, "max_abs_error": 0.1}},
                },
                "needs an output of classes",
                id="confidence",
            ),
            pytest.param({"slices": {"discover": ["size"]}}, "slices.discover", id="trait"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, policy, changes, message):
        """A metric without a margin, or of another task, is no gate that is silently off."""
        with pytest.raises(PolicyError, match=message):
            policy(**changes)


@pytest.mark.parametrize("name", ["sqnr", "slice_accuracy_loss", "f1_loss", "slice_f1_loss"])
def test_advisory_gates_are_known(policy, name):
    """Any gate of the policy can be on trial, those of its metrics too."""
    default = tomllib.loads(DIGITS.read_text())["gates"]["default"]
    default |= {"advisory": [name], "max_metric_loss": {"f1": 0.02}}

    rules = policy(metrics={"f1": {"kind": "macro_f1"}}, gates={"default": default})

    assert rules.gates["default"].advisory == {name}


def test_a_misspelt_advisory_gate_is_refused(policy):
    """A typo would leave the gate deciding, or another one not."""
    default = tomllib.loads(DIGITS.read_text())["gates"]["default"]

    with pytest.raises(PolicyError, match=r"'acuracy_loss'.*known: .*accuracy_loss"):
        policy(gates={"default": {**default, "advisory": ["acuracy_loss"]}})
