"""Who did what, when, why and from where: an append-only, hash-chained log beside the releases.

Events are written under the repository's lock. After each one the log's head is noted in the
model's commit point, and every release manifest (which is signed) holds the head of the moment
it was staged, so that lines removed from the end show too, as long as those are left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from enginegate.atomic_io import write_file
from enginegate.candidate import Sha256
from enginegate.decision import Decision, Head
from enginegate.errors import EnginegateError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.records import Record
from enginegate.repository.history.hash_chain import GENESIS, HashChain, LogEntry
from enginegate.repository.history.journal import Entry, Journal, Kind
from enginegate.repository.store.imported_release import copied_versions
from enginegate.repository.store.layout import AUDIT, Layout, locked

_LOCK_TIMEOUT_S = 30.0
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
# The way of what another host decided, and this one did after it.
FOLLOWING = "following"
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


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The log of one repository; whoever notes something holds the repository's lock.

    Attributes:
        way: by which way operations come here: command, Prefect, Python, watch, following.
    """

    root: Path
    way: str = "Python"

    @property
    def path(self) -> Path:
        """Triton ignores files in its repository's root."""
        return self.root / AUDIT

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
        """Write an event and remember the head; an operation that is in the log is not repeated.

        Raises:
            TamperedError: the log was changed.
            RepositoryError: it cannot be written.
        """
        try:
            if not (deed.operation and deed.operation in {e.operation for e in self.read()}):
                at = datetime.now(tz=UTC)
                place = {"sequence": 0, "at": at, "previous": GENESIS}
                self._chain.append(Event(**dict(deed), **place))
            self._remember(Layout(self.root, deed.model))
        except OSError as error:
            raise RepositoryError(
                f"The audit log {self.path} cannot be written: {error.strerror}. Free space or fix "
                "permissions; the next operation then writes what is missing."
            ) from error

    def close(self, journal: Journal, entry: Entry, *, done: bool, why: str) -> None:
        """End a journalled operation: here first, so that one cut short is told by recovery.

        By the way that began it, and by whom and why where that was noted, whoever recovers: what
        was only followed stays so.
        """
        layout, begun = Layout(self.root, entry.model), journal.begun(entry)
        there = layout.release_file(entry.version).exists()
        release = layout.release(entry.version) if there else None
        scorecard = begun.get("scorecard") or (release.scorecard_sha256 if release else None)
        deed = AuditRecord(
            event=_DONE[entry.kind] if done else "refused",
            model=entry.model,
            who=begun.get("who") or user_at_host(),
            why=(begun.get("why") if done else None) or why,
            origin=origin(begun.get("way") or self.way),
            release=entry.version,
            scorecard=scorecard,
            operation=entry.operation,
            manifest=release.digest if release else None,
        )
        self.note(deed)
        journal.add(entry, "done" if done else "undone", reason=why[:_REASON_LENGTH])

    def tell(self, event: What, model: str, *, why: str, release: int | None = None) -> None:
        """Note something that is no journalled operation."""
        who, where = user_at_host(), origin(self.way)
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

    def check(self, model: str) -> None:
        """Check the chain, and that it goes as far as the model's releases know.

        Raises:
            TamperedError: a line was changed, removed or added.
        """
        self._chain.read()
        layout = Layout(self.root, model)
        for said_by, head in _known_heads(layout):
            self._chain.check_head(head, said_by)

    def _remember(self, layout: Layout) -> None:
        current = layout.current()
        if current is not None:
            told = current.model_copy(update={"audit": self.head()})
            write_file(layout.current_file, told.pretty_json())

    @property
    def _chain(self) -> HashChain[Event]:
        return HashChain(self.path, Event, "an audit event")


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
    with locked(root, timeout_s=_LOCK_TIMEOUT_S):
        AuditLog(root).note(deed)


def is_followed(event: Event) -> bool:
    """Whether another host decided it, and this one only did the same."""
    return event.event in LIVE_EVENTS and event.origin.endswith(f", {FOLLOWING}")


def origin(way: str) -> str:
    """From where something was done: user, host and way."""
    return f"{user_at_host()}, {way}"


def _known_heads(layout: Layout) -> Iterator[tuple[str, Head]]:
    try:
        current, releases = layout.current(), layout.releases()
        elsewhere = copied_versions(layout)
    except EnginegateError:
        return  # a damaged manifest is reported by itself
    if current is not None and current.audit is not None:
        yield str(layout.current_file), current.audit
    for release in releases:
        if release.audit is not None and release.version not in elsewhere:
            yield str(layout.release_file(release.version)), release.audit
