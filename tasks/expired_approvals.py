"""Promotions that ended because nobody answered: Prefect knows, and the audit log is updated.

A suspended promotion is no process. When its time is over Prefect's server fails the run by itself,
so whoever checks next writes down that this was a no, unless the scorecard was answered elsewhere.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL

from enginegate.errors import EnginegateError, InputError
from enginegate.policy import read_policy
from enginegate.policy.operating import LiveTables
from enginegate.redact import masked
from enginegate.repository import AuditLog, AuditRecord, origin, record_act
from enginegate.repository.history.audit import Event
from enginegate.workspace import Workspace, now
from tasks.prefect_server import REFUSALS, flow_runs, quick_client

# Prefect's words for it: "The flow was paused and never resumed."
_EXPIRED = "never resumed."
_PROMOTIONS = FlowFilter(name=FlowFilterName(any_=["promote"]))
_FAILED = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.FAILED]))
# Nobody looked for longer than this: what is older stays Prefect's alone.
_LOOKED_BACK = timedelta(days=30)
_ANSWERS = frozenset({"approved", "rejected", "published", "refused"})
_SILENCE = "unanswered"
_log = logging.getLogger("enginegate.unanswered")


@task(task_run_name="note-unanswered", cache_policy=NO_CACHE)
def note_expired_approvals(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Write a refusal for each promotion of the policy that nobody answered in time, once.

    What cannot be written now is written by the next promotion or watch.
    """
    if not PREFECT_API_URL.value():
        return ()
    root = tables.target.repository
    try:
        events = AuditLog(root).of(tables.model)
        with quick_client() as client:
            found = list(_refusals(client, tables, workspace, events))
        for deed in found:
            record_act(root, deed)
    except (EnginegateError, *REFUSALS) as error:
        why = masked(str(error))
        _log.warning("promotions that nobody answered were not searched for: %s", why)
        return ()
    for deed in found:
        _log.warning("%s", deed.why)
    return tuple(deed.why for deed in found)


def _refusals(
    client: SyncPrefectClient,
    tables: LiveTables,
    workspace: Workspace,
    events: Sequence[Event],
) -> Iterator[AuditRecord]:
    known = {event.operation for event in events}
    is_under = cache(lambda policy: _is_same(policy, tables))
    for run in _expired(client):
        if _operation(run.state_id) in known or not is_under(_policy(run)):
            continue
        states = client.read_flow_run_states(run.id)
        question = _Question.of(run, states, workspace)
        if question is None or question.operation in known:
            continue
        if not question.was_answered(events):
            yield _refusal(run, question, tables.model)


def _expired(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Promotions that Prefect ended lately because nobody resumed them."""
    wanted = FlowRunFilter(
        state=_FAILED, end_time=FlowRunFilterEndTime(after_=now() - _LOOKED_BACK)
    )
    for run in flow_runs(client, wanted, flows=_PROMOTIONS):
        if run.state is not None and (run.state.message or "").endswith(_EXPIRED):
            yield run


def _is_same(policy: str, tables: LiveTables) -> bool:
    """Whether a promotion was to publish to the policy's own repository.

    One whose policy is not here, or cannot be read, is left to a worker that has it.
    """
    try:
        theirs = read_policy(Path(policy))
    except EnginegateError:
        return False
    return (theirs.name, theirs.target.repository) == (tables.model, tables.target.repository)


@dataclass(frozen=True, slots=True)
class _Question:
    """A suspension that was over before anybody resumed it."""

    scorecard: str
    asked: datetime
    until: datetime
    operation: str
    workspace: Workspace

    @classmethod
    def of(cls, run: FlowRun, states: Sequence[State], workspace: Workspace) -> "_Question | None":
        """The last one of a run; None: somebody ended the run by hand.

        The server's service and whoever answers too late can both fail it: the first end counts.
        """
        ended, asked = None, None
        for state in sorted(states, key=lambda state: state.timestamp, reverse=True):
            if state.type is not StateType.FAILED:
                asked = state
                break
            ended = state
        if asked is None or ended is None or asked.type is not StateType.PAUSED:
            return None
        until = asked.state_details.pause_timeout
        if until is None or until > ended.timestamp:
            return None
        scorecard = str(run.parameters.get("scorecard", ""))
        return cls(scorecard, asked.timestamp, until, _operation(ended.id), workspace)

    @property
    def digest(self) -> str | None:
        """The scorecard's, where the workspace has it."""
        with suppress(InputError):
            return self.workspace.scorecard(self.scorecard).digest
        return None

    def was_answered(self, events: Sequence[Event]) -> bool:
        """Whether an answer reached the workspace or the audit log meanwhile, but not the run.

        That another run was not answered is no answer.
        """
        digest = self.digest
        answers = [event.at for event in events if self._is_answered_by(event, digest)]
        if digest is not None:
            answers += [given.decided_at for given in self.workspace.decisions(digest)]
        return any(self.asked <= at <= self.until for at in answers)

    def _is_answered_by(self, event: Event, digest: str | None) -> bool:
        beginning = digest or self.scorecard
        own = bool(beginning) and (event.scorecard or "").startswith(beginning)
        return own and event.event in _ANSWERS and not event.operation.startswith(_SILENCE)


def _refusal(run: FlowRun, question: _Question, model: str) -> AuditRecord:
    asked, until = question.asked, question.until
    hours = (until - asked).total_seconds() / 3600
    return AuditRecord(
        event="refused",
        model=model,
        who="nobody",
        why=(
            f"Nobody answered for scorecard {question.scorecard[:12]} within {hours:.3g} h, from "
            f"{asked:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S %Z}; that means no."
        ),
        origin=f"{origin('Prefect')}: run {run.name} ({run.id})",
        scorecard=question.digest,
        operation=question.operation,
    )


def _policy(run: FlowRun) -> str:
    return str(run.parameters.get("policy", ""))


def _operation(state: UUID | None) -> str:
    """Of this end of a run: one that is started and not answered again ends in another state."""
    return f"{_SILENCE} {state}"
