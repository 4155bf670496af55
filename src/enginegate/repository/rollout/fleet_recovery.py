"""Bringing the servers of a fleet back together: to what was live, or to what the lead says."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginegate.errors import EnginegateError
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, Withdrawal, was_withdrawn
from enginegate.repository.rollout.fleet_server import FleetServer, each_of, lines
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.store.layout import Layout
from enginegate.repository.store.pointer import after_rollback, live_words

LEAD = "the lead"
_NOT_HELD = "its roll-out did not hold"


@dataclass(frozen=True, slots=True)
class FleetRecovery:
    """A lead and its members; whoever calls holds the fleet's lock."""

    lead: LiveRepository
    members: tuple[FleetServer, ...]

    @property
    def rollouts(self) -> RolloutState:
        """What is under way from the lead."""
        return RolloutState(self.lead.root)

    def give_back(self, progress: RolloutProgress, told: Sequence[FleetServer]) -> str:
        """Bring back what was live, last told first; one that fails does not stop the others."""
        model, before, canary = progress.model, progress.before, progress.canary
        current = Layout(self.lead.root, model).current()
        if current is None or canary is None or current.version != canary:
            return " ".join([f"{live_words(current)} by now.", *self.align(model)])
        target = after_rollback(current, before) if before is not None else None
        by = Withdrawal(progress.who, progress.why) if progress.why else UNDONE
        failed: dict[str, str] = {}
        returned = each_of(
            tuple(reversed(told)), lambda member: member.return_to(model, target, by=by), failed
        )
        try:
            if before is None:
                self.lead.take_away(model, canary, by=by)
            else:
                self.lead.rollback(model, before, reason=_NOT_HELD, expected=canary)
            returned += [LEAD]
        except EnginegateError as error:
            failed[LEAD] = str(error)
        live = f"Release {before} is live" if before is not None else "Nothing is live"
        said = f"{live} again on: {', '.join(returned) or 'none'}."
        return f"{said} Not returned:\n{lines(failed)}" if failed else said

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left, on every server."""
        self.rollouts.sweep()
        said = [*self.lead.recover()]
        for member in self.members:
            if not member.shares:
                said += self._recovered(member)
        for progress in self.rollouts.unfinished():
            if self.rollouts.is_settled(progress):
                said += self._follow(progress)
            else:
                words = self.give_back(progress, self.members)
                said.append(f"A roll-out of {progress.model} was cut short on the canary. {words}")
            self.rollouts.settle(progress.model)
        return tuple(said)

    def _follow(self, progress: RolloutProgress) -> list[str]:
        """The others follow a canary that held; if one that answers cannot, all go back.

        Whoever killed the roll-out may have spared it that very refusal. A server that is dead says
        nothing about the release: it is named, and waits for `repair`.
        """
        failed: dict[str, str] = {}
        said = self._aligned(progress.model, failed)
        current = Layout(self.lead.root, progress.model).current()
        if current is None or current.version != progress.canary:
            return said
        if not any(member.name in failed and member.answers() for member in self.members):
            return said
        undone = progress.model_copy(update={"held": False})
        self.rollouts.note(undone)
        words = self.give_back(undone, self.members)
        return [*said, f"A roll-out of {progress.model} was cut short. {words}"]

    def _recovered(self, member: FleetServer) -> list[str]:
        """One member's trouble must not keep the others from going back."""
        try:
            return [f"{member.name}: {words}" for words in member.repository.recover()]
        except EnginegateError as error:
            return [f"{member.name} could not be recovered: {error}"]

    def _emptied(self, model: str, failed: dict[str, str]) -> list[str]:
        """What was withdrawn must not serve on a server that was away meanwhile."""
        left = [
            member
            for member in self.members
            if not member.shares and Layout(member.repository.root, model).current() is not None
        ]
        by = Withdrawal(why="it was withdrawn on the lead")
        done = each_of(left, lambda member: member.return_to(model, None, by=by), failed)
        said = [f"{name} let go of {model}, which was withdrawn." for name in done]
        return said + [f"{name} could not be emptied: {why}" for name, why in failed.items()]

    def align(self, model: str) -> list[str]:
        """Bring every server to what the lead's repository says."""
        return self._aligned(model, {})

    def _aligned(self, model: str, failed: dict[str, str]) -> list[str]:
        layout = Layout(self.lead.root, model)
        current = layout.current()
        if current is None:
            return self._emptied(model, failed) if was_withdrawn(layout) else []
        release = layout.release(current.version)
        behind = [m for m in self.members if not m.serves(model, current.version)]
        reached = each_of(behind, lambda member: member.take(release), failed)
        said = [f"{name} was brought to release {current.version} of {model}." for name in reached]
        return said + [f"{name} could not be: {why}" for name, why in failed.items()]
