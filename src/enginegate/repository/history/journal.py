"""What was under way: an append-only, flushed list of steps; and the hash chain it is kept as.

Every line of a `HashChain` holds the sha256 of the line before it. An edit in the middle shows, and
so does a line that was removed or added there. A line cut short by a crash is the only damage an
honest machine can cause; it says nothing yet and is dropped. Whole lines removed from the end
cannot show in the file itself: that needs a `Head` kept elsewhere.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Literal, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from enginegate.atomic_io import NotRegularFileError, open_regular, read_file, sync_folder
from enginegate.candidate import Sha256
from enginegate.decision import Head
from enginegate.errors import RepositoryError, TamperedError
from enginegate.messages import counted
from enginegate.records import Record

GENESIS = "0" * 64


class LogEntry(Record):
    """One line: its place in the file, when it was written, and the digest of the line before."""

    sequence: int
    at: datetime
    previous: Sha256


L = TypeVar("L", bound=LogEntry)


@dataclass(slots=True)
class HashChain(Generic[L]):
    """One such file; whoever appends holds the repository's lock.

    Its lines are parsed and hashed once, and again only after somebody else changed the file.

    Attributes:
        kind: what a line is.
        noun: what a line is called in messages, e.g. "a journal entry".
    """

    path: Path
    kind: type[L]
    noun: str
    _links: tuple[L, ...] = field(default=(), init=False, repr=False)
    _size: int = field(default=0, init=False, repr=False)
    _seen: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def read(self) -> tuple[L, ...]:
        """Every line, oldest first.

        Raises:
            TamperedError: a line is damaged, or the chain is broken; the message names it.
            RepositoryError: the file cannot be read, or is a link, a FIFO or the like.
        """
        seen = self._stamp()
        if seen is None or seen != self._seen:
            lines = self._lines()
            self._links = self._checked(lines)
            self._size = sum(len(line) + 1 for line in lines)
            self._seen = seen
        return self._links

    def append(self, link: L) -> L:
        """Write ``link`` in the next place; it is on disk when this returns.

        Raises:
            TamperedError: what is there already was changed.
            OSError: it cannot be written.
        """
        links = self.read()
        previous = links[-1].digest if links else GENESIS
        placed = link.model_copy(update={"sequence": len(links), "previous": previous})
        line = placed.canonical_json() + b"\n"
        handle = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._seen = None
        with os.fdopen(handle, "ab") as file:
            file.truncate(self._size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path.parent)
        self._links, self._size = (*links, placed), self._size + len(line)
        self._seen = self._stamp()
        return placed

    def head(self) -> Head | None:
        """How many lines there are, and the digest of the last; None of an empty file."""
        links = self.read()
        return Head(count=len(links), sha256=links[-1].digest) if links else None

    def check_head(self, known: Head, said_by: str) -> None:
        """Compare with a head that was kept elsewhere, on which the file may have grown since.

        Raises:
            TamperedError: lines are missing from the end, or the whole file was written anew.
        """
        links = self.read()
        if len(links) < known.count:
            raise TamperedError(
                f"{self.path} has {counted(len(links), 'line')}; {said_by} knows of "
                f"{known.count}. Lines were "
                "removed from its end: restore it from a backup."
            )
        found = links[known.count - 1].digest
        if found != known.sha256:
            raise TamperedError(
                f"{self.path}, line {known.count}: its digest is {found[:12]}, {said_by} has "
                f"{known.sha256[:12]}. The file was written anew: restore it from a backup."
            )

    def _checked(self, lines: list[bytes]) -> tuple[L, ...]:
        found: list[L] = []
        previous = GENESIS
        for number, line in enumerate(lines, start=1):
            try:
                link = self.kind.model_validate_json(line)
            except ValidationError as error:
                raise TamperedError(f"{self.path}, line {number}: not {self.noun}.") from error
            if link.previous != previous or link.sequence != len(found):
                raise TamperedError(
                    f"{self.path}, line {number}: the chain is broken; a line before it was "
                    "changed, removed or added."
                )
            found.append(link)
            previous = link.digest
        return tuple(found)

    def _stamp(self) -> tuple[int, ...] | None:
        """By which a change of the file by somebody else shows; None where it cannot be asked."""
        try:
            now = self.path.lstat()
        except OSError:
            return None
        return now.st_ino, now.st_size, now.st_mtime_ns

    def _lines(self) -> list[bytes]:
        """Whole lines only: what follows the last newline was cut short by a crash."""
        try:
            content = read_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except NotRegularFileError as error:
            raise RepositoryError(f"{error.strerror}.") from error
        except OSError as error:
            raise RepositoryError(f"{self.path} cannot be read: {error.strerror}.") from error
        return content[: content.rfind(b"\n") + 1].splitlines()


JOURNAL = ".enginegate-journal.jsonl"
# "unloading": what serves, or what stands by, is about to be unloaded to make room.
Step = Literal[
    "intent", "placed", "unloading", "prepared", "configured", "loaded", "done", "undone"
]
Kind = Literal["publish", "rollback", "withdraw", "promise"]

CLOSING: tuple[Step, ...] = ("done", "undone")


class Entry(LogEntry):
    """One step of one operation."""

    operation: str
    kind: Kind
    model: str
    step: Step
    version: int
    detail: dict[str, str]


def last_change(entries: Iterable[Entry]) -> Entry | None:
    """The last operation that was done and changed which release is live; None: there is none."""
    done = [entry for entry in entries if entry.step == "done" and entry.kind != "promise"]
    return done[-1] if done else None


def unfinished(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The latest entry of each operation that was neither done nor undone, oldest first."""
    latest = {entry.operation: entry for entry in entries}
    return tuple(entry for entry in latest.values() if entry.step not in CLOSING)


