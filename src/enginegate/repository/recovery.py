"""Finishing or undoing an operation that came to no end, by what the commit point says."""

from dataclasses import dataclass

from enginegate.atomic_io import write_file
from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.deployment import finish, go_to
from enginegate.repository.deploy.desired_config import right_config
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.journal import Entry, Journal, Step, last_change
from enginegate.repository.history.live_record import check_live_recorded
from enginegate.repository.store.layout import JOURNAL, Current, Layout, models
from enginegate.repository.store.removal import remove, remove_all, sweep
from enginegate.repository.transitions import live_words
from enginegate.triton.client import TritonClient

_TOLD: tuple[Step, ...] = ("prepared", "configured", "loaded")
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


def was_withdrawn(layout: Layout) -> bool:
    """Whether the last change of what is live left nothing, by the journal."""
    entries = Journal(layout.root / JOURNAL).read()
    change = last_change(e for e in entries if e.model == layout.model)
    return change is not None and change.kind == "withdraw"


@dataclass(frozen=True, slots=True)
class OperationRecovery:
    """How operations of one repository are ended; whoever calls holds its lock.

    Attributes:
        client: the live server; None: none answers.
    """

    client: TritonClient | None
    load_timeout_s: float
    audit: AuditLog
    journal: Journal

    def recover(self) -> tuple[str, ...]:
        """Finish or undo whatever was cut short; one sentence for each operation.

        Raises:
            TamperedError: a commit point is not what journal and audit log say: nothing is ended
                by it.
        """
        said = []
        for entry in self.journal.unfinished():
            layout = Layout(self.audit.root, entry.model)
            check_live_recorded(self.audit.root, entry.model)
            note = self.undo(layout, entry, reason=f"cut short after {entry.step}")
            said.append(
                f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its "
                f"step '{entry.step}'. {note}"
            )
        known = {*models(self.audit.root), *(entry.model for entry in self.journal.read())}
        for name in known:
            sweep(Layout(self.audit.root, name))
        return tuple(said)

    def undo(self, layout: Layout, entry: Entry, *, reason: str) -> str:
        """Restore what the commit point says, on disk first, then on the server.

        If the server does not answer, or what is on disk is damaged, the operation stays open in
        the journal: whoever changes the repository next tries again.

        Returns:
            What is live now, in words.
        """
        current = layout.current()
        if entry.kind == "promise":
            return self._undo_promise(layout, entry, current, reason)
        if entry.kind == "withdraw" and current is not None:
            if current.version != entry.version:
                self._close(entry, done=False, why="another release is live by now")
                return f"{live_words(current)}."
            layout.current_file.unlink()
            current = None
        elif current is not None and current.version == entry.version:
            finish(self.client, layout, current, self.load_timeout_s)
            self._close(entry, done=True, why=f"committed before it was interrupted: {reason}")
            return f"Release {entry.version} is live."
        doubt = self._restore(layout, entry, current)
        if doubt:
            return f"{live_words(current)} on disk; {doubt}"
        if entry.kind == "publish":
            remove(layout, entry.version, known=self.journal.was_published(entry))
        if current is None and entry.kind != "rollback":
            remove_all(layout, entry.version, history=entry.kind == "withdraw")
        self._close(entry, done=entry.kind == "withdraw", why=reason)
        return f"{live_words(current)}, as before."

    def _undo_promise(
        self, layout: Layout, entry: Entry, current: Current | None, reason: str
    ) -> str:
        """No server is told of a promise: the commit point has it, or what was written goes."""
        digest = self.journal.begun(entry)["promise"]
        if current is not None and current.promises.get(entry.version) == digest:
            self._close(entry, done=True, why=f"committed before it was interrupted: {reason}")
            return f"Release {entry.version} is held to its new promise."
        layout.promise_file(entry.version, digest).unlink(missing_ok=True)
        layout.promise_signature(entry.version, digest).unlink(missing_ok=True)
        self._close(entry, done=False, why=reason)
        return f"Release {entry.version} is held to the promise that it had."

    def _restore(self, layout: Layout, entry: Entry, current: Current | None) -> str:
        """Folder and server as the commit point says; why that is in doubt, if it is."""
        if current is None and entry.kind == "rollback":
            return ""  # somebody removed the commit point: nothing to go by
        try:
            if current is not None:
                write_file(layout.config, right_config(layout, current))
            go_to(self.client, layout, current, self.load_timeout_s)
        except (ServerError, RepositoryError) as error:
            return f"that it serves could not be proved: {error}"
        return _UNKNOWN if self.client is None and self._was_told(entry, layout) else ""

    def _was_told(self, entry: Entry, layout: Layout) -> bool:
        """Whether a server may serve something of this operation; parts go before any note."""
        last = self.journal.last_step(entry)
        if last in _TOLD or entry.kind == "withdraw":
            return True
        placed = layout.release_file(entry.version).is_file()
        return placed and bool(layout.release(entry.version).parts)

    def _close(self, entry: Entry, *, done: bool, why: str) -> None:
        self.audit.close(self.journal, entry, done=done, why=why)
