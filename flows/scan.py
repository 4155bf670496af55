"""Scheduled: new versions in the registry -> qualify, once each."""

from pathlib import Path

from prefect import flow

from enginegate.errors import EnginegateError
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows.qualify import qualify
from flows.run_names import scan_name
from tasks.release import recover_interrupted
from tasks.scan import Start, new_versions, start_elsewhere


@flow(
    name="scan",
    flow_run_name=scan_name,
    persist_result=False,
    validate_parameters=False,
)
def scan(policy: Path, deployment: str | None = None) -> tuple[str, ...]:
    """Start `qualify` for each version that carries the policy's alias or tag and is new.

    Args:
        policy: the model family's policy file.
        deployment: who qualifies, e.g. ``qualify/qualify-digits``, without waiting; none: this
            process.

    Returns:
        The versions that were started.

    Raises:
        EnginegateError: some could not be started; the next scan tries those again, three times at
            most, and the message lists them.
    """
    opened = read_policy(Path(policy))
    workspace = Workspace.of(opened)
    recover_interrupted(opened.live_tables, workspace)
    problems, started = [], []
    starts = new_versions(opened.scan, opened.model, opened.digest_for, workspace)
    for start in starts:
        try:
            _start(Path(policy), start, deployment)
        except EnginegateError as error:
            problems.append(f"{start.uri}: {error}")
        else:
            started.append(start.uri)
    if problems:
        raise EnginegateError("\n".join(problems))
    return tuple(started)


def _start(policy: Path, start: Start, deployment: str | None) -> None:
    try:
        if deployment is None:
            qualify(policy, start.uri)
        else:
            start_elsewhere(policy, start, deployment)
    except BaseException:
        start.failed()
        raise
    start.started()
