"""What was under way: an append-only, flushed list of steps, kept as a hash chain."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from enginegate.chained_log.hash_chain import GENESIS, HashChain, LogEntry

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

    @property
    def what(self) -> str:
        """The step."""
        return self.step

    @property
    def is_open(self) -> bool:
        """Whether its operation goes on after it."""
        return self.step not in CLOSING


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

    def read(self) -> Sequence[Entry]:
        """Every entry, oldest first.

        Raises:
            TamperedError: a line in the middle is damaged, or the chain is broken.
        """
        return self._chain.read()

    def of(self, model: str) -> tuple[Entry, ...]:
        """Every entry of one model, oldest first; raises as `read`."""
        return self._chain.select(model)

    def models(self) -> frozenset[str]:
        """Every model that an operation was ever on; raises as `read`."""
        return frozenset(model for model, _ in self._chain.tally())

    def extents(self) -> dict[str, tuple[int, int]]:
        """How many lines each model has, and the place of its last; raises as `read`."""
        return self._chain.extents()

    def check_all(self) -> None:
        """Read and check every line, whatever the index of a long log says; raises as `read`."""
        self._chain.check_all()

    def unfinished(self) -> tuple[Entry, ...]:
        """The latest entry of each operation that was neither done nor undone, oldest first."""
        return self._chain.unfinished()

    def last_step(self, entry: Entry) -> Step:
        """How far an operation has come."""
        own = self.of(entry.model)
        return next(e.step for e in reversed(own) if e.operation == entry.operation)
