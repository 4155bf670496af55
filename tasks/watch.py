"""Steps of the watch: recorded traffic, the live repository, and checks of the live release."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from enginegate.candidate import registered_version
from enginegate.contract.server_versions import read_versions
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
from enginegate.report import page_of_log
from enginegate.repository import (
    AuditLog,
    Current,
    Golden,
    Layout,
    open_target,
    verify,
)
from enginegate.repository.deploy.upgrades import UpgradeFinding, find_upgrades, live_engines
from enginegate.repository.history.audit import Event
from enginegate.repository.history.broken_promises import (
    BrokenPromise,
    broken_promises,
    operation_of,
    record_broken,
    shown_state,
)
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.verified import VerifiedRecords
from enginegate.shadow import expire_samples, recover_recordings
from enginegate.tracking import Tracker, deliver, state_tag
from enginegate.triton.endpoint import LiveAddresses, live_addresses
from enginegate.watch.log import SampledTraffic, ShareCount, WatchAction, WatchCheck, WatchLog
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
def deliver_to_mlflow(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Deliver to MLflow what it has not got yet of the audit log; a refusal is retried later."""
    try:
        make_page = partial(page_of_log, rules=tables.approval)
        return deliver(workspace, tables.target.repository, model=tables.model, make_page=make_page)
    except EnginegateError as error:
        _log.warning("MLflow may not have all of the audit log yet: %s", error)
        return ()


