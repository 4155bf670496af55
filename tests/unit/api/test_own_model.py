"""Model, data and SLO in, a policy file out: once, and never another one under the same name."""

from types import SimpleNamespace

import onnx
import pytest

import enginegate
from enginegate.data import write_data
from enginegate.policy import read_policy
from tests.fakes.evidence import scorecard
from tests.fakes.family import classifier, samples


@pytest.fixture
def qualified(tmp_path, monkeypatch):
    """A folder with a model and its data; the policies that were qualified, without Prefect."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    (tmp_path / "pyproject.toml").touch()
    onnx.save(classifier(), tmp_path / "tiny.onnx")
    write_data(samples(1000, 1), tmp_path / "heldout.npz")
    found = []

    def qualify(policy, version):
        found.append((policy, version))
        return scorecard()

    flow = SimpleNamespace(qualify=qualify)
    monkeypatch.setattr("enginegate.api.pipeline_module", lambda _: flow)
    return found


def call(**changes):
    given = {
        "model": "tiny.onnx",
        "data": "heldout.npz",
        "p99_ms": 20,
        "min_throughput_per_s": 50,
    }
    return enginegate.qualify(**(given | changes))


def test_model_data_and_slo_become_a_policy_that_is_used_again(qualified, tmp_path, capsys):
    """The file is a person's from then on; the scorecard comes back, and nothing is printed."""
    card = call()
    written = (tmp_path / "policies" / "tiny.toml").read_text()
    call()

    assert card.winner == "onnxruntime-int8"
    assert card.policy == str(tmp_path / "policies" / "tiny.toml")
    assert qualified == [(tmp_path / "policies" / "tiny.toml", None)] * 2
    assert (tmp_path / "policies" / "tiny.toml").read_text() == written
    assert [path.name for path in (tmp_path / "policies").iterdir()] == ["tiny.toml"]
    policy = read_policy(tmp_path / "policies" / "tiny.toml")
    assert (policy.task, policy.slo.p99_ms, policy.model.scheme) == ("classification", 20, "file")
    assert capsys.readouterr().out == ""


def test_policy_that_says_something_else_is_neither_replaced_nor_used(qualified, tmp_path):
    call()
    written = (tmp_path / "policies" / "tiny.toml").read_text()

    with pytest.raises(enginegate.InputError, match=r"tiny\.toml is there already .* \(name="):
        call(p99_ms=5)
    call(p99_ms=5, name="tiny_fast")

    assert (tmp_path / "policies" / "tiny.toml").read_text() == written
    assert [policy.name for policy, _ in qualified] == ["tiny.toml", "tiny_fast.toml"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "tiny.onnx", "data": "heldout.npz"}, "needs a policy file, or all of model"),
        ({"policy": "policies/tiny.toml", "p99_ms": 3.0}, "got a policy and, beside it"),
    ],
)
def test_half_of_what_is_needed_is_refused(qualified, given, said):
    with pytest.raises(enginegate.InputError, match=said):
        enginegate.qualify(**given)
    assert qualified == []
