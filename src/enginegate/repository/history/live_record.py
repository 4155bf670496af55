"""Which release is live by what was written down of every change: the journal and the audit log.

Both are chained, and neither can show by itself that its end was cut, or that it is gone. So each
is compared with the other, and the commit point, which is one small file without a chain, with
both: whoever deletes one of them and edits the commit point does not decide what serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginegate.errors import TamperedError
from enginegate.repository.history.audit import LIVE_EVENTS, AuditLog, Event
from enginegate.repository.history.changes import live_changes
from enginegate.repository.history.journal import CLOSING, Entry, Journal, last_change
from enginegate.repository.store.layout import AUDIT, JOURNAL, Current, Layout
from enginegate.workspace import now


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """What journal and audit log say of one model.

    Attributes:
        layout: of the model.
        entries: the journal's, of every model.
        events: the audit log's, of every model.
    """

    layout: Layout
    entries: tuple[Entry, ...]
    events: tuple[Event, ...]

    @classmethod
    def of(cls, layout: Layout) -> "LiveRecord":
        """As both files are now.

        Raises:
            TamperedError: a line of one of them was changed.
        """
        entries = Journal(layout.root / JOURNAL).read()
        return cls(layout, entries, AuditLog(layout.root).read())

    @property
    def version(self) -> int | None:
        """The release that the last change made live; None: nothing is.

        By the audit log; by the journal where the log tells of no change (it was begun anew).
        """
        changes = [c for c in live_changes(self.events) if c.event.model == self.layout.model]
        if changes:
            return changes[-1].after
        last = last_change(self._own_entries)
        return last.version if last is not None and last.kind != "withdraw" else None

    @property
    def last_number(self) -> int:
        """The highest number that was ever issued for the model; 0 when none was.

        By all that knows one: a withdrawn release has left no manifest, and a journal may be lost.
        """
        numbers = [entry.version for entry in self._own_entries]
        numbers += [event.release for event in self._own_events if event.release]
        return max([0, *numbers, *(release.version for release in self.layout.releases())])

    def check_commit_point(self, current: Current | None) -> None:
        """Refuse a commit point that names another release than the last change made live.

        While an operation is open it may also name the release that this operation makes live.

        Raises:
            TamperedError: it names another one, or is gone.
        """
        live = current.version if current else None
        if live == self.version or live in self._open_versions():
            return
        if current is None and self._is_brought_back():
            return
        file = self.layout.current_file
        if current is None:
            raise TamperedError(
                f"{file} is gone, but {self._said_by()} made release {self.version} live. Restore "
                "it from a backup, or have it written again (`enginegate rollback POLICY --to "
                f"{self.version}`)."
            )
        raise TamperedError(
            f"{file} says that release {live} is live; {self._said_by()} made "
            f"{f'release {self.version}' if self.version else 'nothing'} live. Somebody changed "
            f"the folder, so release {live} is not made live. Find out who, then {self._way_back()}"
        )

    def _way_back(self) -> str:
        """What to do about an edited commit point."""
        if self.version:
            return (
                "restore the file from a backup, or go to the recorded release (`enginegate "
                f"rollback POLICY --to {self.version}`)."
            )
        if self._own_entries or self._own_events:
            return "remove the file: nothing is live then, as recorded."
        return "restore the file, the journal and the audit log from a backup."

    def lost_commit_point(self, to: int | None) -> Current | None:
        """The commit point that is gone, of the release that the last change made live.

        Args:
            to: the release that somebody asks for; None where it is not that one.
        """
        if to is None or to != self.version or self.layout.current() is not None:
            return None
        journal = Journal(self.layout.root / JOURNAL)
        given = {
            release.version: journal.last_promise(self.layout.model, release.version)
            for release in self.layout.releases()
        }
        promises = {version: digest for version, digest in given.items() if digest is not None}
        return Current(version=to, known=(to,), changed_at=now(), promises=promises)

    def check_journal_whole(self) -> None:
        """Refuse a journal that lacks an operation which the audit log has.

        Raises:
            TamperedError: it does; the message names the first one.
        """
        known = {entry.operation for entry in self.entries}
        lacking = [e for e in self._own_events if _is_operation(e) and e.operation not in known]
        if not lacking:
            return
        first, path = lacking[0], self.layout.root / JOURNAL
        state = "was cut" if self.entries else "is gone or empty"
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise TamperedError(
            f"{path} {state}: it lacks an operation on {first.model} release {first.release}{more} "
            f"that {self._line(first)} has as {first.event!r}. Find out who removed it, and "
            "restore it from a backup. Until then the audit log decides which release is live; "
            "releases serve, and can be published and rolled back."
        )

    def check_log_whole(self) -> None:
        """Refuse an audit log that lacks an operation which the journal has ended.

        Raises:
            TamperedError: it does; the message names the first one.
        """
        told = {event.operation for event in self._own_events}
        lacking = [
            entry
            for entry in self._own_entries
            if entry.step in CLOSING and entry.operation not in told
        ]
        if lacking:
            raise TamperedError(
                f"{self.layout.root / AUDIT} does not tell of a {lacking[0].kind} of "
                f"{lacking[0].model} release {lacking[0].version} that the journal has. Lines were "
                "removed from it: restore it from a backup."
            )

    def check_release_known(self, version: int) -> None:
        """Refuse the bytes of a release that no operation brought here.

        Raises:
            TamperedError: neither journal nor audit log knows it.
        """
        known = {entry.version for entry in self._own_entries}
        known |= {event.release for event in self._own_events if event.release}
        if version not in known:
            raise TamperedError(
                f"{self.layout.version_folder(version)} belongs to no operation that the journal "
                "or the audit log has. Find out who put it there, or who cut both."
            )

    @property
    def _own_entries(self) -> Sequence[Entry]:
        return [entry for entry in self.entries if entry.model == self.layout.model]

    @property
    def _own_events(self) -> Sequence[Event]:
        return [event for event in self.events if event.model == self.layout.model]

    def _open_versions(self) -> set[int | None]:
        """What operations without an end may have made live; one in the audit log has ended."""
        latest = {entry.operation: entry for entry in self._own_entries}
        told = {event.operation for event in self._own_events}
        return {
            None if entry.kind == "withdraw" else entry.version
            for entry in latest.values()
            if entry.step not in CLOSING and entry.operation not in told
            if entry.kind != "promise"  # it changes what a release is held to, not which is live
        }

    def _is_brought_back(self) -> bool:
        """Whether an operation without an end was to write the lost commit point again."""
        latest = {entry.operation: entry for entry in self._own_entries}
        return any(
            (entry.kind, entry.version) == ("rollback", self.version) and entry.step not in CLOSING
            for entry in latest.values()
        )

    def _said_by(self) -> str:
        changes = [c for c in live_changes(self.events) if c.event.model == self.layout.model]
        if changes:
            return f"{self._line(changes[-1].event)} ({changes[-1].event.event})"
        if self.version is not None:
            return "the journal's last change"
        return "no change that the journal or the audit log has"

    def _line(self, event: Event) -> str:
        return f"line {event.sequence + 1} of the audit log {self.layout.root / AUDIT}"


def check_live_recorded(root: Path, model: str) -> None:
    """Refuse what a commit point says is live where journal and audit log say otherwise.

    Raises:
        TamperedError: they do, or one of them was changed.
    """
    layout = Layout(root, model)
    LiveRecord.of(layout).check_commit_point(layout.current())


def _is_operation(event: Event) -> bool:
    """Whether the journal must have it too: decisions and looks are no operations."""
    ended = event.event in LIVE_EVENTS or event.event == "promised"
    ended = ended or (event.event == "refused" and event.release is not None)
    return ended and bool(event.operation)
