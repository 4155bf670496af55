"""Looking after recorded traffic, the live repository, and what the live release does."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from enginegate.decision import Release
from enginegate.errors import (
    EnginegateError,
    NotEverywhereError,
    RepositoryBusyError,
    ServerError,
    TamperedError,
    TrackingError,
)
from enginegate.evidence import Finding, Outcome
from enginegate.policy.operating import LiveTables, Retention
from enginegate.repository import (
    AuditLog,
    Current,
    Golden,
    Layout,
    open_target,
    verify,
)
from enginegate.repository.history.audit import Event
from enginegate.repository.history.broken_promises import (
    BrokenPromise,
    ShownState,
    broken_promises,
    operation_of,
    record_broken,
    shown_state,
)
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.shadow import expire_samples, recover_recordings
from enginegate.tracking import Tracker, deliver, state_tag
from enginegate.triton.endpoint import LiveAddresses, live_addresses
from enginegate.watch.log import Action, Count, SampledTraffic, WatchCheck, WatchLog
from enginegate.watch.probe import LiveProber, LiveReading, take_reading
from enginegate.workspace import Workspace, now
from validation.live import action_for, judge_reading, live_finding, not_measured

FAILED_EVENT = "enginegate.watch.failed"
_CHANNEL = "watch"
_log = logging.getLogger("enginegate.watch")


@task(task_run_name="expire-shadow", cache_policy=NO_CACHE)
def expire_shadow(retention: Retention, workspace: Workspace) -> tuple[str, ...]:
    """Delete samples older than the policy's limit, and end recordings whose process died."""
    home, days = workspace.shadow, retention.shadow_days
    deleted = expire_samples(home, days, now())
    done = [f"{path.name} was deleted: it was older than {days} days." for path in deleted]
    done += recover_recordings(home)
    for sentence in done:
        _log.info("%s", sentence)
    return tuple(done)


@task(task_run_name="deliver-to-mlflow", cache_policy=NO_CACHE)
def deliver_to_mlflow(repository: Path, workspace: Workspace) -> tuple[str, ...]:
    """Give MLflow what it could not be given when it happened; what it refuses waits longer."""
    try:
        return deliver(workspace, repository)
    except EnginegateError as error:
        _log.warning("MLflow does not have all of the audit log yet: %s", error)
        return ()


