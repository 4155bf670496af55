"""Work pools that make parts of a qualification: their runs, waited for and taken over.

A part that is there is not run; a run that is under way is waited for; one whose process or host
died is started again, at most `_ATTEMPTS` times in one qualification. Prefect's server and its
database may restart meanwhile.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.events.filters import (
    EventFilter,
    EventNameFilter,
    EventOccurredFilter,
    EventResourceFilter,
)
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed

from enginegate.devices import (
    DeviceQualification,
    PartIdentity,
    PartStore,
    fetch_part,
    known_part,
)
from enginegate.errors import EnginegateError
from enginegate.object_storage import ObjectStore
from enginegate.policy.devices import DeviceKind
from enginegate.redact import masked
from enginegate.workspace import Workspace
from tasks.prefect_server import REFUSALS, may_pass

FLOW = "qualify-device"
_ENTRYPOINT = "flows.qualify_device.qualify_device"
_log = logging.getLogger("enginegate.devices")
# More than a host that dies by accident, fewer than a part that kills every worker it gets.
_ATTEMPTS = 3
_POLL_S = 2.0
# Prefect's heartbeats come every 30 s: six that are missing are no hiccup of a network.
_SILENT_S = 180.0
# From being taken by a worker to running; an image that is pulled takes minutes.
_STARTING_S = 900.0
# Workers ask every 10 s by default; a minute without one is worth a line, and no reason to end.
_UNTAKEN_S = 60.0
# A server or its database that is upgraded is back by then; one that is gone is told before a
# person gives up on the line that says so.
_AWAY_S = 600.0
_HEARTBEAT = "prefect.flow-run.heartbeat"
_Answer = TypeVar("_Answer")
_RUNNING = frozenset({StateType.RUNNING, StateType.CANCELLING})


def is_made(identity: PartIdentity, kind: DeviceKind, workspace: Workspace) -> bool:
    """Whether workspace or object storage has that part, and nothing of it broke.

    Raises:
        RepositoryError: storage cannot be reached or refuses.
        TamperedError: what is in storage is not what its record says.
    """
    store = ObjectStore(kind.store) if kind.store else None
    return known_part(identity, workspace, store) is not None


@task(task_run_name="check-pools", cache_policy=NO_CACHE)
def check_pools(kinds: Mapping[str, DeviceKind]) -> None:
    """Refuse work pools that Prefect's server does not have, before any other is put to work.

    Args:
        kinds: by name: those whose part is not made yet.

    Raises:
        EnginegateError: names each pool that is missing, or the server cannot be asked.
    """
    named = {name: kind.pool for name, kind in kinds.items() if kind.pool}
    if not named or not PREFECT_API_URL.value():
        return  # `qualify_on_pool` says what is missing then
    missing = {}
    try:
        with get_client(sync_client=True) as client:
            for name, pool in named.items():
                try:
                    client.read_work_pool(pool)
                except ObjectNotFound:
                    missing[name] = pool
    except REFUSALS as error:
        raise EnginegateError(
            f"Prefect's server could not be asked for its work pools: {masked(str(error))}"
        ) from error
    if missing:
        lines = "\n".join(f"  {name}: {pool!r}" for name, pool in missing.items())
        pool = next(iter(missing.values()))
        raise EnginegateError(
            f"Prefect's server has no work pool of the name that the policy gives to:\n{lines}\n"
            "Nothing was started. Correct the policy, or make the pool, such as with "
            f"`prefect work-pool create {pool} --type process`, and start a worker of it."
        )


@task(task_run_name="qualify-on-{identity.device}", cache_policy=NO_CACHE)
def qualify_on_pool(
    identity: PartIdentity, kind: DeviceKind, policy: Path, workspace: Workspace
) -> DeviceQualification:
    """The part of one kind of device: from the workspace, else made by a worker of its pool.

    Args:
        identity: of the part.
        kind: names the pool.
        policy: the policy's file, as workers see it.
        workspace: where workers keep their parts.

    Raises:
        EnginegateError: there is no pool and no part, the run failed, or it took too long.
    """
    device, store = identity.device, ObjectStore(kind.store) if kind.store else None
    found = known_part(identity, workspace, store)
    if found is not None:
        when = f"{found.made_at:%Y-%m-%d %H:%M}"
        _log.info("%s: qualified at %s by %s", found.device, when, found.made_by)
        return found
    if not kind.pool:
        raise EnginegateError(_nobody(identity, policy, workspace))
    if not PREFECT_API_URL.value():
        raise EnginegateError(
            f"Workers of the pool {kind.pool!r} qualify {device}, and they need Prefect's server: "
            "set PREFECT_API_URL to the one they ask. On a machine that has such a device, "
            f"`enginegate qualify {policy} --device {device}` needs none."
        )
    parameters = {
        "policy": str(policy),
        "device": device,
        "model_uri": identity.model_uri,
    }
    try:
        with get_client(sync_client=True) as client:
            deployment = _deployment(client, identity, kind)
            runs = PartRuns(
                client,
                deployment,
                parameters,
                identity.digest,
                kind.wait_hours * 3600,
                pool=kind.pool,
            )
            runs.finish()
    except REFUSALS as error:
        raise EnginegateError(
            f"Prefect's server could not be asked for {device}: {masked(str(error))}. What was "
            "started goes on; qualify again to wait for it."
        ) from error
    fetched = fetch_part(identity, workspace, store) if store is not None else None
    part = fetched or PartStore(workspace).find(identity)
    if part is None:
        raise EnginegateError(_lost(identity, kind, workspace))
    return part


@dataclass(slots=True)
class PartRuns:
    """The runs of one part on its pool: at most one at a time, and one more after a death.

    Attributes:
        deployment: whose runs they are.
        key: of the part; with a number it is a run's idempotency key, so that a qualification
            that was killed finds its run again.
        limit_s: how long all of it may take.
        pool: whose workers take them.
        clock: monotonic seconds.
    """

    client: SyncPrefectClient
    deployment: str
    parameters: Mapping[str, Any]
    key: str
    limit_s: float
    pool: str = field(kw_only=True)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _number: int = field(default=0, init=False)
    _away_s: float = field(default=0.0, init=False)

    def finish(self) -> None:
        """Return once a run has completed.

        Raises:
            EnginegateError: one failed or was cancelled, as many died as may, or time is over.
        """
        deadline_s = self.clock() + self.limit_s
        for _ in range(_ATTEMPTS):
            run = self._asked(self._next)
            ended = self._wait(run, deadline_s)
            if ended is None:
                _log.warning("%s died, so another run takes over what is left", run.name)
                continue
            state = ended.state
            if state is not None and state.type is StateType.COMPLETED:
                return
            words = f"{state.name}: {state.message or 'no reason was given'}" if state else "lost"
            raise EnginegateError(
                f"{self.deployment} did not end well ({run.name}): {masked(words)}\n"
                "Its log on Prefect's pages says more. What it finished is kept; mend that, then "
                "qualify again."
            )
        raise EnginegateError(
            f"{_ATTEMPTS} runs of {self.deployment} died one after the other. The logs of its "
            "workers say why: memory that ran out, or a host that was taken away. What they "
            "finished is kept; qualify again to go on."
        )

    def _next(self) -> FlowRun:
        """The run that is under way, else a new one; runs that ended before are passed over."""
        while True:
            # Typed as a coroutine too, which it is where it is awaited.
            run = cast(
                "FlowRun",
                run_deployment(
                    self.deployment,
                    parameters=dict(self.parameters),
                    timeout=0,
                    idempotency_key=f"{self.key}-{self._number + 1}",
                ),
            )
            self._number += 1
            if run.state is None or not run.state.is_final():
                _log.info("%s: %s", self.deployment, run.name)
                return run

    def _wait(self, run: FlowRun, deadline_s: float) -> FlowRun | None:
        """The run once it ended; None: it died, and is marked as crashed.

        Raises:
            EnginegateError: time is over; the run goes on.
        """
        signs, untaken = SignsOfLife(self._while_answering), Once(self.clock, _UNTAKEN_S)
        while True:
            run, heartbeat = self._asked(partial(self._seen, run))
            state = run.state
            if state is not None and state.is_final():
                return None if state.type is StateType.CRASHED else run
            if state is not None and signs.are_over(state.type, heartbeat):
                died: State[Any] = Crashed(
                    message="no heartbeat came any more, so another run takes over"
                )
                self._asked(partial(self.client.set_flow_run_state, run.id, died, force=True))
                return None
            if state is not None and state.type is StateType.SCHEDULED and untaken.is_due():
                _log.warning(
                    "no worker of the pool %r has taken %s for %d s; if none runs, start one on a "
                    "machine that has the device: prefect worker start --pool %s",
                    self.pool,
                    run.name,
                    _UNTAKEN_S,
                    self.pool,
                )
            if self.clock() > deadline_s:
                raise EnginegateError(
                    f"{self.deployment} has not ended after {self.limit_s / 3600:g} h, by "
                    f"wait_hours of its device; its run {run.name} is "
                    f"{state.name if state else 'unknown'}. If it is late, no worker of that pool "
                    "runs. Qualify again to wait on."
                )
            self.sleep(_POLL_S)

    def _seen(self, run: FlowRun) -> tuple[FlowRun, UUID | None]:
        """The run as it is now, and its last heartbeat."""
        now = self.client.read_flow_run(run.id)
        return now, self._last_heartbeat(now)

    def _while_answering(self) -> float:
        """Seconds, without those in which the server was away and took no heartbeat."""
        return self.clock() - self._away_s

    def _asked(self, ask: Callable[[], _Answer]) -> _Answer:
        """What Prefect's server answers; while it or its database is away, it is asked again.

        Raises:
            Exception: it refuses, or is away for too long.
        """
        since_s: float | None = None
        while True:
            try:
                answer = ask()
            except REFUSALS as error:
                if not may_pass(error):
                    raise
                if since_s is None:
                    since_s = self.clock()
                    _log.warning(
                        "Prefect's server does not answer (%s); the runs go on, and it is asked "
                        "again for %d s",
                        masked(str(error)).partition("\n")[0],
                        _AWAY_S,
                    )
                if self.clock() - since_s > _AWAY_S:
                    raise
                self.sleep(_POLL_S)
            else:
                if since_s is not None:
                    self._away_s += self.clock() - since_s
                    _log.info("Prefect's server answers again")
                return answer

    def _last_heartbeat(self, run: FlowRun) -> UUID | None:
        """The newest heartbeat's id: the run's process lives while it changes."""
        if run.state is None or run.state.type not in _RUNNING:
            return None
        since = run.start_time or run.created or datetime.now(tz=UTC)
        wanted = EventFilter(
            event=EventNameFilter(name=[_HEARTBEAT]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
            occurred=EventOccurredFilter(since=since),
        )
        events = self.client.read_events(wanted, limit=1).events
        return events[0].id if events else None


@dataclass(slots=True)
class Once:
    """Due a single time, once so many seconds have passed since it was made."""

    clock: Callable[[], float]
    after_s: float
    _since_s: float = field(init=False)
    _was_due: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def is_due(self) -> bool:
        """Whether it is time, and nobody was told so."""
        if self._was_due or self.clock() - self._since_s < self.after_s:
            return False
        self._was_due = True
        return True


@dataclass(slots=True)
class SignsOfLife:
    """Whether a run that does not end still lives, by what is seen of it and this host's clock.

    A run that never sent a heartbeat (they can be turned off) is believed to live.
    """

    clock: Callable[[], float]
    _seen: object = field(default=None, init=False)
    _since_s: float = field(default=0.0, init=False)

    def are_over(self, state: StateType, heartbeat: UUID | None) -> bool:
        """Whether nothing new was seen for too long.

        Args:
            state: of the run now.
            heartbeat: its newest one.
        """
        seen = (state, heartbeat)
        if seen != self._seen:
            self._seen, self._since_s = seen, self.clock()
        silent_s = self.clock() - self._since_s
        if state is StateType.PENDING:
            return silent_s > _STARTING_S
        return state in _RUNNING and heartbeat is not None and silent_s > _SILENT_S


def _nobody(identity: PartIdentity, policy: Path, workspace: Workspace) -> str:
    device, near = identity.device, PartStore(workspace).near(identity)
    so_far = f" ({near})" if near else ""
    here = f"enginegate qualify {policy} --device {device}"
    carry = f"enginegate evidence export FILE --device {device}"
    return (
        f"Nobody has qualified {identity.model_uri} on {device}, and the policy names no work pool "
        f"for it{so_far}. On a machine that has such a device run `{here}` and `{carry}`, bring "
        "FILE here, run `enginegate evidence import FILE`, then qualify again."
    )


def _lost(identity: PartIdentity, kind: DeviceKind, workspace: Workspace) -> str:
    near = PartStore(workspace).near(identity)
    found = f"The run on {kind.pool} ended well, and {workspace.root} has no such part"
    found += f" ({near})" if near else ""
    return (
        f"{found}. Workers must have the workspace that this host has (a shared folder, named by "
        "ENGINEGATE_HOME for both, with the policy and its data in the same place), or leave their "
        f"part in object storage: set devices.{identity.device}.store in the policy."
    )


def _deployment(client: SyncPrefectClient, identity: PartIdentity, kind: DeviceKind) -> str:
    """The deployment on the device's pool, made on first use; its name.

    Raises:
        EnginegateError: one of that name is on another pool.
    """
    name = f"{identity.model}-{identity.device}"
    full = f"{FLOW}/{name}"
    try:
        there = client.read_deployment_by_name(full)
    except ObjectNotFound:
        like = _own_deployment(client)
        client.create_deployment(
            client.create_flow_from_name(FLOW),
            name=name,
            description=f"Build, judge and benchmark {identity.model} on {identity.device}.",
            entrypoint=_ENTRYPOINT,
            work_pool_name=kind.pool,
            tags=["enginegate", "qualify"],
            enforce_parameter_schema=False,
            **like,
        )
        return full
    if there.work_pool_name != kind.pool:
        raise EnginegateError(
            f"The deployment {full} is on the pool {there.work_pool_name!r}, and the policy says "
            f"{kind.pool!r} for {identity.device}. Delete the deployment, so that it is made anew, "
            "or correct the policy."
        )
    return full


def _own_deployment(client: SyncPrefectClient) -> dict[str, Any]:
    """How workers find the code: as the deployment of this run says, else in this folder."""
    context = FlowRunContext.get()
    own = context.flow_run.deployment_id if context and context.flow_run else None
    if own is not None:
        deployment = client.read_deployment(own)
        return {
            "pull_steps": deployment.pull_steps or [],
            "job_variables": deployment.job_variables or {},
        }
    return {
        "pull_steps": [{"enginegate.pipeline.enter_project": {"directory": str(Path.cwd())}}],
        "job_variables": {
            "env": {
                "PREFECT_LOGGING_EXTRA_LOGGERS": "enginegate",
                "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
                # The server's answer while its database restarts.
                "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
            }
        },
    }
