"""What became live, by the audit log, and how far MLflow or Prefect has it.

Lines of the log are never removed, so a cursor says what was delivered and what was not.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import file_lock, write_file
from enginegate.decision import Head
from enginegate.errors import InputError
from enginegate.records import sha256_bytes
from enginegate.repository.history.audit import LIVE_EVENTS, Event, What, is_replicated
from enginegate.workspace import Workspace

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
        """What happened; going back to a release that had to be fetched again is no publication.

        Numbers are issued upwards, so what replaces a higher one is older.
        """
        older = self.before is not None and self.after is not None and self.after < self.before
        return "rolled back" if older else self.event.event

    @property
    def followed(self) -> bool:
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


def undelivered_changes(events: Sequence[Event], delivered: Head | None) -> tuple[LiveChange, ...]:
    """Changes after a cursor; all of them where the cursor is in another log.

    What was only replicated is left out: the host where it was decided has it in its own log.
    """
    start = len(events) - len(undelivered_events(events, delivered))
    new = (change for change in live_changes(events) if change.event.sequence >= start)
    return tuple(change for change in new if not change.followed)


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
