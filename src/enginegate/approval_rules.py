"""Whether people's answers allow a scorecard to be promoted: pure, and total over all answers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from enginegate.candidate import Candidate
from enginegate.decision import CLOCK_TOLERANCE, Decision, OnRecord, Release
from enginegate.errors import ApprovalError, RejectedError
from enginegate.evidence import Finding, Outcome, Scorecard
from enginegate.policy.operating import Approval, person

_NOTHING = OnRecord()
_USED_UP = (
    "it was given before what it led to was rolled back or withdrawn, or replaced by another "
    "promise. Look at the scorecard, and approve again if it may go live after all."
)
_UNBACKED = (
    "it is only a file in the workspace: neither the audit log nor a signature shows that it was "
    "given. Approve again, with `enginegate approve` on a machine that has the live repository."
)


@dataclass(frozen=True, slots=True)
class ApprovalStatus:
    """What several people's answers to one scorecard amount to now.

    Attributes:
        approvals: those that count, oldest first, each by another person, for one candidate.
        missing: how many more people must approve.
        rejection: why nothing may be promoted whoever else approves; empty if nobody said no.
        objections: why other approvals do not count.
    """

    approvals: tuple[Decision, ...]
    missing: int
    rejection: str = ""
    objections: tuple[str, ...] = ()


def approval_status(
    decisions: Iterable[Decision],
    scorecard: Scorecard,
    rules: Approval,
    *,
    now: datetime,
    record: OnRecord = _NOTHING,
) -> ApprovalStatus:
    """Add up all answers: the latest of each person counts, and a no voids approvals before it.

    Raises:
        ApprovalError: a decision was made more than five minutes in the future, and the audit log
            does not say when it arrived.
    """
    given = tuple(decisions)
    backed = [d for d in given if d.digest not in record.unbacked]
    yes, noes = _answers(backed, rules, now, record)
    standing = [d for d in yes if all(record.follows(d, no) for no in noes)]
    objections = {
        d: _USED_UP if record.used_up(d) else objection(d, scorecard, rules, now=now)
        for d in standing
    }
    good = [d for d in standing if not objections[d]]
    named = {d: d.candidate or scorecard.winner for d in good}
    chosen = [d for d in good if named[d] == named[good[-1]]]
    said = [f"The approval by {d.approver}: {why}" for d, why in objections.items() if why]
    said += [f"The approval by {d.approver}: {_UNBACKED}" for d in given if d not in backed]
    said += [f"{d.approver} approved another candidate." for d in good if d not in chosen]
    rejection = f"Rejected by {noes[-1].approver}: {noes[-1].reason}" if noes else ""
    return ApprovalStatus(
        approvals=tuple(chosen),
        missing=max(0, rules.required - len(chosen)),
        rejection="" if standing else rejection,
        objections=tuple(said),
    )


def check_decision(
    decisions: Iterable[Decision],
    scorecard: Scorecard,
    rules: Approval,
    *,
    now: datetime,
    record: OnRecord = _NOTHING,
) -> tuple[Decision, ...]:
    """The approvals, oldest first, if they allow this very scorecard to be promoted now.

    Raises:
        ApprovalError: nothing on the scorecard can be approved, or there are not enough valid
            approvals of it; the message says of each why it does not count.
        RejectedError: a person said no.
    """
    check_approvable(scorecard, rules)
    given = tuple(decisions)
    own = tuple(d for d in given if d.scorecard_sha256 == scorecard.digest)
    if given and not own:
        raise ApprovalError(
            f"The decision is for scorecard {given[-1].scorecard_sha256[:12]}, not for "
            f"{scorecard.digest[:12]}. The evidence changed, so it needs a new decision."
        )
    standing = approval_status(own, scorecard, rules, now=now, record=record)
    if standing.rejection:
        raise RejectedError(standing.rejection)
    if standing.missing:
        raise ApprovalError(_too_few(standing, scorecard, rules))
    return standing.approvals


def check_approvable(scorecard: Scorecard, rules: Approval) -> None:
    """Refuse a scorecard on which there is nothing that anybody could approve.

    Raises:
        ApprovalError: no candidate passed, nor may one be accepted as inconclusive.
    """
    winner = scorecard.winner
    if winner is not None and scorecard.outcome(winner) is Outcome.PASSED:
        return
    if acceptable(scorecard, rules):
        return
    raise ApprovalError(
        f"Scorecard {scorecard.digest[:12]} has no candidate that passed every gate, so there "
        f"is nothing to approve: {scorecard.reason}"
    )


def acceptable(scorecard: Scorecard, rules: Approval) -> tuple[Candidate, ...]:
    """Inconclusive candidates that a person may accept by name, where the policy allows it."""
    if not rules.accept_inconclusive:
        return ()
    if scorecard.further:
        return ()  # each kind of device has its own winner, which one name cannot stand for
    return tuple(
        v.candidate
        for v in scorecard.verdicts
        if scorecard.outcome(v.candidate) is Outcome.INCONCLUSIVE
        and not unpublishable(v.candidate, scorecard)
    )


def outdated(
    scorecard: Scorecard,
    candidate: Candidate | None,
    *,
    policy_sha256: str,
    live: Release | None,
    known: bool = True,
) -> str:
    """Why a scorecard cannot be promoted any more, whoever approves it; empty when it can.

    Args:
        scorecard: what is to be promoted.
        candidate: what of it; None: the winner.
        policy_sha256: digest of the policy as it is now, for the scorecard's version of the model.
        live: the release that is live now, with the scorecard that it is held to; None: nothing is.
        known: what is live is known here; else only the policies are compared.
    """
    if policy_sha256 != scorecard.policy_sha256:
        return (
            "its policy has changed since it was made. Qualify again: what was "
            "measured stays, and the new scorecard needs its own decision."
        )
    version = live.version if live else None
    verdict = scorecard.verdict(named) if (named := candidate or scorecard.winner) else None
    # It is what is live, and what that is held to: promoting it again changes nothing.
    done = (
        live is not None
        and verdict is not None
        and (live.engine.engine_sha256, live.scorecard_sha256)
        == (verdict.engine_sha256, scorecard.digest)
    )
    if version == scorecard.replaces or done or not known:
        return ""
    return (
        f"it was made while {_release_words(scorecard.replaces)} was live; now it is "
        f"{_release_words(version)}. Qualify again: what was measured stays, and the new scorecard "
        "is compared with what is live now."
    )


def _release_words(version: int | None) -> str:
    return f"release {version}" if version else "nothing"


def inconclusive(candidate: Candidate, scorecard: Scorecard) -> tuple[str, ...]:
    """What is not known well enough about a candidate, as GATE/SCOPE, sorted."""
    found = _counting(candidate, scorecard)
    return tuple(
        sorted({f"{f.gate}/{f.scope}" for f in found if f.outcome is Outcome.INCONCLUSIVE})
    )


def unpublishable(candidate: Candidate, scorecard: Scorecard) -> str:
    """Why there is nothing of a candidate that could serve; empty when there is."""
    verdict, measured = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    if verdict is None or verdict.engine_sha256 is None:
        return f"the scorecard has no engine of {candidate}."
    if measured is None or measured.chosen is None:
        return f"no serving configuration of {candidate} was measured and chosen."
    return ""


def expires_at(approval: Decision, rules: Approval) -> datetime:
    """Until when an approval stands."""
    return approval.decided_at + timedelta(hours=rules.expires_hours)


def still_asked(standing: ApprovalStatus, scorecard: Scorecard, rules: Approval) -> tuple[str, ...]:
    """Whom the policy names that could approve as well; empty if it names nobody who could."""
    passed_over = {person(approval.approver) for approval in standing.approvals}
    if not rules.requester_may_approve:
        passed_over.add(person(scorecard.requested_by))
    return tuple(name for name in rules.approvers if person(name) not in passed_over)


def objection(approval: Decision, scorecard: Scorecard, rules: Approval, *, now: datetime) -> str:
    """Why one approval does not count; empty when it does."""
    candidate = approval.candidate or scorecard.winner
    reasons = (
        _who_objection(approval, scorecard, rules),
        _age_objection(approval, rules, now),
        "it names no candidate, and the scorecard has no winner."
        if candidate is None
        else _what_objection(approval, candidate, scorecard, rules),
    )
    return next((reason for reason in reasons if reason), "")


def _who_objection(approval: Decision, scorecard: Scorecard, rules: Approval) -> str:
    if not _named(approval, rules):
        return (
            f"{approval.approver!r} may not approve this model. The policy names: "
            f"{', '.join(rules.approvers)}."
        )
    if rules.requester_may_approve:
        return ""
    if not scorecard.requested_by:
        return (
            "the scorecard does not say who asked for it, so that nobody approves their own "
            "request cannot be shown. Qualify again."
        )
    if person(approval.approver) == person(scorecard.requested_by):
        return f"{scorecard.requested_by} asked for this qualification; somebody else must approve."
    return ""


def _age_objection(approval: Decision, rules: Approval, now: datetime) -> str:
    age = now - approval.decided_at
    if -age > CLOCK_TOLERANCE:
        return (
            f"it was given at {approval.decided_at.isoformat(timespec='seconds')}, and it is "
            f"{now.isoformat(timespec='seconds')} now, so how old it is cannot be known: the clock "
            "of this machine was set back since, or was ahead then. Approve again."
        )
    if age <= timedelta(hours=rules.expires_hours):
        return ""
    return (
        f"it is {age.total_seconds() / 3600:.1f} h old; an approval stands for "
        f"{rules.expires_hours:g} h. Look at the scorecard and approve again."
    )


def _what_objection(
    approval: Decision, candidate: Candidate, scorecard: Scorecard, rules: Approval
) -> str:
    outcome = scorecard.outcome(candidate)
    found = inconclusive(candidate, scorecard)
    missing = unpublishable(candidate, scorecard)
    if outcome in {Outcome.FAILED, Outcome.ERRORED}:
        return f"{candidate} {outcome.word}; that can never be approved."
    if scorecard.further and candidate != scorecard.winner:
        return (
            f"it names {candidate}, and the scorecard is about several kinds of device "
            f"({', '.join(scorecard.devices)}), each with its own winner. Approve without a name."
        )
    if missing:
        return missing
    if outcome is Outcome.INCONCLUSIVE and not rules.accept_inconclusive:
        return (
            f"{candidate} is inconclusive, and the policy does not allow accepting that "
            "(approval.accept_inconclusive)."
        )
    if approval.accepts != found:
        return (
            f"it accepts {', '.join(approval.accepts) or 'nothing'}, but what is inconclusive of "
            f"{candidate} is {', '.join(found) or 'nothing'}. Approve again."
        )
    return ""


def _answers(
    decisions: Iterable[Decision], rules: Approval, now: datetime, record: OnRecord
) -> tuple[list[Decision], list[Decision]]:
    """What each person said last, as approvals and rejections, each oldest first.

    A no by somebody the policy does not know is no answer.
    """
    given = sorted(decisions, key=record.position)
    for decision in given:
        if decision.digest not in record.places:
            _check_clock(decision, now)
    noes = [d for d in given if d.answer == "reject" and not may_not_reject(d.approver, rules)]
    latest: dict[tuple[str, bool], Decision] = {}
    for decision in given:
        who = person(decision.approver)
        own = [no for no in noes if person(no.approver) == who]
        if decision.answer == "approve" and all(record.follows(decision, no) for no in own):
            latest[who, _named(decision, rules)] = decision
    changed = {who for who, named in latest if named}
    yes = sorted(latest.values(), key=record.position)
    return yes, [no for no in noes if person(no.approver) not in changed]


def may_not_reject(name: str, rules: Approval) -> str:
    """Why somebody's no does not count; empty when it does: the person must be named, no more."""
    if not rules.approvers or person(name) in {person(each) for each in rules.approvers}:
        return ""
    return f"{name!r} may not decide on this model. The policy names: {', '.join(rules.approvers)}."


