"""Ending an operation that came to no end: one pure decision, and the one executor of it.

A publish, rollback or withdrawal that fails uses it at once; one that was killed is ended by the
next start. The live pointer decides: what it says is finished, anything else is undone. Nothing but
a withdrawal is ended by changing the pointer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from enginegate.atomic_io import write_file
from enginegate.decision import Release
from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.deployment import Deployment
from enginegate.repository.deploy.desired_config import right_config, right_files
from enginegate.repository.deploy.memory import Room
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.journal import (
    Entry,
    Journal,
    intent_detail,
    last_change,
    unfinished,
    unloaded_first,
    was_published,
)
from enginegate.repository.store.layout import Current, Layout, models
from enginegate.repository.store.live_record import LiveRecord
from enginegate.repository.store.pointer import commit, live_words
from enginegate.repository.store.removal import remove, remove_all, sweep
from enginegate.triton.client import TritonClient

# After these steps a server may have loaded something of the operation.
_TOLD = frozenset({"unloading", "prepared", "configured", "loaded"})
_UNKNOWN = (
    "what a server serves is not known, because none answers: what was cut short stays noted, and "
    "whoever starts next with one ends it"
)


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """By whom a release is withdrawn, and why.

    Attributes:
        who: empty: whoever runs this process.
    """

    who: str = ""
    why: str = "its promotion failed"


UNDONE = Withdrawal()


@dataclass(frozen=True, slots=True)
class RemovePointer:
    """Nothing is live: the commit of a withdrawal."""


@dataclass(frozen=True, slots=True)
class ServePointer:
    """Bring folder and server to what the pointer says, and prove it; until then stop here."""

    pointer: Current | None
    loaded: bool
    """A server may have loaded something else, so without one this cannot be proved."""
    room: Room = Room.BESIDE
    """What was unloaded to make room: the way back has no more room, so it is unloaded again."""


@dataclass(frozen=True, slots=True)
class ReleaseOldParts:
    """After a commit: composing models unload versions that nothing needs."""

    pointer: Current


@dataclass(frozen=True, slots=True)
class RemoveRelease:
    """Remove the bytes of a release that did not go live, and what staging left of it."""

    keep_history: bool
    """It was live before, and its bytes were to come back: its records stay."""


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Remove the model's folder, where this release was its only one."""

    with_history: bool
    """Also where other releases were before it."""


@dataclass(frozen=True, slots=True)
class RemovePromise:
    """Remove a promise that the release was not given."""

    digest: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the operation in the audit log, then in the journal."""

    done: bool
    why: str
    words: str
    """What is live now, for people."""


Action: TypeAlias = (
    RemovePointer
    | ServePointer
    | ReleaseOldParts
    | RemoveRelease
    | RemoveModel
    | RemovePromise
    | Close
)


class Rollout(Protocol):
    """How far a roll-out to several servers had come."""

    @property
    def canary(self) -> int | None:
        """The release that the first server was given."""

    @property
    def canary_passed(self) -> bool:
        """Whether the canary analysis had passed."""


@dataclass(frozen=True, slots=True)
class RollBackServers:
    """The canary had not passed: every server returns to what was live before it."""


@dataclass(frozen=True, slots=True)
class AlignServers:
    """Every server is brought to what the primary's pointer says."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one operation is ended: its actions in order, the last of which closes it."""

    entry: Entry
    actions: tuple[Action, ...]


