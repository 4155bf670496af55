"""Deleting what nothing refers to any more: runs that Prefect knows of, and the scheduled part."""

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import EnginegateError
from enginegate.messages import byte_size, counted
from enginegate.policy import Policy, read_policy
from enginegate.redact import masked
from enginegate.retention import PruneScope, RunsUnderWay, plan_scope, prune_scope
from enginegate.workspace import Workspace, now
from tasks.prefect_server import REFUSALS, flow_runs, quick_client

_log = logging.getLogger("enginegate.retention")
_FLOWS = FlowFilter(
    name=FlowFilterName(any_=["qualify", "qualify-device", "benchmark", "promote", "rollback"])
)
_UNFINISHED = FlowRunFilter(
    state=FlowRunFilterState(
        type=FlowRunFilterStateType(
            any_=[
                StateType.SCHEDULED,
                StateType.PENDING,
                StateType.RUNNING,
                StateType.CANCELLING,
                StateType.PAUSED,
            ]
        )
    )
)
# A run whose host died is RUNNING for ever where nobody watches heartbeats. No qualification takes
# a week, so that such a run holds nothing back for longer.
_LONGEST_RUN = timedelta(days=7)
# The watch runs every ten minutes; what is deleted is at least a day old.
_PRUNE_EVERY = timedelta(days=1)


def unfinished_runs() -> RunsUnderWay:
    """Runs on Prefect's server that have not ended, suspended promotions included.

    Where no server is named, there is none that could have suspended a run.

    Raises:
        EnginegateError: the server does not answer, so that it is not known what runs need.
    """
    server = PREFECT_API_URL.value()
    if not server:
        return RunsUnderWay()
    try:
        with quick_client() as client:
            runs = list(flow_runs(client, _UNFINISHED, flows=_FLOWS))
    except REFUSALS as error:
        raise EnginegateError(
            f"Prefect's server {masked(server)} could not be asked which runs are under way, and "
            f"which promotions are suspended: {masked(str(error))}. Nothing is deleted without "
            "knowing. See whether it runs, and try again."
        ) from error
    named = (str(run.parameters.get("scorecard") or "") for run in runs)
    began = [run.start_time for run in runs if run.start_time and _may_be_alive(run.start_time)]
    return RunsUnderWay(
        frozenset(str(run.id) for run in runs),
        min(began, default=None),
        frozenset(scorecard for scorecard in named if scorecard),
    )


def _may_be_alive(began: datetime) -> bool:
    return now() - began < _LONGEST_RUN


def prune_on_schedule(policy: Policy, workspace: Workspace) -> tuple[str, ...]:
    """Delete what every policy of the project lets the watch delete, once a day.

    It fails no watch: what it could not find out is logged, and it tries again the next day.

    Args:
        policy: the one that is watched.
        workspace: that of the project.

    Returns:
        A sentence if something was deleted or could not be.
    """
    if policy.retention.unused_days is None:
        return ()
    stamp = workspace.cursors / "pruned"
    try:
        with file_lock(workspace.cursors / ".pruned.lock"):
            if not _is_due(stamp):
                return ()
            write_file(stamp, b"")
            return _pruned(policy, workspace)
    except TimeoutError:
        return ()  # another policy's watch does it now
    except (EnginegateError, OSError) as error:
        _log.warning("nothing was pruned: %s", error)
        return (f"Nothing was pruned: {error}",)


def _is_due(stamp: Path) -> bool:
    try:
        return now().timestamp() - stamp.stat().st_mtime >= _PRUNE_EVERY.total_seconds()
    except FileNotFoundError:
        return True


def _pruned(policy: Policy, workspace: Workspace) -> tuple[str, ...]:
    policies = [policy, *_others(policy)]
    unasked = sorted(each.name for each in policies if each.retention.unused_days is None)
    if unasked:
        _log.info("nothing is pruned: no retention.unused_days in %s", ", ".join(unasked))
        return ()
    days = max(each.retention.unused_days or 0 for each in policies)
    scope = scope_of(policies, workspace, unused_for=timedelta(days=days))
    outcome = prune_scope(scope, plan_scope(scope))
    for place, why in outcome.failed.items():
        _log.warning("%s could not be deleted: %s", place, why)
    if not outcome.deleted:
        return ()
    count = counted(len(outcome.deleted), "entry", "entries")
    said = f"Deleted what nothing refers to, and nobody used for {days} days"
    sentence = f"{said}: {count} of {byte_size(outcome.freed_bytes)}."
    _log.info("%s", sentence)
    return (sentence,)


def _others(policy: Policy) -> Iterator[Policy]:
    """The other policies of a project, whose releases and scorecards are in the same workspace."""
    folder = (policy.root or Path.cwd()) / "policies"
    for path in sorted(folder.glob("*.toml")):
        opened = read_policy(path)
        if opened.digest != policy.digest:
            yield opened


def scope_of(
    policies: Sequence[Policy],
    workspace: Workspace,
    *,
    unused_for: timedelta,
    keep: int | None = None,
    retired: frozenset[str] = frozenset(),
) -> PruneScope:
    """What is pruned under several policies; runs that Prefect knows of count."""
    stores = (device.store for each in policies for device in each.devices.values())
    return PruneScope(
        workspace=workspace,
        tables=tuple(each.live_tables for each in policies),
        unused_for=unused_for,
        part_stores=tuple(sorted({store for store in stores if store})),
        keep=keep,
        retired=retired,
        elsewhere=unfinished_runs,
    )
