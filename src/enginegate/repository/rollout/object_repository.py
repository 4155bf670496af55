"""A live repository whose truth is in object storage; servers read a local copy of it.

There is no rename there, and Triton cannot be trusted to read it. So a release is staged here,
uploaded whole under its number and read back, then published here with proof, and only then made
current by replacing one object on condition that nobody else did. Other hosts follow.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from enginegate.decision import Release, RenewedPromise
from enginegate.errors import EnginegateError, NotEverywhereError, PublishError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.repository.history.journal import Kind
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.cancel_request import CancelWatcher, watched
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.replica_sync import (
    go_back_here,
    note_way_back,
    promise_differs,
    replicate,
    sweep_pulls,
)
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.live_record import LiveRecord
from enginegate.repository.store.object_client import ObjectStore
from enginegate.repository.store.object_journal import Lease, ObjectJournal
from enginegate.repository.store.object_lease import (
    check_live,
    close,
    close_abandoned,
    forget_quietly,
    in_words,
    live_version,
    was_undone,
)
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.package import Package
from enginegate.triton.client import TritonClient

LEASE_S = 3600.0
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class ObjectRepository:
    """One model's releases in object storage, and the local repository that follows them.

    Attributes:
        local: this host's repository with its server, or a fleet.
        keep: releases whose bytes are kept in storage.
        lease_s: how long a change may take before another host may call it dead.
    """

    store: ObjectStore
    model: str
    local: LiveRepository | Fleet
    keep: int = 5
    lease_s: float = LEASE_S

    @property
    def root(self) -> Path:
        """The local copy."""
        return self.local.root

    @property
    def client(self) -> TritonClient | None:
        """This host's server; a fleet's first."""
        return self.local.client

    @property
    def releases(self) -> ObjectReleases:
        """What is in storage."""
        return ObjectReleases(self.store, self.model)

    @property
    def journal(self) -> ObjectJournal:
        """Who is changing it, and every step taken."""
        return ObjectJournal(self.store, self.model, self.lease_s)

    def publish(self, package: Package, *, expected: int | None) -> Release:
        """Make a package the live release, here and in storage, or leave everything as it was.

        Raises:
            RepositoryBusyError: another host is changing this model.
            RepositoryError: another release is live than expected, or storage refuses.
            PublishError: something went wrong on the way and was undone.
        """
        self.store.check_conditions()
        self.recover()
        check_live(self.releases, expected)
        here = LiveRecord.of(Layout(self.root, self.model)).last_number
        above = (here, *self.releases.versions())
        with self._turn("publish", 1 + max(*above, *self.releases.stray(), 0)) as turn:
            tag = check_live(self.releases, expected)
            release = watched(self.local, turn).publish(
                package,
                expected=expected,
                version=turn.entry.version,
                placed=partial(self._upload, turn),
            )
            self._commit(turn, release, tag)
            forget_quietly(self.releases, self.keep, self.local.pinned)
        return release

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again: proved here first, then everywhere else by pulling.

        A canary that is being watched, by whichever host, is ended by this: its promoter goes back.
        What is live, and to be left, is not fetched for that by a host that does not have it.

        Raises:
            RepositoryBusyError: another host is changing this model, or does not end its roll-out.
            NotEverywhereError: it is live, but a server of this host's fleet does not serve it.
            RepositoryError: there is no such release, its bytes are gone, or another release is
                live than expected.
            PublishError: it did not prove itself; the release that was live is live again.
        """
        self._check_model(model)
        ended = self._ending.end(to, leave=expected, reason=reason)
        self._close_left()
        live = live_version(self.current())
        if ended is not None and live == ended.before:
            if to in {None, live}:
                self._follow()
                return self._ending.outcome(ended)
        elif expected is not None:
            check_live(self.releases, expected)
        target = self.releases.before(live, to).version
        with self._turn("rollback", target) as turn:
            tag = check_live(self.releases, live)
            release = self.releases.before(live, target)
            back = go_back_here(self.local, self.releases, release, reason=reason)
            self._commit(turn, release, tag)
        if back.was_here:
            left = f"release {live} was live in {self.store.url}, and not here"
            note_way_back(self.local, release, reason=reason, left=left)
        if back.partly is not None:
            raise back.partly
        return release

    def withdraw(self, model: str, version: int) -> str:
        """Take back a release whose promotion failed after it was published.

        Raises:
            RepositoryError: another release is live by now.
        """
        self._check_model(model)
        previous = self.releases.release(version).previous_version
        if previous is not None:
            try:
                back = self.rollback(model, previous, expected=version)
            except NotEverywhereError as error:
                return str(error)
            return f"Release {back.version} is live, as before."
        check_live(self.releases, version)
        with self._turn("withdraw", version) as turn:
            tag = check_live(self.releases, version)
            self.local.withdraw(self.model, version)
            self._commit(turn, None, tag)
        return "Nothing is live, as before."

    def withdraw_first(self, model: str, by: Withdrawal) -> Release:
        """Unload the live release that nothing was before, and leave nothing live in storage.

        Other hosts let it go with their next pull.

        Returns:
            What was live.

        Raises:
            RepositoryBusyError: another host is changing this model.
            RepositoryError: nothing is live, or there is a release to go back to.
            PublishError: something went wrong on the way; what was live is live in storage.
        """
        self._check_model(model)
        self.store.check_conditions()
        self.recover()
        pointer = self.current()
        release = self.releases.release_of(pointer) if pointer else None
        if release is None:
            raise RepositoryError(f"Nothing of {model} is live in {self.store.url}.")
        self.releases.check_withdrawable(release)
        with self._turn("withdraw", release.version) as turn:
            tag = check_live(self.releases, release.version)
            self.local.withdraw_first(model, by, checked=True)
            self._commit(turn, None, tag, by)
        return release

    def renew(self, renewed: RenewedPromise) -> RenewedPromise:
        """Hold the live release to another promise, in storage and here; other hosts follow.

        Raises:
            RepositoryBusyError: another host is changing this model.
            RepositoryError: another release is live.
            PublishError: something went wrong on the way, and was undone.
        """
        self.store.check_conditions()
        self.recover()
        version = renewed.version
        check_live(self.releases, version)
        given = Layout(self.root, self.model).renewed(version)
        if given is not None and given.scorecard_sha256 == renewed.scorecard_sha256:
            return given
        with self._turn("promise", version, promise=renewed.digest) as turn:
            tag = check_live(self.releases, version)
            release = self.releases.release(version)
            self.local.prepare_promise(renewed)
            self.releases.upload_promise(self.root, renewed)
            turn.add("loaded")
            self.releases.commit(release, tag, promises={version: renewed.digest})
            # What fails from here on is made good by the next pull.
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
        self.journal.check_not_ours()
        sweep_pulls(self.root, self.model)
        self.local.recover()
        return replicate(self.local, self.releases, self.journal)

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left, and bring this host to what is live."""
        return (*self.local.recover(), *self._close_left(), *self._follow())

    def _close_left(self) -> tuple[str, ...]:
        sweep_pulls(self.root, self.model)
        said = close_abandoned(self.journal, self.releases)
        last, here = self.journal.last(), self._here()
        if self.journal.under_way() or self.current() or here is None or was_undone(last, here):
            return said
        return (*said, self._seed())

    def _follow(self) -> tuple[str, ...]:
        if self.journal.under_way() or self.local.client is None or not self._behind():
            return ()
        self.pull()
        return (f"{self.root} was brought to what is live in {self.store.url}.",)

    def repair(self) -> tuple[str, ...]:
        """Recover, remove what killed uploads left, and repair this host's copy."""
        said = [*self.recover()]
        if self.journal.under_way() is None:
            for version in self.releases.stray():
                self.releases.remove(version)
                said.append(
                    f"Objects of {self.model} release {version}, which was never live, were "
                    f"removed from {self.store.url}."
                )
        return (*said, *self.local.repair())

    def serves(self, model: str) -> bool:
        """Whether this host proves now that it serves what is live in storage."""
        return not self._behind() and self.local.serves(model)

    def bring_up(self, model: str) -> Release:
        """Load what is live on a server that has just started, and prove it."""
        self._check_model(model)
        self.pull()
        return self.local.bring_up(model)

    def current(self) -> Pointer | None:
        """What is live in storage; None before the first release.

        Raises:
            TamperedError: the commit point is damaged.
        """
        return self.releases.pointer()[0]

    @property
    def _ending(self) -> CancelWatcher:
        return CancelWatcher(self.releases, self.journal, self.local)

    def _upload(self, turn: Lease, release: Release) -> None:
        self.releases.upload(self.root, release, turn.entry.operation)
        turn.add("placed")

    def _commit(
        self, turn: Lease, release: Release | None, tag: str | None, by: Withdrawal | None = None
    ) -> None:
        """The moment a change happens, if nothing did since the turn's tag was read."""
        turn.add("loaded")
        if by is None:
            self.releases.commit(release, tag)
        else:
            self.releases.commit(release, tag, who=by.who or user_at_host(), why=by.why)

    @contextmanager
    def _turn(self, kind: Kind, version: int, **detail: str) -> Iterator[Lease]:
        """Hold the turn; whatever ends the block early (Ctrl-C too), all is as it was before."""
        turn = self.journal.take(kind, version, **detail)
        try:
            yield turn
        except BaseException as error:
            step = turn.entry.step
            note = self._undo(turn)
            if not isinstance(error, EnginegateError):
                raise
            raise PublishError(
                f"The {kind} of {self.model} release {version} in {self.store.url} failed after "
                f"its step '{step}': {error}\n{note}"
            ) from error
        try:
            turn.add("done")
        except RepositoryError as error:
            _log.warning("it is live, and the next start closes its entry: %s", error)

    def _undo(self, turn: Lease) -> str:
        """Give the turn back and follow what is live; what cannot be done now is done later."""
        try:
            close(turn, self.releases)
            self.pull()
        except EnginegateError as error:
            return f"Not all of it could be undone; the next start tries again: {error}"
        return in_words(self.releases)

    def _seed(self) -> str:
        """What this host serves already becomes the first release in storage."""
        layout, here = Layout(self.root, self.model), self._here()
        if here is None:
            raise RepositoryError(f"{self.root} has no live release of {self.model}.")
        release = layout.release(here.version)
        with self._turn("rollback", release.version) as turn:
            tag = check_live(self.releases, None)
            self.releases.upload(self.root, release)
            turn.add("loaded")
            given = {v: digest for v, digest in here.promises.items() if v == release.version}
            self.releases.commit(release, tag, promises=given)
        return f"Release {release.version}, which {self.root} serves, is now in {self.store.url}."

    def _behind(self) -> bool:
        pointer, here = self.current(), self._here()
        if live_version(pointer) != live_version(here):
            return True
        return pointer is not None and promise_differs(pointer, here)

    def _here(self) -> Current | None:
        return Layout(self.root, self.model).current()

    def _check_model(self, model: str) -> None:
        if model != self.model:
            raise RepositoryError(f"{self.store.url} is asked for {self.model} here, not {model}.")