def decide(
    journal: Sequence[Entry],
    pointer: Current | None,
    rollout: Rollout | None = None,
    *,
    failed: Entry | None = None,
    reason: str = "",
) -> tuple[Ending | RollBackServers | AlignServers, ...]:
    """What ends everything of one model that came to no end; nothing is read or changed.

    Args:
        journal: every entry of the model.
        pointer: what is live; None: nothing.
        rollout: one that came to no end.
        failed: end only this operation.
        reason: why it failed; else operations were cut short.
    """
    endings: list[Ending | RollBackServers | AlignServers] = []
    for entry in unfinished(journal):
        if failed is not None and entry.operation != failed.operation:
            continue
        actions = _ending(entry, journal, pointer, reason or f"cut short after {entry.step}")
        if RemovePointer() in actions:
            pointer = None
        endings.append(Ending(entry, actions))
    if rollout is not None:
        endings.append(AlignServers() if may_stand(pointer, rollout) else RollBackServers())
    return tuple(endings)


def may_stand(pointer: Current | None, rollout: Rollout) -> bool:
    """Whether what is live may stay live, by a roll-out that came to no end."""
    return rollout.canary_passed or pointer is None or pointer.version != rollout.canary


def _ending(
    entry: Entry, journal: Sequence[Entry], pointer: Current | None, reason: str
) -> tuple[Action, ...]:
    loaded, room = entry.step in _TOLD, Room(unloaded_first(journal, entry) or Room.BESIDE)
    committed = f"committed before it was interrupted: {reason}"
    if entry.kind == "promise":
        return _ending_promise(
            intent_detail(journal, entry)["promise"], entry, pointer, reason, committed
        )
    if entry.kind == "withdraw":
        if pointer is not None and pointer.version != entry.version:
            words = f"{live_words(pointer)}."
            return (Close(done=False, why="another release is live by now", words=words),)
        return (
            *((RemovePointer(),) if pointer is not None else ()),
            ServePointer(None, loaded=True),
            RemoveModel(with_history=True),
            Close(done=True, why=reason, words="Nothing is live, as before."),
        )
    if pointer is not None and pointer.version == entry.version:
        words = f"Release {entry.version} is live."
        return ReleaseOldParts(pointer), Close(done=True, why=committed, words=words)
    undone = Close(done=False, why=reason, words=f"{live_words(pointer)}, as before.")
    if entry.kind == "rollback":  # without a pointer there is nothing to go by
        return (ServePointer(pointer, loaded, room), undone) if pointer is not None else (undone,)
    return (
        ServePointer(pointer, loaded, room),
        RemoveRelease(keep_history=was_published(journal, entry)),
        *((RemoveModel(with_history=False),) if pointer is None else ()),
        undone,
    )


def _ending_promise(
    digest: str, entry: Entry, pointer: Current | None, reason: str, committed: str
) -> tuple[Action, ...]:
    """No server is notified of a promise: the pointer has it, or what was written goes."""
    if pointer is not None and pointer.promises.get(entry.version) == digest:
        words = f"Release {entry.version} is held to its new promise."
        return (Close(done=True, why=committed, words=words),)
    words = f"Release {entry.version} is held to the promise that it had."
    return RemovePromise(digest), Close(done=False, why=reason, words=words)