@task(task_run_name="follow-storage", cache_policy=NO_CACHE)
def follow_storage(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Install on this host the release that is live in object storage."""
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


@task(task_run_name="verify-live-{tables.model}", cache_policy=NO_CACHE)
def verify_live(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Problems of the live repository and its server; nothing is changed."""
    repository = open_target(tables, workspace, channel=_CHANNEL)
    try:
        checks = verify(repository, read_back=False, records=VerifiedRecords(workspace))
    except RepositoryBusyError as error:
        _log.info("not verified this time: %s", error)
        return ()
    problems = tuple(
        f"{check.subject}: {check.problem or check.unknown}"
        for check in checks
        if check.problem or check.unknown
    )
    for problem in problems:
        _log.error("%s", problem)
    return problems


@task(task_run_name="check-upgrades", cache_policy=NO_CACHE)
def check_upgrades(tables: LiveTables, policy: Path) -> tuple[UpgradeFinding, ...]:
    """What an upgrade of a server does to the live release and the one before it; logged.

    A server that does not answer is left to the checks of the release.
    """
    engines = live_engines(Layout(tables.target.repository, tables.model))
    found: list[UpgradeFinding] = []
    for addresses in _addresses(tables).values() if engines else ():
        if addresses is None:
            continue
        try:
            versions = read_versions(addresses)
        except ServerError as error:
            _log.info("versions were not compared: %s", error)
            continue
        found += find_upgrades(engines, versions, policy=str(policy))
    for finding in found:
        _log.log(logging.ERROR if finding.certain else logging.WARNING, "%s", finding.words)
    return tuple(found)


@task(task_run_name="live-release-{tables.model}", cache_policy=NO_CACHE)
def release_to_watch(tables: LiveTables) -> Release | None:
    """The release that is live now; None before the first promotion.

    None as well while it is rolled out to a fleet: the rollout itself checks the canary, and the
    other servers have another release.
    """
    current = _current(tables)
    layout = Layout(tables.target.repository, tables.model)
    promoter = RolloutState(layout.root).under_way_by(tables.model)
    if current is not None and promoter is not None:
        _log.info("release %d is being rolled out by %s", current.version, promoter)
        return None
    return layout.release(current.version) if current else None


@task(task_run_name="check-release-{release.version}", cache_policy=NO_CACHE)
def check_release(
    tables: LiveTables, release: Release, sampled: SampledTraffic, workspace: Workspace
) -> WatchCheck:
    """Check the live release on every server; a server that cannot be read is an errored finding.

    Args:
        tables: what is live where, and its limits.
        release: the live release.
        sampled: how its answers compare with FP32.
        workspace: has the log of checks.
    """
    log = WatchLog.at(workspace, release)
    promised, number = with_promise(tables, release), log.next_number()
    # Counts against another promise say nothing about this one.
    past = tuple(
        each for each in log.read() if each.promised_by(release) == promised.scorecard_sha256
    )
    servers = _check_servers(tables, promised, number, past)
    readings = {each.server: each.reading for each in servers if each.reading is not None}
    findings = [finding for each in servers for finding in each.findings]
    counts = [count for each in servers for count in each.counts]
    live = _current(tables)
    if live is None or live.version != release.version:
        # The new release's start is no fault of the old one.
        why = "another release became live during the check"
        findings, counts = [live_finding("measured", Outcome.INCONCLUSIVE, why)], []
    check = WatchCheck(
        model=release.model,
        version=release.version,
        release_sha256=release.digest,
        number=number,
        at=now(),
        intensive=_age_s(live, release) < tables.watch.window_s,
        reading=readings.pop("", None),
        others=readings,
        findings=(*findings, *sampled.findings),
        counts=(*counts, *sampled.counts),
        sample=sampled.sample,
        scorecard=promised.scorecard_sha256,
    )
    can_go_back = release.previous_version is not None and not log.rolled_back
    action = action_for(check, tables.watch, promised.promise, can_go_back=can_go_back)
    check = check.model_copy(update={"action": action})
    try:
        # From here on no other check has its number, which alerts and the audit log name.
        check = log.add(check)
    except EnginegateError as error:
        # A failed check is acted on all the same; `record_check` tries again to write it.
        _log.warning("%s", error)
    _log.info("%s", check)
    return check


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A release that the watch made live again.

    Attributes:
        message: where it is live again; names a dead server of a fleet.
    """

    release: Release
    message: str


@task(task_run_name="roll-back-{release.version}", cache_policy=NO_CACHE)
def roll_back_failed(
    tables: LiveTables, release: Release, check: WatchCheck, workspace: Workspace
) -> RolledBack | None:
    """Roll back a release that failed its check, once for each failed release.

    Returns:
        The release that is live again; None when another release is live by now, this one was
        rolled back before, or the repository refused. The log says why.
    """
    name, before = tables.model, release.previous_version
    log = WatchLog.at(workspace, release)
    if before is None or not is_live(tables, release) or not log.claim_rollback():
        _log.warning("release %d was rolled back before, or is not live any more", release.version)
        return None
    repository = open_target(tables, workspace, channel=_CHANNEL)
    try:
        # Only the release that failed is rolled back: a change of what is live meanwhile stays.
        back = repository.rollback(name, before, reason=str(check), expected=release.version)
        return RolledBack(back, f"Release {back.version} is live again.")
    except NotEverywhereError as error:
        return RolledBack(Layout(tables.target.repository, name).release(before), str(error))
    except EnginegateError as error:
        log.return_claim()
        if not is_live(tables, release):
            _log.warning("not rolled back, as another release is live by now: %s", error)
            return None
        _log.error(
            "release %d failed its watch and could not be rolled back: %s", release.version, error
        )
        return None


@task(task_run_name="record-broken-promise-{check.version}", cache_policy=NO_CACHE)
def record_broken_promise(repository: Path, check: WatchCheck) -> None:
    """Write a failed check into the audit log, where it stays until a person acknowledges it.

    Where it cannot be written now, a later run writes it, from the log of checks.
    """
    if not check.broken:
        return
    try:
        record_broken(repository, check)
    except EnginegateError as error:
        _log.error("the audit log does not have check %d yet: %s", check.number, error)


@task(
    task_run_name="record-check-{check.number}-of-release-{release.version}", cache_policy=NO_CACHE
)
def record_check(
    tables: LiveTables, release: Release, check: WatchCheck, workspace: Workspace
) -> WatchCheck:
    """Record a check as it was acted on, also in MLflow; it counts even if MLflow is away."""
    check = WatchLog.at(workspace, release).add(check)
    past = WatchLog.at(workspace, release).read()
    state = shown_state(_events(tables), tables.model, release.version, past)
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    try:
        tracker.log_check(check, release, state, with_promise(tables, release).promise)
        if version := registered_version(release.model_uri):
            tracker.tag_version(*version, state_tag(state, release))
    except TrackingError as error:
        _log.warning("check %d counts, but is not in MLflow: %s", check.number, error)
    return check


@task(task_run_name="unacknowledged-{tables.model}", cache_policy=NO_CACHE)
def unacknowledged(tables: LiveTables, workspace: Workspace) -> tuple[BrokenPromise, ...]:
    """Broken promises of the live release that nobody has acknowledged; others' are logged.

    Failed checks that could not be written to the audit log before are written now.
    """
    current = _current(tables)
    live = current.version if current else None
    checks: tuple[WatchCheck, ...] = ()
    if live is not None:
        release = Layout(tables.target.repository, tables.model).release(live)
        checks = WatchLog.at(workspace, release).read()
    recorded = {event.operation for event in _events(tables)}
    for check in checks:
        if check.broken and operation_of(check) not in recorded:
            record_broken_promise.fn(tables.target.repository, check)
    known = broken_promises(_events(tables), tables.model, checks)
    waiting = tuple(each for each in known if each.acknowledged is None)
    for each in waiting:
        if each.release != live:
            _log.warning("%s. Nobody has acknowledged this.", each)
    return tuple(each for each in waiting if each.release == live)


def _events(tables: LiveTables) -> tuple[Event, ...]:
    """The audit log's records; none where it was tampered with, which `verify_live` reports."""
    try:
        return AuditLog(tables.target.repository).of(tables.model)
    except TamperedError as error:
        _log.error("acknowledgements cannot be read: %s", error)
        return ()


@task(task_run_name="alert", cache_policy=NO_CACHE)
def alert(
    model: str, why: str, *, version: int | None = None, action: WatchAction = "alert"
) -> None:
    """Emit an event that Prefect's automations turn into a message (docs/watching.md)."""
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
class _ServerCheck:
    """One server in one check."""

    server: str
    reading: LiveReading | None
    findings: tuple[Finding, ...]
    counts: tuple[ShareCount, ...] = ()


def _check_servers(
    tables: LiveTables, release: Release, number: int, past: tuple[WatchCheck, ...]
) -> tuple[_ServerCheck, ...]:
    """Every server at one time; the first has no name."""
    servers = _addresses(tables)

    def check(server: str) -> _ServerCheck:
        try:
            reading = _read(tables, release, number, servers[server])
        except EnginegateError as error:
            return _ServerCheck(server, None, (not_measured(str(error), server=server),))
        return _ServerCheck(
            server, reading, *judge_reading(reading, release, tables.watch, past, server=server)
        )

    with ThreadPoolExecutor(max_workers=len(servers)) as threads:
        return tuple(threads.map(check, servers))


def _addresses(tables: LiveTables) -> dict[str, LiveAddresses | None]:
    """Where every server listens; the first has no name, and may not be known."""
    others = {
        each.name: LiveAddresses(grpc=each.endpoint, metrics=each.metrics)
        for each in tables.target.fleet
    }
    return {"": live_addresses(tables.target), **others}


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
        server, tables.model, release.version, duration_s=tables.watch.look_s, prober=prober
    )


def with_promise(tables: LiveTables, release: Release) -> Release:
    """A release with the promise that it must keep now, which a later scorecard may have renewed.

    Its digest is still ``release``'s.
    """
    return Layout(tables.target.repository, tables.model).held_to(release)


def is_live(tables: LiveTables, release: Release) -> bool:
    """Whether a release is live here."""
    current = _current(tables)
    return current is not None and current.version == release.version


def _current(tables: LiveTables) -> Current | None:
    return Layout(tables.target.repository, tables.model).current()


def _age_s(live: Current | None, release: Release) -> float:
    """How long the release has been live; a rollback makes it live anew."""
    since = live.changed_at if live else release.published_at
    return (now() - since).total_seconds()
