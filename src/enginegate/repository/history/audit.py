"""Who did what, when, why and from where: an append-only, hash-chained log beside the releases.

Events are written under the repository's lock. The chain shows every edit but lines removed from
the end; for those the log keeps its head in a file beside it after each event. That shows a log
that was cut, restored from an older backup or begun anew by whoever did not think of that file.
Whoever may write here can change both, which shows only against what is kept elsewhere: each
release manifest (which is signed) holds the head of the moment it was staged, and the journal has
the operations.

Lines are never removed, so a `Cursor` says how far MLflow or Prefect has been notified.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from enginegate.atomic_io import file_lock, write_file
from enginegate.candidate import Sha256
from enginegate.chained_log.hash_chain import GENESIS, HashChain, LogEntry
from enginegate.decision import Decision, Head, OnRecord, Release
from enginegate.errors import EnginegateError, InputError, RepositoryError, TamperedError
from enginegate.evidence import Scorecard
from enginegate.machine import user_at_host
from enginegate.records import Record, sha256_bytes
from enginegate.repository.history.journal import Entry, Journal, Kind, intent_detail
from enginegate.repository.lock import hold_lock
from enginegate.workspace import Workspace

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
    """The journal's name of it, or a decision's digest: recorded once, even if it was cut short."""
    manifest: Sha256 | None = None
    """Digest of the release's manifest, so that a lost journal takes no evidence with it."""


class Event(AuditRecord, LogEntry):
    """One line of the log."""

    @property
    def what(self) -> str:
        """Which event."""
        return self.event


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

    def read(self) -> Sequence[Event]:
        """Every event, oldest first; those of a long log are parsed as they are asked for.

        Raises:
            TamperedError: a line is damaged, or the chain is broken; the message names it.
        """
        return self._chain.read()

    def of(self, model: str, *what: What) -> tuple[Event, ...]:
        """Every event of one model, oldest first; raises as `read`.

        Args:
            model: its name; empty: of every model.
            what: only these; none given: all.
        """
        return self._chain.select(model, what)

    def tally(self) -> Counter[tuple[str, str]]:
        """How many events there are, by model and what happened; raises as `read`."""
        return self._chain.tally()

    def models_since(self, known: Head | None) -> frozenset[str] | None:
        """Models that have lines after a head that was kept; None: the log does not go on from it.

        Raises:
            TamperedError: a line is damaged, or the chain is broken.
        """
        if known == self.head():
            return frozenset()
        if known is None:
            return None
        try:
            self._chain.check_head(known, "an earlier reading")
        except TamperedError:
            return None
        return self._chain.models_from(known.count)

    def extents(self) -> dict[str, tuple[int, int]]:
        """How many lines each model has, and the place of its last; raises as `read`."""
        return self._chain.extents()

    def check_all(self) -> None:
        """Read and check every line, whatever the index of a long log says; raises as `read`."""
        self._chain.check_all()

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
            if not (deed.operation and deed.operation in self._operations(deed.model)):
                at = datetime.now(tz=UTC)
                place = {"sequence": 0, "at": at, "previous": GENESIS}
                self._chain.append(Event(**dict(deed), **place))
            self._keep_head()
        except OSError as error:
            raise RepositoryError(
                f"The audit log {self.path} cannot be written: {error.strerror}. Free space or fix "
                "permissions; the next operation then writes what is missing."
            ) from error

    def _operations(self, model: str) -> frozenset[str]:
        """Those of one model that are in the log."""
        return frozenset(event.operation for event in self.of(model))

    def close(
        self, journal: Journal, entry: Entry, release: Release | None, *, done: bool, why: str
    ) -> None:
        """End a journalled operation: here first, so that recovery closes one that was cut short.

        By the channel that began it, and by whom and why where that was noted, whoever recovers: a
        change that was only replicated stays so.

        Args:
            journal: that has the operation.
            entry: of the operation.
            release: which it is about; None: its manifest is not here any more.
            done: else it was undone.
            why: for both.
        """
        noted = intent_detail(journal.of(entry.model), entry)
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
        lines, kept = len(self.read()), self._kept_head()
        if kept is not None:
            self._chain.check_head(kept, str(self.head_file))
        elif lines > 1:  # a kill comes between log and head once, before there is a head
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
    also says in which order answers arrived, and whether their release was replaced since.

    An approval that is not in the log is only a file, which anybody may have written: it does not
    count. A no needs no proof.

    Raises:
        TamperedError: the log was changed.
    """
    events = AuditLog(root).of(scorecard.model)
    own = [event for event in events if event.scorecard == scorecard.digest]
    kept = tuple(given)
    places = {e.operation: e.sequence for e in own if e.event in {"approved", "rejected"}}
    known = {decision.digest for decision in kept}
    rejections = {
        _rejection(event): event.sequence
        for event in own
        if event.event == "rejected" and event.operation not in known
    }
    places |= {decision.digest: place for decision, place in rejections.items()}
    times = {event.sequence: event.at for event in own}
    written = {digest: times[place] for digest, place in places.items()}
    only_files = {d.digest for d in kept if d.answer == "approve" and d.digest not in places}
    record = OnRecord(places, _ended(events, scorecard), written, frozenset(only_files))
    return Answers((*kept, *rejections), record)


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


# Of another process that delivers the same log to the same receiver: the next run does the rest.
_LOCK_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class LiveChange:
    """An event after which something else was live.

    Attributes:
        before: the release that was live; None: nothing was.
        after: the release that became live; None: nothing is.
    """

    event: Event
    before: int | None
    after: int | None

    @property
    def head(self) -> Head:
        """The log's head when this was its last line."""
        return head_at(self.event)

    @property
    def kind(self) -> What:
        """What happened; a rollback to a release that had to be fetched again is no publication.

        Numbers are issued upwards, so what replaces a higher one is older.
        """
        older = self.before is not None and self.after is not None and self.after < self.before
        return "rolled back" if older else self.event.event

    @property
    def replicated(self) -> bool:
        """Whether another host decided it, and this one only did the same."""
        return is_replicated(self.event)

    def __str__(self) -> str:
        live = f"release {self.after} is live" if self.after else "nothing is live"
        return f"{live} of {self.event.model} after {self.before or 'nothing'} ({self.kind})"


