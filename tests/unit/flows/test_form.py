"""The approval form: what it asks for, and what becomes of an answer."""

import pytest
from pydantic import ValidationError

from enginegate.approval_rules import ApprovalStatus
from enginegate.errors import RepositoryBusyError
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows import approval
from tests.fakes.evidence import FP32, WHEN, decision, scorecard
from tests.fakes.family import _POLICY as POLICY


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_rejection_is_stored_before_the_audit_log_has_it(tmp_path, monkeypatch, answer):
    """Prefect's run fails and may never come back; a yes that the log lacks is not kept."""
    path = tmp_path / "tiny.toml"
    path.write_text(POLICY.format(root=tmp_path))
    card, workspace = scorecard(model="tiny"), Workspace(tmp_path / "workspace")
    given = approval.ApprovalForm(decision=answer, approver="grace", reason="too early")

    def busy(*_):
        raise RepositoryBusyError("live is being changed by pid 7.")

    for name, stub in {
        "suspend_flow_run": lambda **_: given,
        "_form": lambda *_: approval.ApprovalForm,
        "_key": lambda *_: "key",
        "_origin": lambda _number: "form",
        "_answered_at": lambda _key: WHEN,
        "record_decision": busy,
    }.items():
        monkeypatch.setattr(approval, name, stub)
    with pytest.raises(RepositoryBusyError):
        approval._ask(card, read_policy(path), workspace, ApprovalStatus((), 1), 0)

    kept = [decision.answer for decision in workspace.decisions(card.digest)]
    assert kept == (["reject"] if answer == "reject" else [])


def test_nothing_is_approved_by_a_form_that_is_empty():
    """A forced retry fills in defaults, so there are none."""
    with pytest.raises(ValidationError, match="decision"):
        approval.ApprovalForm()

    asked = approval.approval_form("text", (), ()).model_json_schema()
    assert asked["required"] == ["decision", "approver", "reason"]
    assert set(asked["properties"]) == {"decision", "approver", "reason"}
    assert not any("default" in field for field in asked["properties"].values())


def test_form_has_the_fields_that_the_policy_allows():
    """Names of those who may still approve, and inconclusive candidates that may be accepted."""
    form = approval.approval_form("text", ("ada", "grace"), (FP32,))

    asked = form.model_json_schema()["properties"]
    assert asked["approver"]["title"] == "Your name: ada or grace"
    assert asked["accept_inconclusive"]["enum"] == ["none", "onnxruntime-fp32"]
    given = {"decision": "approve", "approver": "ada", "reason": "checks right"}
    assert form(**given).named_candidate == ""
    assert form(**given, accept_inconclusive="onnxruntime-fp32").named_candidate == FP32.name
    with pytest.raises(ValidationError, match="accept_inconclusive"):
        form(**given, accept_inconclusive="tensorrt-fp8")


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({}, ""),
        ({"accept_inconclusive": ""}, ""),
        ({"accept_inconclusive": "onnxruntime-fp32"}, "onnxruntime-fp32"),
        ({"candidate": "onnxruntime-fp32"}, "onnxruntime-fp32"),
    ],
    ids=["form", "before an upgrade", "by Python", "by command"],
)
def test_candidate_is_heard_though_the_form_does_not_ask_for_it(sent, named):
    """Else somebody who named another candidate would have approved the winner."""
    form = approval.approval_form("text", (), ())

    answer = form(decision="approve", approver="ada", reason="checks right", **sent)

    assert answer.named_candidate == named


def test_answer_is_known_by_its_run_and_not_by_the_run_s_name(monkeypatch):
    """A run is named anew when it is resumed; the question it asked stays answered."""
    runtime = "PREFECT__RUNTIME__FLOW_RUN__"
    for name, value in {"ID": "0a1b", "RUN_COUNT": "1", "NAME": "brown-fox"}.items():
        monkeypatch.setenv(runtime + name, value)
    given = decision(scorecard(), origin=approval._origin(0))

    monkeypatch.setenv(f"{runtime}NAME", "promote digits v1 onnxruntime-int8")

    assert approval._answers_question(given, 0)
    assert not approval._answers_question(given, 1)
    monkeypatch.setenv(f"{runtime}RUN_COUNT", "2")
    assert not approval._answers_question(given, 0)
