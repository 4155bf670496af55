"""Deciding on a scorecard: approve, reject, accept what is inconclusive, and what waits for it."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from enginegate.approval_rules import (
    ApprovalStatus,
    approval_status,
    check_approvable,
    expires_at,
    inconclusive,
    may_not_reject,
    objection,
    outdated,
    still_asked,
)
from enginegate.candidate import Candidate
from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import DecisionDocument, WaitingScorecard
from enginegate.cli.policies import policies_here
from enginegate.decision import Decision, Release
from enginegate.errors import ApprovalError, EnginegateError, InputError
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted, explain_validation
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, read_policy
from enginegate.policy.operating import Approval
from enginegate.report import page_of_log
from enginegate.report.tables import print_hanging
from enginegate.repository import Layout, ReleaseSigning, origin, record_decision
from enginegate.repository.history.audit import answers_to
from enginegate.repository.store.live_record import LiveRecord
from enginegate.tracking import check_authentic, try_deliver
from enginegate.workspace import Workspace, now

_log = logging.getLogger("enginegate.approve")


@dataclass(frozen=True, slots=True)
class PersonAnswer:
    """A person's answer, as typed.

    Attributes:
        candidate: KIND-PRECISION; empty: the winner.
        accept_inconclusive: accept everything that is inconclusive about it.
    """

    answer: Literal["approve", "reject"]
    approver: str
    reason: str
    candidate: str = ""
    accept_inconclusive: bool = False


def decide_scorecard(
    scorecard: Scorecard,
    answer: PersonAnswer,
    policy: Path | None,
    workspace: Workspace,
    output: Printer,
) -> None:
    """Put the decision in the audit log, keep it, and update MLflow and suspended promotions.

    A rejection is kept even if the log cannot be written: the promotion then writes it there.

    Raises:
        ApprovalError: it would not count, by the policy that the scorecard was made under; or
            nothing shows that the scorecard is what a qualification found.
        TamperedError: the scorecard is not the one that MLflow has.
        InputError: it is no decision, names a candidate that the scorecard does not have, or is an
            approval for which no policy was found.
    """
    out = output.console
    path, rules = _rules(scorecard, policy, answer)
    decision = _decision(scorecard, answer)
    _check(decision, scorecard, rules)
    # One that cannot be read may be a no: nothing is added to it, and the message names it.
    workspace.decisions(scorecard.digest)
    later = ""
    if rules is None:
        workspace.save_decision(decision)
        later = "its policy is not in policies/"
    elif decision.answer == "approve":
        signing = ReleaseSigning.of(rules.signing, workspace)
        check_authentic(scorecard, workspace, signing)
        # First: a file that the log does not have counts for nothing.
        record_decision(rules.target.repository, decision, rules.name)
        signing.sign_record(decision, workspace.save_decision(decision))
    else:
        later = _reject(decision, rules, workspace)
    word = "Approved" if answer.answer == "approve" else "Rejected"
    named = f"scorecard {scorecard.digest[:12]} ({scorecard.model_uri})"
    print_hanging(out, f"{word} by {answer.approver}: {named}.")
    if later:
        print_hanging(out, f"The audit log gets it at the promotion: {later}")
    if scorecard.mlflow_run and rules is not None:
        refusal = try_deliver(
            workspace,
            rules.target.repository,
            model=rules.name,
            make_page=partial(page_of_log, rules=rules.approval),
        )
        if refusal:
            print_hanging(out, f"MLflow is updated later: {refusal.splitlines()[0]}")
    resumed = _resume_suspended(decision)
    missing = _still_missing(decision, scorecard, rules, workspace)
    command = f"enginegate promote {path} {scorecard.digest[:12]}"
    if decision.answer == "reject" or resumed or missing.approvals:
        command = ""
    for sentence in (*(f"The suspended run {name} continues." for name in resumed), *missing.why):
        print_hanging(out, sentence)
    if command:
        out.print(f"Next: {command}", markup=False, soft_wrap=True)
    output.document(
        DecisionDocument(
            decision=decision,
            model=scorecard.model,
            model_uri=scorecard.model_uri,
            in_audit_log=not later,
            missing=missing.approvals,
            resumed=resumed,
            next=command,
        )
    )


def _reject(decision: Decision, rules: Policy, workspace: Workspace) -> str:
    """Keep a no, which counts as a file too; why the audit log does not have it, if it does not."""
    path = workspace.save_decision(decision)
    ReleaseSigning.of(rules.signing, workspace).sign_record(decision, path)
    try:
        record_decision(rules.target.repository, decision, rules.name)
    except EnginegateError as error:
        return str(error)
    return ""


def _decision(scorecard: Scorecard, answer: PersonAnswer) -> Decision:
    candidate = Candidate.parse(answer.candidate) if answer.candidate else None
    if candidate is not None and scorecard.verdict(candidate) is None:
        raise InputError(f"Scorecard {scorecard.digest[:12]} has no candidate {candidate}.")
    if answer.accept_inconclusive and candidate is None:
        raise InputError(
            "Say which candidate is accepted: --accept-inconclusive --candidate KIND-PRECISION."
        )
    accepts = inconclusive(candidate, scorecard) if candidate else ()
    if candidate and scorecard.outcome(candidate) is Outcome.INCONCLUSIVE:
        _check_accepted(candidate, accepts, accepted=answer.accept_inconclusive)
    try:
        return Decision(
            scorecard_sha256=scorecard.digest,
            answer=answer.answer,
            approver=answer.approver,
            reason=answer.reason,
            decided_at=now(),
            origin=origin("command"),
            accepts=accepts,
            candidate=candidate,
        )
    except ValidationError as error:
        raise InputError(f"This is no decision:\n{explain_validation(error, Decision)}") from error


def _check_accepted(candidate: Candidate, accepts: tuple[str, ...], *, accepted: bool) -> None:
    if not accepted:
        raise ApprovalError(
            f"{candidate} is inconclusive: {', '.join(accepts) or 'it was not benchmarked'}.\n"
            "To publish it all the same, if the policy allows that, add --accept-inconclusive."
        )


def _check(decision: Decision, scorecard: Scorecard, rules: Policy | None) -> None:
    """Refuse now what the promotion would refuse, or overlook, later."""
    if decision.answer == "reject":
        why = may_not_reject(decision.approver, rules.approval) if rules else ""
        if why:
            raise ApprovalError(f"This rejection would not count: {why}")
        return
    if rules is None:
        if decision.candidate is None and scorecard.winner is None:
            raise ApprovalError(f"There is nothing to approve: {scorecard.reason}")
        raise InputError(
            f"No policy in policies/ is the one that scorecard {scorecard.digest[:12]} was made "
            "under. An approval counts only in the audit log of that policy's repository, so name "
            "the policy: --policy FILE."
        )
    layout = Layout(rules.target.repository, rules.name)
    current = layout.current()
    why = outdated(
        scorecard,
        decision.candidate,
        policy_sha256=rules.with_model(scorecard.model_uri).digest,
        live=layout.held_to(layout.release(current.version)) if current else None,
        known=knows_what_is_live(layout),
    )
    if why:
        raise ApprovalError(
            f"Scorecard {scorecard.digest[:12]} of {rules.name} cannot be promoted any more: {why}"
        )
    check_approvable(scorecard, rules.approval)
    reason = objection(decision, scorecard, rules.approval, now=now())
    if reason:
        raise ApprovalError(f"This approval would not count: {reason}")


class _Missing(NamedTuple):
    """Approvals by other people that are still needed, with the reasons in sentences."""

    approvals: int = 0
    why: tuple[str, ...] = ()


def _still_missing(
    decision: Decision, scorecard: Scorecard, rules: Policy | None, workspace: Workspace
) -> _Missing:
    if decision.answer == "reject" or rules is None:
        return _Missing()
    given = answers_to(scorecard, workspace.decisions(scorecard.digest), rules.target.repository)
    standing = approval_status(
        given.decisions, scorecard, rules.approval, now=now(), record=given.record
    )
    if not standing.missing:
        return _Missing()
    needed = f"Still missing: {counted(standing.missing, 'approval')} by other people."
    said = (needed, standing.rejection, *standing.objections)
    return _Missing(standing.missing, tuple(sentence for sentence in said if sentence))


def _rules(
    scorecard: Scorecard, given: Path | None, answer: PersonAnswer
) -> tuple[Path, Policy] | tuple[None, None]:
    """The policy that a scorecard was made under, and its file: the one given, else one of
    ``policies/``; None where there is none.

    Raises:
        ApprovalError: it is to be approved, and the given one, or the one of its model, is another.
    """
    found = [given] if given else policies_here()
    policies = {path: _read(path, required=given is not None) for path in found}
    for path, policy in policies.items():
        if policy and policy.with_model(scorecard.model_uri).digest == scorecard.policy_sha256:
            return path, policy
    others = [
        path for path, policy in policies.items() if policy and policy.name == scorecard.model
    ]
    if given is not None or (others and answer.answer == "approve"):
        raise ApprovalError(
            f"Scorecard {scorecard.digest[:12]} was made under other rules than "
            f"{given or others[0]} has now. Qualify under it, and decide on the new scorecard."
            + ("" if given else " If it was made under another file, name that with --policy.")
        )
    return None, None


def _read(path: Path, *, required: bool) -> Policy | None:
    try:
        return read_policy(path)
    except EnginegateError as error:
        if required:
            raise
        _log.warning("%s is left out: %s", path, error)
        return None


def _resume_suspended(decision: Decision) -> tuple[str, ...]:
    """Resume promotions that wait on a Prefect server; none without one."""
    if not os.environ.get("PREFECT_API_URL"):
        return ()
    names: tuple[str, ...] = pipeline_module("flows.answer").resume_suspended(decision)
    return names


_WHEN = "%Y-%m-%d %H:%M:%S %Z"


def waiting(
    policy: Policy,
    workspace: Workspace,
    path: Path,
    *,
    releases: Sequence[Release],
    cards: Iterable[Scorecard],
    ages: Callable[[Scorecard], None] = lambda _: None,
) -> Iterator[WaitingScorecard]:
    """Each scorecard of the policy that somebody has to do something about.

    Args:
        policy: the rules as they are now.
        workspace: holds decisions.
        path: the policy's file, for the command to type.
        releases: of its model.
        cards: that the workspace holds, oldest first.
        ages: called with each scorecard whose state the passing of time may change.
    """
    layout = Layout(policy.target.repository, policy.name)
    current = layout.current()
    published = {release.scorecard_sha256 for release in releases}
    live = next((r for r in releases if current and r.version == current.version), None)
    known, own = knows_what_is_live(layout), live.scorecard_sha256 if live else None
    if live is not None:
        with suppress(EnginegateError):  # `verify` says what is wrong with a promise it was given
            live = layout.held_to(live)
    past = 0
    for card in cards:
        if card.model != policy.name or card.digest == own:
            continue
        if live is not None and live.scorecard_sha256 == card.digest:
            continue
        rules = policy.with_model(card.model_uri).digest
        why = outdated(card, None, policy_sha256=rules, live=live, known=known)
        try:
            given = workspace.decisions(card.digest)
            found = _state_of(card, policy, workspace, path, ages) if given and not why else None
        except EnginegateError as error:
            yield _waits(card, "cannot be decided", str(error))
            continue
        if why:
            past += card.digest not in published and card.winner is not None
        elif not given and card.winner:
            command = f"enginegate approve {card.digest[:12]} --reason WHY"
            yield _waits(card, "waits for a decision", command=command)
        elif found is not None:
            yield found
    if past:
        yield WaitingScorecard(
            scorecard="",
            state="not promoted, and cannot be any more",
            sentence=(
                f"not promoted, and cannot be any more: {past} of the scorecards, made under other "
                "rules or before another release went live"
            ),
        )


def knows_what_is_live(layout: Layout) -> bool:
    """Whether this machine has had a release of the model: people may answer on one that has not.

    Raises:
        TamperedError: journal or audit log was changed.
    """
    return layout.current() is not None or LiveRecord.of(layout).last_number > 0


def _state_of(
    card: Scorecard,
    policy: Policy,
    workspace: Workspace,
    path: Path,
    ages: Callable[[Scorecard], None],
) -> WaitingScorecard | None:
    """The state of a scorecard's approval; None where somebody rejected it."""
    ages(card)
    rules, given = policy.approval, workspace.decisions(card.digest)
    answers = answers_to(card, given, policy.target.repository)
    standing = approval_status(answers.decisions, card, rules, now=now(), record=answers.record)
    if standing.approvals and not standing.missing and not standing.rejection:
        return _waits(
            card,
            "approved and not promoted",
            f"approved by {_by(standing, rules)}",
            command=f"enginegate promote {path} {card.digest[:12]}",
        )
    if standing.approvals:
        left = " or ".join(still_asked(standing, card, rules)) or "nobody that the policy names"
        asked = left if rules.approvers else "anybody else"
        return _waits(
            card,
            "waits for more approvals",
            f"approved by {_by(standing, rules)}; {standing.missing} more needed, by {asked}",
        )
    if standing.objections and not standing.rejection:
        return _waits(
            card,
            "waits for a new decision",
            " ".join(standing.objections),
            command=f"enginegate explain {card.digest[:12]}",
        )
    return None


def _waits(card: Scorecard, state: str, words: str = "", command: str = "") -> WaitingScorecard:
    named = f"{state}: {card.digest[:12]} ({card.model_uri})"
    sentence = f"{named}: {words}" if words else named
    return WaitingScorecard(scorecard=card.digest, state=state, sentence=sentence, next=command)


def _by(standing: ApprovalStatus, rules: Approval) -> str:
    return ", ".join(
        f"{each.approver} (valid until {expires_at(each, rules):{_WHEN}})"
        for each in standing.approvals
    )
