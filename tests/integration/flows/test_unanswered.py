"""Promotions that nobody answered: Prefect ends them by itself, and the audit log hears of it."""

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import FlowPauseTimeout, Pause
from prefect.flow_runs import resume_flow_run
from prefect.states import Failed

from enginegate.errors import ApprovalError
from enginegate.policy import read_policy
from enginegate.repository import AuditLog, record_decision
from enginegate.workspace import Workspace, now
from flows.watch import watch
from tasks.expired_approvals import note_expired_approvals
from tests.fakes.authentic import keep
from tests.fakes.deployed import Deployed
from tests.fakes.evidence import decision, scorecard
from tests.fakes.family import _POLICY as POLICY

pytestmark = pytest.mark.xdist_group("flows")

_ANSWER = {"decision": "reject", "approver": "grace", "reason": "too late"}
_TWO_SECONDS, _A_DAY = 0.0006, 24
_EXPIRED = Failed(message="The flow was paused and never resumed.")


@pytest.fixture
def policy(prefect_server, tmp_path, monkeypatch, request):
    """One under which nothing is live, and a promotion waits for two seconds, or for hours."""
    del prefect_server  # it only has to run
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    path = tmp_path / "policy.toml"
    hours = getattr(request, "param", _TWO_SECONDS)
    path.write_text(f"{POLICY.format(root=tmp_path)}timeout_hours = {hours}\n")
    return path


@pytest.fixture
def card(policy):
    """A scorecard made under it."""
    rules = read_policy(policy)
    made = scorecard(model="tiny", model_uri="models:/tiny/1", policy_sha256=rules.digest)
    return keep(made, rules, Workspace.here())


def suspended(policy, card):
    run = Deployed(policy, card.digest)
    with pytest.raises(Pause):
        run.step()
    return run


def question_of(run):
    """When it was suspended, and until when it waits."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run.id).state
    return state.timestamp, state.state_details.pause_timeout


def answered_too_late(run):
    with pytest.raises(FlowPauseTimeout):
        resume_flow_run(run.id, run_input=_ANSWER)


def failed(run):
    """As Prefect's service, or a person, fails it."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, _EXPIRED, force=True)


def waited_out(run, end=answered_too_late):
    """Its time is over, and somebody finds that out."""
    _, until = question_of(run)
    time.sleep(max(0.0, (until - now()).total_seconds()) + 0.1)
    end(run)
    assert run.state == "Failed"


def midway(run):
    """A moment at which it still waited, however slow this machine is."""
    asked, until = question_of(run)
    return asked + (until - asked) / 2


@contextmanager
def logged_at(moment, monkeypatch):
    """What the audit log notes in the block, it notes at this time."""

    class Clock:
        @staticmethod
        def now(**_):
            return moment

    with monkeypatch.context() as patch:
        patch.setattr("enginegate.repository.history.audit.datetime", Clock)
        yield


def noted(policy):
    return note_expired_approvals.fn(policy.live_tables, Workspace.of(policy))


def refusals(policy):
    events = AuditLog(read_policy(policy).target.repository).read()
    return [event for event in events if event.event == "refused"]


def test_expired_promotion_is_recorded_once(policy, card, tmp_path):
    """By the next watch: for which scorecard, how long it waited, and in which run."""
    run = suspended(policy, card)
    asked, until = question_of(run)
    waited_out(run)

    done = watch(policy, 0.0).done

    (event,) = refusals(policy)
    assert done == (event.why,)
    hours = f"{(until - asked).total_seconds() / 3600:.3g}"
    silence = f"Nobody answered for scorecard {card.digest[:12]} within {hours} h, from "
    assert event.why.startswith(silence)
    assert (event.who, event.scorecard, event.model) == ("nobody", card.digest, "tiny")
    assert str(run.id) in event.origin
    failed(run)
    assert watch(policy, 0.0).done == ()
    assert len(refusals(policy)) == 1
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(policy.read_text().replace('/live"', '/elsewhere"'))
    assert noted(read_policy(elsewhere)) == ()


def test_the_next_promotion_writes_it_too(policy, card):
    """Started again, and again not answered: two refusals, whoever else fails the run as well."""
    run = suspended(policy, card)
    waited_out(run)

    again = suspended(policy, card)

    assert len(refusals(policy)) == 1
    waited_out(again)
    failed(again)
    assert len(noted(read_policy(policy))) == 1
    assert len(refusals(policy)) == 2


@pytest.mark.parametrize("policy", [_A_DAY], indirect=True)
def test_answered_or_cancelled_promotion_is_not_recorded(policy, card):
    """A no is on record as a no; a run that waits, or that somebody ended, was not waited out."""
    run, ended = suspended(policy, card), suspended(policy, card)
    assert noted(read_policy(policy)) == ()
    resume_flow_run(run.id, run_input=_ANSWER)
    with pytest.raises(ApprovalError, match="Rejected by grace"):
        run.step()
    failed(ended)

    assert noted(read_policy(policy)) == ()

    assert [event.why for event in refusals(policy)] == ["Rejected by grace: too late"]


@pytest.mark.parametrize("where", ["workspace", "audit log"])
def test_undelivered_answer_is_not_recorded_as_expired(policy, card, where, monkeypatch):
    """Somebody answered in a shell that knew no Prefect server; the run expired all the same."""
    run = suspended(policy, card)
    meanwhile = midway(run)
    answer = decision(card, decided_at=meanwhile)
    if where == "workspace":
        Workspace.here().save_decision(answer)
    else:
        with logged_at(meanwhile, monkeypatch):
            record_decision(read_policy(policy).target.repository, answer, "tiny")
    waited_out(run)

    assert noted(read_policy(policy)) == ()
    assert refusals(policy) == []


def test_late_answer_keeps_the_expiry_record(policy, card):
    """Both are on record: nobody answered in time, and somebody did later."""
    run = suspended(policy, card)
    waited_out(run, failed)
    Workspace.here().save_decision(decision(card, decided_at=now()))

    assert len(noted(read_policy(policy))) == 1


def test_expiries_of_one_scorecard_are_recorded_apart(policy, card, monkeypatch):
    """Two promotions of one scorecard that waited at the same time are two refusals."""
    first, second = suspended(policy, card), suspended(policy, card)
    waited_out(first)
    with logged_at(midway(second), monkeypatch):
        assert len(noted(read_policy(policy))) == 1
    waited_out(second)

    assert len(noted(read_policy(policy))) == 1
    assert len(refusals(policy)) == 2


def test_prefect_is_asked_little(policy, card, monkeypatch):
    """Not for what ended a month ago, and not again for what is written down."""
    waited_out(suspended(policy, card))
    rules = read_policy(policy)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.expired_approvals.now", lambda: now() + timedelta(days=31))
        assert noted(rules) == ()
    assert len(noted(rules)) == 1

    asked = []
    monkeypatch.setattr(SyncPrefectClient, "read_flow_run_states", lambda _, run: asked.append(run))
    assert noted(rules) == ()
    assert asked == []
