"""Everything a policy's release goes to: one server, a fleet, and object storage before them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from enginegate.policy.operating import LiveTables, ServerEntry
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.rollout.canary import Canary, CanaryAnalysis, Judge
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.fleet_server import FleetServer
from enginegate.repository.rollout.object_repository import LEASE_S, ObjectRepository
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.store.object_client import ObjectStore
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import live_addresses, live_client
from enginegate.workspace import Workspace

# A port that is closed says so at once; a server that is busy takes its time.
_ANSWER_S = 10.0

LiveTarget = LiveRepository | Fleet | ObjectRepository


def open_lead(
    tables: LiveTables,
    workspace: Workspace,
    *,
    way: str = "Python",
    pinned: frozenset[int] | None = frozenset(),
) -> LiveRepository:
    """The policy's own live repository, with its server if one answers; not the rest of a fleet."""
    target = tables.target
    return LiveRepository(
        root=target.repository,
        client=live_client(target),
        load_timeout_s=target.load_timeout_s,
        keep=tables.retention.releases,
        signing=ReleaseSigning.of(tables.signing, workspace),
        way=way,
        pinned=pinned,
    )


def open_repository(
    tables: LiveTables,
    workspace: Workspace,
    *,
    way: str = "Python",
    pinned: frozenset[int] | None = frozenset(),
    judge: Judge | None = None,
) -> LiveTarget:
    """What publishing and rolling back change, with every server that answers.

    Args:
        tables: of the policy whose release it is.
        workspace: keys, and looks at a canary.
        way: how it is changed, for the audit log.
        pinned: releases that retention leaves alone; None: it deletes nothing.
        judge: of the looks at a fleet's canary; None: only its failed requests are counted.
    """
    target, lead = tables.target, open_lead(tables, workspace, way=way, pinned=pinned)
    local: LiveRepository | Fleet = lead
    if target.fleet:
        # Each may take its time to say that it is there, and a rollback waits for all of them.
        with ThreadPoolExecutor(len(target.fleet)) as pool:
            members = tuple(pool.map(partial(_member, lead=lead), target.fleet))
        canary = Canary(
            lead,
            tables.model,
            tables.watch,
            goes_on=partial(RolloutState(lead.root).check_goes_on, tables.model),
            looking=CanaryAnalysis(judge, live_addresses(target), workspace) if judge else None,
        )
        local = Fleet(lead, members, canary_s=target.canary_s, hold=canary.hold)
    return open_storage(tables, local) or local


def open_storage(tables: LiveTables, local: LiveRepository | Fleet) -> ObjectRepository | None:
    """The policy's object storage, which ``local`` follows; None where it names none."""
    if tables.target.objects is None:
        return None
    store = ObjectStore(tables.target.objects)
    return ObjectRepository(
        store,
        tables.model,
        local,
        keep=tables.retention.releases,
        lease_s=LEASE_S + tables.target.canary_s,
    )


def _member(member: ServerEntry, lead: LiveRepository) -> FleetServer:
    own = replace(lead, root=member.repository or lead.root, client=_client(member.endpoint))
    return FleetServer(member.name, own, lead)


def _client(address: str) -> TritonClient | None:
    with TritonClient(address, timeout_s=_ANSWER_S) as probe:
        if not probe.live():
            return None
    return TritonClient(address)
