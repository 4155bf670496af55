"""Several servers that serve the same release: one canary first, then the rest one at a time.

The lead's repository says what is live; its server is the canary. A file beside its journal says
that a roll-out is under way: whoever comes after a kill takes a canary back that had not held yet,
and then brings every server to what the lead's repository says.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from enginegate.decision import Release, RenewedPromise
from enginegate.errors import (
    EnginegateError,
    NotEverywhereError,
    PublishError,
    RepositoryError,
)
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, Withdrawal
from enginegate.repository.rollout.fleet_recovery import LEAD, FleetRecovery
from enginegate.repository.rollout.fleet_server import FleetServer, each_of, lines
from enginegate.repository.rollout.rollout_state import RolloutProgress
from enginegate.repository.store.layout import Layout, models
from enginegate.repository.store.live_record import LiveRecord, check_live_recorded
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.repository.store.pointer import (
    check_expected,
    check_still_live,
    check_withdrawable,
    live_release,
    rollback_target,
)
from enginegate.triton.client import TritonClient


@dataclass(frozen=True, slots=True)
class Fleet:
    """A lead and the servers that follow it; changed like one live repository.

    Attributes:
        members: told in this order, after the lead.
        canary_s: how long the lead is watched before the others are told.
        hold: watches the lead for that long, and raises if it should not go on.
    """

    lead: LiveRepository
    members: tuple[FleetServer, ...]
    canary_s: float = 0.0
    hold: Callable[[float], None] | None = None

    @property
    def root(self) -> Path:
        """The lead's repository."""
        return self.lead.root

    @property
    def pinned(self) -> frozenset[int] | None:
        """Releases that retention leaves alone."""
        return self.lead.pinned

    @property
    def client(self) -> TritonClient | None:
        """The lead's server."""
        return self.lead.client

    def publish(
        self,
        package: Package | ImportedRelease,
        *,
        expected: int | None,
        version: int | None = None,
        placed: Callable[[Release], None] | None = None,
    ) -> Release:
        """Make a package live on the lead, watch it, then on every other server.

        Raises:
            RepositoryBusyError: a roll-out is under way.
            RepositoryError: a server does not answer, or another release is live somewhere.
            PublishError: a server failed; all were returned to the previous release. The message
                names the server, and any that could not be returned.
        """
        with self._recall.rollouts.alone():
            self._check_all_answer()
            self._recall.recover()
            layout = Layout(self.root, package.model)
            check_expected(layout, layout.current(), expected)
            for member in self.members:
                if not member.shares:
                    member.check_expected(package.model, expected)
            self._recall.rollouts.settle(package.model)
            noted = partial(self._placed, expected, placed)
            try:
                release = self.lead.publish(
                    package, expected=expected, version=version, placed=noted
                )
                self._roll_out(release, expected)
            finally:
                self._recall.rollouts.settle(package.model)
            return release

    def publish_again(self, model: str, version: int, *, reason: str = "") -> Release:
        """Make a release live whose bytes are here, by the path of one that is new.

        Nobody knows why it was left: a canary may not have held. Raises as `publish`.
        """
        with self._recall.rollouts.alone():
            self._check_all_answer()
            self._recall.recover()
            current = Layout(self.root, model).current()
            before = current.version if current else None
            self._recall.rollouts.note(RolloutProgress(model=model, before=before, canary=version))
            try:
                release = self.lead.rollback(model, version, reason=reason)
                self._roll_out(release, before)
            finally:
                self._recall.rollouts.settle(model)
            return release

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again on every server that answers.

        If the lead's server is dead, another one that serves its folder stands in. A canary that
        is being watched is ended by this, and going back from it is all that is done.

        Raises:
            NotEverywhereError: some server could not be told: the message names it; the lead and
                the others serve the earlier release.
            RepositoryError: there is no such release, or no server of the lead's folder answers.
        """
        with ExitStack() as rolling:
            asked = self._recall.rollouts.alone_instead(
                rolling, model, self.lead.load_timeout_s, lambda p: expected in {None, p.canary}
            )
            layout = Layout(self.root, model)
            left, cut = layout.current(), self._recall.rollouts.of(model)
            self._recall.recover()
            current = layout.current()
            if cut is not None and cut.went_back(left, current) and expected in {None, cut.canary}:
                asked = cut  # cut short after it had held: recovery has done what is asked for
            ended = asked.before if asked is not None else None
            wanted = ended if to is None else to
            if ended is not None and current is not None and current.version == wanted:
                return layout.release(current.version)
            if ended is None or current is None or current.version != ended:
                check_still_live(layout, current, expected)
            lost = LiveRecord.of(layout).lost_commit_point(wanted)
            version = rollback_target(layout, lost or current, wanted, lost=lost is not None)
            return self._go_back(model, version, reason)

    def withdraw(self, model: str, version: int) -> str:
        """Take back a release whose promotion failed after it was published, on every server."""
        with self._recall.rollouts.alone():
            layout = Layout(self.root, model)
            check_still_live(layout, layout.current(), version)
            previous = layout.release(version).previous_version
            progress = RolloutProgress(model=model, before=previous, canary=version)
            self._recall.rollouts.note(progress)
            try:
                return self._recall.give_back(progress, self.members)
            finally:
                self._recall.rollouts.settle(model)

    def renew(self, renewed: RenewedPromise, *, new: bool = True) -> RenewedPromise:
        """Hold the live release to another promise; only the lead's repository says to which.

        Raises as `LiveRepository.renew`.
        """
        return self.lead.renew(renewed, new=new)

    def prepare_promise(self, renewed: RenewedPromise) -> None:
        """Write and sign a promise that nothing is held to yet; raises as `renew`."""
        self.lead.prepare_promise(renewed)

    def take_away(self, model: str, version: int, *, by: Withdrawal = UNDONE) -> str:
        """Leave nothing live on every server that answers; what is live now, in words.

        Raises:
            RepositoryError: another release is live by now.
        """
        with self._recall.rollouts.alone():
            layout = Layout(self.root, model)
            check_still_live(layout, layout.current(), version)
            progress = RolloutProgress(model=model, canary=version, who=by.who, why=by.why)
            self._recall.rollouts.note(progress)
            try:
                return self._recall.give_back(progress, self.members)
            finally:
                self._recall.rollouts.settle(model)

    def withdraw_first(self, model: str, by: Withdrawal, *, checked: bool = False) -> Release:
        """Unload the live release that nothing was before from every server; nothing is live then.

        A server that does not answer would serve it again when it is back, so all must answer. The
        lead is last: until then all go back to the release if one refuses.

        Args:
            model: its name.
            by: whom, and why.
            checked: whoever calls knows that there is no release to go back to.

        Returns:
            What was live.

        Raises:
            RepositoryError: a server does not answer, nothing is live, or there is a release to go
                back to.
            PublishError: a server did not let it go, so it is live on all that could be reached;
                the message names the server.
            NotEverywhereError: it is withdrawn, and a server that shares the lead's folder goes on
                serving it.
        """
        with self._recall.rollouts.alone():
            self._check_all_answer()
            self._recall.recover()
            layout = Layout(self.root, model)
            release = live_release(layout)
            check_live_recorded(self.root, model)
            if not checked:
                check_withdrawable(layout, release)
            progress = RolloutProgress(model=model, canary=release.version, who=by.who, why=by.why)
            self._recall.rollouts.note(progress)
            failed: dict[str, str] = {}
            words = ""
            try:
                each_of(self.members, lambda member: member.let_go(model, by=by), failed)
                if not failed:
                    self._withdraw_lead(model, by, failed)
                if failed:
                    self._recall.rollouts.note(progress.model_copy(update={"held": True}))
                    words = " ".join(self._recall.align(model))
            finally:
                self._recall.rollouts.settle(model)
            named = f"Release {release.version} of {model}"
            if failed:
                raise PublishError(
                    f"{named} was not withdrawn, because not every server let it go:\n"
                    f"{lines(failed)}\n{words}"
                )
            sharing = tuple(member for member in self.members if member.shares)
            each_of(sharing, lambda member: member.check_gone(model), failed)
            if failed:
                raise NotEverywhereError(
                    f"{named} was withdrawn, and still serves:\n{lines(failed)}\nStart these "
                    "servers again."
                )
            return release

    def _withdraw_lead(self, model: str, by: Withdrawal, failed: dict[str, str]) -> None:
        """The lead is last; what it refuses before it has begun leaves it live everywhere."""
        try:
            self.lead.withdraw_first(model, by, checked=True)
        except EnginegateError as error:
            if Layout(self.root, model).current() is None:
                raise
            failed[LEAD] = str(error)

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left, on every server."""
        with self._recall.rollouts.alone():
            return self._recall.recover()

    def end(
        self, model: str, may: Callable[[RolloutProgress], bool] = lambda _: True
    ) -> RolloutProgress | None:
        """End what is rolled out, and also what is about to be; then recover.

        Args:
            model: of which model.
            may: whether it may be ended.

        Returns:
            What was ended.

        Raises:
            RepositoryBusyError: a roll-out goes on.
        """
        with ExitStack() as rolling:
            asked = self._recall.rollouts.alone_instead(
                rolling, model, self.lead.load_timeout_s, may
            )
            self._recall.recover()
            return asked

    def repair(self) -> tuple[str, ...]:
        """Repair the lead, then bring every server to what it says."""
        with self._recall.rollouts.alone():
            said = [*self._recall.recover(), *self.lead.repair()]
            for member in self.members:
                if not member.shares:
                    said += [f"{member.name}: {words}" for words in member.repository.repair()]
            known = {*models(self.root), *(m for each in self.members for m in each.models())}
            for model in sorted(known):
                said += self._recall.align(model)
            return tuple(said)

    def serves(self, model: str) -> bool:
        """Whether every server proves now that it serves the lead's release."""
        current = Layout(self.root, model).current()
        live = current.version if current else None
        return self.lead.serves(model) and all(m.serves(model, live) for m in self.members)

    def bring_up(self, model: str) -> Release:
        """Load the lead's release on every server that does not serve it, and prove it.

        Raises:
            NotEverywhereError: a server could not be brought to it; the message names it.
            RepositoryError: the lead could not.
        """
        release = self.lead.bring_up(model)
        failed: dict[str, str] = {}
        each_of(self.members, lambda member: member.take(release), failed)
        if failed:
            raise NotEverywhereError(
                f"Release {release.version} of {model} does not serve everywhere:\n{lines(failed)}"
            )
        return release

    @property
    def _recall(self) -> FleetRecovery:
        return FleetRecovery(self.lead, self.members)

    def _placed(
        self, before: int | None, then: Callable[[Release], None] | None, release: Release
    ) -> None:
        """The lead has the bytes: from here on there is something to take back."""
        progress = RolloutProgress(model=release.model, before=before, canary=release.version)
        self._recall.rollouts.note(progress)
        if then is not None:
            then(release)

    def _roll_out(self, release: Release, before: int | None) -> None:
        """The canary's window, then one server after another; any failure returns all."""
        told: list[FleetServer] = []
        where = f"the canary ({LEAD})"
        progress = RolloutProgress(model=release.model, before=before, canary=release.version)
        try:
            if self.hold is not None:
                self.hold(self.canary_s)
            self._recall.rollouts.note(progress.model_copy(update={"held": True}))
            for member in self.members:
                where = f"server {member.name!r}"
                told.append(member)
                member.take(release)
        except BaseException as error:
            self._recall.rollouts.note(progress)
            words = self._recall.give_back(progress, told)
            if not isinstance(error, EnginegateError):
                raise
            raise PublishError(
                f"The roll-out of {release.model} release {release.version} failed at {where}: "
                f"{error}\n{words}"
            ) from error

    def _go_back(self, model: str, version: int, reason: str) -> Release:
        release = Layout(self.root, model).release(version)
        failed: dict[str, str] = {}
        self._recall.rollouts.note(RolloutProgress(model=model, before=version, held=True))
        try:
            turned = self._turn_lead(model, version, reason, failed)
            rest = [member for member in self.members if member.name not in turned]
            reached = turned + each_of(rest, lambda member: member.take(release), failed)
        finally:
            self._recall.rollouts.settle(model)
        if not turned:
            raise RepositoryError(
                f"Nothing in {self.root} was changed, because none of its servers answers:\n"
                f"{lines(failed)}\nRelease {version} of {model} serves on "
                f"{', '.join(reached) or 'none'}. Start one of them, then roll back again."
            )
        if failed:
            raise NotEverywhereError(
                f"Release {version} of {model} is live again on {', '.join(reached)}, but not "
                f"everywhere:\n{lines(failed)}\nWhen they answer again, bring them to it with "
                "`enginegate verify --repair`."
            )
        return release

    def _turn_lead(
        self, model: str, version: int, reason: str, failed: dict[str, str]
    ) -> list[str]:
        """Roll the lead's repository back through the first server of it that answers."""
        servers = {LEAD: self.lead, **{m.name: m.repository for m in self.members if m.shares}}
        for name, repository in servers.items():
            if repository.client is None or not repository.client.live():
                failed[name] = "it does not answer"
                continue
            # A fault of the release itself must not be asked of every server in turn.
            replace(self.lead, client=repository.client).rollback(model, version, reason=reason)
            return [name]
        return []

    def _check_all_answer(self) -> None:
        servers = {LEAD: self.lead.client, **{m.name: m.repository.client for m in self.members}}
        dead = [name for name, client in servers.items() if client is None or not client.live()]
        if dead:
            raise RepositoryError(
                f"Of the fleet of {self.root}, {', '.join(dead)} does not answer, so nothing was "
                "begun. Start it, or take it out of target.fleet in the policy."
            )
