"""Promotions that ended because nobody answered: Prefect knows, and the audit log is told.

A suspended promotion is no process. When its time is over Prefect's server fails the run by itself,
so whoever looks next writes down that this was a no.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from httpx import HTTPError
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL

from enginegate.errors import EnginegateError, InputError
from enginegate.policy import Policy, read_policy
from enginegate.repository import AuditLog, Deed, origin, record_deed
from enginegate.workspace import Workspace

# Prefect's words for it: "The flow was paused and never resumed."
_EXPIRED = "never resumed."
_PROMOTIONS = FlowFilter(name=FlowFilterName(any_=["promote"]))
_FAILED = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.FAILED]))
)
_PAGE = 200
_log = logging.getLogger("enginegate.unanswered")


@task(task_run_name="note-unanswered", cache_policy=NO_CACHE)
def note_unanswered(rules: Policy) -> tuple[str, ...]:
    """Write a refusal for each promotion of the policy that nobody answered in time, once.

    What cannot be written now is written by the next promotion or watch.
    """
    if not PREFECT_API_URL.value():
        return ()
    root = rules.target.repository
    try:
        with get_client(sync_client=True) as client:
            known = {event.operation for event in AuditLog(root).read()}
            found = [deed for deed in _refusals(client, rules) if deed.operation not in known]
        for deed in found:
            record_deed(root, deed)
    except (EnginegateError, HTTPError) as error:
        _log.warning("promotions that nobody answered were not looked for: %s", error)
        return ()
    for deed in found:
        _log.warning("%s", deed.why)
    return tuple(deed.why for deed in found)


def _refusals(client: SyncPrefectClient, rules: Policy) -> Iterator[Deed]:
    for run in _failed(client):
        expired = run.state is not None and (run.state.message or "").endswith(_EXPIRED)
        if expired and _is_under(run, rules):
            question = _question(client.read_flow_run_states(run.id))
            if question is not None:
                yield _refusal(run, question, rules)


def _failed(client: SyncPrefectClient) -> Iterator[FlowRun]:
    offset = 0
    while page := client.read_flow_runs(
        flow_filter=_PROMOTIONS,
        flow_run_filter=_FAILED,
        sort=FlowRunSort.END_TIME_DESC,
        limit=_PAGE,
        offset=offset,
    ):
        yield from page
        offset += len(page)


def _is_under(run: FlowRun, rules: Policy) -> bool:
    """Whether a promotion was to publish to the policy's own repository.

    One whose policy is not here, or cannot be read, is left to a worker that has it.
    """
    try:
        theirs = read_policy(Path(str(run.parameters.get("policy", ""))))
    except EnginegateError:
        return False
    return (theirs.name, theirs.target.repository) == (rules.name, rules.target.repository)


def _question(states: Sequence[State]) -> State | None:
    """The suspension that was over before anybody resumed it; None: somebody ended it by hand."""
    last = sorted(states, key=lambda state: state.timestamp)[-2:]
    asked, ended = last[0], last[-1]
    until = _until(asked)
    return asked if until is not None and until <= ended.timestamp else None


def _until(state: State) -> datetime | None:
    return state.state_details.pause_timeout if state.type is StateType.PAUSED else None


def _refusal(run: FlowRun, question: State, rules: Policy) -> Deed:
    asked, until = question.timestamp, _until(question) or question.timestamp
    reference = str(run.parameters.get("scorecard", ""))
    digest = None
    with suppress(InputError):
        digest = Workspace.here().scorecard(reference).digest
    hours = (until - asked).total_seconds() / 3600
    return Deed(
        event="refused",
        model=rules.name,
        who="nobody",
        why=(
            f"Nobody answered for scorecard {reference[:12]} within {hours:.3g} h, from "
            f"{asked:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S %Z}; that means no."
        ),
        origin=f"{origin('Prefect')}: run {run.name} ({run.id})",
        scorecard=digest,
        # A run that is started again and not answered again is another refusal.
        operation=f"unanswered {question.id}",
    )
