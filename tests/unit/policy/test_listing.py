"""Every key of a policy with its value, where that comes from, and its meaning."""

import tomllib

import pytest

from enginegate.candidate import Precision
from enginegate.policy import parse_policy
from enginegate.policy.listing import list_keys, list_limits, table_meanings, toml_value
from enginegate.policy.tolerances import REASONS, STANDARD

STATED = {
    "name": "mine",
    "task": "classification",
    "model": {"uri": "file:model.onnx"},
    "data": {"evaluation": "evaluation.npz"},
    "candidates": {"onnxruntime": ["fp32", "int8"]},
    "gates": {"default": {"tolerances": "standard"}, "int8": {"max_accuracy_loss": 0.03}},
    "slo": {"p99_ms": 100, "min_throughput_per_s": 50},
}
POLICY = parse_policy(STATED, "policy")


def key(table, name, policy=POLICY, stated=STATED):
    (found,) = [k for k in list_keys(policy, stated) if (k.table, k.key) == (table, name)]
    return found


def limit(name, policy=POLICY, stated=STATED):
    (found,) = [each for each in list_limits(policy, stated) if each.key == name]
    return found


@pytest.mark.parametrize(
    ("table", "name", "value", "origin"),
    [
        ("", "name", '"mine"', "stated"),
        ("slo", "p99_ms", "100", "stated"),
        ("slo", "confidence", "0.95", "default"),
        ("search", "min_rate_per_s", "50", "default"),
        ("target", "repository", '"model_repo"', "default"),
        ("data", "calibration", "not set", "default"),
        ("candidates", "onnxruntime", '["fp32", "int8"]', "stated"),
    ],
)
def test_value_and_its_origin(table, name, value, origin):
    found = key(table, name)

    assert (found.value, found.origin) == (value, origin)
    assert found.meaning


def test_without_a_policy_rules_are_listed():
    """What a file must state is told from what it may leave out."""
    assert key("slo", "p99_ms", None, None).origin == "required"
    assert "slo.min_throughput_per_s" in key("search", "min_rate_per_s", None, None).value


def test_limits_are_told_by_precision():
    """Those of the file are marked, those of the standard have a reason."""
    found = limit("max_accuracy_loss")

    assert found.values == {Precision.FP32: "0.005", Precision.INT8: "0.03"}
    assert found.stated == {Precision.INT8}
    assert found.reason == REASONS["max_accuracy_loss"]


def test_standard_is_listed_without_a_policy():
    found = limit("min_sqnr_db", None, None)

    assert found.values == {p: toml_value(STANDARD[p]["min_sqnr_db"]) for p in Precision}


def test_every_standard_has_a_reason():
    assert {each for row in STANDARD.values() for each in row} <= REASONS.keys()


def test_every_listed_table_has_a_meaning():
    assert {key.table for key in list_keys()} <= table_meanings().keys()


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.25,
        True,
        "a\n\"b\" = 'c'\u00e9",
        [1, [2.5]],
        {"a b": {"c": [True]}},
        1e-5,
        "\x9b2J\u202e\x7f",
    ],
)
def test_values_are_toml(value):
    """They may be copied into a file, and command no terminal."""
    assert toml_value(value).isprintable()
    assert tomllib.loads(f"key = {toml_value(value)}")["key"] == value
