"""Bringing a host to a release that is live elsewhere, by the path that every promotion takes."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryBusyError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.repository.history.audit import REPLICATION, AuditLog, AuditRecord, origin
from enginegate.repository.lock import hold_lock
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.target import LocalTarget
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.object_journal import ObjectJournal, is_from_here, was_undone
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.release_files import check_same

_LOCK = ".enginegate-pull.lock"
_LOCK_TIMEOUT_S = 30.0
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class ReplicaSync:
    """A host, and what is live in the storage that it replicates."""

    local: LocalTarget
    releases: ObjectReleases
    journal: ObjectJournal

    def pull(self) -> Release | None:
        """Bring this host to what is live in storage; None where nothing is.

        Raises:
            As `install`; RepositoryError: it was left while it was fetched.
            TamperedError: what storage says is live is not what its journal says.
        """
        self.journal.check_recorded(self.releases, AuditLog(self.local.root).read())
        pointer, _ = self.releases.pointer()
        release = self.releases.release_of(pointer) if pointer else None
        if pointer is None or release is None:
            self._leave(pointer)
            return None
        replica = self._as_replica()
        self.install(replica, release, check=partial(self._check_still_live, release))
        if given := pointer.missing_promise(self.current()):
            promise = self.releases.fetch_promise(release.version, given, self.local.root)
            replica.renew(promise, new=False)
        return release

    def current(self) -> Current | None:
        """What is live here."""
        return Layout(self.local.root, self.journal.model).current()

    def is_behind(self) -> bool:
        """Whether another release, or another promise of it, is live in storage than here."""
        pointer, here = self.releases.pointer()[0], self.current()
        if (pointer.version if pointer else None) != (here.version if here else None):
            return True
        return pointer is not None and pointer.missing_promise(here) is not None

    def install(
        self,
        local: LocalTarget,
        release: Release,
        *,
        reason: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve a release: go back to it if it is here, else fetch it and publish the copy.

        A fleet that analyses canaries analyses one that is newer than what it serves, also if it is
        here: it may have been left because it did not pass.

        Args:
            local: this host's servers, and how they are changed.
            release: what to serve.
            reason: for the audit log.
            check: raises if it should not serve any more; called before anything is loaded.

        Raises:
            TamperedError: a file or an object is not what was published.
            PublishError: it did not prove itself; what served before still serves.
            NotEverywhereError: it serves, but not on every server of a fleet.
        """
        layout, here = Layout(local.root, release.model), self.current()
        if here is None or not layout.version_folder(release.version).is_dir():
            self._fetch_and_publish(local, release, here, check)
            return
        check_same(local.root, layout.release(release.version), release.digest)
        if here.version != release.version:
            check()
            forward = release.version > here.version
            make_live = local.publish_again if forward else local.rollback
            make_live(release.model, release.version, reason=reason)
        elif not local.serves(release.model):
            local.bring_up(release.model)

    def sweep(self) -> None:
        """Remove what a killed pull had fetched so far; one that is under way is left alone."""
        if any(self._fetched()):
            with suppress(RepositoryBusyError), self._pulling(0.0):
                pass

    def _fetch_and_publish(
        self, local: LocalTarget, release: Release, here: Current | None, check: Callable[[], None]
    ) -> None:
        around = local.root.absolute().parent
        with (
            self._pulling(_LOCK_TIMEOUT_S),
            tempfile.TemporaryDirectory(dir=around, prefix=self._prefix) as folder,
        ):
            copy = self.releases.fetch(release.version, Path(folder))
            check_same(self.releases.store.url, copy.release, release.digest)
            expected = here.version if here else None
            local.publish(copy, expected=expected, placed=lambda _: check())

    def _as_replica(self) -> LocalTarget:
        """This host, whose audit log says that what is done now was decided by another host.

        Not where it leaves what this host itself could not commit: no other log has that.
        """
        last, here = self.journal.last(), self.current()
        if last is not None and last.step == "undone" and last.kind != "promise":
            reached = None if last.kind == "withdraw" else last.version
            if is_from_here(last) and reached == (here.version if here else None):
                return self.local
        return self.local.through(REPLICATION)

    def _check_still_live(self, release: Release) -> None:
        self.journal.check_not_changing_here()
        live = self.releases.live_version()
        if live != release.version:
            raise RepositoryError(
                f"Release {release.version} of {release.model} is no longer live in "
                f"{self.releases.store.url}, but {live or 'none'}. Pull again."
            )

    def _leave(self, pointer: Pointer | None) -> None:
        """Nothing is live in storage: leave here what was withdrawn there, or never got in."""
        model, here = self.journal.model, self.current()
        if here is None:
            return
        if pointer is not None:
            # Also where this host has not pulled for long, and has something later or earlier.
            by = Withdrawal(pointer.who, pointer.why or "its promotion failed")
            self._as_replica().withdraw_version(model, here.version, by=by)
        elif was_undone(self.journal.last(), here):
            self._as_replica().roll_back_promotion(model, here.version)

    @contextmanager
    def _pulling(self, timeout_s: float) -> Iterator[None]:
        """One pull to a host at a time; what a killed one left is removed."""
        root = self.local.root
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(root / _LOCK, timeout_s=timeout_s))
            except TimeoutError as error:
                raise RepositoryBusyError(
                    f"A release is being fetched for {root} by {error}. Try again when it has "
                    "finished."
                ) from error
            except OSError as error:
                raise RepositoryError(
                    f"Nothing can be fetched for {root}: {error.strerror}."
                ) from error
            for left in self._fetched():
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _fetched(self) -> Iterator[Path]:
        return self.local.root.absolute().parent.glob(f"{self._prefix}*")

    @property
    def _prefix(self) -> str:
        return f".{self.journal.model}-pull."


def record_rollback(primary: LiveRepository, release: Release, *, reason: str, left: str) -> None:
    """Say in this host's audit log that it decided on a rollback which changed nothing here.

    Others only replicate, so no other log has it. It is live by now: a log that cannot be written
    fails nothing. Where this host has pulled something later meanwhile, the log is not told that it
    went back after that: its last change is what is live.
    """
    record = AuditRecord(
        event="rolled back",
        model=release.model,
        who=user_at_host(),
        why=f"{reason}; {left}" if reason else left,
        origin=origin(primary.channel),
        release=release.version,
        scorecard=release.scorecard_sha256,
    )
    try:
        with hold_lock(primary.root, timeout_s=_LOCK_TIMEOUT_S):
            current = Layout(primary.root, release.model).current()
            if current is not None and current.version == release.version:
                AuditLog(primary.root, primary.channel).note(record)
                return
        why_not = "another release was pulled meanwhile"
    except EnginegateError as error:
        why_not = str(error)
    _log.warning("the audit log does not say that release %d is live: %s", record.release, why_not)
