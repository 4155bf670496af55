"""The live repository: publish, roll back, withdraw, recover. Nothing else changes it.

A promotion is ten steps, each a method of `Change` below. It is committed by one rename, of the
live pointer; every operation begins by recovering what was cut short before it (recovery.py), which
goes by the pointer: before the rename the old release is restored, after it the new one stands.

==================  =====================================  =======================================
step                what a kill leaves in or after it      what the next start does
==================  =====================================  =======================================
1  check            nothing                                nothing
2  number           an intent in the journal               closes it as undone; the number is spent
3  stage            a staging folder, or bytes, records    removes them
                    and models that nothing serves
4  sign             also a signature, whole or not there   removes it with them
5  journal          also the digest in the journal         removes them
6  load beside      what was in the way is unloaded;       they serve the old release, proved;
                    composing models serve old and new     then the new one is removed
7  switch           the new config.pbtxt, loaded or not    writes the old one, loads and proves it
8  prove            the new release serves, unproved       the same
9  commit           the pointer: the new release is live   composing models unload old versions;
                                                           closes it as done
10 record, retain   audit log without journal, or old      closes it; the next promotion removes
                    bytes to be removed                    old bytes
==================  =====================================  =======================================

Step 6 unloads nothing where GPU memory has room for both releases. Where it has not, the older one
that stands by goes first, and then, if `when_memory_is_short` says so, the live one too: nobody is
answered from there to step 7. On the way back there is no more room, so what had to be unloaded for
the new release is unloaded again before the old one is loaded.

A rollback is steps 1, 2 and 6 to 10. A new promise for the live release is 1, 2, 4, 9 and 10, and
no server is notified. A withdrawal is 1 and 2: what is cut short after its intent is finished.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginegate.atomic_io import write_file
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import (
    EnginegateError,
    PublishError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository.deploy.deployment import Deployment
from enginegate.repository.deploy.desired_config import right_config, wrong_files
from enginegate.repository.deploy.gpu_room import GpuRoom, demand_of
from enginegate.repository.deploy.memory import MemoryDemand, Room, RoomDecision
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.journal import Entry, Journal, Kind, Step
from enginegate.repository.history.signing import ReleaseSigning, SignedFiles
from enginegate.repository.lock import hold_lock
from enginegate.repository.recovery import UNDONE, OperationRecovery, Withdrawal
from enginegate.repository.store.layout import Current, Layout, models, why_not_beside
from enginegate.repository.store.live_record import LiveRecord, facts_of_placement
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.repository.store.pointer import (
    after_promise,
    after_publish,
    after_rollback,
    check_expected,
    check_still_live,
    check_withdrawable,
    commit,
    live_release,
    live_words,
    rollback_target,
)
from enginegate.repository.store.release_files import ReleaseFiles, check_same, signed_promise
from enginegate.repository.store.removal import forget_quietly
from enginegate.repository.store.staging import check_engine_for, check_room, place
from enginegate.triton.client import TritonClient

_log = logging.getLogger("enginegate.repository")
_MEND = "Free space or fix permissions; `enginegate verify --repair` then finishes or undoes it."


@dataclass(frozen=True, slots=True)
class LiveRepository:
    """One Triton model repository and the server that serves from it.

    Attributes:
        root: the folder Triton reads.
        client: the live server; None when it is down, which only recovery of the folder can bear.
        load_timeout_s: limit on one load.
        keep: releases whose bytes are kept.
        gpu_room: the memory of the server's GPUs, and what is done where it is short.
        pinned: older releases that something still points to; None: that could not be found out,
            so nothing is deleted.
        signing: how releases are signed and checked; None: they are not.
        channel: how changes come here, for the audit log.
        device: kind of device of the server; empty: the policy names none.
    """

    root: Path
    client: TritonClient | None
    load_timeout_s: float = 120.0
    keep: int = 5
    signing: ReleaseSigning | None = None
    channel: str = "Python"
    pinned: frozenset[int] | None = frozenset()
    gpu_room: GpuRoom = field(default_factory=GpuRoom)
    device: str = ""

    @property
    def primary(self) -> "LiveRepository":
        """This repository: nothing else is changed."""
        return self

    @property
    def servers(self) -> tuple[()]:
        """No server replicates it."""
        return ()

    @property
    def storage(self) -> None:
        """None is before it."""

    def leased(self, _lease: object) -> "LiveRepository":
        """The same: one server has no canary whose analysis could be cancelled."""
        return self

    def without_canary(self) -> "LiveRepository":
        """The same."""
        return self

    def through(self, channel: str) -> "LiveRepository":
        """The repository whose changes the audit log says came through another channel."""
        return replace(self, channel=channel)

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
        new = isinstance(package, Package)
        self.check_device(package)
        if isinstance(package, ImportedRelease):
            seen = package.release.seen_from(self.device)
            package = replace(package, release=seen, device=self.device)
        with self._change(package.model) as change:
            before = change.check(expected)
            room = self.check_memory(package)
            number = change.number(package, version)
            with change.ended_on_failure():
                release = change.stage(package, number, before)
                change.sign(ReleaseFiles(change.layout, release).signed(), new=new)
                change.note("placed", **facts_of_placement(change.layout, release, package))
                if placed is not None:
                    placed(release)
                stays = room.room is not Room.ALONE and change.stays(before, release)
                after = after_publish(before, number, stays=stays)
                change.make_room(before, release, room)
                change.load_beside(after)
                change.switch(after)
                change.prove(after)
                change.commit(after)
            change.record(f"{release.decision.approver}: {release.decision.reason}")
            change.retain(self.keep, self.pinned)
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
            RollbackTargetError: there is no such release, it is live, or its bytes are gone.
            RepositoryError: there is none to go back to, or another one is live than expected.
            TamperedError: its bytes changed since it was published, or its signature is not valid.
            PublishError: it did not prove itself; the release that was live is live again.
        """
        with self._change(model) as change:
            after = change.check_rollback(to, expected)
            before, target = change.layout.current(), change.layout.release(after.version)
            room = self.gpu_room.decide(
                change.layout, MemoryDemand.of(target.engine), version=target.version
            )
            change.begin("rollback", after.version)
            with change.ended_on_failure():
                change.make_room(before, target, room)
                change.load_beside(after)
                change.switch(after)
                change.prove(after)
                change.commit(after)
            change.record(reason)
            return change.layout.release(after.version)

    def publish_again(self, model: str, version: int, *, reason: str = "") -> Release:
        """Make a release live whose bytes are here; raises as `rollback`."""
        return self.rollback(model, version, reason=reason)

    def cancel_rollout(self, _model: str, _may: object = None) -> None:
        """There is none to cancel; what a killed process left is finished or undone."""
        self.recover()

    def roll_back_promotion(self, model: str, version: int) -> str:
        """Leave a release whose promotion failed after it was published.

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
        return self.withdraw_version(model, version)

    def withdraw_version(self, model: str, version: int, *, by: Withdrawal = UNDONE) -> str:
        """Leave nothing live: the way back from a release before which nothing was.

        Returns:
            What is live now, in words.

        Raises:
            RepositoryError: another release is live by now.
        """
        with self._change(model) as change:
            check_still_live(change.layout, change.layout.current(), version)
            change.live_record.check_commit_point(change.layout.current())
            scorecard = change.layout.release(version).scorecard_sha256
            entry = change.begin("withdraw", version, who=by.who, why=by.why, scorecard=scorecard)
            return change.recovery.end(change.layout, entry, reason=by.why)

    def withdraw(self, model: str, by: Withdrawal, *, checked: bool = False) -> Release:
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
            RepositoryError: nothing is live, there is a release to roll back to, or no server
                answers; or it was withdrawn here, and that the server let it go is not proved.
        """
        self.recover()
        layout = Layout(self.root, model)
        release, live = live_release(layout), self.deployment(layout)
        if not checked:
            check_withdrawable(layout, release)
        words = self.withdraw_version(model, release.version, by=by)
        if any(entry.model == model for entry in Journal(self.root).unfinished()):
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
            TamperedError: it is about another manifest than the live one, or its signature is not
                valid.
            PublishError: it could not be written, and the release is held to what it was.
        """
        version, digest = renewed.version, renewed.digest
        with self._change(renewed.model) as change:
            layout, before = change.layout, change.layout.current()
            change.live_record.check_commit_point(before)
            check_still_live(layout, before, version)
            given = layout.renewed(version)
            again = given is not None and given.scorecard_sha256 == renewed.scorecard_sha256
            if given is not None and (given == renewed or (new and again)):
                return given
            check_same(self.root, layout.release(version), renewed.release_sha256)
            change.begin("promise", version, promise=digest, scorecard=renewed.scorecard_sha256)
            with change.ended_on_failure():
                write_file(layout.promise_file(version, digest), renewed.pretty_json())
                change.sign(signed_promise(layout, renewed), new=new)
                commit(layout, after_promise(layout, renewed))
            change.record(f"{renewed.decision.approver}: {renewed.decision.reason}")
            return renewed

    def prepare_promise(self, renewed: RenewedPromise) -> None:
        """Write and sign a promise that nothing is held to yet; raises as `renew`."""
        with self._change(renewed.model) as change:
            layout, version = change.layout, renewed.version
            check_still_live(layout, layout.current(), version)
            check_same(self.root, layout.release(version), renewed.release_sha256)
            write_file(layout.promise_file(version, renewed.digest), renewed.pretty_json())
            change.sign(signed_promise(layout, renewed), new=True)

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left; one sentence for each operation found."""
        with self._opened() as recovery:
            return recovery.recover()

    def repair(self) -> tuple[str, ...]:
        """Recover, put back every configuration that is not right, and load what does not serve."""
        with self._opened() as recovery:
            done = list(recovery.recover())
            changed: list[TamperedError] = []
            for name in models(self.root):
                layout = Layout(self.root, name)
                current = layout.current()
                try:
                    recovery.live_record(layout).check_commit_point(current)
                except TamperedError as error:
                    changed.append(error)
                    continue
                if current is None:
                    continue
                for path, content in wrong_files(layout, current).items():
                    write_file(path, content)
                    done.append(f"{path} was put back: {live_words(current)}.")
                    recovery.audit.tell("repaired", name, why=done[-1], release=current.version)
                if self.client is not None and not self.serves(name):
                    self._bring_up(recovery.live_record(layout))
                    done.append(f"Release {current.version} of {name} was loaded and proved.")
                    recovery.audit.tell("repaired", name, why=done[-1], release=current.version)
            for refusal in changed:  # one model's never keeps another from being repaired
                raise refusal
            return tuple(done)

    def serves(self, model: str) -> bool:
        """Whether the server proves now that it serves the live release."""
        layout = Layout(self.root, model)
        current = layout.current()
        if current is None or self.client is None:
            return False
        return self.deployment(layout).serves(current)

    def bring_up(self, model: str) -> Release:
        """Load the live release on a server that has just started, and prove it.

        Raises:
            RepositoryBusyError: somebody is changing this repository.
            RepositoryError: nothing is live, or it does not prove itself.
            TamperedError: it is not what was published.
        """
        with hold_lock(self.root):
            return self._bring_up(LiveRecord.of(Layout(self.root, model)))

    def restore(self, live: Deployment, current: Current) -> None:
        """Go over to ``current`` from wherever the server is, with the room that this takes."""
        live.restore(current, self.gpu_room.decide_restore(live.layout, live.loaded(), current))

    def check_device(self, package: Package | ImportedRelease, name: str = "") -> None:
        """Refuse a package without an engine for the kind of device that serves here.

        Args:
            package: what is to come.
            name: of the server, in a fleet.

        Raises:
            RepositoryError: it has none; nothing was changed.
        """
        check_engine_for(f"Server {name!r}" if name else self.root, self.device, package)

    def check_memory(self, package: Package | ImportedRelease) -> RoomDecision:
        """How the server's GPUs can take a package, beside what serves there.

        Raises:
            RepositoryError: they cannot, or only if the live release is unloaded first, which the
                policy does not allow; nothing was changed.
        """
        layout = Layout(self.root, package.model)
        where = self.client.address if self.client is not None else str(self.root)
        return self.gpu_room.check(layout, demand_of(package, self.device), where)

    def deployment(self, layout: Layout) -> Deployment:
        """The model on the live server.

        Raises:
            RepositoryError: there is no server.
        """
        if self.client is None:
            raise RepositoryError(
                f"No live Triton answers for {self.root}, so nothing can be proved to serve. Start "
                "one (`enginegate serve POLICY`), or set target.endpoint in the policy."
            )
        return Deployment(self.client, layout, self.load_timeout_s)

    def _bring_up(self, record: LiveRecord) -> Release:
        current = record.layout.current()
        if current is None:
            raise RepositoryError(f"{self.root} has no live release of {record.layout.model}.")
        record.check_commit_point(current)
        release = record.layout.release(current.version)
        record.admit(release, self.signing)
        self.restore(self.deployment(record.layout), current)
        return release

    @contextmanager
    def _opened(self) -> Iterator[OperationRecovery]:
        """Journal and audit log, read and checked once for all that is done under the lock."""
        with hold_lock(self.root):
            journal, audit = Journal(self.root), AuditLog(self.root, self.channel)
            audit.read()
            try:
                yield OperationRecovery(self.client, self.load_timeout_s, audit, journal)
            except OSError as error:
                raise RepositoryError(f"{self.root} cannot be changed: {error}. {_MEND}") from error

    @contextmanager
    def _change(self, model: str) -> Iterator["Change"]:
        with self._opened() as recovery:
            recovery.recover(model)
            yield Change(self, Layout(self.root, model), recovery)


