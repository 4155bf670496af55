"""Ending a canary that is watched, from any host: an object beside the journal asks for it.

Whoever promotes to a fleet holds the model's turn while the canary is watched, so nobody else can
go back then. Its journal says that it watches. Whoever wants to go back asks it to, and waits until
it has: the promoter alone returns its servers and closes its turn.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pydantic import ValidationError

from enginegate.atomic_io import file_lock
from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryBusyError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.records import Record
from enginegate.repository.history.journal import Entry
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.rollout_state import LOCK, RolloutProgress, RolloutState
from enginegate.repository.store.layout import Layout
from enginegate.repository.store.object_journal import (
    Lease,
    ObjectJournal,
    holder,
    is_abandoned,
    is_open,
    is_watched,
)
from enginegate.repository.store.object_lease import live_version
from enginegate.repository.store.object_release import ObjectReleases

_LOOK_S = 0.5
_PATIENCE_S = 30.0
_GOES_BACK = "It goes back at its next look at the canary; look there."
_GOES_ON = "The canary had held by then, so it goes on: roll back when it has finished."
_log = logging.getLogger("enginegate.repository")


class CancelRequest(Record):
    """Somebody wants a roll-out to end: ``end.json``. Of any other roll-out it says nothing."""

    operation: str
    by: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A roll-out that was asked to end, or whose promoter is dead."""

    canary: int
    before: int | None


@dataclass(frozen=True, slots=True)
class CancelWatcher:
    """Asks for the end of a roll-out, from the host of ``local``."""

    releases: ObjectReleases
    journal: ObjectJournal
    local: LiveRepository | Fleet

    def end(self, to: int | None, *, leave: int | None, reason: str) -> Cancelled | None:
        """End the roll-out whose canary is watched now, and wait until it has gone back.

        Then this host is recovered, and one that it has only begun is ended too.

        Args:
            to: where to go back; nothing is ended for a release that is not there.
            leave: only if this is its canary; None: whichever is.
            reason: why.

        Returns:
            None where there is no such roll-out.

        Raises:
            RepositoryBusyError: it was asked to end and has not yet.
            RepositoryError: there is no release ``to``, or its bytes are gone.
        """
        here = self._end_here(to, leave)
        ended = self._end_anywhere(to, leave, reason) or here
        late = self._recover(to, leave)
        if late is None:
            return ended
        return self._end_anywhere(to, leave, reason) or late

    def _recover(self, to: int | None, leave: int | None) -> Cancelled | None:
        """Last, because it waits for whatever is rolled out from here."""
        if not isinstance(self.local, Fleet):
            self.local.recover()
            return None
        asked = self.local.end(self.journal.model, lambda p: self._may_end(p, to, leave))
        return _ended(asked)

    def _may_end(self, progress: RolloutProgress, to: int | None, leave: int | None) -> bool:
        if progress.canary is None or to == progress.canary:
            return False
        if to not in {None, progress.before}:
            self.releases.before(live_version(self.releases.pointer()[0]), to)
        return leave in {None, progress.canary}

    def _end_here(self, to: int | None, leave: int | None) -> Cancelled | None:
        """Of what this host rolls out itself: a pull has no turn, and storage may be away."""
        rollouts, model = RolloutState(self.local.root), self.journal.model
        progress = rollouts.of(model)
        if progress is None or not self._may_end(progress, to, leave):
            return None
        if rollouts.ask_to_end(model, leave=leave) is None:
            return None
        _log.warning("the roll-out of release %d from here was asked to end", progress.canary)
        try:
            with file_lock(rollouts.root / LOCK, timeout_s=self._patience_s):
                return _ended(progress)
        except TimeoutError as error:
            raise RepositoryBusyError(
                f"The roll-out of {model} release {progress.canary} by {error} was asked to end, "
                f"and has not in {self._patience_s:.0f} s. {_GOES_BACK}"
            ) from error

    def _end_anywhere(self, to: int | None, leave: int | None, reason: str) -> Cancelled | None:
        # Before the journal: a canary that is still watched after this was not committed before it.
        pointer, _ = self.releases.pointer()
        last, before = self.journal.last(), live_version(pointer)
        if last is None or not is_watched(last) or to == last.version:
            return None
        if leave not in {None, last.version}:
            return None
        if to not in {None, before}:
            self.releases.before(before, to)
        if not is_abandoned(last):
            ask = CancelRequest(operation=last.operation, by=user_at_host(), reason=reason)
            self.journal.store.write(_key(self.journal), ask.pretty_json())
            self._wait_for(last)
        return Cancelled(last.version, before)

    def outcome(self, ended: Cancelled) -> Release:
        """What is live again after a roll-out was ended.

        Raises:
            RepositoryError: nothing was live before it, or this host could not go back.
        """
        pointer, _ = self.releases.pointer()
        release = self.releases.release_of(pointer) if pointer else None
        here = live_version(Layout(self.local.root, self.journal.model).current())
        said = f"The roll-out of {self.journal.model} release {ended.canary} was ended"
        if here != live_version(pointer):
            raise RepositoryError(
                f"{said}, but this host has release {here or 'none'} and not "
                f"{live_version(pointer) or 'none'}, which is live in {self.journal.store.url}. "
                "When its server answers, bring it there with `enginegate verify --repair`."
            )
        if release is None:
            raise RepositoryError(f"{said}. Nothing was live before it, and nothing is now.")
        return release

    @property
    def _patience_s(self) -> float:
        lead = self.local.lead if isinstance(self.local, Fleet) else self.local
        return _PATIENCE_S + lead.load_timeout_s

    def _wait_for(self, asked: Entry) -> None:
        deadline = time.monotonic() + self._patience_s
        while _is_under_way(last := self.journal.last(), asked):
            if time.monotonic() > deadline:
                goes_back = last is not None and is_watched(last)
                raise RepositoryBusyError(
                    f"The {asked.kind} of {asked.model} release {asked.version} by "
                    f"{holder(asked)} was asked to end, and has not in {self._patience_s:.0f} s. "
                    f"{_GOES_BACK if goes_back else _GOES_ON} If that host is gone, roll back "
                    f"after {asked.detail.get('until', 'an hour')}."
                )
            time.sleep(_LOOK_S)