def _check_clock(decision: Decision, now: datetime) -> None:
    if decision.decided_at - now > CLOCK_TOLERANCE:
        raise ApprovalError(
            f"The decision by {decision.approver} was made at "
            f"{decision.decided_at.isoformat(timespec='seconds')}, and it is "
            f"{now.isoformat(timespec='seconds')} now: the clock of this machine was set back, or "
            "that of the machine where it was given is ahead, and the audit log does not say when "
            "it arrived. Set the clocks right, take that decision out of the workspace's decisions "
            "folder, and approve again."
        )


def _counting(candidate: Candidate, scorecard: Scorecard) -> Iterator[Finding]:
    for judged in (scorecard.verdict(candidate), scorecard.benchmark(candidate)):
        yield from (f for f in (judged.findings if judged else ()) if not f.advisory)


def _too_few(standing: ApprovalStatus, scorecard: Scorecard, rules: Approval) -> str:
    command = f"  enginegate approve {scorecard.digest[:12]} --approver NAME --reason WHY"
    if not standing.approvals and not standing.objections:
        return f"Nobody has decided on scorecard {scorecard.digest[:12]}. Answer with:\n{command}"
    by = ", ".join(d.approver for d in standing.approvals) or "nobody"
    needed = (
        f"Scorecard {scorecard.digest[:12]} is validly approved by {by}; the policy needs "
        f"{rules.required} people."
    )
    return "\n".join([needed, *standing.objections, f"Answer with:\n{command}"])


def _named(decision: Decision, rules: Approval) -> bool:
    names = {name.strip().casefold() for name in rules.approvers}
    return not names or decision.approver.strip().casefold() in names
