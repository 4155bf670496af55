"""What was under way: an append-only, flushed, hash-chained list of steps.

Each line holds the sha256 of the line before it, so an edit in the middle shows. A line cut short
by a crash is the only damage an honest machine can cause; it says nothing yet and is dropped.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import ValidationError

from enginegate.candidate import Sha256
from enginegate.canonical import Record
from enginegate.durable import sync_folder
from enginegate.errors import TamperedError

Step = Literal["intent", "placed", "configured", "loaded", "done", "undone"]
Kind = Literal["publish", "rollback", "withdraw"]

_GENESIS = "0" * 64
_CLOSING: tuple[Step, ...] = ("done", "undone")


class Entry(Record):
    """One step of one operation."""

    sequence: int
    at: datetime
    operation: str
    kind: Kind
    model: str
    step: Step
    version: int
    detail: dict[str, str]
    previous: Sha256


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal file of one repository; whoever appends holds the repository's lock."""

    path: Path

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
            previous=_GENESIS,
        )
        return self._append(intent)

    def add(self, entry: Entry, step: Step, **detail: str) -> Entry:
        """Note the next step of an operation; it is on disk when this returns."""
        return self._append(entry.model_copy(update={"step": step, "detail": detail}))

    def read(self) -> tuple[Entry, ...]:
        """Every entry, oldest first.

        Raises:
            TamperedError: a line in the middle is damaged, or the chain does not hold.
        """
        lines = self._lines()
        entries: list[Entry] = []
        previous = _GENESIS
        for number, line in enumerate(lines, start=1):
            try:
                entry = Entry.model_validate_json(line)
            except ValidationError as error:
                raise TamperedError(f"{self.path}, line {number}: not a journal entry.") from error
            if entry.previous != previous or entry.sequence != len(entries):
                raise TamperedError(
                    f"{self.path}, line {number}: the chain is broken; a line before it was "
                    "changed, "
                    "removed or added."
                )
            entries.append(entry)
            previous = entry.digest
        return tuple(entries)

    def unfinished(self) -> tuple[Entry, ...]:
        """The latest entry of each operation that was neither done nor undone, oldest first."""
        latest = {entry.operation: entry for entry in self.read()}
        return tuple(entry for entry in latest.values() if entry.step not in _CLOSING)

    def last_step(self, entry: Entry) -> Step:
        """How far an operation has come."""
        return next(e.step for e in reversed(self.read()) if e.operation == entry.operation)

    def last_version(self, model: str) -> int:
        """The highest version number ever issued for a model; 0 when none was."""
        return max((e.version for e in self.read() if e.model == model), default=0)

    def _append(self, entry: Entry) -> Entry:
        entries = self.read()
        last = entries[-1] if entries else None
        position = {
            "sequence": len(entries),
            "at": datetime.now(tz=UTC),
            "previous": last.digest if last else _GENESIS,
        }
        chained = entry.model_copy(update=position)
        with self.path.open("ab") as file:
            file.truncate(sum(len(line) + 1 for line in self._lines()))
            file.write(chained.canonical_json() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path.parent)
        return chained

    def _lines(self) -> list[bytes]:
        """Whole lines only: what follows the last newline was cut short by a crash."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        return content[: content.rfind(b"\n") + 1].splitlines()
