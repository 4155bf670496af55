"""Asking a person: a typed form on a suspended run, bound to one scorecard."""

from typing import Literal

from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from pydantic import Field

from enginegate.decision import Decision
from enginegate.errors import ApprovalError
from enginegate.evidence import Scorecard
from enginegate.policy import Policy
from enginegate.report import approval_markdown
from enginegate.workspace import Workspace, now


class Answer(RunInput):
    """The form. Only the answer has a default, and it is no: silence never approves."""

    decision: Literal["approve", "reject"] = Field(
        default="reject", description="approve = publish the winner into the live Triton repository"
    )
    approver: str = Field(description="your name or e-mail", min_length=2)
    reason: str = Field(description="why; kept with the release", min_length=5)


def decision_on(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> Decision | None:
    """The decision already written for this scorecard, else the answer to a suspended run.

    Only a deployed run can be suspended: its process ends and any worker continues it. Elsewhere
    the answer must exist before the flow starts (`enginegate approve`).
    """
    written = workspace.decision(scorecard.digest)
    if written is not None or deployment.id is None:
        return written
    return _ask(scorecard, policy, workspace)


def _ask(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> Decision:
    form = Answer.with_initial_data(description=approval_markdown(scorecard))
    # run_count grows with every retry, so a retry asks again: a fixed key would hand the form's
    # defaults to a forced retry, and an old answer to an unforced one.
    answer = suspend_flow_run(
        wait_for_input=form,
        timeout=int(policy.approval.timeout_hours * 3600),
        key=f"approval-{scorecard.digest[:12]}-{flow_run.run_count}",
    )
    if answer is None:
        raise ApprovalError(
            f"Nobody answered for scorecard {scorecard.digest[:12]}; that means no."
        )
    decision = Decision(
        scorecard_sha256=scorecard.digest,
        answer=answer.decision,
        approver=answer.approver,
        reason=answer.reason,
        decided_at=now(),
    )
    workspace.save_decision(decision)
    return decision
