"""Answering suspended promotions from outside the Prefect UI."""

import logging
import time

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus

from enginegate.decision import Decision
from enginegate.errors import EnginegateError
from enginegate.redact import masked
from tasks.prefect_server import REFUSALS, check_prefect_answers, flow_runs

_WAITING = FlowRunFilter(
    state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Suspended", "Paused"]))
)
# Prefect's words while a run is suspended and its form is not saved yet.
_NO_FORM_YET = "Run input schema not found."
_FORM_S, _POLL_S = 10.0, 0.2
_log = logging.getLogger("enginegate.answer")


def resume_suspended(decision: Decision) -> tuple[str, ...]:
    """Resume every promotion that waits for this scorecard; their names.

    The decision is in the workspace already, and the resumed flow reads it there; the form is
    filled in as well, so that the Prefect UI shows who answered. So a server that cannot be asked
    is no reason to fail, and one run that it refuses is no reason to leave out the next.
    """
    form = {
        "decision": decision.answer,
        "approver": decision.approver,
        "reason": decision.reason,
        **({"candidate": decision.candidate.name} if decision.candidate else {}),
    }
    answered: list[str] = []
    try:
        check_prefect_answers()
        with get_client(sync_client=True) as client:
            answered += [
                str(run.name)
                for run in flow_runs(client, _WAITING)
                if _waits_for(run, decision) and _took_or_said(client, run, form)
            ]
    except (EnginegateError, *REFUSALS) as error:
        _log.warning(
            "Prefect could not be asked which promotions wait for this decision, which is kept: "
            "%s\nIf one is suspended, resume it in Prefect's UI; it finds the decision.",
            masked(str(error)),
        )
    return tuple(answered)


def _waits_for(run: FlowRun, decision: Decision) -> bool:
    wanted = str(run.parameters.get("scorecard", ""))
    return bool(wanted) and decision.scorecard_sha256.startswith(wanted)


def _took_or_said(client: SyncPrefectClient, run: FlowRun, form: dict[str, str]) -> bool:
    try:
        return _took(client, run, form)
    except REFUSALS as error:
        _log.warning(
            "the suspended run %s could not be resumed: %s\nResume it in Prefect's UI; it finds "
            "the decision.",
            run.name,
            masked(str(error)),
        )
        return False


def _took(client: SyncPrefectClient, run: FlowRun, form: dict[str, str]) -> bool:
    """Whether the run goes on with this form; not if it was answered, or is over, by now.

    Prefect's own `resume_flow_run` raises nothing when a run ends just before it is resumed.
    """
    end_s = time.monotonic() + _FORM_S
    while True:
        response = client.resume_flow_run(run.id, run_input=form)
        if response.status is not SetStateStatus.REJECT:
            return response.status is SetStateStatus.ACCEPT
        if response.state is not None and response.state.is_failed():
            return False  # its time was over
        why = getattr(response.details, "reason", "")
        if why != _NO_FORM_YET or time.monotonic() > end_s:
            _log.warning("the suspended run %s did not take the answer: %s", run.name, why)
            return False
        time.sleep(_POLL_S)
