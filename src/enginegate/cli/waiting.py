"""What waits for people: scorecards without an answer, and those that too few have approved."""

from collections.abc import Iterator

from enginegate.approving import expires_at, standing_of, still_asked
from enginegate.errors import EnginegateError
from enginegate.evidence import Scorecard
from enginegate.policy import Policy
from enginegate.repository.decided import answers_to
from enginegate.workspace import Workspace, now


def waiting(policy: Policy, workspace: Workspace) -> Iterator[str]:
    """One sentence for each scorecard of the policy that people have not answered to the end."""
    for card in workspace.scorecards():
        if card.model != policy.name:
            continue
        named = f"{card.digest[:12]} ({card.model_uri})"
        if not workspace.decisions(card.digest):
            if card.winner:
                yield f"waits for a decision: {named}"
        elif policy.with_model(card.model_uri).digest == card.policy_sha256:
            missing = _missing(card, policy, workspace)
            if missing:
                yield f"waits for more approvals: {named}: {missing}"


def _missing(card: Scorecard, policy: Policy, workspace: Workspace) -> str:
    """Who has approved, until when, and who else may; empty where nobody has, or enough have."""
    rules, given = policy.approval, workspace.decisions(card.digest)
    try:
        answers = answers_to(card, given, policy.target.repository)
        standing = standing_of(answers.decisions, card, rules, now=now(), record=answers.record)
    except EnginegateError as error:
        return str(error)
    if not (standing.approvals and standing.missing):
        return ""
    by = ", ".join(
        f"{each.approver} (valid until {expires_at(each, rules):%Y-%m-%d %H:%M:%S %Z})"
        for each in standing.approvals
    )
    left = " or ".join(still_asked(standing, card, rules)) or "nobody that the policy names"
    asked = left if rules.approvers else "anybody else"
    return f"approved by {by}; {standing.missing} more needed, by {asked}"
