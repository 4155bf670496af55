"""An append-only file of lines, each of which holds the sha256 of the line before it.

An edit in the middle shows, and so does a line that was removed or added there. A line cut short by
a crash is the only damage an honest machine can cause; it says nothing yet and is dropped. Whole
lines removed from the end cannot show in the file itself: that needs a `Head` kept elsewhere.

A short log is parsed whole by whoever reads it. A long one has an index beside it (line_index.py),
by which the lines of one model are read alone, and is never in memory as a whole.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar, overload

from pydantic import ValidationError

from enginegate.atomic_io import NotRegularFileError, open_regular, read_file, sync_folder
from enginegate.candidate import Sha256
from enginegate.chained_log.line_index import (
    LineFacts,
    LineIndex,
    LogState,
    Stamp,
    StateOf,
)
from enginegate.decision import Head
from enginegate.errors import RepositoryError, TamperedError
from enginegate.messages import counted
from enginegate.records import Record, sha256_bytes

GENESIS = "0" * 64
# Bytes from which a log is read by an index: 4 MiB are 10,000 lines, which take 50 ms to parse;
# below that an index saves nothing, and is one more file.
INDEXED_FROM = 4 << 20
# Whoever appends writes the line first, and then the index: a reader between the two waits.
_ATTEMPTS, _RETRY_S = 3, 0.02


class LogEntry(Record):
    """One line: its place in the file, when it was written, and the digest of the line before."""

    sequence: int
    at: datetime
    previous: Sha256
    model: str
    operation: str

    @property
    def what(self) -> str:
        """Which kind of line it is, by which an index finds it."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """Whether an operation goes on after this line."""
        return False


L = TypeVar("L", bound=LogEntry)


@dataclass(slots=True)
class HashChain(Generic[L]):
    """One such file; whoever appends holds the repository's lock.

    Its lines are checked once, and again only after somebody else changed the file.

    Attributes:
        kind: what a line is.
        noun: what a line is called in messages, e.g. "a journal entry".
    """

    path: Path
    kind: type[L]
    noun: str
    _links: tuple[L, ...] = field(default=(), init=False, repr=False)
    _state: LogState | None = field(default=None, init=False, repr=False)
    _index: LineIndex | None = field(default=None, init=False, repr=False)

    @property
    def index_file(self) -> Path:
        """Where the index of a long log is."""
        return self.path.with_name(f"{self.path.stem}-index.db")

    def read(self) -> Sequence[L]:
        """Every line, oldest first; those of a long log are parsed as they are asked for.

        Raises:
            TamperedError: a line is damaged, or the chain is broken; the message names it.
            RepositoryError: the file cannot be read, or is a link, a FIFO or the like.
        """
        self._refresh()
        return (
            self._links if self._index is None else StoredLines(self.path, self.kind, self._index)
        )

    def select(self, model: str = "", what: Sequence[str] = ()) -> tuple[L, ...]:
        """Lines of one model, of some kinds, or of both, oldest first; raises as `read`."""
        self._refresh()
        if self._index is not None:
            stored = StoredLines(self.path, self.kind, self._index)
            return tuple(stored.parsed(self._index.select(model, what)))
        return tuple(
            link
            for link in self._links
            if (not model or link.model == model) and (not what or link.what in what)
        )

    def tally(self) -> Counter[tuple[str, str]]:
        """How many lines there are, by model and kind; raises as `read`."""
        self._refresh()
        if self._index is not None:
            return self._index.tally()
        return Counter((link.model, link.what) for link in self._links)

    def extents(self) -> dict[str, tuple[int, int]]:
        """How many lines each model has, and the place of its last; raises as `read`.

        Lines are never removed, so a model whose extent is as before has the lines that it had.
        """
        self._refresh()
        if self._index is not None:
            return self._index.extents()
        found: dict[str, tuple[int, int]] = {}
        for link in self._links:
            count, _ = found.get(link.model, (0, 0))
            found[link.model] = (count + 1, link.sequence)
        return found

    def models_from(self, sequence: int) -> frozenset[str]:
        """Models of the lines from a place on; raises as `read`."""
        self._refresh()
        if self._index is not None:
            return self._index.models_from(sequence)
        return frozenset(link.model for link in self._links[sequence:])

    def unfinished(self) -> tuple[L, ...]:
        """The last line of each operation that has not ended, oldest first; raises as `read`."""
        lines, state = self.read(), self._refresh()
        return tuple(lines[sequence] for sequence in sorted(state.unfinished.values()))

    def append(self, link: L) -> L:
        """Write ``link`` in the next place; it is on disk when this returns.

        Raises:
            TamperedError: what is there already was changed.
            OSError: it cannot be written.
        """
        state = self._refresh()
        previous = state.head.sha256 if state.head else GENESIS
        placed = link.model_copy(update={"sequence": state.count, "previous": previous})
        text = placed.canonical_json()
        handle = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._state = None
        with os.fdopen(handle, "ab") as file:
            file.truncate(state.size)
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path.parent)
        unfinished = dict(state.unfinished)
        _follow(unfinished, placed)
        grown = LogState(
            Stamp.of(self.path),
            state.size + len(text) + 1,
            Head(count=state.count + 1, sha256=sha256_bytes(text)),
            unfinished,
        )
        if self._index is not None:
            facts = LineFacts(placed.sequence, state.size, len(text), placed.model, placed.what)
            if not self._index.add(facts, grown):
                self._index = None  # and no state: whoever asks next writes it anew
                return placed
        else:
            self._links = (*self._links, placed)
        self._state = grown
        return placed

    def head(self) -> Head | None:
        """How many lines there are, and the digest of the last; None of an empty file."""
        return self._refresh().head

    def check_head(self, known: Head, said_by: str) -> None:
        """Compare with a head that was kept elsewhere, on which the file may have grown since.

        Raises:
            TamperedError: lines are missing from the end, or the whole file was written anew.
        """
        links, state = self.read(), self._refresh()
        if known == state.head:
            return
        if state.count < known.count:
            raise TamperedError(
                f"{self.path} has {counted(state.count, 'line')}; {said_by} knows of "
                f"{known.count}. Lines were "
                "removed from its end: restore it from a backup."
            )
        found = links[known.count - 1].digest
        if found != known.sha256:
            raise TamperedError(
                f"{self.path}, line {known.count}: its digest is {found[:12]}, {said_by} has "
                f"{known.sha256[:12]}. The file was written anew: restore it from a backup."
            )

    def check_all(self) -> None:
        """Read and check every line, whatever an index says, which is written anew.

        Raises:
            TamperedError: a line is damaged, or the chain is broken; the message names it.
            RepositoryError: the file cannot be read, or is a link, a FIFO or the like.
        """
        self._state = self._index = None
        stamp = Stamp.of(self.path)
        if stamp is not None and stamp.size >= INDEXED_FROM:
            self._adopt(self._built(stamp))
        else:
            self._refresh()

    def _refresh(self) -> LogState:
        """How far the file has come; it is checked where it is not as this program left it."""
        stamp = Stamp.of(self.path)
        if self._state is not None and stamp is not None and stamp == self._state.stamp:
            return self._state
        if stamp is None or stamp.size < INDEXED_FROM:
            self._index, collected, links = None, StateOf(stamp), []
            for _, link in self._checked(self._lines(), collected):
                links.append(link)
            self._links, self._state = tuple(links), collected()
            return self._state
        for attempt in range(_ATTEMPTS):
            index = LineIndex.open(self.index_file)
            if index is None:
                break
            if index.state.stamp == Stamp.of(self.path):
                return self._adopt(index)
            if attempt < _ATTEMPTS - 1:
                time.sleep(_RETRY_S)
        return self._adopt(self._built(Stamp.of(self.path)))

    def _adopt(self, index: LineIndex) -> LogState:
        self._links, self._index, self._state = (), index, index.state
        return index.state

    def _built(self, stamp: Stamp | None) -> LineIndex:
        """Check every line, and write the index anew."""
        collected = StateOf(stamp)

        def facts() -> Iterator[LineFacts]:
            for start, link in self._checked(self._streamed(), collected):
                length = collected.size - start - 1
                yield LineFacts(link.sequence, start, length, link.model, link.what)

        return LineIndex.build(self.index_file, facts(), collected)

    def _checked(self, lines: Iterator[bytes], collected: StateOf) -> Iterator[tuple[int, L]]:
        """Each line with its first byte, once it follows on the one before it."""
        last: L | None = None
        written = GENESIS
        for number, line in enumerate(lines, start=1):
            try:
                link = self.kind.model_validate_json(line)
            except ValidationError as error:
                raise TamperedError(f"{self.path}, line {number}: not {self.noun}.") from error
            # A line is written as its canonical text, so its digest is that of its bytes. Another
            # version may have written the same content in another way: its digest still counts.
            follows = link.previous == written or (
                last is not None and link.previous == last.digest
            )
            if not follows or link.sequence != number - 1:
                raise TamperedError(
                    f"{self.path}, line {number}: the chain is broken; a line before it was "
                    "changed, removed or added."
                )
            start, last, written = collected.size, link, sha256_bytes(line)
            collected.size += len(line) + 1
            _follow(collected.unfinished, link)
            yield start, link
        if last is not None:
            collected.head = Head(count=last.sequence + 1, sha256=last.digest)

    def _lines(self) -> Iterator[bytes]:
        """Whole lines only: what follows the last newline was cut short by a crash."""
        try:
            content = read_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except NotRegularFileError as error:
            raise RepositoryError(f"{error.strerror}.") from error
        except OSError as error:
            raise RepositoryError(f"{self.path} cannot be read: {error.strerror}.") from error
        yield from content[: content.rfind(b"\n") + 1].splitlines()

    def _streamed(self) -> Iterator[bytes]:
        """The same of a long log, a part at a time."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield line[:-1]
        except NotRegularFileError as error:
            raise RepositoryError(f"{error.strerror}.") from error
        except OSError as error:
            raise RepositoryError(f"{self.path} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class StoredLines(Sequence[L]):
    """The lines of a long log, parsed when they are asked for."""

    path: Path
    kind: type[L]
    lines: LineIndex

    def __len__(self) -> int:
        """How many there are."""
        return self.lines.state.count

    @overload
    def __getitem__(self, place: int) -> L: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[L, ...]: ...

    def __getitem__(self, place: int | slice) -> L | tuple[L, ...]:
        """One line, or a part of them."""
        if isinstance(place, slice):
            places = range(*place.indices(len(self)))
            return tuple(self.parsed(self.lines.line(each) for each in places))
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        (found,) = self.parsed(iter((self.lines.line(place),)))
        return found

    def __iter__(self) -> Iterator[L]:
        """All of them, oldest first."""
        return self.parsed(self.lines.select())

    def parsed(self, facts: Iterator[LineFacts]) -> Iterator[L]:
        """The lines that an index names.

        Raises:
            TamperedError: one is not there: the log was changed while it was read.
        """
        with os.fdopen(open_regular(self.path), "rb") as file:
            handle = file.fileno()
            for each in facts:
                line = os.pread(handle, each.length, each.start)
                try:
                    link = self.kind.model_validate_json(line)
                except ValidationError as error:
                    raise self._changed(each) from error
                if (link.sequence, link.model) != (each.sequence, each.model):
                    raise self._changed(each)
                yield link

    def _changed(self, facts: LineFacts) -> TamperedError:
        return TamperedError(
            f"{self.path}, line {facts.sequence + 1} is not the line that its index has. Somebody "
            "changed the file while it was read: check it with `enginegate verify`."
        )


def _follow(unfinished: dict[str, int], link: LogEntry) -> None:
    if link.is_open:
        unfinished[link.operation] = link.sequence
    else:
        unfinished.pop(link.operation, None)
