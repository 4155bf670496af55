"""Who did what, when, why and from where: an append-only, hash-chained log beside the releases.

Events are written under the repository's lock. The chain shows every edit but lines removed from
the end; for those the log keeps its head in a file beside it after each event. That shows a log
that was cut, restored from an older backup or begun anew by whoever did not think of that file.
Whoever may write here can change both, which shows only against what is kept elsewhere: each
release manifest (which is signed) holds the head of the moment it was staged, and the journal has
the operations.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from enginegate.atomic_io import write_file
from enginegate.candidate import Sha256
from enginegate.decision import Decision, Head, OnRecord, Release
from enginegate.errors import EnginegateError, InputError, RepositoryError, TamperedError
from enginegate.evidence import Scorecard
from enginegate.machine import user_at_host
from enginegate.records import Record
from enginegate.repository.history.hash_chain import GENESIS, HashChain, LogEntry
from enginegate.repository.history.journal import Entry, Journal, Kind, intent_detail
from enginegate.repository.lock import hold_lock

AUDIT = ".enginegate-audit.jsonl"
AUDIT_HEAD = ".enginegate-audit-head.json"
_REASON_LENGTH = 500

What = Literal[
    "approved",
    "rejected",
    "published",
    "rolled back",
    "withdrawn",
    "promised",
    "repaired",
    "refused",
    "watched",
    "promise broken",
    "acknowledged",
]
# After which another release is live than before, or none.
LIVE_EVENTS: frozenset[What] = frozenset({"published", "rolled back", "withdrawn"})
# The channel of a change that another host decided on, and this one replicated.
REPLICATION = "replication"
_DONE: dict[Kind, What] = {
    "publish": "published",
    "rollback": "rolled back",
    "withdraw": "withdrawn",
    "promise": "promised",
}


class AuditRecord(Record):
    """What was done, before it has a place in the log."""

    event: What
    model: str
    who: str
    why: str
    origin: str
    release: PositiveInt | None = None
    check: PositiveInt | None = None
    """Of a broken promise: the number of the release's check that failed, or the newest of those
    that are acknowledged."""
    scorecard: Sha256 | None = None
    operation: str = ""
    """The journal's name of it, or a decision's digest: told once, also when it was cut short."""
    manifest: Sha256 | None = None
    """Digest of the release's manifest, so that a lost journal takes no evidence with it."""


class Event(AuditRecord, LogEntry):
    """One line of the log."""


