"""Where each line of a long log is, by model: a file beside the log that may be deleted.

A log of a million lines is parsed and checked once; afterwards whoever asks for one model reads the
lines of that model. The index holds nothing that the log does not say. It counts only while the
log's inode, size and times of change are those that were noted when its chain was checked, or when
this program appended to it: after any other change all of the log is read and checked again.
"""

import json
import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from enginegate.decision import Head
from enginegate.errors import RepositoryError

_SCHEMA = """
create table line (
    sequence integer primary key, start integer not null, length integer not null,
    model text not null, what text not null
);
create table state (only_row integer primary key, content text not null);
"""
_BY_MODEL = "create index by_model on line (model, what)"
_INSERT = "insert into line values (?, ?, ?, ?, ?)"
# Whoever appends holds the index for milliseconds; after that long it is read without one.
_BUSY_S = 5.0
# A million lines take ten seconds; what nobody wrote to for an hour was left by a killed process.
_LONGEST_BUILD_S = 3600.0


class Stamp(NamedTuple):
    """By which a change of a file shows, without reading it.

    ``changed_ns`` cannot be set by who writes a file, only by the kernel's clock.
    """

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Stamp | None":
        """That of a file now; None where it cannot be asked."""
        try:
            now = path.lstat()
        except OSError:
            return None
        return cls(now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


class LineFacts(NamedTuple):
    """What the index says of one line.

    Attributes:
        start: its first byte.
        length: in bytes, without the newline.
        what: which event or step it is.
    """

    sequence: int
    start: int
    length: int
    model: str
    what: str


@dataclass(frozen=True, slots=True)
class LogState:
    """How far a log had come when its index was written.

    Attributes:
        stamp: of the log's file then.
        size: bytes of its whole lines.
        head: None of an empty log.
        unfinished: operation -> the last line of it, of those that have not ended.
    """

    stamp: Stamp | None
    size: int
    head: Head | None
    unfinished: dict[str, int]

    @property
    def count(self) -> int:
        """Lines."""
        return self.head.count if self.head else 0

    def to_json(self) -> str:
        """For `from_json`."""
        head = self.head.model_dump() if self.head else None
        return json.dumps([self.stamp, self.size, head, self.unfinished])

    @classmethod
    def from_json(cls, text: str) -> "LogState":
        """Read what `to_json` wrote."""
        stamp, size, head, unfinished = json.loads(text)
        known = Head(**head) if head else None
        return cls(Stamp(*stamp) if stamp else None, size, known, unfinished)


# Its stamp is that of no file.
_STALE = LogState(None, 0, None, {})


class LineIndex:
    """The index of one log, opened; SQLite's."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Of a database with the tables above."""
        self._connection = connection
        (content,) = connection.execute("select content from state").fetchone()
        self.state = LogState.from_json(content)

    @classmethod
    def open(cls, path: Path) -> "LineIndex | None":
        """The index at ``path``; None where there is none that can be read."""
        with suppress(OSError, sqlite3.Error, ValueError, TypeError):
            if stat.S_ISREG(path.lstat().st_mode):
                return cls(_connect(str(path)))
        return None

    @classmethod
    def build(cls, path: Path, lines: Iterable[LineFacts], state_of: "StateOf") -> "LineIndex":
        """Write the index of a log anew; where its folder may not be written to, a temporary one.

        Args:
            path: where it is to be.
            lines: what it holds.
            state_of: asked when all lines are in.

        Raises:
            RepositoryError: the disk is full, or SQLite refuses otherwise.
        """
        # Threads, and processes of several containers, share a process's number.
        staged = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        writable = os.access(path.parent, os.W_OK)
        try:
            if writable:
                _remove_left(path)
            connection = _connect(str(staged) if writable else "")
            # Written whole or not at all: the rename below is what makes it count.
            connection.execute("pragma journal_mode = off")
            connection.execute("pragma synchronous = off")
            connection.executescript(_SCHEMA)
            with connection:
                connection.executemany(_INSERT, lines)
                connection.execute(_BY_MODEL)
                connection.execute("insert into state values (1, ?)", (state_of().to_json(),))
            if not writable:
                return cls(connection)
            connection.close()
            _flush(staged)
            staged.replace(path)
            return cls(_connect(str(path)))
        except (sqlite3.Error, OSError) as error:
            raise RepositoryError(
                f"The index {path} of a log cannot be written: {error}. Free space or fix "
                "permissions there; it may be deleted."
            ) from error
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)

    def add(self, line: LineFacts, state: LogState) -> bool:
        """Take in a line that was appended; False: the index is stale, and must not be used.

        It counts for nothing until all of it is on disk: a writer that is killed leaves no half.
        """
        try:
            self._note(_STALE)
            with self._connection:
                self._connection.execute(_INSERT, line)
            self._note(state)
        except sqlite3.Error:
            return False
        self.state = state
        return True

    def _note(self, state: LogState) -> None:
        with self._connection:
            self._connection.execute("update state set content = ?", (state.to_json(),))

    def select(self, model: str = "", what: Sequence[str] = ()) -> Iterator[LineFacts]:
        """Lines of one model, of one kind, or of both, oldest first; all where neither is given."""
        asked, values = [], []
        if model:
            asked.append("model = ?")
            values.append(model)
        if what:
            asked.append(f"what in ({', '.join('?' * len(what))})")
            values += what
        where = f" where {' and '.join(asked)}" if asked else ""
        query = f"select * from line{where} order by sequence"  # noqa: S608 - names are ours
        with closing(self._connection.execute(query, values)) as rows:
            yield from map(LineFacts._make, rows)

    def line(self, sequence: int) -> LineFacts:
        """The facts of one line."""
        row = self._connection.execute(
            "select * from line where sequence = ?", (sequence,)
        ).fetchone()
        return LineFacts._make(row)

    def extents(self) -> dict[str, tuple[int, int]]:
        """How many lines each model has, and which is its last."""
        rows = self._connection.execute(
            "select model, count(*), max(sequence) from line group by model"
        )
        return {model: (count, last) for model, count, last in rows}

    def models_from(self, sequence: int) -> frozenset[str]:
        """Models of the lines from a place on."""
        rows = self._connection.execute(
            "select distinct model from line where sequence >= ?", (sequence,)
        )
        return frozenset(model for (model,) in rows)

    def tally(self) -> Counter[tuple[str, str]]:
        """How many lines there are of each model and kind."""
        rows = self._connection.execute("select model, what, count(*) from line group by 1, 2")
        return Counter({(model, what): count for model, what, count in rows})


class StateOf:
    """How far a log has come, collected while its lines are read."""

    def __init__(self, stamp: Stamp | None) -> None:
        """Of a log with this stamp before its first line was read."""
        self.stamp, self.size = stamp, 0
        self.head: Head | None = None
        self.unfinished: dict[str, int] = {}

    def __call__(self) -> LogState:
        """By now."""
        return LogState(self.stamp, self.size, self.head, self.unfinished)


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
    connection.execute("pragma trusted_schema = off")
    # SQLite finds a journal by the database's name. One on disk, of a writer whose index somebody
    # has written anew meanwhile, would be rolled back into the new one.
    connection.execute("pragma journal_mode = memory")
    return connection


def _remove_left(index: Path) -> None:
    """What killed processes left of an index that they wrote."""
    for left in index.parent.glob(f".{index.name}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - left.lstat().st_mtime > _LONGEST_BUILD_S:
                left.unlink()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
