"""New versions of the registry, each qualified once."""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.deployments import run_deployment

from enginegate.atomic_io import write_file
from enginegate.candidate import Sha256
from enginegate.errors import EnginegateError, InputError
from enginegate.messages import counted
from enginegate.policy.model_source import ModelSource
from enginegate.policy.operating import Scan
from enginegate.records import Record
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace, now

_ATTEMPTS = 3
# On another machine nobody can see whether a start still runs, and here another process may have
# its number after a restart.
_GIVEN_UP_AFTER = timedelta(hours=24)
_log = logging.getLogger("enginegate.scan")


class Claim(Record):
    """Who starts a qualification, so that nobody else does."""

    host: str
    pid: int
    at: datetime

    def abandoned(self) -> bool:
        """Whether its process died before it said how the start ended."""
        if now() - self.at > _GIVEN_UP_AFTER:
            return True
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt to start the qualification of one version under one policy.

    Attributes:
        uri: the version.
        claim: file that only one process could make.
    """

    uri: str
    claim: Path

    @property
    def key(self) -> str:
        """The same for every attempt at one start, so that Prefect makes one run of them.

        An attempt may have asked for its run and died before it could say so.
        """
        first = self.claim.with_name("1.json")
        return f"{self.claim.parent.name[:32]}-{sha256(first.read_bytes()).hexdigest()[:32]}"

    def failed(self) -> None:
        """The next scan tries again, at most three times in all."""
        _mark(self.claim, "failed")

    def started(self) -> None:
        """It is not started again."""
        _mark(self.claim, "started")


@task(task_run_name="new-versions", cache_policy=NO_CACHE)
def new_versions(
    scan: Scan,
    model: ModelSource,
    policy_of: Callable[[str], Sha256],
    workspace: Workspace,
) -> tuple[Start, ...]:
    """Versions the policy's alias or tag stands for that nobody started yet; claimed for us.

    Args:
        scan: which versions.
        model: any version of the model.
        policy_of: the digest of the policy for a version, which tells one start from another.
        workspace: keeps who started what.

    Raises:
        InputError: the policy says nothing to scan for, or its model is not in a registry.
        TrackingError: MLflow cannot be reached.
    """
    if not model.registered or not (scan.alias or scan.tag):
        raise InputError(
            f"There is nothing to scan for {model.uri}: name an alias or a tag under [scan], and "
            "a model of the registry (models:/NAME/VERSION) under [model] uri."
        )
    name = model.location.lstrip("/").partition("@")[0].partition("/")[0]
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    found = [
        f"models:/{name}/{version}"
        for version in tracker.versions_with(name, alias=scan.alias, tag=scan.tag)
    ]
    starts = tuple(
        start for uri in found if (start := _claimed(workspace.root / "scan" / policy_of(uri), uri))
    )
    _log.info("%s with the mark, %d new", counted(len(found), "version"), len(starts))
    return starts


@task(task_run_name="start-{start.uri}", cache_policy=NO_CACHE)
def start_elsewhere(policy: Path, start: Start, deployment: str) -> None:
    """Let a worker qualify it: schedules a run of the deployment and does not wait for it.

    Raises:
        EnginegateError: Prefect has no such deployment, or does not answer.
    """
    try:
        run_deployment(
            deployment,
            parameters={"policy": str(policy), "model_uri": start.uri},
            timeout=0,
            as_subflow=False,
            idempotency_key=start.key,
        )
    except Exception as error:
        raise EnginegateError(
            f"The deployment {deployment} could not be started for {start.uri}: {error}. Deploy it "
            "(`prefect deploy --all`), or scan without one."
        ) from error


def _claimed(folder: Path, uri: str) -> Start | None:
    """The next free attempt, made ours; None when it is started, under way, or was given up."""
    for attempt in range(1, _ATTEMPTS + 1):
        claim = folder / f"{attempt}.json"
        if claim.with_suffix(".started").exists():
            return None
        if not claim.exists() and _take(claim):
            return Start(uri, claim)
        if not claim.with_suffix(".failed").exists() and not _abandoned(claim):
            return None
    _log.warning("%s failed to start %d times and is left alone: %s", uri, _ATTEMPTS, folder)
    return None


def _take(claim: Path) -> bool:
    claim.parent.mkdir(parents=True, exist_ok=True)
    ours = Claim(host=socket.gethostname(), pid=os.getpid(), at=now())
    staged = claim.with_name(f".{claim.name}.{ours.pid}")
    write_file(staged, ours.pretty_json())
    try:
        # Whole or not at all, and only if nobody else was first.
        os.link(staged, claim)
    except FileExistsError:
        return False
    finally:
        staged.unlink(missing_ok=True)
    return True


def _abandoned(claim: Path) -> bool:
    try:
        return Claim.read(claim).abandoned()
    except InputError:
        return True


def _mark(claim: Path, how: str) -> None:
    write_file(claim.with_suffix(f".{how}"), b"")