@dataclass(frozen=True, slots=True)
class OperationRecovery:
    """Carries out what was decided; whoever calls holds the repository's lock.

    Attributes:
        client: the live server; None: none answers.
    """

    client: TritonClient | None
    load_timeout_s: float
    audit: AuditLog
    journal: Journal

    def live_record(self, layout: Layout) -> LiveRecord:
        """What journal and audit log say of one model by now."""
        return LiveRecord.of(layout, self.journal, self.audit)

    def recover(self, changing: str = "") -> tuple[str, ...]:
        """Finish or undo whatever was cut short; one sentence for each operation.

        Args:
            changing: the model that is about to be changed: of all others without an open operation
                nothing is looked at. Empty: what killed processes left is removed of every model.

        Raises:
            TamperedError: a commit point is not what journal and audit log say: nothing is ended
                by it.
        """
        sentences = []
        open_ones = self.journal.unfinished()
        for entry in open_ones:
            layout = Layout(self.audit.root, entry.model)
            self.live_record(layout).check_commit_point(layout.current())
            words = self.end(layout, entry)
            sentences.append(
                f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its "
                f"step '{entry.step}'. {words}"
            )
        known = {changing, *(entry.model for entry in open_ones)}
        if not changing:
            known = {*models(self.audit.root), *self.journal.models()}
        sweep(self.audit.root, known)
        return tuple(sentences)

    def end(self, layout: Layout, entry: Entry, *, reason: str = "") -> str:
        """End one operation by what the pointer says, on disk first, then on the server.

        If the server does not answer, or what is on disk is damaged, the operation stays open in
        the journal: whoever changes the repository next tries again.

        Args:
            layout: of its model.
            entry: any of it.
            reason: why it failed; empty: it was cut short.

        Returns:
            What is live now, in words.
        """
        decided = decide(
            self.journal.of(layout.model), layout.current(), failed=entry, reason=reason
        )
        sentences = [self._carry_out(layout, each) for each in decided if isinstance(each, Ending)]
        return " ".join(sentences)

    def _carry_out(self, layout: Layout, ending: Ending) -> str:
        words = ""
        for action in ending.actions:
            match action:
                case RemovePointer():
                    commit(layout, None)
                case ServePointer(pointer, loaded, room):
                    loaded = loaded or _has_parts(layout, ending.entry)
                    doubt = self._serve(layout, pointer, room, loaded=loaded)
                    if doubt:
                        return f"{live_words(pointer)} on disk; {doubt}"
                case ReleaseOldParts(pointer):
                    self._release_old_parts(layout, pointer)
                case RemoveRelease(keep_history):
                    remove(layout, ending.entry.version, known=keep_history)
                case RemoveModel(with_history):
                    remove_all(layout, ending.entry.version, history=with_history)
                case RemovePromise(digest):
                    version = ending.entry.version
                    layout.promise_file(version, digest).unlink(missing_ok=True)
                    layout.promise_signature(version, digest).unlink(missing_ok=True)
                case Close(done, why, words):
                    release = release_of(layout, ending.entry)
                    self.audit.close(self.journal, ending.entry, release, done=done, why=why)
        return words

    def _serve(self, layout: Layout, pointer: Current | None, room: Room, *, loaded: bool) -> str:
        """Folder and server as the pointer says; why that is in doubt, if it is.

        What serves as it should is not unloaded to make room for itself.
        """
        try:
            if pointer is not None:
                write_file(layout.config, right_config(layout, pointer))
            if self.client is None:
                _write_right(layout, pointer)
                return _UNKNOWN if loaded else ""
            live = Deployment(self.client, layout, self.load_timeout_s)
            if pointer is not None:
                if room is not Room.BESIDE and live.serves(pointer):
                    room = Room.BESIDE
                live.restore(pointer, room)
            else:
                live.unload()
        except (ServerError, RepositoryError) as error:
            return f"that it serves could not be proved: {error}"
        return ""

    def _release_old_parts(self, layout: Layout, pointer: Current) -> None:
        if self.client is None:
            _write_right(layout, pointer)
        else:
            live = Deployment(self.client, layout, self.load_timeout_s)
            live.trim_after_commit(pointer)


def release_of(layout: Layout, entry: Entry) -> Release | None:
    """The release that an operation is about; None: its manifest is not here."""
    there = layout.release_file(entry.version).exists()
    return layout.release(entry.version) if there else None


def was_withdrawn(layout: Layout) -> bool:
    """Whether the last change of what is live left nothing, by the journal."""
    change = last_change(Journal(layout.root).of(layout.model))
    return change is not None and change.kind == "withdraw"


def _has_parts(layout: Layout, entry: Entry) -> bool:
    """Whether its composing models are here; a polling server may have loaded them unnoted."""
    release = release_of(layout, entry)
    return release is not None and bool(release.engine.parts)


def _write_right(layout: Layout, pointer: Current | None) -> None:
    for path, content in (right_files(layout, pointer) if pointer else {}).items():
        write_file(path, content)
