"""The journal of a model in object storage, and the lease that its open operation holds.

There is one object for each step ever taken. An entry is written only where none is, so of two
writers one wins. An operation that is not closed holds the lease: nobody else appends until it is
closed, its holder is known to be dead, or its time is up. The one exception is a request to cancel
the analysis of its canary: a flag in the lease, which its holder finds at its next step at the
latest. A holder that was preempted notices at its next step too, before it commits.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from pydantic import ValidationError

from enginegate.chained_log.hash_chain import GENESIS
from enginegate.errors import RepositoryBusyError, RepositoryError, TamperedError
from enginegate.machine import runs, user_at_host
from enginegate.object_storage import ObjectStore
from enginegate.repository.history.audit import Event, is_replicated
from enginegate.repository.history.journal import CLOSING, Entry, Kind, Step
from enginegate.repository.store.layout import Current
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.workspace import now

_READS = 3
# Flags of a lease, in the details of its entry.
_CANARY, _CANCEL, _CANCEL_REASON = "canary_analysis", "cancel_requested", "cancel_reason"
_FLAGS = (_CANARY, _CANCEL, _CANCEL_REASON)


@dataclass(slots=True)
class Lease:
    """The right to change one model until the operation is closed."""

    journal: "ObjectJournal"
    entry: Entry

    def add(self, step: Step, *, canary_analysis: bool = False) -> None:
        """Note the next step, and whether a canary is analysed in it, which can be cancelled.

        Raises:
            RepositoryBusyError: somebody took this operation for dead and closed it.
            RepositoryError: somebody asked to cancel it, and this step does not close it.
        """
        detail = {name: value for name, value in self.entry.detail.items() if name not in _FLAGS}
        flags = {_CANARY: "yes"} if canary_analysis else {}
        while not self.journal.write(entry := _after(self.entry, step, detail | flags)):
            request = self._cancel_request()
            if request is None:
                raise RepositoryBusyError(
                    f"This {entry.kind} of {entry.model} release {entry.version} took longer than "
                    "its lease, and another host closed it. Start it again."
                )
            self.entry = request
            if step not in CLOSING:
                raise _cancelled(request)
        self.entry = entry

    def check_not_cancelled(self) -> None:
        """Look whether somebody asked to cancel the analysis of the canary.

        Storage that is away for a moment cancels nothing: without it there is no commit either.

        Raises:
            RepositoryError: somebody did; the message says who, and why.
        """
        try:
            request = self._cancel_request()
        except RepositoryError:
            return
        if request is not None:
            raise _cancelled(request)

    def is_ours(self) -> bool:
        """Whether nobody took this operation for dead and closed it."""
        last = self.journal.under_way()
        return last is not None and last.operation == self.entry.operation

    def close(self, releases: ObjectReleases) -> None:
        """End the operation by what the live pointer says; only what it wrote itself is removed.

        Raises:
            RepositoryBusyError: somebody closed it already.
        """
        entry = self.entry
        pointer, _ = releases.pointer()
        if entry.kind == "promise":
            given = pointer.promises.get(entry.version) if pointer else None
            self.add("done" if given == entry.detail["promise"] else "undone")
            return
        if (pointer.version if pointer else None) == _reached(entry):
            self.add("done")
            return
        own = releases.was_written_by(entry.version, entry.operation)
        if entry.kind == "publish" and own and self.is_ours():
            releases.remove(entry.version)
        self.add("undone")

    def _cancel_request(self) -> Entry | None:
        next_entry = self.journal.entry(self.entry.sequence + 1)
        if next_entry is None or next_entry.operation != self.entry.operation:
            return None
        return next_entry if is_cancelled(next_entry) else None


@dataclass(frozen=True, slots=True)
class ObjectJournal:
    """The journal of one model.

    Attributes:
        lease_s: how long an operation may hold the lease if nobody can ask after its holder.
    """

    store: ObjectStore
    model: str
    lease_s: float

    def acquire(self, kind: Kind, version: int, **detail: str) -> Lease:
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
            raise _busy(self.last() or entry)
        return Lease(self, entry)

    def request_cancel(self, analysing: Entry, reason: str) -> bool:
        """Flag the lease, of which this is the latest entry; False if its holder has gone on."""
        flags = {_CANCEL: user_at_host(), _CANCEL_REASON: reason}
        return self.write(_after(analysing, analysing.step, {**analysing.detail, **flags}))

    def close_abandoned(self, releases: ObjectReleases) -> tuple[str, ...]:
        """End the operation whose holder is dead, if there is one, and say so."""
        last = self.under_way()
        if last is None or not is_abandoned(last):
            return ()
        releases.fence()
        Lease(self, last).close(releases)
        return (f"{cut_short(last)} {releases.live_words()}",)

    def check_not_changing_here(self) -> None:
        """Refuse to replicate what is live while this host is changing it.

        Raises:
            RepositoryBusyError: it is.
        """
        last = self.under_way()
        if last is not None and not is_abandoned(last) and is_from_here(last):
            raise _busy(last)

    def check_recorded(self, releases: ObjectReleases, events: Iterable[Event]) -> None:
        """Refuse a live pointer that the journal has no record of, and a journal that was cut.

        A cut one shows by releases with numbers that it never issued: in storage, and in what this
        host's audit log says was replicated. While an operation is open, the live pointer may also
        name what this operation makes live.

        Raises:
            TamperedError: somebody changed the bucket.
            RepositoryBusyError: others commit one change after another.
        """
        # Before the journal: whoever publishes meanwhile has an entry by the time this is there.
        replicated = (e.release or 0 for e in events if e.model == self.model and is_replicated(e))
        newest = max((*releases.versions(), *replicated), default=0)
        if newest > highest(self.last()):
            raise TamperedError(
                f"The journal of {self.model} in {self.store.url} ends before release {newest}, "
                "which was published: its newest entries were removed. Restore them from a backup "
                "(or an earlier version of these objects); what serves here still serves."
            )
        for _ in range(_READS):
            pointer, tag = releases.pointer()
            done, last = self._last_done(), self.last()
            recorded = _reached(done) if done else None
            allowed = {recorded}
            if last is not None and is_open(last):
                allowed.add(_reached(last))
            live = pointer.version if pointer else None
            if live in allowed:
                return
            if releases.pointer()[1] == tag:  # else somebody committed between these reads
                raise TamperedError(
                    f"current.json of {self.model} in {self.store.url} says that release "
                    f"{live or 'none'} is live; the journal's last change made it "
                    f"{recorded or 'none'}. Somebody changed the bucket, so nothing is "
                    "replicated: restore the object from a backup (or an earlier version of it)."
                )
        raise RepositoryBusyError(
            f"What is live in {self.store.url} was changed again and again while it was read. Try "
            "again."
        )

    def write(self, entry: Entry) -> bool:
        """Write an entry in its place; False if the place is taken."""
        return self.store.create(self._key(entry.sequence), entry.canonical_json())

    def last(self) -> Entry | None:
        """The latest entry; None before the first."""
        keys = self._keys()
        return self._read(keys[-1]) if keys else None

    def under_way(self) -> Entry | None:
        """The last step of an operation that is not closed; its holder may be dead."""
        last = self.last()
        return last if last is not None and is_open(last) else None

    def entry(self, sequence: int) -> Entry | None:
        """The entry in a place; None where none is."""
        key = self._key(sequence)
        stored = self.store.read(key)
        return None if stored is None else self._parse(key, stored.content)

    def read(self) -> tuple[Entry, ...]:
        """Every entry, oldest first.

        Raises:
            TamperedError: one is damaged or missing, or the chain is broken.
        """
        entries: list[Entry] = []
        previous = GENESIS
        for place, key in enumerate(self._keys()):
            entry = self._read(key)
            if entry.previous != previous or entry.sequence != place:
                raise TamperedError(
                    f"{self.store.url}/{key}: the chain is broken; an entry before it was changed "
                    "or removed."
                )
            entries.append(entry)
            previous = entry.digest
        return tuple(entries)

    def _last_done(self) -> Entry | None:
        """The end of the last operation that changed what is live; reads back to that one only."""
        entries = (self._read(key) for key in reversed(self._keys()))
        return next((entry for entry in entries if entry.step == "done"), None)

    def _read(self, key: str) -> Entry:
        stored = self.store.read(key)
        return self._parse(key, stored.content if stored else b"")

    def _parse(self, key: str, content: bytes) -> Entry:
        try:
            return Entry.model_validate_json(content)
        except ValidationError as error:
            raise TamperedError(f"{self.store.url}/{key} is not a journal entry.") from error

    def _keys(self) -> tuple[str, ...]:
        return self.store.keys(f"{self.model}/journal/")

    def _key(self, sequence: int) -> str:
        return f"{self.model}/journal/{sequence:08d}.json"


def is_open(entry: Entry) -> bool:
    """Whether the operation of a journal's last entry is still under way, or was cut short."""
    return entry.step not in CLOSING


