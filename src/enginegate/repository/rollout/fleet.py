"""Several servers that serve the same release: a canary first, then the others one at a time.

The primary's repository says what is live; its server is the canary. A file beside its journal says
that a roll-out is under way: whoever comes after a kill rolls back a canary that had not passed
yet, and then brings every server to what the primary's repository says.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from enginegate.decision import Release, RenewedPromise
from enginegate.errors import (
    EnginegateError,
    NotEverywhereError,
    PublishError,
    RepositoryError,
)
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, AlignServers, Withdrawal, decide, was_withdrawn
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.rollout.target import FleetServer, each_of, lines
from enginegate.repository.store.layout import Layout, models
from enginegate.repository.store.live_record import LiveRecord, check_live_recorded
from enginegate.repository.store.object_journal import Lease
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.repository.store.pointer import (
    after_rollback,
    check_expected,
    check_still_live,
    check_withdrawable,
    live_release,
    live_words,
    rollback_target,
)
from enginegate.triton.client import TritonClient

PRIMARY = "the primary"
_NOT_PASSED = "its roll-out failed"

# (how long, raises if somebody cancelled it) -> returns once the canary has passed, else raises.
AnalyseCanary: TypeAlias = Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A primary and the servers that replicate it; changed like one live repository.

    Attributes:
        servers: changed in this order, after the primary.
        canary_s: how long the primary's server is analysed before the others are changed.
        analyse_canary: does that; None: it is not analysed.
        lease: of the promotion in object storage, by which any host may cancel the analysis.
    """

    primary: LiveRepository
    servers: tuple[FleetServer, ...]
    canary_s: float = 0.0
    analyse_canary: AnalyseCanary | None = None
    lease: Lease | None = None

    @property
    def root(self) -> Path:
        """The primary's repository."""
        return self.primary.root

    @property
    def client(self) -> TritonClient | None:
        """The primary's server."""
        return self.primary.client

    @property
    def rollouts(self) -> RolloutState:
        """Roll-outs from the primary."""
        return RolloutState(self.root)

    @property
    def storage(self) -> None:
        """None is here."""

    def leased(self, lease: Lease) -> "Fleet":
        """The fleet whose canary analysis can be cancelled by this lease too."""
        return replace(self, lease=lease)

    def without_canary(self) -> "Fleet":
        """The fleet that changes its servers at once."""
        return replace(self, analyse_canary=None)

    def through(self, channel: str) -> "Fleet":
        """The fleet whose changes the audit log says came through another channel."""
        return replace(self, primary=self.primary.through(channel))

    def publish(
        self,
        package: Package | ImportedRelease,
        *,
        expected: int | None,
        version: int | None = None,
        placed: Callable[[Release], None] | None = None,
    ) -> Release:
        """Make a package live on the primary, analyse the canary, then on every other server.

        If a server fails, all return to the previous release; the message names that server, and
        any that could not be returned.
        """

        def note_canary(release: Release) -> None:
            """From here on, the primary has the bytes, and there is something to roll back."""
            self.rollouts.note(_canary_of(release, expected))
            if placed is not None:
                placed(release)

        with self._rolling_out(package.model):
            layout = Layout(self.root, package.model)
            check_expected(layout, layout.current(), expected)
            self.primary.check_device(package)
            for server in self.servers:
                server.repository.check_device(package, server.name)
                if not server.shares:
                    server.check_expected(package.model, expected)
                server.repository.check_memory(package)
            release = self.primary.publish(
                package, expected=expected, version=version, placed=note_canary
            )
            self._roll_out(release, expected)
            return release

    def publish_again(self, model: str, version: int, *, reason: str = "") -> Release:
        """Make a release live again that was left, perhaps because its canary did not pass."""
        if self.analyse_canary is None:
            return self.rollback(model, version, reason=reason)
        with self._rolling_out(model):
            current = Layout(self.root, model).current()
            before = current.version if current else None
            self.rollouts.note(RolloutProgress(model=model, before=before, canary=version))
            release = self.primary.rollback(model, version, reason=reason)
            self._roll_out(release, before)
            return release

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again on every server that answers.

        If the primary's server is dead, another one that serves its folder stands in. The analysis
        of a canary is cancelled by this, and rolling the canary back is all that is done.
        """
        with self._preempting(model, lambda p: expected in {None, p.canary}) as preempted:
            layout, cancelled = Layout(self.root, model), preempted
            left, cut = layout.current(), self.rollouts.of(model)
            self._recover()
            current = layout.current()
            was_cut = cut is not None and cut.was_rolled_back(left, current)
            if cut is not None and was_cut and expected in {None, cut.canary}:
                cancelled = cut  # cut short after it had passed: recovery did what is asked for
            before = cancelled.before if cancelled is not None else None
            wanted = before if to is None else to
            live = current.version if current else None
            if before is not None and live is not None and live == wanted:
                return layout.release(live)
            if before is None or live != before:
                check_still_live(layout, current, expected)
            lost = LiveRecord.of(layout).lost_commit_point(wanted)
            version = rollback_target(layout, lost or current, wanted, lost=lost is not None)
            return self._go_to(model, version, reason)

    def roll_back_promotion(self, model: str, version: int) -> str:
        """Leave a release whose promotion failed after it was published, on every server."""
        previous = Layout(self.root, model).release(version).previous_version
        return self._take_back(RolloutProgress(model=model, before=previous, canary=version))

    def withdraw_version(self, model: str, version: int, *, by: Withdrawal = UNDONE) -> str:
        """Leave nothing live on every server that answers."""
        progress = RolloutProgress(model=model, canary=version, who=by.who, why=by.why)
        return self._take_back(progress)

    def renew(self, renewed: RenewedPromise, *, new: bool = True) -> RenewedPromise:
        """Give the live release another promise; only the primary's repository says which."""
        return self.primary.renew(renewed, new=new)

    def withdraw(self, model: str, by: Withdrawal, *, checked: bool = False) -> Release:
        """Unload the live release that nothing was before from every server; nothing is live then.

        A server that does not answer would serve it again when it is back, so all must answer. The
        primary is last: until then all return to the release if one refuses.

        Raises:
            PublishError: a server did not unload it, so it is live on all that could be reached;
                the message names the server.
            NotEverywhereError: it is withdrawn, and a server that shares the primary's folder goes
                on serving it.
        """
        with self._rolling_out(model):
            layout = Layout(self.root, model)
            release = live_release(layout)
            check_live_recorded(self.root, model)
            if not checked:
                check_withdrawable(layout, release)
            progress = RolloutProgress(model=model, canary=release.version, who=by.who, why=by.why)
            self.rollouts.note(progress)
            failed: dict[str, str] = {}
            each_of(self.servers, lambda server: server.withdraw(model, by=by), failed)
            if not failed:
                try:
                    self.primary.withdraw(model, by, checked=True)
                except EnginegateError as error:
                    if layout.current() is None:
                        raise
                    failed[PRIMARY] = str(error)
            named = f"Release {release.version} of {model}"
            if failed:
                self.rollouts.note(progress.model_copy(update={"canary_passed": True}))
                raise PublishError(
                    f"{named} was not withdrawn, because not every server unloaded it:\n"
                    f"{lines(failed)}\n{' '.join(self._align(model, {}))}"
                )
            sharing = tuple(server for server in self.servers if server.shares)
            each_of(sharing, lambda server: server.check_gone(model), failed)
            if failed:
                raise NotEverywhereError(
                    f"{named} was withdrawn, and still serves:\n{lines(failed)}\nStart these "
                    "servers again."
                )
            return release

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left, on every server."""
        with self.rollouts.exclusive():
            return self._recover()

    def cancel_rollout(
        self, model: str, may: Callable[[RolloutProgress], bool] = lambda _: True
    ) -> RolloutProgress | None:
        """Cancel the analysis of a canary, also of one that is about to be live; then recover."""
        with self._preempting(model, may) as cancelled:
            self._recover()
            return cancelled

    def repair(self) -> tuple[str, ...]:
        """Repair the primary, then bring every server to what it says."""
        with self.rollouts.exclusive():
            done = [*self._recover(), *self.primary.repair()]
            for server in self.servers:
                if not server.shares:
                    done += [f"{server.name}: {words}" for words in server.repository.repair()]
            known = {*models(self.root), *(m for server in self.servers for m in server.models())}
            for model in sorted(known):
                done += self._align(model, {})
            return tuple(done)

    def serves(self, model: str) -> bool:
        """Whether every server proves now that it serves the primary's release."""
        current = Layout(self.root, model).current()
        live = current.version if current else None
        return self.primary.serves(model) and all(s.serves(model, live) for s in self.servers)

    def bring_up(self, model: str) -> Release:
        """Load the primary's release on every server that does not serve it, and prove it."""
        release = self.primary.bring_up(model)
        failed: dict[str, str] = {}
        each_of(self.servers, lambda server: server.replicate(release), failed)
        if failed:
            raise NotEverywhereError(
                f"Release {release.version} of {model} does not serve everywhere:\n{lines(failed)}"
            )
        return release

    @contextmanager
    def _rolling_out(self, model: str) -> Iterator[None]:
        """Begin a roll-out that every server has to take part in, and forget it once it is over."""
        servers = {PRIMARY: self.client, **{s.name: s.repository.client for s in self.servers}}
        with self.rollouts.exclusive():
            dead = [name for name, client in servers.items() if client is None or not client.live()]
            if dead:
                raise RepositoryError(
                    f"Of the fleet of {self.root}, {', '.join(dead)} does not answer, so nothing "
                    "was begun. Start it, or take it out of target.fleet in the policy."
                )
            self._recover()
            self.rollouts.settle(
                model
            )  # a request to cancel may have come too late for its roll-out
            try:
                yield
            finally:
                self.rollouts.settle(model)

    @contextmanager
    def _preempting(
        self, model: str, may: Callable[[RolloutProgress], bool]
    ) -> Iterator[RolloutProgress | None]:
        with ExitStack() as rolling:
            timeout_s = self.primary.load_timeout_s
            yield self.rollouts.preempt(rolling, model, timeout_s, may)

    def _roll_out(self, release: Release, before: int | None) -> None:
        """The canary's analysis, then one server after another; any failure returns all."""
        changed: list[FleetServer] = []
        where = f"the canary ({PRIMARY})"
        progress = _canary_of(release, before)
        try:
            if self.analyse_canary is not None:
                self._analyse(self.analyse_canary, release.model)
            self.rollouts.note(progress.model_copy(update={"canary_passed": True}))
            for server in self.servers:
                where = f"server {server.name!r}"
                changed.append(server)
                server.replicate(release)
        except BaseException as error:
            self.rollouts.note(progress)
            words = self._return_all(progress, changed)
            if not isinstance(error, EnginegateError):
                raise
            raise PublishError(
                f"The roll-out of {release.model} release {release.version} failed at {where}: "
                f"{error}\n{words}"
            ) from error

    def _analyse(self, analyse: AnalyseCanary, model: str) -> None:
        lease, check_here = self.lease, partial(self.rollouts.check_not_cancelled, model)
        if lease is None:
            analyse(self.canary_s, check_here)
            return

        def check() -> None:
            check_here()
            lease.check_not_cancelled()

        lease.add("loaded", canary_analysis=True)
        analyse(self.canary_s, check)
        lease.add("loaded")  # from here on nobody checks, so nobody can ask

    def _go_to(self, model: str, version: int, reason: str) -> Release:
        release = Layout(self.root, model).release(version)
        failed: dict[str, str] = {}
        self.rollouts.note(RolloutProgress(model=model, before=version, canary_passed=True))
        try:
            changed = self._change_primary(model, version, reason, failed)
            rest = [server for server in self.servers if server.name not in changed]
            reached = changed + each_of(rest, lambda server: server.replicate(release), failed)
        finally:
            self.rollouts.settle(model)
        if not changed:
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

    def _change_primary(
        self, model: str, version: int, reason: str, failed: dict[str, str]
    ) -> list[str]:
        """Roll the primary's repository back through the first server of it that answers."""
        shared = {server.name: server.repository for server in self.servers if server.shares}
        for name, repository in ({PRIMARY: self.primary} | shared).items():
            if repository.client is None or not repository.client.live():
                failed[name] = "it does not answer"
                continue
            # A fault of the release itself must not be asked of every server in turn.
            through = replace(self.primary, client=repository.client)
            through.rollback(model, version, reason=reason)
            return [name]
        return []

    def _take_back(self, progress: RolloutProgress) -> str:
        with self.rollouts.exclusive():
            layout = Layout(self.root, progress.model)
            check_still_live(layout, layout.current(), progress.canary)
            self.rollouts.note(progress)
            try:
                return self._return_all(progress, self.servers)
            finally:
                self.rollouts.settle(progress.model)

    def _return_all(self, progress: RolloutProgress, changed: Sequence[FleetServer]) -> str:
        """Return to what was live, last changed first; one that fails does not stop the others."""
        model, before, canary = progress.model, progress.before, progress.canary
        current = Layout(self.root, model).current()
        if current is None or canary is None or current.version != canary:
            return " ".join([f"{live_words(current)} by now.", *self._align(model, {})])
        target = after_rollback(current, before) if before is not None else None
        by = Withdrawal(progress.who, progress.why) if progress.why else UNDONE
        failed: dict[str, str] = {}
        returned = each_of(
            tuple(reversed(changed)), lambda server: server.roll_back(model, target, by=by), failed
        )
        try:
            if before is None:
                self.primary.withdraw_version(model, canary, by=by)
            else:
                self.primary.rollback(model, before, reason=_NOT_PASSED, expected=canary)
            returned += [PRIMARY]
        except EnginegateError as error:
            failed[PRIMARY] = str(error)
        live = f"Release {before} is live" if before is not None else "Nothing is live"
        words = f"{live} again on: {', '.join(returned) or 'none'}."
        return f"{words} Not returned:\n{lines(failed)}" if failed else words

    def _recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left; whoever calls holds the fleet's lock."""
        self.rollouts.sweep()
        done = [*self.primary.recover()]
        for server in self.servers:
            try:
                if not server.shares:
                    done += [f"{server.name}: {words}" for words in server.repository.recover()]
            except EnginegateError as error:  # must not keep the others from being rolled back
                done.append(f"{server.name} could not be recovered: {error}")
        for progress in self.rollouts.unfinished():
            pointer = Layout(self.root, progress.model).current()
            for action in decide((), pointer, progress):
                if action == AlignServers():
                    done += self._finish(progress)
                else:
                    words = self._return_all(progress, self.servers)
                    cut = f"A roll-out of {progress.model} was cut short on the canary."
                    done.append(f"{cut} {words}")
            self.rollouts.settle(progress.model)
        return tuple(done)

    def _finish(self, progress: RolloutProgress) -> list[str]:
        """Bring the others to a canary that passed; if one that answers cannot, all roll back.

        Whoever killed the roll-out may have spared it that very refusal. A server that is dead says
        nothing about the release: it is named, and waits for `repair`.
        """
        failed: dict[str, str] = {}
        done = self._align(progress.model, failed)
        current = Layout(self.root, progress.model).current()
        if current is None or current.version != progress.canary:
            return done
        if not any(server.name in failed and server.answers() for server in self.servers):
            return done
        undone = progress.model_copy(update={"canary_passed": False})
        self.rollouts.note(undone)
        words = self._return_all(undone, self.servers)
        return [*done, f"A roll-out of {progress.model} was cut short. {words}"]

    def _align(self, model: str, failed: dict[str, str]) -> list[str]:
        """Bring every server to what the primary's repository says."""
        layout = Layout(self.root, model)
        current = layout.current()
        if current is not None:
            release = layout.release(current.version)
            behind = [s for s in self.servers if not s.serves(model, current.version)]
            done = each_of(behind, lambda server: server.replicate(release), failed)
            words = [
                f"{name} was brought to release {current.version} of {model}." for name in done
            ]
            return words + [f"{name} could not be: {why}" for name, why in failed.items()]
        if not was_withdrawn(layout):
            return []
        # What was withdrawn must not serve on a server that was away meanwhile.
        left = [s for s in self.servers if not s.shares and s.has_live(model)]
        by = Withdrawal(why="it was withdrawn on the primary")
        done = each_of(left, lambda server: server.roll_back(model, None, by=by), failed)
        words = [f"{name} unloaded {model}, which was withdrawn." for name in done]
        return words + [f"{name} could not unload it: {why}" for name, why in failed.items()]


def _canary_of(release: Release, before: int | None) -> RolloutProgress:
    return RolloutProgress(model=release.model, before=before, canary=release.version)
