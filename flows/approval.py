"""Asking people: a typed form on a suspended run, bound to one scorecard, until enough said yes.

A resumed run starts from the top in a new process, maybe on another machine. So nothing is carried
over but what the workspace and Prefect hold: every answer becomes a decision in the workspace,
named after the question it answers, and a question whose decision is there is not asked again.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from pydantic import ConfigDict, Field, create_model

from enginegate.approval_rules import (
    ApprovalStatus,
    acceptable,
    approval_status,
    check_approvable,
    inconclusive,
    still_asked,
)
from enginegate.candidate import Candidate
from enginegate.decision import CLOCK_TOLERANCE, Decision
from enginegate.errors import ApprovalError, ModelError
from enginegate.evidence import Scorecard
from enginegate.notifications import ApprovalRequest
from enginegate.policy import Policy
from enginegate.report import ApprovalQuestion, approval_form_text
from enginegate.repository import ReleaseSigning, record_decision
from enginegate.repository.history.audit import Answers, answers_to
from enginegate.workspace import Workspace, now
from flows.notices import notify_of_form
from tasks.artifacts import places_of, show_scorecard

NO_CANDIDATE = "none"
_FORM = "Prefect form"
_LONGEST_NAMES = 40


class ApprovalForm(RunInput):
    """The form. Nothing has a default: neither silence nor a forced retry approves.

    Titles say it all, because Prefect gives a description a line that the text above then lacks.
    """

    decision: Literal["approve", "reject"] = Field(
        title="Decision: approve publishes, reject changes nothing"
    )
    approver: str = Field(title="Your name", min_length=2)
    reason: str = Field(title="Reason, kept with the release", min_length=5)

    # `enginegate approve --candidate` sends a name that the form on the screen does not ask for.
    model_config = ConfigDict(extra="allow")

    @property
    def named_candidate(self) -> str:
        """What is to be published instead of the winner; empty: the winner."""
        given = (self.model_dump().get(name, "") for name in ("candidate", "accept_inconclusive"))
        return next((str(name).strip() for name in given if name and name != NO_CANDIDATE), "")


def approval_form(
    text: str, may_approve: tuple[str, ...], candidates: tuple[Candidate, ...]
) -> type[ApprovalForm]:
    """The form with the fields that the policy allows.

    Args:
        text: above the fields, as Markdown.
        may_approve: whom the policy names and who has not approved; empty: anybody.
        candidates: inconclusive ones that may be published after all; none: there is no such field.
    """
    fields: dict[str, Any] = {}
    if may_approve:
        names = " or ".join(may_approve)
        if len(names) > _LONGEST_NAMES:
            names = f"one of {len(may_approve)} that the policy names"
        fields["approver"] = (str, Field(title=f"Your name: {names}", min_length=2))
    if candidates:
        options = Literal[NO_CANDIDATE, *(each.name for each in candidates)]  # type: ignore[valid-type]
        title = "Publish this inconclusive candidate instead of the winner"
        fields["accept_inconclusive"] = (options, Field(default=NO_CANDIDATE, title=title))
    form = create_model("ApprovalForm", __base__=ApprovalForm, **fields)
    return form.with_initial_data(description=text)


def decisions_on(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> Answers:
    """The answers to this scorecard; a suspended run asks until they suffice or one says no.

    Only a deployed run can be suspended: its process ends and any worker continues it. Elsewhere
    the answers must exist before the flow starts (`enginegate approve`).

    Raises:
        ApprovalError: there is nothing to approve, nobody answered, or an answer is no answer.
    """
    if deployment.id is not None:
        check_approvable(scorecard, policy.approval)
        _collect(scorecard, policy, workspace)
    _record(scorecard, policy, workspace)
    return _answers(scorecard, policy, workspace)


def _answers(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> Answers:
    given = workspace.decisions(scorecard.digest)
    return answers_to(scorecard, given, policy.target.repository)


def _record(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> None:
    """Put rejections and signed approvals in the audit log that are not there.

    They were given where the repository is not. An approval without a signature is a file that
    anybody may have written: whoever gave one by command put it in the log then.

    Several that were written meanwhile arrive together: a no comes after every approval that a
    wrong clock could have put behind it.
    """

    def place(decision: Decision) -> datetime:
        no = decision.answer == "reject"
        return decision.decided_at + CLOCK_TOLERANCE if no else decision.decided_at

    signing = ReleaseSigning.of(policy.signing, workspace)
    for decision in sorted(workspace.decisions(scorecard.digest), key=place):
        path = workspace.decision_file(decision)
        if decision.answer == "approve" and signing.check_record(decision, path):
            continue
        record_decision(policy.target.repository, decision, policy.name)


def _collect(scorecard: Scorecard, policy: Policy, workspace: Workspace) -> None:
    answered = _answered_questions()
    for number in count():
        _record(scorecard, policy, workspace)
        given = _answers(scorecard, policy, workspace)
        if any(_answers_question(decision, number) for decision in given.decisions):
            continue
        standing = approval_status(
            given.decisions, scorecard, policy.approval, now=now(), record=given.record
        )
        # An answer that Prefect holds counts before those that were written meanwhile suffice.
        if _key(scorecard, number) not in answered and (standing.rejection or not standing.missing):
            return
        if _key(scorecard, number) not in answered:
            show_scorecard(scorecard, workspace)
            _notify(scorecard, policy, workspace, standing, number)
        _ask(scorecard, policy, workspace, standing, number)


def _ask(
    scorecard: Scorecard,
    policy: Policy,
    workspace: Workspace,
    standing: ApprovalStatus,
    number: int,
) -> None:
    """Suspend with the form; in the process that continues, keep the answer as a decision."""
    answer = suspend_flow_run(
        wait_for_input=_form(scorecard, policy, workspace, standing),
        timeout=int(policy.approval.timeout_hours * 3600),
        key=_key(scorecard, number),
    )
    if answer is None:
        raise ApprovalError(
            f"Nobody answered for scorecard {scorecard.digest[:12]}; that means no."
        )
    given = _decision(answer, scorecard, number)
    # Prefect holds the answer, which shows that it was given: also where a command wrote the file.
    decision = _written(given, workspace) or given
    if decision.answer == "reject":
        # A no counts as a file too, so a log that cannot be written now does not lose it.
        workspace.save_decision(decision)
    record_decision(policy.target.repository, decision, policy.name)
    path = workspace.save_decision(decision)
    ReleaseSigning.of(policy.signing, workspace).sign_record(decision, path)


def _notify(
    scorecard: Scorecard,
    policy: Policy,
    workspace: Workspace,
    standing: ApprovalStatus,
    number: int,
) -> None:
    asked = ApprovalRequest(
        question=f"{flow_run.id}/{_key(scorecard, number)}",
        asked_at=now(),
        policy=str(flow_run.parameters.get("policy", "POLICY")),
        until=now() + timedelta(hours=policy.approval.timeout_hours),
        missing=standing.missing,
        approved_by=tuple(each.approver for each in standing.approvals),
        may_approve=still_asked(standing, scorecard, policy.approval),
    )
    notify_of_form(scorecard, asked, policy.live_tables, workspace)


def _decision(answer: ApprovalForm, scorecard: Scorecard, number: int) -> Decision:
    candidate = _candidate(answer, scorecard)
    return Decision(
        scorecard_sha256=scorecard.digest,
        answer=answer.decision,
        approver=answer.approver,
        reason=answer.reason,
        decided_at=_answered_at(_key(scorecard, number)),
        origin=_origin(number),
        accepts=inconclusive(candidate, scorecard) if candidate else (),
        candidate=candidate,
    )


def _candidate(answer: ApprovalForm, scorecard: Scorecard) -> Candidate | None:
    """What an approval names; whatever else stands in the form, a no is a no.

    Raises:
        ApprovalError: it names something that is not on the scorecard.
    """
    name = answer.named_candidate
    if answer.decision == "reject" or not name:
        return None
    there = ", ".join(str(verdict.candidate) for verdict in scorecard.verdicts)
    with suppress(ModelError):
        candidate = Candidate.parse(name)
        if scorecard.verdict(candidate) is not None:
            return candidate
    raise ApprovalError(
        f"{answer.approver} approved {name!r}, which is no candidate of scorecard "
        f"{scorecard.digest[:12]} (it has {there}), so nothing was approved. Start the promotion "
        "again, and leave that field empty to approve the winner."
    )


def _answered_at(key: str) -> datetime:
    """When the form was filled in; the worker that continues may come much later."""
    with get_client(sync_client=True) as client:
        found = client.filter_flow_run_input(
            flow_run_id=flow_run.id,
            key_prefix=f"suspended-{key}-response",
            limit=1,
            exclude_keys=set(),
        )
    return (found[0].created if found else None) or now()


def _written(decision: Decision, workspace: Workspace) -> Decision | None:
    """The same answer by command, which writes the decision, then fills in the form; None: none.

    An old yes that comes up again must not outlive a later no by the same person.
    """
    given = workspace.decisions(decision.scorecard_sha256)
    own = [each for each in given if each.approver == decision.approver]
    relevant = own if decision.answer == "approve" else own[-1:]
    said = _said(decision)
    return next((each for each in reversed(relevant) if _said(each) == said), None)


def _said(decision: Decision) -> tuple[str, str, Candidate | None, tuple[str, ...]]:
    return decision.answer, decision.reason, decision.candidate, decision.accepts


def _key(scorecard: Scorecard, number: int) -> str:
    """One question's name.

    run_count grows with every retry, so a retry asks again: a fixed key would hand the form's
    defaults to a forced retry, and an old answer to an unforced one.
    """
    return f"approval-{scorecard.digest[:12]}-{flow_run.run_count}-{number}"


def _origin(number: int) -> str:
    """Prefect has no users, so the form knows a name and nothing about who typed it."""
    return f"{_FORM} {number} of run {flow_run.name} ({flow_run.id}, {flow_run.run_count})"


def _answers_question(decision: Decision, number: int) -> bool:
    """Whether a decision came from this run's form; its name may be another by now."""
    run = f" ({flow_run.id}, {flow_run.run_count})"
    return decision.origin.startswith(f"{_FORM} {number} of run ") and decision.origin.endswith(run)


def _answered_questions() -> set[str]:
    with get_client(sync_client=True) as client:
        policy = client.read_flow_run(flow_run.id).empirical_policy
    return set(policy.pause_keys or ())


def _form(
    scorecard: Scorecard, policy: Policy, workspace: Workspace, standing: ApprovalStatus
) -> type[ApprovalForm]:
    rules = policy.approval
    who = still_asked(standing, scorecard, rules)
    candidates, places = acceptable(scorecard, rules), places_of(scorecard, workspace)
    question = ApprovalQuestion(
        missing=standing.missing,
        until=now() + timedelta(hours=rules.timeout_hours),
        approved_by=tuple(each.approver for each in standing.approvals),
        objections=standing.objections,
        open_candidates=candidates,
        page_url=places.page,
        start_command=places.start_command,
    )
    return approval_form(approval_form_text(scorecard, question), who, candidates)
