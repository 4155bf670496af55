"""What waits for people: scorecards without an answer, without enough, or not promoted yet."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from enginegate.approval_rules import (
    ApprovalStatus,
    approval_status,
    expires_at,
    outdated,
    still_asked,
)
from enginegate.errors import EnginegateError
from enginegate.evidence import Scorecard
from enginegate.policy import Policy
from enginegate.policy.operating import Approval
from enginegate.repository import Layout
from enginegate.repository.history.audit import answers_to
from enginegate.repository.store.live_record import LiveRecord
from enginegate.workspace import Workspace, now

_WHEN = "%Y-%m-%d %H:%M:%S %Z"


def waiting(policy: Policy, workspace: Workspace, path: Path) -> Iterator[str]:
    """One sentence for each scorecard of the policy that somebody has to do something about.

    Args:
        policy: the rules as they are now.
        workspace: holds scorecards and decisions.
        path: the policy's file, for the command to type.
    """
    layout = Layout(policy.target.repository, policy.name)
    current, releases = layout.current(), layout.releases()
    published = {release.scorecard_sha256 for release in releases}
    live = next((r for r in releases if current and r.version == current.version), None)
    known, own = knows_what_is_live(layout), live.scorecard_sha256 if live else None
    if live is not None:
        with suppress(EnginegateError):  # `verify` says what is wrong with a promise it was given
            live = layout.held_to(live)
    past = 0
    for card in workspace.scorecards():
        if card.model != policy.name or card.digest == own:
            continue
        if live is not None and live.scorecard_sha256 == card.digest:
            continue
        rules = policy.with_model(card.model_uri).digest
        why = outdated(card, None, rules_sha256=rules, live=live, known=known)
        try:
            given = workspace.decisions(card.digest)
            sentence = _sentence(card, policy, workspace, path) if given and not why else ""
        except EnginegateError as error:
            yield f"cannot be decided: {_named(card)}: {error}"
            continue
        if why:
            past += card.digest not in published and card.winner is not None
        elif not given and card.winner:
            yield f"waits for a decision: {_named(card)}"
        elif sentence:
            yield sentence
    if past:
        yield (
            f"not promoted, and cannot be any more: {past} of the scorecards, made under other "
            "rules or before another release went live"
        )


def knows_what_is_live(layout: Layout) -> bool:
    """Whether this machine has had a release of the model: people may answer on one that has not.

    Raises:
        TamperedError: journal or audit log was changed.
    """
    return layout.current() is not None or LiveRecord.of(layout).last_number > 0


def _sentence(card: Scorecard, policy: Policy, workspace: Workspace, path: Path) -> str:
    """What its answers amount to; empty where somebody said no."""
    rules, given = policy.approval, workspace.decisions(card.digest)
    answers = answers_to(card, given, policy.target.repository)
    standing = approval_status(answers.decisions, card, rules, now=now(), record=answers.record)
    if standing.approvals and not standing.missing and not standing.rejection:
        return (
            f"approved and not promoted: {_named(card)}: approved by {_by(standing, rules)}. "
            f"Next: enginegate promote {path} {card.digest[:12]}"
        )
    if standing.approvals:
        left = " or ".join(still_asked(standing, card, rules)) or "nobody that the policy names"
        asked = left if rules.approvers else "anybody else"
        return (
            f"waits for more approvals: {_named(card)}: approved by {_by(standing, rules)}; "
            f"{standing.missing} more needed, by {asked}"
        )
    if standing.objections and not standing.rejection:
        return f"waits for a new decision: {_named(card)}: {' '.join(standing.objections)}"
    return ""


def _by(standing: ApprovalStatus, rules: Approval) -> str:
    return ", ".join(
        f"{each.approver} (valid until {expires_at(each, rules):{_WHEN}})"
        for each in standing.approvals
    )


def _named(card: Scorecard) -> str:
    return f"{card.digest[:12]} ({card.model_uri})"
