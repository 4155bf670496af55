"""The live repository: publish, roll back, recover. Nothing else in the program changes it.

A change is committed by one rename, of the model's commit point (layout.py). Killed before it, the
next start restores the old release; killed after it, the new one stands. Every operation begins by
recovering.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import write_file
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import (
    EnginegateError,
    PublishError,
    RepositoryError,
    ServerError,
    TamperedError,
)
from enginegate.repository.deploy.deployment import Deployment, wrong_files
from enginegate.repository.deploy.desired_config import right_config
from enginegate.repository.ensemble.composing_models import check_room
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.journal import Entry, Journal
from enginegate.repository.history.live_record import LiveRecord, check_live_recorded
from enginegate.repository.history.manifest_facts import manifest_facts
from enginegate.repository.history.signing import ReleaseSigning, admit, sign, sign_promise
from enginegate.repository.recovery import UNDONE, OperationRecovery, Withdrawal
from enginegate.repository.store.imported_release import (
    ImportedRelease,
    check_same,
    issued_number,
    origin_of,
    part_names,
)
from enginegate.repository.store.layout import JOURNAL, Current, Layout, locked, models
from enginegate.repository.store.removal import forget_quietly
from enginegate.repository.store.staging import Package, place
from enginegate.repository.transitions import (
    after_promise,
    after_publish,
    after_rollback,
    check_expected,
    check_still_live,
    check_withdrawable,
    live_release,
    live_words,
    rollback_target,
    why_not_beside,
)
from enginegate.triton.client import TritonClient

_log = logging.getLogger("enginegate.repository")
_LOCK_TIMEOUT_S = 30.0
_MEND = "Free space or fix permissions; `enginegate verify --repair` then finishes or undoes it."


@dataclass(frozen=True, slots=True)
class LiveRepository:
    """One Triton model repository and the server that serves from it.

    Attributes:
        root: the folder Triton reads.
        client: the live server; None when it is down, which only recovery of the folder can bear.
        load_timeout_s: limit on one load.
        keep: releases whose bytes are kept.
        pinned: older releases that something still points to; None: that could not be found out,
            so nothing is deleted.
        signing: how releases are signed and checked; None: they are not.
        way: by which way changes come here, for the audit log.
    """

    root: Path
    client: TritonClient | None
    load_timeout_s: float = 120.0
    keep: int = 5
    signing: ReleaseSigning | None = None
    way: str = "Python"
    pinned: frozenset[int] | None = frozenset()

    def publish(
        self,
        package: Package | ImportedRelease,
        *,
        expected: int | None,
        version: int | None = None,
        placed: Callable[[Release], None] | None = None,
    ) -> Release:
        """Make a package the live release of its model, or leave everything as it was.

        Args:
            package: what to publish; a copy keeps its number.
            expected: the release that was live when this promotion was prepared.
            version: the number to publish under, where another place issues them.
            placed: called when the bytes are here and nothing serves them yet.

        Raises:
            RepositoryBusyError: somebody else is changing this repository.
            RepositoryError: another release is live than expected, or the repository has no server.
            PublishError: something went wrong on the way and was undone; the message names the
            step.
        """
        with self._changing() as journal:
            layout = Layout(self.root, package.model)
            before = layout.current()
            record = LiveRecord.of(layout)
            record.check_commit_point(before)
            check_expected(layout, before, expected)
            self._live(layout)
            version = issued_number(layout, package, version, last=record.last_number)
            check_room(layout, part_names(package), version)
            entry = journal.open("publish", package.model, version, way=self.way)
            with self._undone_on_failure(layout, journal, entry):
                release = place(layout, package, version, before)
                sign(layout, release, self.signing, new=not isinstance(package, ImportedRelease))
                told = manifest_facts(layout, release)
                journal.add(entry, "placed", **told, **origin_of(package))
                if placed is not None:
                    placed(release)
                after = after_publish(before, version, stays=_stays(layout, before, release))
                self._switch(layout, journal, entry, after)
            why = f"{release.decision.approver}: {release.decision.reason}"
            self._audit.close(journal, entry, done=True, why=why)
            release = layout.release(version)
            forget_quietly(layout, self.keep, self.pinned)
            return release

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again: by default the one that the live one replaced.

        Args:
            model: its name.
            to: the release to go to.
            reason: for the audit log.
            expected: the release to leave; None: whichever is live.

        Raises:
            RepositoryError: there is no such release, its bytes are gone, or another release is
                live than expected.
            TamperedError: its bytes changed since it was published, or its signature does not hold.
            PublishError: it did not prove itself; the release that was live is live again.
        """
        with self._changing() as journal:
            layout = Layout(self.root, model)
            before = layout.current()
            check_still_live(layout, before, expected)
            recorded = LiveRecord.of(layout)
            lost = recorded.lost_commit_point(to)
            version = rollback_target(layout, lost or before, to, lost=lost is not None)
            if version != recorded.version:  # else the way back to what was live before an edit
                recorded.check_commit_point(before)
            with self._audit.refusing(model, version):
                admit(layout, layout.release(version), self.signing)
            after = after_rollback(before, version) if before is not None else lost
            if after is None:
                raise RepositoryError(f"Nothing of {model} is live.")
            entry = journal.open("rollback", model, version, way=self.way)
            with self._undone_on_failure(layout, journal, entry):
                self._switch(layout, journal, entry, after)
            self._audit.close(journal, entry, done=True, why=reason)
            return layout.release(version)

    def withdraw(self, model: str, version: int) -> str:
        """Take back a release whose promotion failed after it was published.

        Returns:
            What is live now, in words.

        Raises:
            RepositoryError: another release is live by now.
        """
        previous = Layout(self.root, model).release(version).previous_version
        if previous is not None:
            why = "its promotion failed"
            back = self.rollback(model, previous, reason=why, expected=version)
            return f"Release {back.version} is live, as before."
        return self.take_away(model, version)

    def take_away(self, model: str, version: int, *, by: Withdrawal = UNDONE) -> str:
        """Leave nothing live: the way back from a release before which nothing was.

        Returns:
            What is live now, in words.

        Raises:
            RepositoryError: another release is live by now.
        """
        with self._changing() as journal:
            layout = Layout(self.root, model)
            check_still_live(layout, layout.current(), version)
            check_live_recorded(self.root, model)
            scorecard = layout.release(version).scorecard_sha256
            noted = {"who": by.who, "why": by.why, "scorecard": scorecard}
            entry = journal.open("withdraw", model, version, way=self.way, **noted)
            return self._undoing(journal).undo(layout, entry, reason=by.why)

    def withdraw_first(self, model: str, by: Withdrawal, *, checked: bool = False) -> Release:
        """Unload the live release that nothing was before, and leave nothing live.

        Killed before the journal has it, it is live; after that, the next start ends it. Its bytes
        and those of releases that were left before it go; the audit log and the journal stay.

        Args:
            model: its name.
            by: whom, and why.
            checked: whoever calls knows that there is no release to go back to.

        Returns:
            What was live.

        Raises:
            RepositoryError: nothing is live, there is a release to go back to, or no server
                answers; or it was withdrawn here, and that the server let it go is not proved.
        """
        self.recover()
        layout = Layout(self.root, model)
        release, live = live_release(layout), self._live(layout)
        if not checked:
            check_withdrawable(layout, release)
        words = self.take_away(model, release.version, by=by)
        if any(entry.model == model for entry in Journal(self.root / JOURNAL).unfinished()):
            raise RepositoryError(
                f"The withdrawal of {model} release {release.version} is not finished: {words}"
            )
        live.prove_gone()
        return release

    def renew(self, renewed: RenewedPromise, *, new: bool = True) -> RenewedPromise:
        """Hold the live release to another promise from now on; nothing is loaded.

        Args:
            renewed: what it is held to, on whose word.
            new: whether it is signed here; else it came with a signature from elsewhere.

        Returns:
            What it is held to: the same, or one of the same scorecard that it was given before.

        Raises:
            RepositoryError: another release is live, or a signature is required and is not there.
            TamperedError: it is about another manifest than the live one, or its signature does not
                hold.
            PublishError: it could not be written, and the release is held to what it was.
        """
        with self._changing() as journal:
            layout, version = Layout(self.root, renewed.model), renewed.version
            before = layout.current()
            LiveRecord.of(layout).check_commit_point(before)
            check_still_live(layout, before, version)
            given = layout.renewed(version)
            if given is not None and (given == renewed or (new and _is_same(given, renewed))):
                return given
            check_same(self.root, layout.release(version), renewed.release_sha256)
            noted = {"promise": renewed.digest, "scorecard": renewed.scorecard_sha256}
            entry = journal.open("promise", renewed.model, version, way=self.way, **noted)
            with self._undone_on_failure(layout, journal, entry):
                write_file(layout.promise_file(version, renewed.digest), renewed.pretty_json())
                sign_promise(layout, renewed, self.signing, new=new)
                write_file(layout.current_file, after_promise(layout, renewed).pretty_json())
            why = f"{renewed.decision.approver}: {renewed.decision.reason}"
            self._audit.close(journal, entry, done=True, why=why)
            return renewed

    def prepare_promise(self, renewed: RenewedPromise) -> None:
        """Write and sign a promise that nothing is held to yet; raises as `renew`."""
        with self._changing():
            layout = Layout(self.root, renewed.model)
            check_still_live(layout, layout.current(), renewed.version)
            check_same(self.root, layout.release(renewed.version), renewed.release_sha256)
            write_file(layout.promise_file(renewed.version, renewed.digest), renewed.pretty_json())
            sign_promise(layout, renewed, self.signing, new=True)

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left; one sentence for each operation found."""
        with self._changing(recover=False) as journal:
            return self._undoing(journal).recover()

    def repair(self) -> tuple[str, ...]:
        """Recover, put back every configuration that is not right, and load what does not serve."""
        with self._changing(recover=False) as journal:
            said = list(self._undoing(journal).recover())
            changed: list[TamperedError] = []
            for name in models(self.root):
                layout = Layout(self.root, name)
                current = layout.current()
                try:
                    LiveRecord.of(layout).check_commit_point(current)
                except TamperedError as error:
                    changed.append(error)
                    continue
                if current is None:
                    continue
                for path, content in wrong_files(layout, current).items():
                    write_file(path, content)
                    said.append(f"{path} was put back: {live_words(current)}.")
                    self._audit.tell("repaired", name, why=said[-1], release=current.version)
                if self.client is not None and not self.serves(name):
                    self._bring_up(name)
                    said.append(f"Release {current.version} of {name} was loaded and proved.")
                    self._audit.tell("repaired", name, why=said[-1], release=current.version)
            for refusal in changed:  # one model's never keeps another from being repaired
                raise refusal
            return tuple(said)

    def serves(self, model: str) -> bool:
        """Whether the server proves now that it serves the live release."""
        layout = Layout(self.root, model)
        current = layout.current()
        if current is None:
            return False
        try:
            self._live(layout).prove_all(current)
        except (ServerError, RepositoryError):
            return False
        return True

    def bring_up(self, model: str) -> Release:
        """Load the live release on a server that has just started, and prove it.

        Raises:
            RepositoryBusyError: somebody is changing this repository.
            RepositoryError: nothing is live, or it does not prove itself.
            TamperedError: it is not what was published.
        """
        with locked(self.root, timeout_s=_LOCK_TIMEOUT_S):
            return self._bring_up(model)

    def _bring_up(self, model: str) -> Release:
        layout = Layout(self.root, model)
        current = layout.current()
        if current is None:
            raise RepositoryError(f"{self.root} has no live release of {model}.")
        LiveRecord.of(layout).check_commit_point(current)
        release = layout.release(current.version)
        admit(layout, release, self.signing)
        self._live(layout).restore(current)
        return release

    @contextmanager
    def _changing(self, *, recover: bool = True) -> Iterator[Journal]:
        with locked(self.root, timeout_s=_LOCK_TIMEOUT_S):
            journal = Journal(self.root / JOURNAL)
            self._audit.read()
            try:
                if recover:
                    self._undoing(journal).recover()
                yield journal
            except OSError as error:
                raise RepositoryError(f"{self.root} cannot be changed: {error}. {_MEND}") from error

    def _undoing(self, journal: Journal) -> OperationRecovery:
        return OperationRecovery(self.client, self.load_timeout_s, self._audit, journal)

    @property
    def _audit(self) -> AuditLog:
        return AuditLog(self.root, self.way)

    def _switch(self, layout: Layout, journal: Journal, entry: Entry, after: Current) -> None:
        """The one function that changes what is live: configure, load, prove, commit."""
        live = self._live(layout)
        if live.ready_parts(after):
            journal.add(entry, "prepared")
        write_file(layout.config, right_config(layout, after))
        journal.add(entry, "configured")
        live.flip(after)
        journal.add(entry, "loaded")
        live.prove(after)
        write_file(layout.current_file, after.pretty_json())
        live.trim_after_commit(after)

    @contextmanager
    def _undone_on_failure(self, layout: Layout, journal: Journal, entry: Entry) -> Iterator[None]:
        """Whatever ends the block early (Ctrl-C too), the release that was live is restored."""
        try:
            yield
        except BaseException as error:
            step = journal.last_step(entry)
            try:
                note = self._undoing(journal).undo(layout, entry, reason=str(error))
            except OSError as refusal:
                note = f"It could not be undone: {refusal}. {_MEND}"
            if not isinstance(error, EnginegateError | OSError):
                raise
            raise PublishError(
                f"The {entry.kind} of {entry.model} release {entry.version} failed after its step "
                f"'{step}': {error}\n{note}"
            ) from error

    def _live(self, layout: Layout) -> Deployment:
        if self.client is None:
            raise RepositoryError(
                f"No live Triton answers for {self.root}, so nothing can be proved to serve. Start "
                "one (`enginegate serve POLICY`), or set target.endpoint in the policy."
            )
        return Deployment(self.client, layout, self.load_timeout_s)


def _stays(layout: Layout, before: Current | None, release: Release) -> bool:
    """Whether what is live stays loaded, ready to come back; said where it cannot."""
    why_not = why_not_beside(layout.release(before.version), release) if before else ""
    if before is not None and why_not:
        _log.info(
            "release %d of %s leaves the server while release %d comes, because one configuration "
            "cannot load both: %s. Going back to it will load it again.",
            before.version,
            layout.model,
            release.version,
            why_not,
        )
    return not why_not


def _is_same(given: RenewedPromise, renewed: RenewedPromise) -> bool:
    """Whether a release was given the promise of that very scorecard before."""
    return given.scorecard_sha256 == renewed.scorecard_sha256
