"""Live repository -> an earlier release. Needs the folder and the server, nothing else."""

from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.policy import read_policy
from tasks.release import follow_with_champion, go_back
from tasks.release_events import announce_releases


@flow(name="rollback", persist_result=False, validate_parameters=False)
def rollback(policy: Path, to: int | None = None, reason: str = "") -> Release:
    """Make an earlier release live again, proved like a promotion.

    Args:
        policy: the model family's policy file.
        to: release number; by default the one that the live release replaced.
        reason: why; kept in the audit log.
    """
    rules = read_policy(Path(policy))
    release = go_back(rules, to, reason)
    follow_with_champion(rules, release)
    announce_releases(rules)
    return release
