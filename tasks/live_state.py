"""What is live of a model, as one artifact in Prefect whose history is the model's timeline."""

import logging
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.errors import EnginegateError
from enginegate.policy.operating import LiveTables
from enginegate.report import live_timeline
from enginegate.repository import AuditLog, Layout
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace
from tasks.run_page import RunArtifact, artifact_key, extend_history

_log = logging.getLogger("enginegate.live_state")


@task(task_run_name="show-live-{tables.model}", cache_policy=NO_CACHE)
def show_live(tables: LiveTables, policy: Path, workspace: Workspace) -> None:
    """Show in Prefect what is live and whether it keeps its promise.

    The artifact of the model's key is renewed while nothing happens, and gets a successor when
    something does. A repository that cannot be read is others' to report.
    """
    layout = Layout(tables.target.repository, tables.model)
    try:
        current = layout.current()
        release = layout.release(current.version) if current else None
        checks = WatchLog.at(workspace, release).read() if release else ()
        events = AuditLog(layout.root).read() if layout.root.is_dir() else ()
        held = layout.held_to(release) if release else None
    except EnginegateError as error:
        _log.warning("Prefect is not shown what is live: %s", error)
        return
    shown = live_timeline(tables.model, held, events, checks, policy=str(policy))
    place = tables.target.objects or str(layout.root.resolve())
    extend_history(
        RunArtifact(
            artifact_key("live", tables.model), "markdown", shown.markdown, shown.state, place
        )
    )
