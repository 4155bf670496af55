"""[devices]: what may differ between kinds of device, and which servers a policy may name."""

import tomllib
from pathlib import Path

import pytest

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy

_POLICY = Path(__file__).parents[3] / "policies" / "digits.toml"
_KINDS = {"l4": {"pool": "gpu-l4", "gpu": "L4"}, "cpu-two": {"pool": "cpu"}}


def policy(devices=_KINDS, **target):
    raw = tomllib.loads(_POLICY.read_text())
    raw["target"] |= target
    raw["candidates"] = {"onnxruntime": ["fp32", "int8"], "tensorrt": ["fp16", "int8"]}
    return parse_policy(raw | ({"devices": devices} if devices else {}), "a policy", Path("/work"))


def test_policy_without_kinds_digests_as_before_there_were_any():
    """Approvals of its scorecards stay valid: the table is no part of the digest."""
    without = policy(devices=None)

    assert b"devices" not in without.canonical_json()
    assert b'"device"' not in without.target.canonical_json()
    assert policy().digest != without.digest


def test_kind_asks_what_the_policy_asks_but_for_its_tables():
    """Candidates, cost, search and the engine kinds' tables; gates and SLO never."""
    kinds = {
        "l4": {
            "candidates": ["tensorrt-fp16", "onnxruntime-fp32"],
            "tables": {"onnxruntime": {"threads": 4}, "cost": {"price_per_hour": 0.8}},
        }
    }

    asked = policy(kinds).for_device("l4")

    assert {c.name for c in asked.candidates.all()} == {"tensorrt-fp16", "onnxruntime-fp32"}
    assert (asked.onnxruntime.threads, asked.cost.price_per_hour) == (4, 0.8)
    assert asked.slo == policy().slo
    assert asked.devices == {}
    assert asked.root == Path("/work")


def test_kind_may_ask_for_candidates_made_elsewhere():
    """By the name that each has on the scorecard."""
    raw = tomllib.loads(_POLICY.read_text())
    raw["candidates"]["made"] = [{"file": "qat.onnx", "precision": "int8", "name": "qat"}]
    raw["devices"] = {"l4": {"candidates": ["onnxruntime-int8+qat"]}}

    asked = parse_policy(raw, "a policy", Path("/work")).for_device("l4")

    assert [candidate.name for candidate in asked.candidates.all()] == ["onnxruntime-int8+qat"]
    assert asked.candidates.made[0].file == Path("/work/qat.onnx")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param({"tables": {"slo": {"p99_ms": 9}}}, "tables.slo may not differ", id="slo"),
        pytest.param({"tables": {"gates": {}}}, "tables.gates may not differ", id="gates"),
        pytest.param(
            {"tables": {"onnxruntime": {"thread": 1}}}, "did you mean threads", id="misspelt"
        ),
        pytest.param({"candidates": ["onnxruntime-bf16"]}, "does not list", id="unlisted"),
        pytest.param({"candidates": ["fast"]}, "is not a candidate", id="no-candidate"),
    ],
)
def test_what_must_be_proved_never_differs(kind, message):
    with pytest.raises(PolicyError, match=message):
        policy({"l4": kind})


@pytest.mark.parametrize("name", ["L4", "l4/../x", "", "-l4"])
def test_kind_is_named_plainly(name):
    """Names of kinds become names of files, deployments and runs."""
    with pytest.raises(PolicyError, match="devices"):
        policy({name: {}})


def server(device="", repository="/srv/b"):
    return {"name": "b", "endpoint": "b:8001", "device": device, "repository": repository}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param({"device": "h100"}, "target has device 'h100'", id="target"),
        pytest.param({"fleet": [server("h100")]}, "server 'b' has device 'h100'", id="server"),
        pytest.param(
            {"fleet": [server("cpu-two", None)]}, "needs a repository of its own", id="shared"
        ),
    ],
)
def test_server_of_an_unknown_or_mixed_kind_is_refused_by_name(target, message):
    """Also one of another kind that would read the target's folder."""
    target = {**target, "fleet": [_given(each) for each in target.get("fleet", ())]}

    with pytest.raises(PolicyError, match=message):
        policy(**target)


def _given(entry):
    return {name: value for name, value in entry.items() if value is not None}


def test_kind_of_the_targets_own_server_comes_first():
    """The first named, unless the target says which."""
    assert policy().device_names == ("l4", "cpu-two")
    assert policy(device="cpu-two").device_names == ("cpu-two", "l4")
    assert policy(device="cpu-two").live_tables.device == "cpu-two"
    assert policy(devices=None).live_tables.device == ""
