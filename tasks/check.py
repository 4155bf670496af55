"""A policy against what is here, before the first build."""

import logging
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.policy import Policy
from enginegate.policy.hooks import importable_from
from enginegate.preflight import check_policy
from enginegate.triton.install import find_triton
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.check")


@task(task_run_name="check", cache_policy=NO_CACHE)
def check(policy: Policy, origin: Path, workspace: Workspace) -> None:
    """Refuse what could only fail later; say what will be inconclusive.

    Raises:
        PolicyError: the policy names a file or a function that is not there, or a type that cannot
            be served or recorded.
        ServerError: there is no Triton to benchmark with.
    """
    if policy.root is not None:
        importable_from(policy.root)
    found = check_policy(policy)
    found.refuse(origin)
    find_triton(workspace.root / "triton")
    for candidate, obstacle in found.undecidable.items():
        _log.info("%s will be inconclusive: %s", candidate, obstacle.why)
    for note in found.notes:
        _log.warning("will be inconclusive: %s", note)
