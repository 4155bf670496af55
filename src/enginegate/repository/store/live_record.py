"""Which release is live by what was written down of every change: the journal and the audit log.

Both are chained, and neither can show by itself that its end was cut, or that it is gone. So each
is compared with the other, and the commit point, which is one small file without a chain, with
both: whoever deletes one of them and edits the commit point does not decide what serves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from enginegate.decision import Head, Release
from enginegate.errors import EnginegateError, TamperedError
from enginegate.repository.history.audit import AUDIT, LIVE_EVENTS, AuditLog, Event, live_changes
from enginegate.repository.history.journal import (
    CLOSING,
    JOURNAL,
    Entry,
    Journal,
    last_change,
    last_promise,
)
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.repository.store.release_files import ReleaseFiles, signed_promise
from enginegate.workspace import now

_COPIED = "copied_from"
_YES, _NO = "yes", "no"


@dataclass(frozen=True)
class LiveRecord:
    """What journal and audit log say of one model.

    Attributes:
        layout: of the model.
        entries: the journal's, of this model.
        events: the audit log's, of this model.
    """

    layout: Layout
    entries: tuple[Entry, ...]
    events: tuple[Event, ...]

    @classmethod
    def of(
        cls, layout: Layout, journal: Journal | None = None, audit: AuditLog | None = None
    ) -> "LiveRecord":
        """As both files are now; those that were opened already are not checked again.

        Raises:
            TamperedError: a line of one of them was changed.
        """
        entries = (journal or Journal(layout.root)).of(layout.model)
        return cls(layout, entries, (audit or AuditLog(layout.root)).of(layout.model))

    @property
    def version(self) -> int | None:
        """The release that the last change made live; None: nothing is.

        By the audit log; by the journal where the log tells of no change (it was begun anew).
        """
        changes = live_changes(self.events)
        if changes:
            return changes[-1].after
        last = last_change(self.entries)
        return last.version if last is not None and last.kind != "withdraw" else None

    @property
    def last_number(self) -> int:
        """The highest number that was ever issued for the model; 0 when none was.

        By all that knows one: a withdrawn release has left no manifest, and a journal may be lost.
        """
        numbers = [entry.version for entry in self.entries]
        numbers += [event.release for event in self.events if event.release]
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
        if self.entries or self.events:
            return "remove the file: nothing is live then, as recorded."
        return "restore the file, the journal and the audit log from a backup."

    def lost_commit_point(self, to: int | None) -> Current | None:
        """The commit point that is gone, of the release that the last change made live.

        Args:
            to: the release that somebody asks for; None where it is not that one.
        """
        if to is None or to != self.version or self.layout.current() is not None:
            return None
        given = {
            release.version: last_promise(self.entries, self.layout.model, release.version)
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
        lacking = [e for e in self.events if _is_operation(e) and e.operation not in known]
        if not lacking:
            return
        first, path = lacking[0], self.layout.root / JOURNAL
        state = "was cut" if _has_content(path) else "is gone or empty"
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
        logged = {event.operation for event in self.events}
        lacking = [
            entry
            for entry in self.entries
            if entry.step in CLOSING and entry.operation not in logged
        ]
        if lacking:
            raise TamperedError(
                f"{self.layout.root / AUDIT} has no record of a {lacking[0].kind} of "
                f"{lacking[0].model} release {lacking[0].version} that the journal has. Lines were "
                "removed from it: restore it from a backup."
            )

    def check_release_known(self, version: int) -> None:
        """Refuse the bytes of a release that no operation brought here.

        Raises:
            TamperedError: neither journal nor audit log knows it.
        """
        if version not in self._known:
            raise TamperedError(
                f"{self.layout.version_folder(version)} belongs to no operation that the journal "
                "or the audit log has. Find out who put it there, or who cut both."
            )

    def check_as_published(self, release: Release) -> None:
        """Refuse a manifest that was changed since, and a signature that was removed.

        Raises:
            TamperedError: it is not what was published.
        """
        version, manifest = release.version, self.layout.release_file(release.version)
        detail = self._placed.get(version, {})
        if detail.get("release", release.digest) != release.digest:
            raise TamperedError(
                f"{manifest} is not the manifest that was published: its digest is "
                f"{release.digest}, the journal has {detail['release']}."
            )
        noted = self._noted.get(version)
        if noted is not None and noted.manifest != release.digest:
            raise TamperedError(
                f"{manifest} is not the manifest that was published: its digest is "
                f"{release.digest}, line {noted.sequence + 1} of the audit log has "
                f"{noted.manifest}."
            )
        if detail.get("signed") == _YES and not self.layout.signature_file(version).is_file():
            raise TamperedError(
                f"Release {version} of {self.layout.model} was signed when it was published, and "
                f"{self.layout.signature_file(version)} is gone. Find out who removed it; until "
                "then go to one that verifies."
            )

    def admit(self, release: Release, signing: ReleaseSigning | None) -> None:
        """Check every digest, the signature and the journal of a release that is to serve again.

        Raises:
            TamperedError: its bytes changed since it was published, or its signature is not valid.
            RepositoryError: a signature is required, and there is none.
        """
        files = ReleaseFiles(self.layout, release)
        files.check()
        renewed = self.layout.renewed(release.version)
        if signing is not None:
            signing.check(files.signed())
            if renewed is not None:
                signing.check(signed_promise(self.layout, renewed))
        self.check_as_published(release)

    @cached_property
    def _known(self) -> frozenset[int]:
        """Every release that an operation or an event is about."""
        told = {event.release for event in self.events if event.release}
        return frozenset({entry.version for entry in self.entries} | told)

    @cached_property
    def _placed(self) -> dict[int, Mapping[str, str]]:
        """What was noted when each release was last placed."""
        return {e.version: e.detail for e in self.entries if e.step == "placed"}

    @cached_property
    def _noted(self) -> dict[int | None, Event]:
        """The first event after which each release was live that has its manifest."""
        live = [e for e in self.events if e.event in LIVE_EVENTS and e.manifest]
        return {event.release: event for event in reversed(live)}

    def _open_versions(self) -> set[int | None]:
        """What operations without an end may have made live; one in the audit log has ended."""
        latest = {entry.operation: entry for entry in self.entries}
        logged = {event.operation for event in self.events}
        return {
            None if entry.kind == "withdraw" else entry.version
            for entry in latest.values()
            if entry.step not in CLOSING and entry.operation not in logged
            if entry.kind != "promise"  # it changes what a release is held to, not which is live
        }

    def _is_brought_back(self) -> bool:
        """Whether an operation without an end was to write the lost commit point again."""
        latest = {entry.operation: entry for entry in self.entries}
        return any(
            (entry.kind, entry.version) == ("rollback", self.version) and entry.step not in CLOSING
            for entry in latest.values()
        )

    def _said_by(self) -> str:
        changes = live_changes(self.events)
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


def facts_of_placement(
    layout: Layout, release: Release, package: Package | ImportedRelease
) -> dict[str, str]:
    """What the journal takes in of a release that was just placed (and signed, if it was).

    Of an import also from where: its manifest tells of another repository's audit log.
    """
    signed = _YES if layout.signature_file(release.version).is_file() else _NO
    origin = {_COPIED: str(package.root)} if isinstance(package, ImportedRelease) else {}
    return {"release": release.digest, "signed": signed, **origin}


def check_audit(layout: Layout, audit: AuditLog) -> None:
    """Check the audit log's chain, and that it goes as far as what knows of it.

    Raises:
        TamperedError: a line was changed, removed or added.
    """
    audit.check(_kept_heads(layout))


def _kept_heads(layout: Layout) -> Iterator[tuple[str, Head]]:
    """How far this repository's audit log had come when each release was staged here."""
    try:
        entries, releases = Journal(layout.root).of(layout.model), layout.releases()
    except EnginegateError:
        return  # a damaged journal or manifest is reported by itself
    imported = {e.version for e in entries if _COPIED in e.detail}
    for release in releases:
        if release.audit is not None and release.version not in imported:
            yield str(layout.release_file(release.version)), release.audit


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _is_operation(event: Event) -> bool:
    """Whether the journal must have it too: decisions and watch checks are no operations."""
    ended = event.event in LIVE_EVENTS or event.event == "promised"
    ended = ended or (event.event == "refused" and event.release is not None)
    return ended and bool(event.operation)
