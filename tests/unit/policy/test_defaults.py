"""What a policy need not state, and what follows from what it does state."""

import pytest

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy, policy_model
from enginegate.policy.defaults import DEFAULTS, fill_in

SMALL = {
    "name": "mine",
    "task": "classification",
    "model": {"uri": "file:model.onnx"},
    "data": {"evaluation": "evaluation.npz"},
    "candidates": {"onnxruntime": ["fp32"]},
    "gates": {"default": {"tolerances": "standard"}},
    "slo": {"p99_ms": 100, "min_throughput_per_s": 50},
}


def test_a_small_policy_is_whole():
    """Everything that was left out has its documented value."""
    policy = parse_policy(SMALL, "policy")

    assert (policy.search.min_rate_per_s, policy.search.max_rate_per_s) == (50, 1000)
    assert policy.search.budget_s == 700
    assert policy.gates["int8"].min_samples == 400
    assert str(policy.target.repository) == "model_repo"
    assert policy.approval.expires_hours == 72


def test_stated_keys_take_precedence():
    """A default never replaces what the file says."""
    policy = parse_policy(SMALL | {"search": {"max_rate_per_s": 60, "instances": [4]}}, "policy")

    assert (policy.search.max_rate_per_s, policy.search.instances) == (60, (4,))
    assert policy.search.min_rate_per_s == 50


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, 8),
        ({"load": {"rows": 32}}, 32),
        ({"load": {"rows": [1, 16]}}, 16),
        ({"shapes": {"batch": {"min": 1, "best": 1, "max": 1}}}, 1),
    ],
)
def test_batch_sizes_fit_requests_and_shapes(tables, expected):
    assert parse_policy(SMALL | tables, "policy").search.max_batch_sizes == (expected,)


@pytest.mark.parametrize(
    ("search", "rates"),
    [
        ({"min_rate_per_s": 200}, (200, 4000)),
        ({"max_rate_per_s": 20}, (20, 20)),
        ({"objective": "latency", "at_rate_per_s": 10}, (10, 1000)),
        ({"objective": "latency", "at_rate_per_s": 5000}, (50, 5000)),
    ],
)
def test_rates_follow_what_is_stated(search, rates):
    found = parse_policy(SMALL | {"search": search}, "policy").search

    assert (found.min_rate_per_s, found.max_rate_per_s) == rates


def test_filling_in_twice_changes_nothing():
    """A policy that was read is written to records whole, and read again."""
    once = fill_in(SMALL)

    assert fill_in(once) == once
    whole = parse_policy(SMALL, "policy")
    assert parse_policy(whole.model_dump(), "policy").digest == whole.digest


@pytest.mark.parametrize(
    "raw", [{"slo": 3}, {"search": []}, {"slo": {"min_throughput_per_s": "x"}}]
)
def test_what_is_no_table_or_number_is_left_to_the_check(raw):
    """Filling in raises nothing; the check names the key."""
    with pytest.raises(PolicyError, match=next(iter(raw))):
        parse_policy(SMALL | raw, "policy")


def test_every_default_is_of_a_required_key():
    """A key that has a default of its own keeps it there: there is one place for each."""
    for default in DEFAULTS:
        *tables, key = default.key.split(".")
        model = policy_model()
        for table in tables:
            model = model.model_fields[table].annotation
        assert model.model_fields[key].is_required(), default.key