@dataclass(slots=True)
class Change:
    """One change of what is live, under the repository's lock: the ten steps.

    Attributes:
        recovery: how it is ended if it fails, with the opened journal and audit log.
    """

    repository: LiveRepository
    layout: Layout
    recovery: OperationRecovery
    _entry: Entry | None = field(default=None, init=False)
    _unanswered_since_s: float | None = field(default=None, init=False)
    _unanswered_s: float | None = field(default=None, init=False)

    @property
    def live_record(self) -> LiveRecord:
        """What journal and audit log say of the model by now."""
        return self.recovery.live_record(self.layout)

    @property
    def entry(self) -> Entry:
        """The operation's intent."""
        if self._entry is None:
            raise ValueError("The operation has not begun.")
        return self._entry

    def check(self, expected: int | None) -> Current | None:
        """1. Is live what this was prepared for, by the records too, and is there a server?"""
        before = self.layout.current()
        self.live_record.check_commit_point(before)
        check_expected(self.layout, before, expected)
        self.repository.deployment(self.layout)
        return before

    def check_rollback(self, to: int | None, expected: int | None) -> Current:
        """1. The same of a way back, and that its release is as it was published."""
        layout, record, before = self.layout, self.live_record, self.layout.current()
        check_still_live(layout, before, expected)
        lost = record.lost_commit_point(to)
        version = rollback_target(layout, lost or before, to, lost=lost is not None)
        if version != record.version:  # else the way back to what was live before an edit
            record.check_commit_point(before)
        with self.recovery.audit.refusing(layout.model, version):
            record.admit(layout.release(version), self.repository.signing)
        after = after_rollback(before, version) if before is not None else lost
        if after is None:
            raise RepositoryError(f"Nothing of {layout.model} is live.")
        return after

    def number(self, package: Package | ImportedRelease, asked: int | None) -> int:
        """2. The number it goes by: an import's own, the one asked for, or the next; it is spent.

        Raises:
            RepositoryError: the number was issued before, or its place is taken.
            TamperedError: an import's number stands for another release here.
        """
        layout, last = self.layout, self.live_record.last_number
        if isinstance(package, ImportedRelease):
            number = package.release.version
            _check_import(layout, package.release)
        elif asked is not None and asked <= last:
            raise RepositoryError(
                f"Number {asked} cannot be issued for {layout.model}: {layout.root} has known "
                f"{last}. A number is never used twice."
            )
        else:
            number = last + 1 if asked is None else asked
        check_room(layout, package.part_names, number)
        self.begin("publish", number)
        return number

    def begin(self, kind: Kind, version: int, **noted: str) -> Entry:
        """2. The intent: from here on the next start ends what is cut short."""
        journal, channel = self.recovery.journal, self.repository.channel
        self._entry = journal.open(kind, self.layout.model, version, channel=channel, **noted)
        return self._entry

    def stage(
        self, package: Package | ImportedRelease, number: int, before: Current | None
    ) -> Release:
        """3. The bytes come in, and their digests are checked; nothing serves them."""
        head = self.recovery.audit.head()
        return place(self.layout, package, number, before, audit=head)

    def sign(self, signed: SignedFiles, *, new: bool) -> None:
        """4. Sign what is new, and check the signature that an import came with."""
        if self.repository.signing is not None and new:
            self.repository.signing.sign(signed)
        elif self.repository.signing is not None:
            self.repository.signing.check(signed)

    def note(self, step: Step, **detail: str) -> None:
        """5. The journal has a step: of a release in place also its digest, and if it is signed."""
        self.recovery.journal.add(self.entry, step, **detail)

    def make_room(self, before: Current | None, release: Release, decision: RoomDecision) -> None:
        """6. What the GPUs cannot hold beside the new release is unloaded, after it is noted.

        A rollback is never kept back for memory: where the live release may not be unloaded, it is
        tried beside it, and undone if the load fails.
        """
        room, may = decision.room, self.repository.gpu_room.when_short == "replace"
        if before is None or room is Room.BESIDE:
            return
        if room is Room.NONE or (room is Room.ALONE and not may):
            _log.warning("release %d of %s: %s", release.version, release.model, decision.words)
            return
        self.note("unloading", what=room.value, why=decision.words)
        if room is Room.ALONE:
            _log.warning(
                "release %d of %s is unloaded before release %d is loaded, because %s. Nobody is "
                "answered %s.",
                before.version,
                release.model,
                release.version,
                decision.words,
                MemoryDemand.of(release.engine).downtime,
            )
            self._unanswered_since_s = time.monotonic()
        self.repository.deployment(self.layout).make_room(before, room)

    def load_beside(self, after: Current) -> None:
        """6. The composing models of an ensemble serve the new version beside the old."""
        if self.repository.deployment(self.layout).ready_parts(after):
            self.note("prepared")

    def switch(self, after: Current) -> None:
        """7. The configuration of what is to be live is written, and loaded: traffic goes over."""
        write_file(self.layout.config, right_config(self.layout, after))
        self.note("configured")
        self.repository.deployment(self.layout).flip(after)
        self.note("loaded")

    def prove(self, after: Current) -> None:
        """8. The server serves exactly that, with the validated answers."""
        self.repository.deployment(self.layout).prove(after)
        if self._unanswered_since_s is not None:
            self._unanswered_s = time.monotonic() - self._unanswered_since_s

    def commit(self, after: Current) -> None:
        """9. One rename makes it live; composing models unload what nothing needs any more."""
        commit(self.layout, after)
        self.repository.deployment(self.layout).trim_after_commit(after)

    def record(self, why: str) -> None:
        """10. The audit log has it, then the journal closes it."""
        release = self.layout.release(self.entry.version)
        if self._unanswered_s is not None:
            why = (
                f"{why} (GPU memory was short, so what was live was unloaded first; nobody was "
                f"answered for {self._unanswered_s:.1f} s)"
            ).lstrip()
        self.recovery.audit.close(self.recovery.journal, self.entry, release, done=True, why=why)

    def retain(self, keep: int, pinned: frozenset[int] | None) -> None:
        """10. Bytes of old releases go; that fails no promotion."""
        forget_quietly(self.layout, keep, pinned)

    def stays(self, before: Current | None, release: Release) -> bool:
        """Whether what is live stays loaded, ready to come back; logged where it cannot."""
        if before is None:
            return True
        why_not = why_not_beside(self.layout.release(before.version), release)
        if why_not:
            _log.info(
                "release %d of %s leaves the server while release %d comes, because one "
                "configuration cannot load both: %s. Going back to it will load it again.",
                before.version,
                self.layout.model,
                release.version,
                why_not,
            )
        return not why_not

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """Whatever ends the block early (Ctrl-C too), recovery ends the operation at once."""
        try:
            yield
        except BaseException as error:
            entry, step = self.entry, self.recovery.journal.last_step(self.entry)
            try:
                note = self.recovery.end(self.layout, entry, reason=str(error))
            except OSError as refusal:
                note = f"It could not be undone: {refusal}. {_MEND}"
            if not isinstance(error, EnginegateError | OSError):
                raise
            raise PublishError(
                f"The {entry.kind} of {entry.model} release {entry.version} failed after its step "
                f"'{step}': {error}\n{note}"
            ) from error


def _check_import(layout: Layout, release: Release) -> None:
    """A manifest whose bytes retention removed may get them back; nothing else is written over."""
    path = layout.release_file(release.version)
    if path.is_file() and layout.release(release.version).digest != release.digest:
        raise TamperedError(f"{path} is another release than the one to copy.")
    if layout.version_folder(release.version).exists():
        raise RepositoryError(
            f"{layout.version_folder(release.version)} is here already; roll back to it instead."
        )
