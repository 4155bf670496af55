"""What a Prefect server says to an answer, and whether the run counts as answered."""

from contextlib import nullcontext
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import (
    OrchestrationResult,
    SetStateStatus,
    StateAbortDetails,
    StateAcceptDetails,
    StateRejectDetails,
)

from flows.answer import resume_suspended
from tests.fakes.evidence import decision, scorecard

CARD, FLOW = scorecard(), uuid4()
SUSPENDED = State(type=StateType.PAUSED, name="Suspended")
ACCEPTED = OrchestrationResult(
    state=State(type=StateType.SCHEDULED),
    status=SetStateStatus.ACCEPT,
    details=StateAcceptDetails(),
)
ENDED_MEANWHILE = OrchestrationResult(
    state=None,
    status=SetStateStatus.ABORT,
    details=StateAbortDetails(reason="Cannot resume a flow run that is not paused."),
)


def refused(why, state=SUSPENDED):
    details = StateRejectDetails(reason=why)
    return OrchestrationResult(state=state, status=SetStateStatus.REJECT, details=details)


TOO_LATE = refused("The flow run has timed out.", State(type=StateType.FAILED))
NO_FORM = refused("Run input schema not found.")


class Server:
    """Has one suspended run of the scorecard, and says what it is given, the last for ever."""

    def __init__(self, *says):
        self.says, self.forms = list(says), []

    def read_flow_runs(self, **_):
        return [FlowRun(flow_id=FLOW, name="one", parameters={"scorecard": CARD.digest[:12]})]

    def resume_flow_run(self, _, run_input):
        self.forms.append(run_input)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def answered(monkeypatch):
    """The names that come back when the server says this."""
    monkeypatch.setattr("flows.answer._POLL_S", 0.0)
    monkeypatch.setattr("flows.answer.check_prefect_answers", lambda: None)

    def names(server):
        monkeypatch.setattr("flows.answer.get_client", lambda **_: nullcontext(server))
        return resume_suspended(decision(CARD))

    return names


def test_resumed_run_is_named(answered):
    """And its form says who answered what."""
    server = Server(ACCEPTED)

    assert answered(server) == ("one",)
    (form,) = server.forms
    assert (form["decision"], form["approver"]) == ("approve", decision(CARD).approver)


@pytest.mark.parametrize("says", [ENDED_MEANWHILE, TOO_LATE], ids=["ended", "too late"])
def test_ended_run_is_not_named(answered, says):
    """It took no answer, whichever way the server puts it."""
    assert answered(Server(says)) == ()


def test_form_not_yet_saved_is_waited_for(answered):
    """A run is suspended a moment before its form is there."""
    assert answered(Server(NO_FORM, NO_FORM, ACCEPTED)) == ("one",)


@pytest.mark.parametrize("why", ["Run input schema not found.", "Reason: 'x' is too short"])
def test_run_that_takes_no_answer_is_reported(answered, caplog, monkeypatch, why):
    """The decision is written all the same, so this fails nothing."""
    monkeypatch.setattr("flows.answer._FORM_S", 0.0)
    assert answered(Server(refused(why))) == ()
    assert f"one did not take the answer: {why}" in caplog.text


DEAD = httpx.ConnectError("Connection refused")


def test_unreachable_prefect_fails_no_approval(answered, caplog):
    """The decision is kept already, so it is said where people can go on."""

    class Away(Server):
        def read_flow_runs(self, **_):
            raise DEAD

    assert answered(Away()) == ()
    assert "decision, which is kept: Connection refused" in caplog.text


def test_broken_run_does_not_hide_others(answered, caplog):
    """The first is named in the log, the second goes on."""

    class Two(Server):
        def read_flow_runs(self, **_):
            (run,) = super().read_flow_runs()
            return [run, run.model_copy(update={"name": "two"})]

    assert answered(Two(DEAD, ACCEPTED)) == ("two",)
    assert "one could not be resumed: Connection refused" in caplog.text
