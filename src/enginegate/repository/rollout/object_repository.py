"""A live repository whose truth is in object storage; servers read a local copy of it.

There is no rename there, and Triton cannot be trusted to read it. So a release is staged here,
uploaded whole under its number and read back, then published here with proof, and only then made
current by replacing one object on condition that nobody else did. Other hosts replicate it
(`ReplicaSync`), and any of them may cancel a canary by a flag in its lease (`CancelRequest`).
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import (
    EnginegateError,
    NotEverywhereError,
    PublishError,
    RepositoryBusyError,
    RepositoryError,
)
from enginegate.machine import user_at_host
from enginegate.object_storage import ObjectStore
from enginegate.repository.history.audit import REPLICATION, AuditLog, AuditRecord, origin
from enginegate.repository.history.journal import Entry, Kind
from enginegate.repository.lock import hold_lock
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.rollout.target import FleetServer, LocalTarget
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.live_record import LiveRecord
from enginegate.repository.store.object_journal import (
    Lease,
    ObjectJournal,
    holder,
    is_abandoned,
    is_analysing_canary,
    is_cancelled,
    is_from_here,
    was_undone,
)
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.package import Package
from enginegate.repository.store.pointer import (
    check_expected,
    check_withdrawable,
    rollback_target,
)
from enginegate.repository.store.release_files import check_same
from enginegate.triton.client import TritonClient

_log = logging.getLogger("enginegate.repository")
_LOCK = ".enginegate-pull.lock"
_LOCK_TIMEOUT_S = 30.0
_POLL_S = 0.5
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Somebody on the host of ``local`` wants to roll back.

    Attributes:
        to: the release to go to; nothing is cancelled for a release that is not there.
        leave: only if this is the canary; None: whichever is.
    """

    releases: ObjectReleases
    journal: ObjectJournal
    local: LocalTarget
    to: int | None
    leave: int | None
    reason: str

    def cancel(self) -> RolloutProgress | None:
        """Cancel the roll-out whose canary is analysed now, and wait until it is rolled back.

        This host's own roll-out is first, also where storage is away: a pull has no lease. Then
        this host is recovered, and a roll-out that it has only begun is cancelled too.

        Returns:
            What was cancelled; None where there is no such roll-out.

        Raises:
            RepositoryBusyError: it was cancelled, and is not rolled back yet.
            RepositoryError: there is no release ``to``, or its bytes are gone.
        """
        model, rollouts = self.journal.model, RolloutState(self.local.root)
        here, cancelled = rollouts.of(model), None
        if here is not None and not rollouts.is_settled(here) and self._may_cancel(here):
            cancelled = self.local.cancel_rollout(model, self._may_cancel)
        cancelled = self._cancel_lease() or cancelled
        # Last, because it waits for whatever is rolled out from here.
        late = self.local.cancel_rollout(model, self._may_cancel)
        return cancelled if late is None else self._cancel_lease() or late

    def _may_cancel(self, progress: RolloutProgress) -> bool:
        if progress.canary is None or self.to == progress.canary:
            return False
        if self.to not in {None, progress.before}:
            rollback_target(self.releases, self.releases.pointer()[0], self.to)
        return self.leave in {None, progress.canary}

    def _cancel_lease(self) -> RolloutProgress | None:
        while True:
            # Before the journal: a canary that is still analysed after it was not live before it.
            live, last = self.releases.live_version(), self.journal.last()
            if last is None or not is_analysing_canary(last):
                return None
            progress = RolloutProgress(model=last.model, before=live, canary=last.version)
            if not self._may_cancel(progress):
                return None
            if is_abandoned(last):
                return progress
            if is_cancelled(last) or self.journal.request_cancel(last, self.reason):
                self._wait_for(last)
                return progress

    def _wait_for(self, asked: Entry) -> None:
        patience_s = _PATIENCE_S + self.local.primary.load_timeout_s
        deadline = time.monotonic() + patience_s
        while (last := self.journal.under_way()) is not None and not is_abandoned(last):
            if last.operation != asked.operation:
                return
            if time.monotonic() > deadline:
                raise RepositoryBusyError(
                    f"The {asked.kind} of {asked.model} release {asked.version} by "
                    f"{holder(asked)} was cancelled, and is not rolled back after "
                    f"{patience_s:.0f} s. Its host rolls it back at the next canary check. If that "
                    f"host is gone, roll back after {asked.detail.get('until', 'an hour')}."
                )
            time.sleep(_POLL_S)


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
        self.journal.check_recorded(self.releases, AuditLog(self.local.root).of(self.journal.model))
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
        """Serve a release: roll back to it if it is here, else fetch it and publish the copy.

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
    fails nothing. Where this host has pulled something later meanwhile, the log gets no rollback
    after that: its last change is what is live.
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


LEASE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ObjectRepository:
    """One model's releases in object storage, and the local servers that replicate them.

    Attributes:
        local: this host's repository with its server, or a fleet.
        keep: releases whose bytes are kept in storage.
        lease_s: how long a change may take before another host may call it dead.
    """

    store: ObjectStore
    model: str
    local: LocalTarget
    keep: int = 5
    lease_s: float = LEASE_S

    @property
    def root(self) -> Path:
        """The local copy."""
        return self.local.root

    @property
    def client(self) -> TritonClient | None:
        """This host's server, a fleet's primary one."""
        return self.local.client

    @property
    def primary(self) -> LiveRepository:
        """This host's repository with its server."""
        return self.local.primary

    @property
    def servers(self) -> tuple[FleetServer, ...]:
        """The servers that replicate the primary."""
        return self.local.servers

    @property
    def storage(self) -> "ObjectRepository":
        """It is before this host's servers."""
        return self

    @property
    def releases(self) -> ObjectReleases:
        """The releases in storage."""
        return ObjectReleases(self.store, self.model)

    @property
    def journal(self) -> ObjectJournal:
        """Who is changing them, and every step taken."""
        return ObjectJournal(self.store, self.model, self.lease_s)

    def publish(self, package: Package, *, expected: int | None) -> Release:
        """Make a package the live release, here and in storage, or leave everything as it was."""
        self.store.check_conditions()
        self.recover()
        self.releases.tag_of(expected)
        here = LiveRecord.of(Layout(self.root, self.model)).last_number
        newest = max(here, *self.releases.versions(), *self.releases.stray(), 0)
        with self._lease("publish", newest + 1) as lease:
            tag = self.releases.tag_of(expected)

            def upload(release: Release) -> None:
                self.releases.upload(self.root, release, lease.entry.operation)
                lease.add("placed")

            release = self.local.leased(lease).publish(
                package, expected=expected, version=lease.entry.version, placed=upload
            )
            lease.add("loaded")
            self.releases.commit(release, tag)
            try:
                self.releases.forget_old(self.keep, self.primary.pinned)
            except EnginegateError as error:  # must not fail a promotion that is done
                url = self.store.url
                _log.warning("old releases in %s could not be removed: %s", url, error)
        return release

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again: proved here first, then everywhere else by pulling.

        The analysis of a canary, on whichever host, is cancelled by this: its promoter rolls back.
        A release that is live, and to be left, is not fetched for that by a host that lacks it.
        """
        self._check_model(model)
        request = CancelRequest(self.releases, self.journal, self.local, to, expected, reason)
        cancelled = request.cancel()
        self._close_left()
        pointer = self.current()
        live = pointer.version if pointer else None
        if cancelled is not None and live == cancelled.before:
            if to in {None, live}:
                return self._after_cancel(cancelled)
        elif expected is not None:
            check_expected(self.releases, pointer, expected)
        target = rollback_target(self.releases, pointer, to)
        partly: NotEverywhereError | None = None
        with self._lease("rollback", target) as lease:
            tag = self.releases.tag_of(live)
            rollback_target(self.releases, pointer, target)
            release = self.releases.release(target)
            # A pull may have begun to load before the lease was taken; from then on none begins.
            self.local.cancel_rollout(model)
            here = self._sync.current()
            try:
                self._sync.install(self.local.without_canary(), release, reason=reason)
            except NotEverywhereError as error:
                partly = error
            lease.add("loaded")
            self.releases.commit(release, tag)
        if here is not None and here.version == release.version:
            left = f"release {live} was live in {self.store.url}, and not here"
            record_rollback(self.primary, release, reason=reason, left=left)
        if partly is not None:
            raise partly
        return release

    def roll_back_promotion(self, model: str, version: int) -> str:
        """Leave a release whose promotion failed after it was published."""
        self._check_model(model)
        previous = self.releases.release(version).previous_version
        if previous is not None:
            try:
                back = self.rollback(model, previous, expected=version)
            except NotEverywhereError as error:
                return str(error)
            return f"Release {back.version} is live, as before."
        self.releases.tag_of(version)
        with self._lease("withdraw", version) as lease:
            tag = self.releases.tag_of(version)
            self.local.roll_back_promotion(self.model, version)
            lease.add("loaded")
            self.releases.commit(None, tag)
        return "Nothing is live, as before."

    def withdraw(self, model: str, by: Withdrawal) -> Release:
        """Unload the live release that nothing was before, and leave nothing live in storage.

        Other hosts unload it with their next pull.
        """
        self._check_model(model)
        self.store.check_conditions()
        self.recover()
        pointer = self.current()
        release = self.releases.release_of(pointer) if pointer else None
        if release is None:
            raise RepositoryError(f"Nothing of {model} is live in {self.store.url}.")
        check_withdrawable(self.releases, release)
        with self._lease("withdraw", release.version) as lease:
            tag = self.releases.tag_of(release.version)
            self.local.withdraw(model, by, checked=True)
            lease.add("loaded")
            self.releases.commit(None, tag, who=by.who or user_at_host(), why=by.why)
        return release

    def renew(self, renewed: RenewedPromise) -> RenewedPromise:
        """Hold the live release to another promise, in storage and here; others replicate it."""
        self.store.check_conditions()
        self.recover()
        version = renewed.version
        self.releases.tag_of(version)
        given = Layout(self.root, self.model).renewed(version)
        if given is not None and given.scorecard_sha256 == renewed.scorecard_sha256:
            return given
        with self._lease("promise", version, promise=renewed.digest) as lease:
            tag = self.releases.tag_of(version)
            release = self.releases.release(version)
            self.primary.prepare_promise(renewed)
            self.releases.upload_promise(self.root, renewed)
            lease.add("loaded")
            self.releases.commit(release, tag, promises={version: renewed.digest})
            # Whatever fails from here on is made good by the next pull.
            self.local.renew(renewed, new=False)
        return renewed

    def pull(self) -> Release | None:
        """Bring this host to what is live in storage: fetch, check every digest, load, prove.

        Returns:
            The live release; None when nothing is.

        Raises:
            RepositoryBusyError: this host is just publishing there.
            TamperedError: an object is not what was published; what served here still serves.
            PublishError: it did not prove itself here; what served here still serves.
        """
        self.journal.check_not_changing_here()
        self._sync.sweep()
        self.local.recover()
        return self._sync.pull()

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left, and bring this host to what is live."""
        return (*self.local.recover(), *self._close_left(), *self._catch_up())

    def repair(self) -> tuple[str, ...]:
        """Recover, remove what killed uploads left, and repair this host's copy."""
        done = [*self.recover()]
        if self.journal.under_way() is None:
            for version in self.releases.stray():
                self.releases.remove(version)
                done.append(
                    f"Objects of {self.model} release {version}, which was never live, were "
                    f"removed from {self.store.url}."
                )
        return (*done, *self.local.repair())

    def serves(self, model: str) -> bool:
        """Whether this host proves now that it serves what is live in storage."""
        return not self._sync.is_behind() and self.local.serves(model)

    def bring_up(self, model: str) -> Release:
        """Load what is live on a server that has just started, and prove it."""
        self._check_model(model)
        self.pull()
        return self.local.bring_up(model)

    def current(self) -> Pointer | None:
        """What is live in storage; None before the first release.

        Raises:
            TamperedError: the live pointer is damaged.
        """
        return self.releases.pointer()[0]

    @property
    def _sync(self) -> ReplicaSync:
        return ReplicaSync(self.local, self.releases, self.journal)

    @contextmanager
    def _lease(self, kind: Kind, version: int, **detail: str) -> Iterator[Lease]:
        """Hold the lease; whatever ends the block early (Ctrl-C too), all is as it was before."""
        lease = self.journal.acquire(kind, version, **detail)
        try:
            yield lease
        except BaseException as error:
            step = lease.entry.step
            try:
                if step == "loaded":
                    # The commit may still be on its way, and must not arrive after this.
                    self.releases.fence()
                lease.close(self.releases)
                self.pull()
                note = self.releases.live_words()
            except EnginegateError as undone:
                note = f"Not all of it could be undone; the next start tries again: {undone}"
            if not isinstance(error, EnginegateError):
                raise
            raise PublishError(
                f"The {kind} of {self.model} release {version} in {self.store.url} failed after "
                f"its step '{step}': {error}\n{note}"
            ) from error
        try:
            lease.add("done")
        except RepositoryError as error:
            _log.warning("it is live, and the next start closes its entry: %s", error)

    def _close_left(self) -> tuple[str, ...]:
        """Close what a dead holder left; what this host serves already moves in if none is live."""
        self._sync.sweep()
        done = self.journal.close_abandoned(self.releases)
        last, here = self.journal.last(), self._sync.current()
        if self.journal.under_way() or self.current() or here is None or was_undone(last, here):
            return done
        release = Layout(self.root, self.model).release(here.version)
        with self._lease("rollback", release.version) as lease:
            tag = self.releases.tag_of(None)
            self.releases.upload(self.root, release)
            lease.add("loaded")
            given = {v: digest for v, digest in here.promises.items() if v == release.version}
            self.releases.commit(release, tag, promises=given)
        words = f"Release {release.version}, which {self.root} serves, is now in {self.store.url}."
        return (*done, words)

    def _catch_up(self) -> tuple[str, ...]:
        if self.journal.under_way() or self.client is None or not self._sync.is_behind():
            return ()
        self.pull()
        return (f"{self.root} was brought to what is live in {self.store.url}.",)

    def _after_cancel(self, cancelled: RolloutProgress) -> Release:
        """The release that is live again after a roll-out was cancelled.

        Raises:
            RepositoryError: nothing was live before it, or this host could not roll back.
        """
        self._catch_up()
        pointer, current = self.current(), self._sync.current()
        release = self.releases.release_of(pointer) if pointer else None
        live, here = release.version if release else None, current.version if current else None
        words = f"The roll-out of {self.model} release {cancelled.canary} was cancelled"
        if here != live:
            raise RepositoryError(
                f"{words}, but this host has release {here or 'none'} and not {live or 'none'}, "
                f"which is live in {self.store.url}. When its server answers, bring it there with "
                "`enginegate verify --repair`."
            )
        if release is None:
            raise RepositoryError(f"{words}. Nothing was live before it, and nothing is now.")
        return release

    def _check_model(self, model: str) -> None:
        if model != self.model:
            raise RepositoryError(f"{self.store.url} is asked for {self.model} here, not {model}.")
