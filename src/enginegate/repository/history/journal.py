"""What was under way: an append-only, flushed, hash-chained list of steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from enginegate.repository.history.hash_chain import GENESIS, HashChain, LogEntry

JOURNAL = ".enginegate-journal.jsonl"
Step = Literal["intent", "placed", "prepared", "configured", "loaded", "done", "undone"]
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
            TamperedError: a line in the middle is damaged, or the chain does not hold.
        """
        return self._chain.read()

    def unfinished(self) -> tuple[Entry, ...]:
        """The latest entry of each operation that was neither done nor undone, oldest first."""
        return unfinished(self.read())

    def last_step(self, entry: Entry) -> Step:
        """How far an operation has come."""
        return next(e.step for e in reversed(self.read()) if e.operation == entry.operation)
