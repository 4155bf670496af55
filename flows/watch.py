"""Scheduled: recovers, watches and cleans up while nobody promotes anything.

First a killed promotion or rollback is recovered. The live release is watched against its promise:
check after check while it is young, then one check a run. Recorded traffic is user data, so its age
is limited by the policy and enforced here; a recording whose process was killed is ended on the
server; and the live repository is verified, also against an upgrade of a server's TensorRT or
driver that what is live would not survive. What nothing refers to any more is deleted, where the
policies ask for it. A broken promise is a failed run, and so is every later
run of that release until a person acknowledges it.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryError, ServerError
from enginegate.evidence import Outcome
from enginegate.policy import Policy, read_policy
from enginegate.policy.operating import LiveTables
from enginegate.repository import Layout
from enginegate.repository.history.broken_promises import BrokenPromise, broken_words
from enginegate.watch.log import PromiseBrokenError, WatchCheck, WatchResult
from enginegate.workspace import Workspace
from flows.notices import notify_of_watch
from flows.prune import prune_on_schedule
from flows.run_names import watch_name
from flows.states import completed_as, end_of_failed_watch, end_of_watch, failed_as
from tasks.artifacts import show_live
from tasks.expired_approvals import note_expired_approvals
from tasks.live_sample import compare_live
from tasks.release import recover_interrupted, update_mlflow
from tasks.release_events import announce_releases
from tasks.run_page import rename_run
from tasks.watch import (
    alert,
    check_release,
    check_upgrades,
    deliver_to_mlflow,
    expire_shadow,
    follow_storage,
    is_live,
    record_broken_promise,
    record_check,
    release_to_watch,
    roll_back_failed,
    unacknowledged,
    verify_live,
)
from validation.outputs import outputs_to_compare

# One run goes on for at most this long, so that the next one of a schedule of ten minutes starts.
RUN_S = 540.0


@flow(
    name="watch",
    flow_run_name=watch_name,
    persist_result=False,
    validate_parameters=False,
)
def watch(policy: Path, run_s: float = RUN_S) -> WatchResult:
    """Watch what is live, delete recorded traffic that is too old, verify the live repository.

    Args:
        policy: the model family's policy file.
        run_s: a young release is watched for at most this long in one run; 0 is one check.

    Raises:
        RepositoryError: the live repository is not what was published, or a server was upgraded so
            that what is live does not load there any more; the message lists it all.
        ServerError: what is live could not be measured. Both alert.
        PromiseBrokenError: a check failed, now or earlier, and nobody has acknowledged it since.
    """
    opened = read_policy(Path(policy))
    try:
        watched = _watch(opened, policy, run_s)
    except EnginegateError as error:
        # The check that broke a promise has alerted already, if the policy says so.
        if not isinstance(error, PromiseBrokenError):
            alert(opened.name, str(error))
        notify_of_watch(opened.live_tables, policy, Workspace.of(opened), error)
        # Not where the live repository is not what it should be: nobody knows what it refers to.
        if not isinstance(error, RepositoryError):
            prune_on_schedule(opened, Workspace.of(opened))
        return failed_as(end_of_failed_watch(error), error, WatchResult)
    except Exception as error:
        notify_of_watch(opened.live_tables, policy, Workspace.of(opened), error)
        raise
    notify_of_watch(opened.live_tables, policy, Workspace.of(opened), None)
    # Last, because it may take minutes.
    pruned = prune_on_schedule(opened, Workspace.of(opened))
    watched = replace(watched, done=(*watched.done, *pruned))
    name, message = end_of_watch(watched)
    return completed_as(name, watched, message)


def _watch(opened: Policy, policy: Path, run_s: float) -> WatchResult:
    tables, workspace = opened.live_tables, Workspace.of(opened)
    done = (
        *recover_interrupted(tables, workspace),
        *expire_shadow(tables.retention, workspace),
        *deliver_to_mlflow(tables, workspace),
        *follow_storage(tables, workspace),
    )
    try:
        problems = verify_live(tables, workspace)
        upgrades = check_upgrades(tables, policy)
        problems += tuple(each.words for each in upgrades if each.certain)
        done += tuple(each.words for each in upgrades if not each.certain)
        checks = tuple(_checks(opened, workspace, run_s))
    finally:
        # Last: a Prefect server that does not answer delays no check and no rollback.
        done += note_expired_approvals(tables, workspace)
        done += announce_releases(tables.target.repository, workspace)
        done += deliver_to_mlflow(tables, workspace)  # also what this run found and did
        # A model's timeline in Prefect lists runs by their names.
        rename_run(f"{watch_name()}: {show_live(tables, policy, workspace)}")
    errored = [str(check) for check in checks if check.outcome is Outcome.ERRORED]
    broken = [_broken_now(tables, policy, check) for check in checks if check.broken]
    if problems:
        raise RepositoryError("\n".join((*problems, *errored, *broken)))
    if errored:
        raise ServerError("\n".join((*errored, *broken)))
    watched, earlier = WatchResult(done, checks), unacknowledged(tables, workspace)
    if broken:
        raise PromiseBrokenError("\n".join(broken), watched)
    if earlier:
        raise PromiseBrokenError(_broken_earlier(tables.model, policy, earlier, checks), watched)
    return watched


def _broken_now(tables: LiveTables, policy: Path, check: WatchCheck) -> str:
    """Which release promised what, what was measured, what was done, and the next command."""
    layout = Layout(tables.target.repository, tables.model)
    current, release = layout.current(), layout.release(check.version)
    live = f"release {current.version} is live" if current else "nothing is live"
    if check.action == "rollback":
        done = f"It was rolled back: {live} again."
    else:
        done = f'It was not rolled back: {live} (watch.on_failure = "{tables.watch.on_failure}").'
    named = f"{check.version} of {check.model} ({release.engine.candidate}, {release.model_uri})"
    lines = (
        f"Release {named} broke its promise at check {check.number}:",
        *(f"  {broken_words(finding)}" for finding in check.broken),
        done,
        _next(policy, check.version),
    )
    return "\n".join(lines)


def _broken_earlier(
    model: str, policy: Path, broken: tuple[BrokenPromise, ...], checks: tuple[WatchCheck, ...]
) -> str:
    """The newest failed check that nobody has acknowledged, and how this run's checks ended."""
    lines = (
        f"{model}: {broken[-1]}. Nobody has acknowledged this.",
        *(f"  now: {check}" for check in checks),
        _next(policy, broken[-1].release),
    )
    return "\n".join(lines)


