"""Live repository -> nothing live. For a release before which nothing was."""

from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.policy import read_policy
from tasks.release import say_withdrawn, withdraw_first
from tasks.release_events import announce_releases


@flow(name="withdraw", persist_result=False, validate_parameters=False)
def withdraw(policy: Path, reason: str, who: str = "") -> Release:
    """Unload the live release that nothing was before; nothing is live afterwards.

    Args:
        policy: the model family's policy file.
        reason: why; kept in the audit log.
        who: the person's name; empty: whoever runs this process.

    Returns:
        What was live.
    """
    rules = read_policy(Path(policy))
    release = withdraw_first(rules, who, reason)
    say_withdrawn(rules, release)
    announce_releases(rules)
    return release
