"""Scorecards and decisions as the program leaves them: signed, and in the audit log."""

from enginegate.decision import Decision
from enginegate.evidence import Scorecard
from enginegate.policy import Policy
from enginegate.repository import ReleaseSigning, record_decision
from enginegate.workspace import Workspace, now
from tests.fakes.evidence import decision


def keep(card: Scorecard, rules: Policy, workspace: Workspace) -> Scorecard:
    """Keep a scorecard that no qualification made, signed with the workspace's key."""
    path = workspace.save_scorecard(card)
    assert ReleaseSigning.of(rules.signing, workspace).sign_record(card, path) == ""
    return card


def decide(card: Scorecard, rules: Policy, workspace: Workspace, **changes) -> Decision:
    """Decide as `enginegate approve` does: in the audit log first, then as a file."""
    made = decision(card, **({"decided_at": now()} | changes))
    record_decision(rules.target.repository, made, rules.name)
    workspace.save_decision(made)
    return made