def _next(policy: Path, release: int) -> str:
    return (
        f"It stays failed until a person acknowledges it: enginegate acknowledge {policy} "
        f"--release {release} --reason WHY"
    )


def _checks(policy: Policy, workspace: Workspace, run_s: float) -> Iterator[WatchCheck]:
    """One check; while the release is young, more checks until one fails."""
    tables, traffic = policy.live_tables, policy.traffic_tables
    asked = outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices)
    end_s = time.monotonic() + run_s
    while (release := release_to_watch(tables)) is not None:
        sampled = compare_live(release, tables, traffic, policy.gates, asked, workspace)
        check = check_release(tables, release, sampled, workspace)
        record_broken_promise(tables.target.repository, check)
        check = record_check(tables, release, _acted(tables, release, check, workspace), workspace)
        yield check
        stops = check.outcome in {Outcome.FAILED, Outcome.ERRORED}
        if stops or not check.intensive or time.monotonic() + tables.watch.look_s > end_s:
            return


def _acted(
    tables: LiveTables, release: Release, check: WatchCheck, workspace: Workspace
) -> WatchCheck:
    """Do what the policy says about a check; a rollback that is refused becomes an alert.

    Unless another release is live by now: the log says so, and there is nothing left to do.
    """
    if check.action == "rollback":
        back = roll_back_failed(tables, release, check, workspace)
        if back is not None:
            alert(check.model, f"{check}. {back.message}", version=check.version, action="rollback")
            update_mlflow(tables, workspace)
            announce_releases(tables.target.repository, workspace)
            return check
        if not is_live(tables, release):
            # Another release went live meanwhile, so the failed one serves no request.
            return check.model_copy(update={"action": "none"})
        check = check.model_copy(update={"action": "alert"})
    # One that could not be measured ends the run, which alerts.
    if check.action == "alert" and check.outcome is not Outcome.ERRORED:
        alert(check.model, str(check), version=check.version)
    return check