def is_analysing_canary(entry: Entry) -> bool:
    """Whether an operation is under way, or was cut short, while it analysed its canary."""
    return is_open(entry) and _CANARY in entry.detail


def is_cancelled(entry: Entry) -> bool:
    """Whether somebody asked to cancel the analysis of the canary."""
    return _CANCEL in entry.detail


def holder(entry: Entry) -> str:
    """Which process, of which host, began an operation."""
    return entry.detail.get("holder", "")


def is_from_here(entry: Entry) -> bool:
    """Whether a process of this host began an operation."""
    return holder(entry).rpartition(" pid ")[0] == socket.gethostname()


def is_abandoned(entry: Entry) -> bool:
    """Whether an open operation's holder is dead, or its lease is over."""
    pid = holder(entry).rpartition(" pid ")[2]
    # Its time counts here too: after a reboot another process may have the holder's number.
    late = now() > datetime.fromisoformat(entry.detail["until"])
    if is_from_here(entry) and pid.isdigit() and int(pid) != os.getpid():
        return not runs(int(pid)) or late
    return late


def was_undone(last: Entry | None, here: Current | None) -> bool:
    """Whether what a host serves is what the journal's last operation could not publish."""
    if last is None or here is None:
        return False
    return (last.kind, last.step, last.version) == ("publish", "undone", here.version)


