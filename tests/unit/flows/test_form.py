"""What becomes of an answer in the form when the audit log cannot be written."""

import pytest

from enginegate.approval_rules import ApprovalStatus
from enginegate.errors import RepositoryBusyError
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows import approval
from tests.fakes.evidence import WHEN, scorecard
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
