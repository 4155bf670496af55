"""Everything a policy's release goes to: one server, a fleet, and object storage before them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from enginegate.errors import RepositoryError
from enginegate.operating import Member, Watch
from enginegate.policy import Policy
from enginegate.repository.fleet import Fleet
from enginegate.repository.fleet_member import FleetMember
from enginegate.repository.live import LiveRepository
from enginegate.repository.objects import ObjectRepository
from enginegate.repository.opening import open_lead
from enginegate.repository.rollout import Rollouts
from enginegate.repository.storage import ObjectStore
from enginegate.triton.answers import Statistics
from enginegate.triton.client import TritonClient
from enginegate.workspace import Workspace

_ANSWER_S = 2.0
_LOOK_S = 1.0

LiveTarget = LiveRepository | Fleet | ObjectRepository


def open_repository(
    policy: Policy,
    workspace: Workspace,
    *,
    way: str = "Python",
    pinned: frozenset[int] | None = frozenset(),
) -> LiveTarget:
    """What publishing and rolling back change, with every server that answers.

    ``pinned`` are releases that retention leaves alone; None: it deletes nothing.
    """
    target, lead = policy.target, open_lead(policy, workspace, way=way, pinned=pinned)
    local: LiveRepository | Fleet = lead
    if target.fleet:
        members = tuple(_member(each, lead) for each in target.fleet)
        goes_on = partial(Rollouts(lead.root).check_goes_on, policy.name)
        hold = Canary(lead, policy.name, policy.watch, goes_on=goes_on).hold
        local = Fleet(lead, members, canary_s=target.canary_s, hold=hold)
    return open_storage(policy, local) or local


def open_storage(policy: Policy, local: LiveRepository | Fleet) -> ObjectRepository | None:
    """The policy's object storage, which ``local`` follows; None where it names none."""
    if policy.target.objects is None:
        return None
    store = ObjectStore(policy.target.objects)
    return ObjectRepository(store, policy.name, local, keep=policy.retention.releases)


def _member(member: Member, lead: LiveRepository) -> FleetMember:
    own = replace(lead, root=member.repository or lead.root, client=_client(member.endpoint))
    return FleetMember(member.name, own, lead)


def _client(address: str) -> TritonClient | None:
    with TritonClient(address, timeout_s=_ANSWER_S) as probe:
        if not probe.live():
            return None
    return TritonClient(address)


@dataclass(frozen=True, slots=True)
class Canary:
    """Watches the first server of a fleet before the others are told.

    Attributes:
        rules: how many requests may fail, and how few decide nothing.
        goes_on: raises if somebody asked to end it.
    """

    lead: LiveRepository
    model: str
    rules: Watch
    sleep: Callable[[float], None] = time.sleep
    goes_on: Callable[[], None] = lambda: None

    def hold(self, seconds: float) -> None:
        """Look at the server's own counters for so long, then prove once more what it serves.

        Raises:
            RepositoryError: too many requests failed, or it serves something else by now.
            ServerError: it does not answer.
        """
        before, deadline = self._counters(), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.sleep(min(_LOOK_S, left))
            self.goes_on()
            self._judge(before)
        if not self.lead.serves(self.model):
            raise RepositoryError("it does not serve the new release any more")

    def _judge(self, before: Statistics) -> None:
        now = self._counters()
        failed = now.failures - before.failures
        asked = failed + now.requests - before.requests
        # One failure of three is no share yet; as many as the fewest that decide would allow is.
        if failed <= self.rules.max_error_share * max(asked, self.rules.min_requests):
            return
        raise RepositoryError(
            f"{failed} of {asked} requests failed on it; watch.max_error_share allows "
            f"{self.rules.max_error_share:.2%}"
        )

    def _counters(self) -> Statistics:
        if self.lead.client is None:
            raise RepositoryError("no live Triton answers")
        return self.lead.client.statistics(self.model)