def watched(local: LiveRepository | Fleet, turn: Lease) -> LiveRepository | Fleet:
    """The same, but while a fleet watches its canary the journal says so, and it can be ended."""
    if not isinstance(local, Fleet) or local.hold is None:
        return local
    return replace(local, hold=partial(_hold, local.hold, turn, RolloutState(local.root)))


def _hold(
    hold: Callable[[float], None], turn: Lease, rollouts: RolloutState, seconds: float
) -> None:
    turn.add("loaded", watched=True)
    over = threading.Event()
    # Beside the canary's looks: a slow answer of the storage must delay none of their requests.
    threading.Thread(target=_listen, args=(turn, rollouts, over), daemon=True).start()
    try:
        hold(seconds)
    finally:
        over.set()
    # From here on nobody looks any more, so nobody is to ask.
    turn.add("loaded")


def _listen(turn: Lease, rollouts: RolloutState, over: threading.Event) -> None:
    """Hand on what is asked for in storage to where the canary's looks see it."""
    entry, heard = turn.entry, False
    while not over.wait(_LOOK_S):
        ask = _asked(turn.journal)
        if ask is None or ask.operation != entry.operation:
            continue
        if not heard:
            _log.warning("a rollback was asked for by %s: %s", ask.by, ask.reason or "no reason")
        try:
            rollouts.ask_to_end(entry.model, leave=entry.version)
        except EnginegateError as error:
            if not heard:
                _log.error("it could not be handed on, which is tried again: %s", error)
            heard = True
        else:
            return


def _asked(journal: ObjectJournal) -> CancelRequest | None:
    try:
        stored = journal.store.read(_key(journal))
        return CancelRequest.model_validate_json(stored.content) if stored else None
    except (RepositoryError, ValidationError):
        # Storage that is away for a moment ends nothing; without it there is no commit either.
        return None


def _ended(progress: RolloutProgress | None) -> Cancelled | None:
    if progress is None or progress.canary is None:
        return None
    return Cancelled(progress.canary, progress.before)


def _is_under_way(last: Entry | None, asked: Entry) -> bool:
    if last is None or last.operation != asked.operation:
        return False
    return is_open(last) and not is_abandoned(last)


def _key(journal: ObjectJournal) -> str:
    return f"{journal.model}/end.json"
