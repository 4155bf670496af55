"""Parts of a qualification: one for each kind of device, made where such a device is.

Prefect's work pools run them. A part is kept by content, so one that is there is not run; a run
that is under way is waited for; and one whose process or host died is started again, at most
`_ATTEMPTS` times in one qualification. What the dead run had finished is not done again.
"""

import logging
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
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

from enginegate.candidate import Engine, FileDigest, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.data_sources import load_data
from enginegate.devices import (
    DeviceQualification,
    PartIdentity,
    PartStore,
    StoredEngine,
    fetch_part,
    push_part,
    stored_engine,
)
from enginegate.engines import open_engine
from enginegate.engines.cuda import gpu
from enginegate.errors import EnginegateError
from enginegate.evidence import DeviceEvidence, Outcome, Scorecard
from enginegate.machine import processor, user_at_host
from enginegate.object_storage import ObjectStore
from enginegate.policy.data import DataSource
from enginegate.policy.devices import DeviceKind
from enginegate.redact import masked
from enginegate.repository.store.golden import GOLDEN_SAMPLES, Golden
from enginegate.workspace import Workspace, now
from tasks.prefect_server import REFUSALS

_log = logging.getLogger("enginegate.devices")
FLOW = "qualify-device"
_ENTRYPOINT = "flows.qualify_device.qualify_device"
# More than a host that dies by accident, fewer than a part that kills every worker it gets.
_ATTEMPTS = 3
_POLL_S = 2.0
# Prefect's heartbeats come every 30 s: six that are missing are no hiccup of a network.
_SILENT_S = 180.0
# From being taken by a worker to running; an image that is pulled takes minutes.
_STARTING_S = 900.0
# Workers ask every 10 s by default; a minute without one is worth a line, and no reason to end.
_UNTAKEN_S = 60.0
_HEARTBEAT = "prefect.flow-run.heartbeat"
_RUNNING = frozenset({StateType.RUNNING, StateType.CANCELLING})


@task(task_run_name="check-device-{name}", cache_policy=NO_CACHE)
def check_device(name: str, kind: DeviceKind) -> None:
    """Refuse a machine that has no such device: what it measured would be another kind's.

    Raises:
        EnginegateError: the GPU that is used here has not the name that the policy says.
    """
    here = gpu()
    if not kind.gpu or (here is not None and _is_named(here.name, kind.gpu)):
        return
    found = here.name if here is not None else f"none (a processor: {processor()})"
    raise EnginegateError(
        f"The policy's device {name!r} has a GPU named {kind.gpu!r}, and the GPU that is used on "
        f"this machine, the first that CUDA shows, is: {found}. Run it on a worker of the pool "
        f"{kind.pool or name!r}, choose another GPU with CUDA_VISIBLE_DEVICES, or correct "
        f"devices.{name} in the policy."
    )


def _is_named(name: str, wanted: str) -> bool:
    """Whether whole words of a GPU's name are those wanted: an A100 is no A10."""
    words = rf"(?<![0-9a-z]){re.escape(wanted.strip().casefold())}(?![0-9a-z])"
    return re.search(words, name.casefold()) is not None


@task(task_run_name="find-part-{identity.device}", cache_policy=NO_CACHE)
def find_part(
    identity: PartIdentity, workspace: Workspace, store: str | None = None
) -> DeviceQualification | None:
    """The part of that identity if somebody made it, and nothing of it broke.

    Args:
        identity: of the part.
        workspace: looked in first.
        store: URL of the object storage that workers leave it in; None: they share the workspace.
    """
    part = PartStore(workspace).find(identity)
    if store is not None and (part is None or part.errored):
        part = fetch_part(identity, workspace, ObjectStore(store)) or part
    if part is None or part.errored:
        return None
    _log.info(
        "%s: qualified at %s by %s", part.device, f"{part.made_at:%Y-%m-%d %H:%M}", part.made_by
    )
    return part


def is_made(identity: PartIdentity, workspace: Workspace) -> bool:
    """Whether the workspace has that part, and nothing of it broke."""
    part = PartStore(workspace).find(identity)
    return part is not None and not part.errored


@task(task_run_name="push-part-{part.identity.device}", cache_policy=NO_CACHE)
def push_to_store(part: DeviceQualification, workspace: Workspace, store: str) -> None:
    """Leave a part, engines included, in the object storage that the qualification reads."""
    push_part(part, workspace, ObjectStore(store))
    _log.info("%s: its part is in %s", part.device, store)


