"""What became live, by the audit log, and how far somebody outside has been told of it.

Lines of the log are never removed, so a position in it says what was told and what was not.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import file_lock, write_file
from enginegate.decision import Head
from enginegate.errors import InputError
from enginegate.records import sha256_bytes
from enginegate.repository.history.audit import LIVE_EVENTS, Event, What, is_followed
from enginegate.workspace import Workspace

# Whoever else tells the same listener does so with the same log; the next run tells the rest.
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
        return Head(count=self.event.sequence + 1, sha256=self.event.digest)

    @property
    def kind(self) -> What:
        """What happened; going back to a release that had to be fetched again is no publication.

        Numbers are issued upwards, so what replaces a higher one is older.
        """
        older = self.before is not None and self.after is not None and self.after < self.before
        return "rolled back" if older else self.event.event

    @property
    def followed(self) -> bool:
        """Whether another host decided it, and this one only did the same."""
        return is_followed(self.event)

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


def last_change(events: Iterable[Event], model: str) -> Event | None:
    """The last event after which something else of a model was live; None: there is none."""
    own = [change.event for change in live_changes(events) if change.event.model == model]
    return own[-1] if own else None


def untold(events: Sequence[Event], told: Head | None) -> tuple[LiveChange, ...]:
    """Changes after a position; all of them where the log is another one than was told of.

    What was only followed is left out: the host where it was decided has it in its own log.
    """
    start = told.count if told is not None and _holds(events, told) else 0
    new = (change for change in live_changes(events) if change.event.sequence >= start)
    return tuple(change for change in new if not change.followed)


def _holds(events: Sequence[Event], head: Head) -> bool:
    return len(events) >= head.count and events[head.count - 1].digest == head.sha256


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far somebody has been told of one repository's changes; kept in the workspace."""

    path: Path

    @classmethod
    def of(cls, workspace: Workspace, listener: str, root: Path) -> "Cursor":
        """That of a listener, by its address, in the log of a repository."""
        name = sha256_bytes(f"{listener}\n{root.absolute()}".encode())[:16]
        return cls(workspace.outbox / f"told-{name}.json")

    def read(self) -> Head | None:
        """The last line that is known to have arrived; None: tell from the first one."""
        try:
            return Head.read(self.path)
        except InputError:
            return None

    def move(self, head: Head) -> None:
        """Everything up to there has arrived."""
        write_file(self.path, head.pretty_json())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time tells this listener.

        Raises:
            TimeoutError: another one still does.
        """
        with file_lock(self.path.with_suffix(".lock"), timeout_s=_LOCK_TIMEOUT_S):
            yield
