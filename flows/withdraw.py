"""Live repository -> nothing live. For a release before which nothing was."""

from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows.notices import notify_of_releases
from flows.run_names import withdrawal_name
from tasks.artifacts import show_live
from tasks.release import update_mlflow, withdraw_first
from tasks.release_events import announce_releases


@flow(
    name="withdraw",
    flow_run_name=withdrawal_name,
    persist_result=False,
    validate_parameters=False,
)
def withdraw(policy: Path, reason: str, who: str = "") -> Release:
    """Unload the live release that nothing was before; nothing is live afterwards.

    Args:
        policy: the model family's policy file.
        reason: why; kept in the audit log.
        who: the person's name; empty: whoever runs this process.

    Returns:
        What was live.
    """
    opened = read_policy(Path(policy))
    tables, workspace = opened.live_tables, Workspace.of(opened)
    release = withdraw_first(tables, workspace, who, reason)
    update_mlflow(tables, workspace)
    announce_releases(tables.target.repository, workspace)
    show_live(tables, policy, workspace)
    notify_of_releases(tables, workspace)
    return release
