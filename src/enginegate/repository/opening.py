"""This host's live repository of a policy, with its server, its keys and its audit log."""

from enginegate.policy.operating import LiveTables
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.promotion import LiveRepository
from enginegate.triton.endpoint import live_client
from enginegate.workspace import Workspace


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
