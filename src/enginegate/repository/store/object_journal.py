"""Whose turn it is to change a model in object storage: one object for each step ever taken.

An entry is written only where none is, so of two writers one wins. An operation that is not closed
holds the turn: nobody else appends until it is closed, or its holder is known to be dead, or its
time is up. A holder that was overtaken notices at its next step, before it commits.
"""

import os
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from pydantic import ValidationError

from enginegate.errors import RepositoryBusyError, TamperedError
from enginegate.machine import runs
from enginegate.repository.history.hash_chain import GENESIS
from enginegate.repository.history.journal import Entry, Kind, Step
from enginegate.repository.store.object_client import ObjectStore
from enginegate.workspace import now

_CLOSING: tuple[Step, ...] = ("done", "undone")
_WATCHED = "watched"


@dataclass(slots=True)
class Lease:
    """The right to change one model until the operation is closed."""

    journal: "ObjectJournal"
    entry: Entry

    def add(self, step: Step, *, watched: bool = False) -> None:
        """Note the next step, and whether a canary is watched in it, which can be ended.

        Raises:
            RepositoryBusyError: somebody took this operation for dead and closed it.
        """
        detail = {name: said for name, said in self.entry.detail.items() if name != _WATCHED}
        following = self.entry.model_copy(
            update={
                "step": step,
                "detail": {**detail, _WATCHED: "yes"} if watched else detail,
                "sequence": self.entry.sequence + 1,
                "previous": self.entry.digest,
                "at": now(),
            }
        )
        if not self.journal.write(following):
            raise RepositoryBusyError(
                f"This {self.entry.kind} of {self.entry.model} release {self.entry.version} took "
                "longer than its turn, and another host closed it. Start it again."
            )
        self.entry = following

    def is_ours(self) -> bool:
        """Whether nobody took this operation for dead and closed it."""
        return self.journal.last() == self.entry


@dataclass(frozen=True, slots=True)
class ObjectJournal:
    """The journal of one model.

    Attributes:
        lease_s: how long an operation may hold the turn if nobody can ask after its holder.
    """

    store: ObjectStore
    model: str
    lease_s: float

    def take(self, kind: Kind, version: int, **detail: str) -> Lease:
        """Begin an operation; nobody else can until it is closed.

        Args:
            kind: what is begun.
            version: of which release; a publication gets a higher number if this one was issued.
            detail: what else its entries say.

        Raises:
            RepositoryBusyError: somebody else's is under way; the message names the holder.
        """
        last = self.last()
        if last is not None and is_open(last):
            raise _busy(last)
        if kind == "publish":
            version = max(version, highest(last) + 1)
        entry = Entry(
            sequence=last.sequence + 1 if last else 0,
            previous=last.digest if last else GENESIS,
            at=now(),
            operation=uuid4().hex,
            kind=kind,
            model=self.model,
            step="intent",
            version=version,
            detail={
                **detail,
                "highest": str(max(version, highest(last))),
                "holder": _me(),
                "until": (now() + timedelta(seconds=self.lease_s)).isoformat(),
            },
        )
        if not self.write(entry):
            winner = self.last()
            raise _busy(winner or entry)
        return Lease(self, entry)

    def check_not_ours(self) -> None:
        """Refuse to follow what is live while this host is changing it.

        Raises:
            RepositoryBusyError: it is.
        """
        last = self.last()
        if last is not None and is_open(last) and not is_abandoned(last):
            host, _, _ = holder(last).rpartition(" pid ")
            if host == socket.gethostname():
                raise _busy(last)

    def write(self, entry: Entry) -> bool:
        """Write an entry in its place; False if the place is taken."""
        return self.store.create(self._key(entry.sequence), entry.canonical_json())

    def last(self) -> Entry | None:
        """The latest entry; None before the first."""
        keys = self._keys()
        return self._entry(keys[-1]) if keys else None

    def last_done(self) -> Entry | None:
        """The end of the last operation that changed what is live; None: none ever did.

        Only what is needed is read: the newest entries, back to that one.
        """
        found = (self._entry(key) for key in reversed(self._keys()))
        return next((entry for entry in found if entry.step == "done"), None)

    def under_way(self) -> Entry | None:
        """The last step of an operation that is not closed; its holder may be dead."""
        last = self.last()
        return last if last is not None and is_open(last) else None

    def read(self) -> tuple[Entry, ...]:
        """Every entry, oldest first.

        Raises:
            TamperedError: one is damaged or missing, or the chain does not hold.
        """
        entries: list[Entry] = []
        previous = GENESIS
        for place, key in enumerate(self._keys()):
            entry = self._entry(key)
            if entry.previous != previous or entry.sequence != place:
                raise TamperedError(
                    f"{self.store.url}/{key}: the chain is broken; an entry before it was changed "
                    "or removed."
                )
            entries.append(entry)
            previous = entry.digest
        return tuple(entries)

    def _entry(self, key: str) -> Entry:
        stored = self.store.read(key)
        try:
            return Entry.model_validate_json(stored.content if stored else b"")
        except ValidationError as error:
            raise TamperedError(f"{self.store.url}/{key} is not a journal entry.") from error

    def _keys(self) -> tuple[str, ...]:
        return self.store.keys(f"{self.model}/journal/")

    def _key(self, sequence: int) -> str:
        return f"{self.model}/journal/{sequence:08d}.json"


def is_open(entry: Entry) -> bool:
    """Whether the operation of a journal's last entry is still under way, or was cut short."""
    return entry.step not in _CLOSING


def is_watched(entry: Entry) -> bool:
    """Whether an operation is under way, or was cut short, while it watched a canary."""
    return is_open(entry) and _WATCHED in entry.detail


def holder(entry: Entry) -> str:
    """Which process, of which host, began an operation."""
    return entry.detail.get("holder", "")


def is_abandoned(entry: Entry) -> bool:
    """Whether an open operation's holder is dead, or its turn is over."""
    host, _, pid = holder(entry).rpartition(" pid ")
    # Its time counts here too: after a reboot another process may have the holder's number.
    late = now() > datetime.fromisoformat(entry.detail["until"])
    if host == socket.gethostname() and pid.isdigit() and int(pid) != os.getpid():
        return not runs(int(pid)) or late
    return late


def highest(last: Entry | None) -> int:
    """The highest number that was ever issued; 0 when none was."""
    return int(last.detail.get("highest", "0")) if last else 0


def _busy(entry: Entry) -> RepositoryBusyError:
    return RepositoryBusyError(
        f"A {entry.kind} of {entry.model} release {entry.version} is under way: "
        f"{entry.detail.get('holder', 'somebody')} began it and is at its step '{entry.step}' of "
        f"{entry.at:%Y-%m-%d %H:%M:%S} UTC. Try again when it has finished; if that host is gone, "
        f"after {entry.detail.get('until', 'an hour')}."
    )


def _me() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"