def intent_detail(entries: Iterable[Entry], entry: Entry) -> Mapping[str, str]:
    """What was noted when an operation began, such as by which channel, by whom and why."""
    return next(each.detail for each in entries if each.operation == entry.operation)


def unloaded_first(entries: Iterable[Entry], entry: Entry) -> str:
    """What an operation unloaded to make room, as it was noted; empty: nothing."""
    own = (e for e in entries if (e.operation, e.step) == (entry.operation, "unloading"))
    return next((e.detail["what"] for e in own), "")


def was_published(entries: Iterable[Entry], entry: Entry) -> bool:
    """Whether an earlier operation has made this very release live already."""
    return any(
        (e.kind, e.model, e.version, e.step) == ("publish", entry.model, entry.version, "done")
        and e.operation != entry.operation
        for e in entries
    )


def last_promise(entries: Iterable[Entry], model: str, version: int) -> str | None:
    """Digest of the promise that a release was last given; None: it has its own."""
    own = [e for e in entries if (e.kind, e.model, e.version) == ("promise", model, version)]
    done = {e.operation for e in own if e.step == "done"}
    given = [e.detail["promise"] for e in own if e.step == "intent" and e.operation in done]
    return given[-1] if given else None


@dataclass(slots=True)
class Journal:
    """The journal of the repository ``root``; whoever appends holds the repository's lock."""

    root: Path
    _chain: HashChain[Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._chain = HashChain(self.root / JOURNAL, Entry, "a journal entry")

    def open(self, kind: Kind, model: str, version: int, **detail: str) -> Entry:
        """Begin an operation: its intent is on disk before anything else happens."""
        intent = Entry(
            sequence=0,
            at=datetime.now(tz=UTC),
            operation=uuid4().hex,
            kind=kind,
            model=model,
            step="intent",
            version=version,
            detail=detail,
            previous=GENESIS,
        )
        return self._chain.append(intent)

    def add(self, entry: Entry, step: Step, **detail: str) -> Entry:
        """Note the next step of an operation; it is on disk when this returns."""
        changes = {"step": step, "detail": detail, "at": datetime.now(tz=UTC)}
        return self._chain.append(entry.model_copy(update=changes))

    def read(self) -> tuple[Entry, ...]:
        """Every entry, oldest first.

        Raises:
            TamperedError: a line in the middle is damaged, or the chain is broken.
        """
        return self._chain.read()

    def unfinished(self) -> tuple[Entry, ...]:
        """The latest entry of each operation that was neither done nor undone, oldest first."""
        return unfinished(self.read())

    def last_step(self, entry: Entry) -> Step:
        """How far an operation has come."""
        return next(e.step for e in reversed(self.read()) if e.operation == entry.operation)
