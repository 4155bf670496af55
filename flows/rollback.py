"""Live repository -> an earlier release. Needs the folder and the server, nothing else."""

from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows.notices import notify_of_releases
from flows.run_names import rollback_name
from tasks.artifacts import show_live
from tasks.release import roll_back_to, update_mlflow
from tasks.release_events import announce_releases


@flow(
    name="rollback",
    flow_run_name=rollback_name,
    persist_result=False,
    validate_parameters=False,
)
def rollback(policy: Path, to: int | None = None, reason: str = "") -> Release:
    """Make an earlier release live again, proved like a promotion.

    Args:
        policy: the model family's policy file.
        to: release number; by default the one that the live release replaced.
        reason: why; kept in the audit log.
    """
    opened = read_policy(Path(policy))
    tables, workspace = opened.live_tables, Workspace.of(opened)
    release = roll_back_to(tables, workspace, to, reason)
    update_mlflow(tables, workspace)
    announce_releases(tables.target.repository, workspace)
    show_live(tables, policy, workspace)
    notify_of_releases(tables, workspace)
    return release