def highest(last: Entry | None) -> int:
    """The highest number that was ever issued; 0 when none was."""
    return int(last.detail.get("highest", "0")) if last else 0


def cut_short(entry: Entry) -> str:
    """Message about an operation whose holder is dead."""
    return (
        f"A {entry.kind} of {entry.model} release {entry.version} by {holder(entry)} was cut short "
        f"after its step '{entry.step}'."
    )


def _reached(entry: Entry) -> int | None:
    """The release that is live once an operation is done."""
    return None if entry.kind == "withdraw" else entry.version


def _after(entry: Entry, step: Step, detail: Mapping[str, str]) -> Entry:
    changes = {
        "step": step,
        "detail": dict(detail),
        "sequence": entry.sequence + 1,
        "previous": entry.digest,
        "at": now(),
    }
    return entry.model_copy(update=changes)


def _cancelled(request: Entry) -> RepositoryError:
    reason = request.detail.get(_CANCEL_REASON)
    return RepositoryError(
        f"{request.detail[_CANCEL]} asked for a rollback during the canary analysis"
        f"{f': {reason}' if reason else ''}"
    )


def _busy(entry: Entry) -> RepositoryBusyError:
    return RepositoryBusyError(
        f"A {entry.kind} of {entry.model} release {entry.version} is under way: "
        f"{entry.detail.get('holder', 'somebody')} began it and is at its step '{entry.step}' of "
        f"{entry.at:%Y-%m-%d %H:%M:%S} UTC. Try again when it has finished; if that host is gone, "
        f"after {entry.detail.get('until', 'an hour')}."
    )


def _me() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"
