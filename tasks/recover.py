"""What a killed promotion or rollback left in the live repository, found by the next flow."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.errors import EnginegateError
from enginegate.policy.operating import LiveTables
from enginegate.repository import open_target
from enginegate.workspace import Workspace
from validation.live import judge_reading

_log = logging.getLogger("enginegate.repository")


@task(task_run_name="pick-up", cache_policy=NO_CACHE)
def recover_interrupted(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Finish or undo what was cut short; one sentence for each operation found.

    A repository that somebody is changing, or that cannot be recovered now, is left to the next
    flow: the log says so, and this one goes on. Without a repository there is nothing to do.
    """
    if not tables.target.repository.is_dir():
        return ()
    try:
        # With object storage this may bring a new release here, by a canary's window.
        repository = open_target(tables, workspace, channel="Prefect", judge=judge_reading)
        said = repository.recover()
    except EnginegateError as error:
        _log.warning("the live repository was not looked through for what was cut short: %s", error)
        return ()
    for sentence in said:
        _log.warning("%s", sentence)
    return said
