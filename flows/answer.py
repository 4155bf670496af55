"""Answering suspended promotions from outside the Prefect UI."""

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.exceptions import FlowPauseTimeout, NotPausedError
from prefect.flow_runs import resume_flow_run

from enginegate.decision import Decision

_WAITING = FlowRunFilter(
    state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Suspended", "Paused"]))
)


def answer_suspended(decision: Decision) -> tuple[str, ...]:
    """Resume every promotion that waits for this scorecard; their names.

    The decision is in the workspace already, and the resumed flow reads it there; the form is
    filled in as well, so that the Prefect UI shows who answered.
    """
    answered = []
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=_WAITING):
            wanted = str(run.parameters.get("scorecard", ""))
            if wanted and decision.scorecard_sha256.startswith(wanted):
                form = {
                    "decision": decision.answer,
                    "approver": decision.approver,
                    "reason": decision.reason,
                    "accept_inconclusive": str(decision.candidate or ""),
                }
                try:
                    resume_flow_run(run.id, run_input=form)
                except (NotPausedError, FlowPauseTimeout):
                    continue  # it was answered, or its time was over, in this very moment
                answered.append(str(run.name))
    return tuple(answered)
