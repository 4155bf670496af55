"""What is asked of a model's outputs, from its policy."""

import tomllib
from pathlib import Path

from enginegate.policy import parse_policy
from validation.outputs import outputs_to_compare

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


def questions_of(policy):
    return outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices)


def _policy(margins=None, **changes):
    raw = tomllib.loads(DIGITS.read_text())
    raw["gates"] = {"default": {**raw["gates"]["default"], "max_metric_loss": margins or {}}}
    return parse_policy({**raw, **changes}, "test")


def test_single_output():
    """The example asks one question about the model's first output."""
    (asked,) = questions_of(_policy(slices={"discover": ["confidence"], "max_values": 9}))

    assert (asked.output, asked.task, asked.alone) == ("", "classification", False)
    assert (asked.traits, asked.max_values) == (("confidence",), 9)
    assert asked.scope("shadow") == "shadow"


def test_several_outputs():
    """Each output has a question of its own, with its own metrics and traits."""
    boxes, kinds = questions_of(
        _policy(
            margins={"error": 0.1, "top3": 0.01},
            task="multi-output",
            outputs={"boxes": {"task": "regression"}, "kinds": {"task": "classification"}},
            metrics={"error": {"kind": "rmse"}, "top3": {"kind": "topk", "output": "kinds"}},
            slices={"discover": ["confidence", "input_norm"]},
        )
    )

    assert (set(boxes.metrics), set(kinds.metrics)) == ({"error"}, {"top3"})
    assert boxes.traits == ("input_norm",)
    assert kinds.traits == ("confidence", "input_norm")
    assert kinds.scope("evaluation") == "evaluation:kinds"


def test_digest_tells_questions_apart():
    """Another metric or part is another question, so nothing old is taken for it."""
    plain, cut = (
        questions_of(_policy(slices={"discover": parts}))[0] for parts in ([], ["input_norm"])
    )

    assert plain.digest != cut.digest
    assert plain.digest == questions_of(_policy())[0].digest
