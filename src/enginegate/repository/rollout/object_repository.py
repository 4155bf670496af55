"""A live repository whose truth is in object storage; servers read a local copy of it.

There is no rename there, and Triton cannot be trusted to read it. So a release is staged here,
uploaded whole under its number and read back, then published here with proof, and only then made
current by replacing one object on condition that nobody else did. Other hosts replicate it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.decision import Release, RenewedPromise
from enginegate.errors import EnginegateError, NotEverywhereError, PublishError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.repository.history.journal import Kind
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.cancel_request import CancelRequest
from enginegate.repository.rollout.fleet_server import FleetServer
from enginegate.repository.rollout.replica_sync import ReplicaSync, record_rollback
from enginegate.repository.rollout.rollout_state import RolloutProgress
from enginegate.repository.rollout.target import LocalTarget
from enginegate.repository.store.layout import Layout
from enginegate.repository.store.live_record import LiveRecord
from enginegate.repository.store.object_client import ObjectStore
from enginegate.repository.store.object_journal import Lease, ObjectJournal, was_undone
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.package import Package
from enginegate.repository.store.pointer import (
    check_expected,
    check_withdrawable,
    rollback_target,
)
from enginegate.triton.client import TritonClient

LEASE_S = 3600.0
_log = logging.getLogger("enginegate.repository")


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

        The analysis of a canary, on whichever host, is cancelled by this: its promoter goes back.
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
            RepositoryError: nothing was live before it, or this host could not go back.
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
