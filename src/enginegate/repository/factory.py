"""The target that a policy's tables name: one server, a fleet, or object storage before them."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from enginegate.object_storage import ObjectStore
from enginegate.policy.operating import LiveTables, ServerEntry
from enginegate.repository.deploy.gpu_room import GpuRoom
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.rollout.canary import Canary, CanaryAnalysis, Judge
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.object_repository import LEASE_S, ObjectRepository
from enginegate.repository.rollout.target import FleetServer, LocalTarget, Target
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses, live_addresses, live_client
from enginegate.triton.gpu_memory import server_memory
from enginegate.workspace import Workspace

# Names the kind of device of this host's server, where object storage is before several hosts.
DEVICE_HERE = "ENGINEGATE_DEVICE"
# A port that is closed says so at once; a server that is busy takes its time.
_ANSWER_S = 10.0


def open_target(
    tables: LiveTables,
    workspace: Workspace,
    *,
    channel: str = "Python",
    pinned: frozenset[int] | None = frozenset(),
    judge: Judge | None = None,
) -> Target:
    """Open whatever publishing and rolling back change, with every server that answers.

    Args:
        tables: of the policy whose release it is.
        workspace: keys, and checks of a canary.
        channel: how it is changed, for the audit log.
        pinned: releases that retention leaves alone; None: it deletes nothing.
        judge: of the checks of a fleet's canary; None: only its failed requests are counted.
    """
    target, primary = tables.target, open_primary(tables, workspace, channel=channel, pinned=pinned)
    local: LocalTarget = primary
    if target.fleet:
        # Each may take its time to say that it is there, and a rollback waits for all of them.
        with ThreadPoolExecutor(len(target.fleet)) as pool:
            servers = tuple(pool.map(partial(_server, primary=primary), target.fleet))
        analysis = CanaryAnalysis(judge, live_addresses(target), workspace) if judge else None
        canary = Canary(primary, tables.model, tables.watch, analysis=analysis)
        local = Fleet(primary, servers, target.canary_s, canary.analyse)
    return open_storage(tables, local) or local


def open_primary(
    tables: LiveTables,
    workspace: Workspace,
    *,
    channel: str = "Python",
    pinned: frozenset[int] | None = frozenset(),
) -> LiveRepository:
    """Open this host's own live repository, with its server if it answers; no fleet, no storage."""
    return LiveRepository(
        root=tables.target.repository,
        client=live_client(tables.target),
        load_timeout_s=tables.target.load_timeout_s,
        keep=tables.retention.releases,
        signing=ReleaseSigning.of(tables.signing, workspace),
        channel=channel,
        pinned=pinned,
        gpu_room=GpuRoom(
            tables.target.when_memory_is_short,
            lambda: server_memory(live_addresses(tables.target)),
        ),
        device=(tables.device and os.environ.get(DEVICE_HERE)) or tables.device,
    )


def open_storage(tables: LiveTables, local: LocalTarget) -> ObjectRepository | None:
    """Open the object storage that ``local`` replicates; None where the tables name none."""
    if tables.target.objects is None:
        return None
    store, lease_s = ObjectStore(tables.target.objects), LEASE_S + tables.target.canary_s
    return ObjectRepository(store, tables.model, local, tables.retention.releases, lease_s)


def _server(entry: ServerEntry, primary: LiveRepository) -> FleetServer:
    with TritonClient(entry.endpoint, timeout_s=_ANSWER_S) as probe:
        client = TritonClient(entry.endpoint) if probe.live() else None
    addresses = LiveAddresses(grpc=entry.endpoint, metrics=entry.metrics)
    own = replace(
        primary,
        root=entry.repository or primary.root,
        client=client,
        device=entry.device or primary.device,
        gpu_room=replace(primary.gpu_room, read=partial(server_memory, addresses)),
    )
    return FleetServer(entry.name, own, primary)