@task(task_run_name="follow-storage", cache_policy=NO_CACHE)
def follow_storage(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Bring this host to what is live in object storage; `verify_live` says if it is not."""
    storage = open_target(tables, workspace, channel=_CHANNEL, judge=judge_reading).storage
    if storage is None:
        return ()
    try:
        release = storage.pull()
    except EnginegateError as error:
        _log.error("object storage could not be followed: %s", error)
        return ()
    live = f"release {release.version} is" if release else "nothing is"
    return (f"{live} live here, as in {storage.store.url}.",)


@task(task_run_name="verify-live", cache_policy=NO_CACHE)
def verify_live(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """What is wrong with the live repository and its server; nothing is changed."""
    repository = open_target(tables, workspace, channel=_CHANNEL)
    try:
        checks = verify(repository, read_back=False)
    except RepositoryBusyError as error:
        _log.info("not verified this time: %s", error)
        return ()
    found = [(c.subject, c.problem or c.unknown) for c in checks if c.problem or c.unknown]
    for subject, why in found:
        _log.error("%s: %s", subject, why)
    return tuple(f"{subject}: {why}" for subject, why in found)


@task(task_run_name="live-release", cache_policy=NO_CACHE)
def release_to_watch(tables: LiveTables) -> Release | None:
    """What is live now, to be looked at; None before the first promotion.

    None as well while it is rolled out to a fleet: whoever does so looks at the canary, and the
    other servers have another release.
    """
    current = _current(tables)
    layout = Layout(tables.target.repository, tables.model)
    who = RolloutState(layout.root).under_way_by(tables.model)
    if current is not None and who is not None:
        _log.info("release %d is being rolled out by %s", current.version, who)
        return None
    return layout.release(current.version) if current else None


@task(task_run_name="look-at-{release.version}", cache_policy=NO_CACHE)
def take_look(
    tables: LiveTables, release: Release, beside: SampledTraffic, workspace: Workspace
) -> WatchCheck:
    """Watch every live server for one look, and judge what it did; what breaks is errored."""
    looks = WatchLog.at(workspace, release)
    held, number = held_to(tables, release), looks.next_number()
    # What was counted against another promise says nothing about this one.
    past = tuple(
        each for each in looks.read() if each.promised_by(release) == held.scorecard_sha256
    )
    views = _views(tables, held, number, past)
    readings = {view.server: view.reading for view in views if view.reading is not None}
    findings = [f for view in views for f in view.findings]
    counts = [count for view in views for count in view.counts]
    live = _current(tables)
    if live is None or live.version != release.version:
        # A change of what is live is no fault of what was.
        why = "another release became live while it was looked at"
        findings, counts = [live_finding("measured", Outcome.INCONCLUSIVE, why)], []
    look = WatchCheck(
        model=release.model,
        version=release.version,
        release_sha256=release.digest,
        number=number,
        at=now(),
        intensive=_age_s(live, release) < tables.watch.window_s,
        reading=readings.pop("", None),
        others=readings,
        findings=(*findings, *beside.findings),
        counts=(*counts, *beside.counts),
        sample=beside.sample,
        scorecard=held.scorecard_sha256,
    )
    can_go_back = release.previous_version is not None and not looks.rolled_back
    action = action_for(look, tables.watch, held.promise, can_go_back=can_go_back)
    look = look.model_copy(update={"action": action})
    try:
        # From here on its number is its own, which alerts and the audit log name.
        look = looks.add(look)
    except EnginegateError as error:
        # What failed is acted on all the same; `keep_look` tries again.
        _log.warning("%s", error)
    _log.info("%s", look)
    return look


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What the watch made live again, and in words where; a dead server of a fleet is named."""

    release: Release
    said: str


@task(task_run_name="roll-back-{release.version}", cache_policy=NO_CACHE)
def roll_back_failed(
    tables: LiveTables, release: Release, look: WatchCheck, workspace: Workspace
) -> RolledBack | None:
    """Make the release live again that a failed one replaced, once for each failed release.

    Returns:
        What is live again; None when it was not rolled back: another release is live by now, this
        one was rolled back before, or the repository refused. The log says why.
    """
    name, before = tables.model, release.previous_version
    looks = WatchLog.at(workspace, release)
    if before is None or not is_live(tables, release) or not looks.claim_rollback():
        _log.warning("release %d was rolled back before, or is not live any more", release.version)
        return None
    repository = open_target(tables, workspace, channel=_CHANNEL)
    try:
        # Whoever changes what is live after the look is right: only what failed it is left.
        back = repository.rollback(name, before, reason=str(look), expected=release.version)
        return RolledBack(back, f"Release {back.version} is live again.")
    except NotEverywhereError as error:
        return RolledBack(Layout(tables.target.repository, name).release(before), str(error))
    except EnginegateError as error:
        looks.return_claim()
        if not is_live(tables, release):
            _log.warning("not rolled back, as another release is live by now: %s", error)
            return None
        _log.error(
            "release %d failed its watch and could not be rolled back: %s", release.version, error
        )
        return None


@task(task_run_name="record-broken-promise", cache_policy=NO_CACHE)
def record_broken_promise(repository: Path, look: WatchCheck) -> None:
    """Write a failed look into the audit log, where it stays until somebody acknowledges it.

    Where it cannot be written now, the look's own file says the same, and a later run writes it.
    """
    if not look.broken:
        return
    try:
        record_broken(repository, look)
    except EnginegateError as error:
        _log.error("the audit log does not have look %d yet: %s", look.number, error)


@task(task_run_name="keep-look", cache_policy=NO_CACHE)
def keep_look(
    tables: LiveTables, release: Release, look: WatchCheck, workspace: Workspace
) -> WatchCheck:
    """Keep a look as it was acted on, also in MLflow; it counts even if MLflow cannot be told."""
    look = WatchLog.at(workspace, release).add(look)
    state = state_of(tables, release, workspace)
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    try:
        tracker.log_check(look, release, state, held_to(tables, release).promise)
        if release.model_uri.startswith("models:/"):
            name, version = release.model_uri.removeprefix("models:/").split("/")
            tracker.tag_version(name, int(version), state_tag(state, release))
    except TrackingError as error:
        _log.warning("look %d counts, but is not in MLflow: %s", look.number, error)
    return look


def state_of(tables: LiveTables, release: Release, workspace: Workspace) -> ShownState:
    """What is shown of a release: by its looks in this workspace, and by the audit log."""
    looks = WatchLog.at(workspace, release).read()
    return shown_state(_events(tables), tables.model, release.version, looks)


@task(task_run_name="unacknowledged", cache_policy=NO_CACHE)
def unacknowledged(tables: LiveTables, workspace: Workspace) -> tuple[BrokenPromise, ...]:
    """Broken promises of the live release that nobody has acknowledged; those of others are said.

    What is not in the audit log yet, because it could not be written, is written now.
    """
    current = _current(tables)
    live = current.version if current else None
    looks: tuple[WatchCheck, ...] = ()
    if live is not None:
        release = Layout(tables.target.repository, tables.model).release(live)
        looks = WatchLog.at(workspace, release).read()
    recorded = {event.operation for event in _events(tables)}
    for look in looks:
        if look.broken and operation_of(look) not in recorded:
            record_broken_promise.fn(tables.target.repository, look)
    known = broken_promises(_events(tables), tables.model, looks)
    waiting = tuple(each for each in known if each.acknowledged is None)
    for each in waiting:
        if each.release != live:
            _log.warning("%s. Nobody has acknowledged this.", each)
    return tuple(each for each in waiting if each.release == live)


def _events(tables: LiveTables) -> tuple[Event, ...]:
    """Of the audit log; none where it was changed, which `verify_live` reports."""
    try:
        return AuditLog(tables.target.repository).read()
    except TamperedError as error:
        _log.error("acknowledgements cannot be read: %s", error)
        return ()


@task(task_run_name="alert", cache_policy=NO_CACHE)
def alert(model: str, why: str, *, version: int | None = None, action: Action = "alert") -> None:
    """Tell Prefect, where automations turn it into a message (docs/watching.md)."""
    _log.error("%s", why)
    name = f"{model} release {version}" if version else model
    emit_event(
        FAILED_EVENT,
        resource={
            "prefect.resource.id": f"enginegate.live.{model}",
            "prefect.resource.name": name,
        },
        payload={"model": model, "release": version, "action": action, "why": why},
    )


@dataclass(frozen=True, slots=True)
class _View:
    """One server in one look."""

    server: str
    reading: LiveReading | None
    findings: tuple[Finding, ...]
    counts: tuple[Count, ...] = ()


def _views(
    tables: LiveTables, release: Release, number: int, past: tuple[WatchCheck, ...]
) -> tuple[_View, ...]:
    """Every server at the same time; the first has no name."""
    servers = {"": live_addresses(tables.target)}
    servers |= {
        each.name: LiveAddresses(grpc=each.endpoint, metrics=each.metrics)
        for each in tables.target.fleet
    }

    def view(server: str) -> _View:
        try:
            reading = _read(tables, release, number, servers[server])
        except EnginegateError as error:
            return _View(server, None, (not_measured(str(error), server=server),))
        return _View(
            server, reading, *judge_reading(reading, release, tables.watch, past, server=server)
        )

    with ThreadPoolExecutor(max_workers=len(servers)) as readers:
        return tuple(readers.map(view, servers))


def _read(
    tables: LiveTables, release: Release, number: int, server: LiveAddresses | None
) -> LiveReading:
    layout = Layout(tables.target.repository, tables.model)
    if server is None:
        raise ServerError(
            f"release {release.version} of {release.model} is live in {layout.root}, and no server "
            "of it is known or runs"
        )
    prober = LiveProber(
        samples=Golden.read(layout.golden_file(release.version)).samples,
        slo_s=release.promise.slo_p99_ms / 1e3,
        seed=number,
    )
    return take_reading(
        server, tables.model, release.version, look_s=tables.watch.look_s, prober=prober
    )


def held_to(tables: LiveTables, release: Release) -> Release:
    """A release with the promise that it is held to now; its digest is still ``release``'s."""
    return Layout(tables.target.repository, tables.model).held_to(release)


def is_live(tables: LiveTables, release: Release) -> bool:
    """Whether a release is what is live here."""
    current = _current(tables)
    return current is not None and current.version == release.version


def _current(tables: LiveTables) -> Current | None:
    return Layout(tables.target.repository, tables.model).current()


def _age_s(live: Current | None, release: Release) -> float:
    """How long the release has been live; a rollback makes it live anew."""
    since = live.changed_at if live else release.published_at
    return (now() - since).total_seconds()
