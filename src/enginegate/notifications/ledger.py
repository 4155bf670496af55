"""What people were told, so that nothing is told twice and nothing is lost while nobody listens.

One file for each notice in the workspace. A notice stays until each receiver has it, so what a
messenger did not take is tried again by the next watch. Where a process dies between sending and
writing that down, a message may arrive twice, and none is lost.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import Field

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import InputError
from enginegate.notifications.notice import Notice
from enginegate.records import Record, sha256_bytes
from enginegate.workspace import Workspace

_LOCK = ".lock"
_LOCK_TIMEOUT_S = 10.0
# Longer than a delivery takes: another process that is at it is not doubled.
_CLAIM = timedelta(seconds=60)
# Somebody who reads a message a day later has other means; what lasts is tried for as long.
_GIVEN_UP = timedelta(days=1)
# Longer than anything that is told once is looked for.
_KEPT = timedelta(days=30)
# Of a whole workspace, approvals apart: a dead server under a thousand models is one event to a
# person, who reads some of thirty messages and none of a thousand.
_MOST_AN_HOUR = 30

_log = logging.getLogger("enginegate.notify")


class LedgerEntry(Record):
    """One notice and who has it."""

    notice: Notice
    taken_by: tuple[str, ...] = Field(default=(), description="receivers, by place and kind")
    tried_at: datetime | None = None
    said_at: datetime | None = Field(default=None, description="when the first receiver took it")
    moot: bool = Field(default=False, description="whether nobody needs to be told any more")
    began_at: datetime | None = Field(
        default=None, description="of an end: when people were told of its beginning"
    )

    def is_in_flight(self, now: datetime) -> bool:
        """Whether a process may be sending it just now."""
        return self.tried_at is not None and now - self.tried_at < _CLAIM

    def told_since(self, since: datetime) -> int:
        """How many messages people got of it: of an end also that of its beginning."""
        return sum(at is not None and at > since for at in (self.said_at, self.began_at))

    def is_pending(self, receivers: Sequence[str], now: datetime) -> bool:
        """Whether a receiver has yet to get it, and nobody is at it."""
        old = not self.notice.has_end and now - self.notice.at > _GIVEN_UP
        return not (self.moot or self.is_in_flight(now) or old) and bool(
            set(receivers) - set(self.taken_by)
        )


@dataclass(frozen=True, slots=True)
class NoticeLedger:
    """The notices of one workspace."""

    folder: Path

    @classmethod
    def of(cls, workspace: Workspace) -> "NoticeLedger":
        """That of a workspace."""
        return cls(workspace.root / "notices")

    def add(self, notices: Iterable[Notice]) -> None:
        """Take up what nobody has been told.

        Raises:
            TimeoutError: another process holds the ledger.
            OSError: the workspace cannot be written to.
        """
        with self._exclusive():
            for notice in notices:
                if self._read(self._path(notice.key)) is None:
                    self._write(LedgerEntry(notice=notice))

    def settle(self, now_open: Sequence[Notice], ended: Callable[[Notice], Notice | None]) -> None:
        """Take up what has begun and what is over.

        Args:
            now_open: all that lasts of what ``ended`` speaks for.
            ended: the notice of the end of one that is not open any more; None: it is not known to
                be over. What nobody was told of ends without a word.

        Raises:
            TimeoutError: another process holds the ledger.
            OSError: the workspace cannot be written to.
        """
        keys = {notice.key for notice in now_open}
        with self._exclusive():
            for entry in self._entries():
                begun = entry.notice
                if not begun.has_end or begun.key in keys or (over := ended(begun)) is None:
                    continue
                if entry.said_at is not None:
                    self._write(LedgerEntry(notice=over, began_at=entry.said_at))
                self._path(begun.key).unlink(missing_ok=True)
            for notice in now_open:
                if self._read(self._path(notice.key)) is None:
                    self._write(LedgerEntry(notice=notice))

    def claim(
        self,
        wanted: Callable[[Notice], bool],
        receivers: Sequence[str],
        now: datetime,
    ) -> tuple[LedgerEntry, ...]:
        """What is to be said now, oldest first; for a minute nobody else gets it.

        What is no news any more is forgotten, and what is beyond the limit of an hour waits.

        Args:
            wanted: which of the workspace's notices are the caller's to say.
            receivers: labels of those that there are.
            now: the time.

        Raises:
            TimeoutError: another process holds the ledger.
            OSError: the workspace cannot be written to.
        """
        with self._exclusive():
            entries = self._current(now)
            counted = [e for e in entries if e.notice.subject != "approval"]
            since = now - timedelta(hours=1)
            # What others are sending counts: a schedule starts the watches of all models at once.
            room = _MOST_AN_HOUR - sum(e.told_since(since) or e.is_in_flight(now) for e in counted)
            claimed = []
            for entry in entries:
                if not wanted(entry.notice) or not entry.is_pending(receivers, now):
                    continue
                if entry.notice.subject != "approval" and entry.said_at is None:
                    if room <= 0:
                        _log.warning(
                            "held back for an hour, as people got %d messages in the last: %s",
                            _MOST_AN_HOUR,
                            entry.notice.title,
                        )
                        continue
                    room -= 1
                claimed.append(entry.model_copy(update={"tried_at": now}))
                self._write(claimed[-1])
        return tuple(claimed)

    def took(self, entries: Iterable[LedgerEntry], receiver: str, now: datetime) -> None:
        """Write down that a receiver has these.

        Raises:
            TimeoutError: another process holds the ledger.
            OSError: the workspace cannot be written to.
        """
        with self._exclusive():
            for each in entries:
                entry = self._read(self._path(each.notice.key)) or each
                taken = tuple(sorted({*entry.taken_by, receiver}))
                said = entry.said_at or now
                self._write(entry.model_copy(update={"taken_by": taken, "said_at": said}))

    def forget(self, moot: Callable[[Notice], bool]) -> None:
        """Drop what nobody has been told and nobody needs to be told any more.

        Raises:
            TimeoutError: another process holds the ledger.
            OSError: the workspace cannot be written to.
        """
        with self._exclusive():
            for entry in self._entries():
                if not entry.moot and entry.said_at is None and moot(entry.notice):
                    self._write(entry.model_copy(update={"moot": True}))

    def _current(self, now: datetime) -> list[LedgerEntry]:
        """Oldest first, without what is too old."""
        found = []
        for entry in sorted(self._entries(), key=lambda each: each.notice.at):
            age = now - entry.notice.at
            known = entry.said_at is not None or entry.moot
            if not entry.notice.has_end and age > (_KEPT if known else _GIVEN_UP):
                if not known:
                    _log.warning("given up after a day: %s", entry.notice.title)
                self._path(entry.notice.key).unlink(missing_ok=True)
            else:
                found.append(entry)
        return found

    def _entries(self) -> list[LedgerEntry]:
        read = (self._read(path) for path in self.folder.glob("*.json"))
        return [entry for entry in read if entry is not None]

    def _exclusive(self) -> AbstractContextManager[None]:
        return file_lock(self.folder / _LOCK, timeout_s=_LOCK_TIMEOUT_S)

    def _read(self, path: Path) -> LedgerEntry | None:
        try:
            return LedgerEntry.read(path)
        except InputError:
            return None

    def _write(self, entry: LedgerEntry) -> None:
        # It says what is live, and people's comments: for its owner.
        write_file(self._path(entry.notice.key), entry.pretty_json(), mode=0o600)

    def _path(self, key: str) -> Path:
        return self.folder / f"{sha256_bytes(key.encode())[:24]}.json"
