"""Looking after recorded traffic and the live repository."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.policy import Policy
from enginegate.repository import LiveRepository, verify
from enginegate.shadow import expire, recover
from enginegate.triton.live import live_client
from enginegate.workspace import Workspace, now

_log = logging.getLogger("enginegate.watch")


@task(task_run_name="expire-shadow", cache_policy=NO_CACHE)
def expire_shadow(rules: Policy) -> tuple[str, ...]:
    """Delete samples older than the policy's limit, and end recordings whose process died."""
    home, days = Workspace.here().shadow, rules.retention.shadow_days
    deleted = expire(home, days, now())
    done = [f"{path.name} was deleted: it was older than {days} days." for path in deleted]
    done += recover(home)
    for sentence in done:
        _log.info("%s", sentence)
    return tuple(done)


@task(task_run_name="verify-live", cache_policy=NO_CACHE)
def verify_live(rules: Policy) -> tuple[str, ...]:
    """What is wrong with the live repository and its server; nothing is changed."""
    repository = LiveRepository(rules.target.repository, live_client(rules.target))
    found = [check for check in verify(repository) if check.problem]
    for check in found:
        _log.error("%s: %s", check.subject, check.problem)
    return tuple(f"{check.subject}: {check.problem}" for check in found)