def live_changes(events: Iterable[Event]) -> tuple[LiveChange, ...]:
    """Every change of what is live, of all models of a log, oldest first."""
    live: dict[str, int | None] = {}
    found = []
    for event in events:
        if event.event not in LIVE_EVENTS:
            continue
        after = None if event.event == "withdrawn" else event.release
        found.append(LiveChange(event, live.get(event.model), after))
        live[event.model] = after
    return tuple(found)


def last_live_event(events: Iterable[Event], model: str) -> Event | None:
    """The last event after which something else of a model was live; None: there is none."""
    own = [change.event for change in live_changes(events) if change.event.model == model]
    return own[-1] if own else None


def undelivered_events(events: Sequence[Event], delivered: Head | None) -> Sequence[Event]:
    """Lines after a cursor; all of them where the cursor is in another log."""
    if delivered is None or len(events) < delivered.count:
        return events
    same_log = events[delivered.count - 1].digest == delivered.sha256
    return events[delivered.count :] if same_log else events


def undelivered_changes(
    events: Sequence[Event], delivered: Head | None, live: Iterable[Event] | None = None
) -> tuple[LiveChange, ...]:
    """Changes after a cursor; all of them where the cursor is in another log.

    What was only replicated is left out: the host where it was decided has it in its own log.

    Args:
        events: every line of the log.
        delivered: the cursor.
        live: the lines after which something else was live; None: they are found in ``events``.
    """
    start = len(events) - len(undelivered_events(events, delivered))
    changes = live_changes(events if live is None else live)
    new = (change for change in changes if change.event.sequence >= start)
    return tuple(change for change in new if not change.replicated)


def head_at(event: Event) -> Head:
    """The log's head when this was its last line."""
    return Head(count=event.sequence + 1, sha256=event.digest)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Up to which line of one audit log a receiver has it; kept in the workspace."""

    path: Path

    @classmethod
    def of(cls, workspace: Workspace, receiver: str, root: Path) -> "Cursor":
        """That of a receiver, by its address, in the log of a repository."""
        name = sha256_bytes(f"{receiver}\n{root.absolute()}".encode())[:16]
        return cls(workspace.cursors / f"{name}.json")

    def read(self) -> Head | None:
        """The last line that is known to have arrived; None: none is."""
        try:
            return Head.read(self.path)
        except InputError:
            return None

    def move(self, head: Head) -> None:
        """Everything up to there has arrived."""
        write_file(self.path, head.pretty_json())

    @contextmanager
    def exclusive(self, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
        """Only one process at a time delivers to this receiver.

        Raises:
            TimeoutError: another one still does.
            OSError: the workspace cannot be written to.
        """
        with file_lock(self.path.with_suffix(".lock"), timeout_s=timeout_s):
            yield
