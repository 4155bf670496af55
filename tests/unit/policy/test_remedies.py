"""A policy that is too small teaches what to add."""

import pytest

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy, policy_model
from enginegate.policy.remedies import REMEDIES

SMALL = {
    "name": "mine",
    "task": "classification",
    "model": {"uri": "file:model.onnx"},
    "data": {"evaluation": "evaluation.npz"},
    "candidates": {"onnxruntime": ["fp32"]},
    "gates": {"default": {"tolerances": "standard"}},
    "slo": {"p99_ms": 100, "min_throughput_per_s": 50},
}


def refusal(raw):
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw, "mine.toml")
    return str(caught.value)


def without(key):
    return {name: table for name, table in SMALL.items() if name != key}


@pytest.mark.parametrize("key", SMALL)
def test_what_is_missing_is_shown_with_an_example(key):
    assert f"  {key}: is missing: {REMEDIES[key]}" in refusal(without(key))


def test_an_empty_policy_names_the_command_that_writes_one():
    message = refusal({})

    assert all(f"  {key}: is missing: " in message for key in SMALL)
    assert message.endswith("`enginegate init MODEL --data FILE` writes a whole policy.")


def test_limits_that_nobody_chose_are_not_filled_in():
    """They have to be stated, or the standard ones asked for; the message says how."""
    message = refusal(SMALL | {"gates": {"default": {"max_accuracy_loss": 0.01}}})

    assert "gates.default.max_kl_p99_nats: is missing" in message
    assert 'or add tolerances = "standard" under [gates.default]' in message


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"tolerances": "standard"}, "tolerances: there is no such key here; it is one of gates"),
        ({"p99_ms": 3}, "p99_ms: there is no such key here; it is one of slo"),
        ({"model": {"uri": "model.onnx"}}, 'write "file:model.onnx"'),
    ],
)
def test_key_in_the_wrong_place_is_led_to_the_right_one(changes, hint):
    assert hint in refusal(SMALL | changes)


def test_every_remedy_is_of_a_key_that_may_be_missing():
    """A remedy for a key with a default would never be read."""
    for key in REMEDIES:
        model = policy_model()
        *tables, name = key.split(".")
        for table in tables:
            model = model.model_fields[table].annotation
        assert model.model_fields[name].is_required(), key
