"""What may be deleted of what is kept: `plan_scope` says it, `prune_scope` does it."""

from enginegate.retention.plan import KeptTotal, PrunePlan, Reason, StoredEntry
from enginegate.retention.prune import (
    PruneOutcome,
    PruneScope,
    plan_scope,
    prune_scope,
)
from enginegate.retention.running import RunsUnderWay, marked_as_running

__all__ = [
    "KeptTotal",
    "PruneOutcome",
    "PrunePlan",
    "PruneScope",
    "Reason",
    "RunsUnderWay",
    "StoredEntry",
    "marked_as_running",
    "plan_scope",
    "prune_scope",
]
