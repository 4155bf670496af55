"""Cancelling the analysis of a canary from any host, so that nobody waits for its end to go back.

Whoever promotes to a fleet holds the model's lease while its canary is analysed, so nobody else can
roll back then. A request to cancel is a flag in that lease, which the promoter reads between its
checks of the canary: the promoter alone rolls its servers back and closes its lease.
"""

import time
from dataclasses import dataclass

from enginegate.errors import RepositoryBusyError
from enginegate.repository.history.journal import Entry
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.rollout.target import LocalTarget
from enginegate.repository.store.object_journal import (
    ObjectJournal,
    holder,
    is_abandoned,
    is_analysing_canary,
    is_cancelled,
)
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.repository.store.pointer import rollback_target

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
        """Cancel the roll-out whose canary is analysed now, and wait until it has gone back.

        This host's own roll-out is first, also where storage is away: a pull has no lease. Then
        this host is recovered, and a roll-out that it has only begun is cancelled too.

        Returns:
            What was cancelled; None where there is no such roll-out.

        Raises:
            RepositoryBusyError: it was cancelled, and has not gone back yet.
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
                    f"{holder(asked)} was cancelled, and has not gone back in {patience_s:.0f} s. "
                    "It goes back at its next check of the canary; look there. If that host is "
                    f"gone, roll back after {asked.detail.get('until', 'an hour')}."
                )
            time.sleep(_POLL_S)