@dataclass(slots=True)
class AuditLog:
    """The log of one repository; whoever notes something holds the repository's lock.

    Attributes:
        channel: how operations come here: command, Prefect, Python, watch, replication.
    """

    root: Path
    channel: str = "Python"
    _chain: HashChain[Event] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._chain = HashChain(self.path, Event, "an audit event")

    @property
    def path(self) -> Path:
        """Triton ignores files in its repository's root."""
        return self.root / AUDIT

    @property
    def head_file(self) -> Path:
        """How far the log had come after its last event, kept beside it."""
        return self.root / AUDIT_HEAD

    def read(self) -> tuple[Event, ...]:
        """Every event, oldest first.

        Raises:
            TamperedError: a line is damaged, or the chain does not hold; the message names it.
        """
        return self._chain.read()

    def head(self) -> Head | None:
        """How far the log has come."""
        return self._chain.head()

    def note(self, deed: AuditRecord) -> None:
        """Write an event, then the head; an operation that is in the log is not repeated.

        Raises:
            TamperedError: the log was changed.
            RepositoryError: it cannot be written.
        """
        try:
            if not (deed.operation and deed.operation in {e.operation for e in self.read()}):
                at = datetime.now(tz=UTC)
                place = {"sequence": 0, "at": at, "previous": GENESIS}
                self._chain.append(Event(**dict(deed), **place))
            self._keep_head()
        except OSError as error:
            raise RepositoryError(
                f"The audit log {self.path} cannot be written: {error.strerror}. Free space or fix "
                "permissions; the next operation then writes what is missing."
            ) from error

    def close(
        self, journal: Journal, entry: Entry, release: Release | None, *, done: bool, why: str
    ) -> None:
        """End a journalled operation: here first, so that one cut short is told by recovery.

        By the channel that began it, and by whom and why where that was noted, whoever recovers: a
        change that was only replicated stays so.

        Args:
            journal: that has the operation.
            entry: of the operation.
            release: which it is about; None: its manifest is not here any more.
            done: else it was undone.
            why: for both.
        """
        noted = intent_detail(journal.read(), entry)
        deed = AuditRecord(
            event=_DONE[entry.kind] if done else "refused",
            model=entry.model,
            who=noted.get("who") or user_at_host(),
            why=(noted.get("why") if done else None) or why,
            origin=origin(noted.get("channel") or self.channel),
            release=entry.version,
            scorecard=noted.get("scorecard") or (release.scorecard_sha256 if release else None),
            operation=entry.operation,
            manifest=release.digest if release else None,
        )
        self.note(deed)
        journal.add(entry, "done" if done else "undone", reason=why[:_REASON_LENGTH])

    def tell(self, event: What, model: str, *, why: str, release: int | None = None) -> None:
        """Note something that is no journalled operation."""
        who, where = user_at_host(), origin(self.channel)
        deed = AuditRecord(
            event=event, model=model, who=who, why=why, origin=where, release=release
        )
        self.note(deed)

    @contextmanager
    def refusing(self, model: str, release: int) -> Iterator[None]:
        """Note what keeps a release from serving again, whatever the block raises on purpose."""
        try:
            yield
        except EnginegateError as error:
            self.tell("refused", model, why=str(error), release=release)
            raise

    def check(self, known: Iterable[tuple[str, Head]] = ()) -> None:
        """Check the chain, and that it goes as far as its own head and those kept elsewhere.

        Args:
            known: further heads, each with what has it.

        Raises:
            TamperedError: a line was changed, removed or added.
        """
        events, kept = self.read(), self._kept_head()
        if kept is not None:
            self._chain.check_head(kept, str(self.head_file))
        elif len(events) > 1:  # a kill comes between log and head once, before there is a head
            raise TamperedError(
                f"{self.head_file} is gone, so lines removed from the end of {self.path} would not "
                "show. Restore it from a backup, or find out who removed it; the next event writes "
                "it again."
            )
        for said_by, head in known:
            self._chain.check_head(head, said_by)

    def _kept_head(self) -> Head | None:
        """The head that was written last.

        Raises:
            TamperedError: it is damaged.
        """
        if not os.path.lexists(self.head_file):
            return None
        try:
            return Head.read(self.head_file)
        except InputError as error:
            raise TamperedError(str(error)) from error

    def _keep_head(self) -> None:
        """Write the head, unless the one that is kept shows that the log was cut: that stays."""
        head = self.head()
        try:
            kept = self._kept_head()
            if kept is not None:
                self._chain.check_head(kept, str(self.head_file))
        except TamperedError:
            return
        if head is not None and head != kept:
            write_file(self.head_file, head.pretty_json())


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything that was answered to one scorecard."""

    decisions: tuple[Decision, ...]
    record: OnRecord


def answers_to(scorecard: Scorecard, given: Iterable[Decision], root: Path) -> Answers:
    """Add what the audit log of a repository knows to the decisions that are kept as files.

    A workspace may be lost or be another machine's; a no that is in the log still is one. The log
    also says in which order answers arrived, and whether what they led to was taken back.

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


def record_decision(root: Path, decision: Decision, model: str) -> None:
    """Put a person's answer in the log of the repository it is about, once; the folder is made.

    Raises:
        RepositoryBusyError: somebody else is changing the repository.
        RepositoryError: the log cannot be written, or was changed.
    """
    deed = AuditRecord(
        event="approved" if decision.answer == "approve" else "rejected",
        model=model,
        who=decision.approver,
        why=decision.reason,
        origin=decision.origin or origin("Python"),
        scorecard=decision.scorecard_sha256,
        operation=decision.digest,
    )
    record_act(root, deed)


def record_act(root: Path, deed: AuditRecord) -> None:
    """Put an event in the log, under the repository's lock; the folder is made.

    Raises:
        RepositoryBusyError: somebody else is changing the repository.
        RepositoryError: the log cannot be written, or was changed.
    """
    with hold_lock(root):
        AuditLog(root).note(deed)


def is_replicated(event: Event) -> bool:
    """Whether another host decided it, and this one only did the same."""
    return event.event in LIVE_EVENTS and event.origin.endswith(f", {REPLICATION}")


def origin(channel: str) -> str:
    """From where something was done: user, host and channel."""
    return f"{user_at_host()}, {channel}"
