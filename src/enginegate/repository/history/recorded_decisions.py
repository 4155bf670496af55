"""The answers to a scorecard: those that are kept as files, with what the audit log knows of them.

A workspace may be lost or be another machine's; a no that is in the log still is one. The log also
says in which order answers arrived, and whether what they led to was taken back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from enginegate.decision import Decision, OnRecord
from enginegate.evidence import Scorecard
from enginegate.repository.history.audit import AuditLog, Event


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything that was answered to one scorecard."""

    decisions: tuple[Decision, ...]
    record: OnRecord


def answers_to(scorecard: Scorecard, given: Iterable[Decision], root: Path) -> Answers:
    """Add what the audit log of a repository knows to the decisions that are kept as files.

    An approval that is not in the log is only a file, which anybody may have written: it does not
    count. A no needs no proof.

    Raises:
        TamperedError: the log was changed.
    """
    events = AuditLog(root).read()
    own = [event for event in events if event.scorecard == scorecard.digest]
    kept = tuple(given)
    places = {e.operation: e.sequence for e in own if e.event in {"approved", "rejected"}}
    known = {decision.digest for decision in kept}
    told = {
        _rejection(event): event.sequence
        for event in own
        if event.event == "rejected" and event.operation not in known
    }
    places |= {decision.digest: place for decision, place in told.items()}
    written = {digest: events[place].at for digest, place in places.items()}
    only_files = {d.digest for d in kept if d.answer == "approve" and d.digest not in places}
    record = OnRecord(places, _ended(events, scorecard), written, frozenset(only_files))
    return Answers((*kept, *told), record)


def _rejection(event: Event) -> Decision:
    return Decision(
        scorecard_sha256=event.scorecard or "",
        answer="reject",
        approver=event.who,
        reason=event.why,
        decided_at=event.at,
        origin=event.origin,
    )


def _ended(events: Sequence[Event], scorecard: Scorecard) -> tuple[int, datetime] | None:
    """The last event that left this scorecard after it was published, or given as a promise.

    Something else was live after it, or the release was held to another scorecard's promise.
    """
    published, ended = False, None
    for event in events:
        if event.model != scorecard.model:
            continue
        own = event.scorecard == scorecard.digest
        published |= event.event in {"published", "promised"} and own
        other = event.event in {"rolled back", "promised"} and not own
        left = event.event == "withdrawn" or other
        if published and left:
            ended = (event.sequence, event.at)
    return ended