@task(task_run_name="keep-part-{identity.device}", cache_policy=NO_CACHE)
def keep_part(
    identity: PartIdentity,
    card: Scorecard,
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    results: Sequence[Mapping[str, str]],
    evaluation: DataSource,
    workspace: Workspace,
) -> DeviceQualification:
    """Keep what was found out on this machine, with golden answers of what may be published.

    Args:
        identity: of the part.
        card: the evidence.
        attempts: the engines that it is about, in its order.
        results: Great Expectations' results of each by name.
        evaluation: samples that golden answers are given to.
        workspace: keeps the part.
    """
    parts, golden = PartStore(workspace), {}
    for attempt in attempts:
        if not isinstance(attempt, Unbuilt) and _may_be_published(card, attempt.value):
            golden[attempt.value.candidate.name] = _golden(attempt, evaluation, parts)
    own = {name: getattr(card, name) for name in DeviceEvidence.model_fields}
    made = DeviceQualification(
        identity=identity,
        data=card.data,
        evidence=DeviceEvidence(**{**own, "device": identity.device, "golden": golden}),
        engines=_stored(attempts),
        unbuilt=tuple(each for each in attempts if isinstance(each, Unbuilt)),
        results={
            verdict.candidate.name: dict(found)
            for verdict, found in zip(card.verdicts, results, strict=True)
        },
        made_at=now(),
        made_by=user_at_host(),
    )
    path = parts.save(made)
    _log.info("%s: %s", identity.device, card.reason)
    _log.info("its part of the qualification: %s", path)
    return made


def _stored(attempts: Sequence[ContentFolder[Engine] | Unbuilt]) -> dict[str, StoredEngine]:
    built = (attempt for attempt in attempts if not isinstance(attempt, Unbuilt))
    return {each.value.candidate.name: stored_engine(each) for each in built}


def _may_be_published(card: Scorecard, engine: Engine) -> bool:
    measured = card.benchmark(engine.candidate)
    passed = card.outcome(engine.candidate) is Outcome.PASSED
    return passed and measured is not None and measured.chosen is not None


def _golden(built: ContentFolder[Engine], evaluation: DataSource, parts: PartStore) -> FileDigest:
    """The engine's answers on this device, kept by their digest."""
    samples = load_data(evaluation).head(GOLDEN_SAMPLES)
    inputs = dict(samples.in_types(built.value.inputs).inputs)
    with open_engine(built.value, built.folder) as runner:
        answers = runner.run(inputs)
    with tempfile.TemporaryDirectory(prefix="enginegate-golden-") as folder:
        written = Path(folder) / "golden.npz"
        Golden(inputs, answers).write(written)
        digest = FileDigest.of(written)
    path = parts.golden_file(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    Golden(inputs, answers).write(path)
    digest.check(path)
    return digest


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
    found = find_part.fn(identity, workspace, kind.store)
    if found is not None:
        return found
    device = identity.device
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
    fetched = fetch_part(identity, workspace, ObjectStore(kind.store)) if kind.store else None
    part = fetched or PartStore(workspace).find(identity)
    if part is None:
        raise EnginegateError(_lost(identity, kind, workspace))
    return part


def all_made(ended: Mapping[str, object]) -> list[DeviceQualification]:
    """The part of every kind of device, once all have ended.

    Args:
        ended: by kind of device: its part, or what was raised.

    Raises:
        EnginegateError: some have none; names each, and why.
    """
    made = [each for each in ended.values() if isinstance(each, DeviceQualification)]
    failed = {n: e for n, e in ended.items() if not isinstance(e, DeviceQualification)}
    for error in failed.values():
        if not isinstance(error, EnginegateError):
            raise error if isinstance(error, BaseException) else TypeError(str(error))
    if failed:
        lines = "\n".join(f"  {name}: {error}" for name, error in failed.items())
        kept = f" {', '.join(each.device for each in made)} is done and kept." if made else ""
        raise EnginegateError(f"Not every kind of device was qualified.{kept}\n{lines}")
    return made


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

    def finish(self) -> None:
        """Return once a run has completed.

        Raises:
            EnginegateError: one failed or was cancelled, as many died as may, or time is over.
        """
        deadline_s = self.clock() + self.limit_s
        for _ in range(_ATTEMPTS):
            run = self._next()
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
            self._number += 1
            # Typed as a coroutine too, which it is where it is awaited.
            run = cast(
                "FlowRun",
                run_deployment(
                    self.deployment,
                    parameters=dict(self.parameters),
                    timeout=0,
                    idempotency_key=f"{self.key}-{self._number}",
                ),
            )
            if run.state is None or not run.state.is_final():
                _log.info("%s: %s", self.deployment, run.name)
                return run

    def _wait(self, run: FlowRun, deadline_s: float) -> FlowRun | None:
        """The run once it ended; None: it died, and is marked as crashed.

        Raises:
            EnginegateError: time is over; the run goes on.
        """
        signs, untaken = SignsOfLife(self.clock), Once(self.clock, _UNTAKEN_S)
        while True:
            run = self.client.read_flow_run(run.id)
            state = run.state
            if state is not None and state.is_final():
                return None if state.type is StateType.CRASHED else run
            if state is not None and signs.are_over(state.type, self._last_heartbeat(run)):
                why = "no heartbeat came any more, so another run takes over"
                self.client.set_flow_run_state(run.id, Crashed(message=why), force=True)
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
            }
        },
    }
