"""Promotions that nobody answered: Prefect ends them by itself, and the audit log hears of it."""

import re
import time
from datetime import timedelta

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import FlowPauseTimeout, NotPausedError, Pause
from prefect.flow_runs import resume_flow_run
from prefect.states import Failed

from enginegate.errors import ApprovalError
from enginegate.policy import read_policy
from enginegate.repository import AuditLog, record_decision
from enginegate.workspace import Workspace, now
from flows.watch import watch
from tasks.unanswered import note_unanswered
from tests.fakes.deployed import Deployed
from tests.fakes.evidence import decision, scorecard
from tests.fakes.family import _POLICY as POLICY

pytestmark = pytest.mark.xdist_group("flows")

_ANSWER = {"decision": "reject", "approver": "grace", "reason": "too late"}
_A_SECOND, _FOUR_SECONDS, _A_DAY = 0.0003, 0.0012, 24


@pytest.fixture
def policy(prefect_server, tmp_path, monkeypatch, request):
    """One under which nothing is live, and a promotion waits for a second, or for hours."""
    del prefect_server  # it only has to run
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    path = tmp_path / "policy.toml"
    hours = getattr(request, "param", _A_SECOND)
    path.write_text(f"{POLICY.format(root=tmp_path)}timeout_hours = {hours}\n")
    return path


@pytest.fixture
def card(policy):
    """A scorecard made under it."""
    rules = read_policy(policy)
    made = scorecard(model="tiny", model_uri="models:/tiny/1", policy_sha256=rules.digest)
    Workspace.here().save_scorecard(made)
    return made


def suspended(policy, card):
    run = Deployed(policy, card.digest)
    with pytest.raises(Pause):
        run.step()
    return run


def expired(run):
    """Its time is over: Prefect's service says so within seconds, or whoever comes too late."""
    time.sleep(1.1)
    with pytest.raises((FlowPauseTimeout, NotPausedError)):
        resume_flow_run(run.id, run_input=_ANSWER)
    assert run.state == "Failed"


def refusals(policy):
    events = AuditLog(read_policy(policy).target.repository).read()
    return [event for event in events if event.event == "refused"]


def test_a_promotion_that_nobody_answered_is_refused_on_record_once(policy, card, tmp_path):
    """By the next watch: for which scorecard, how long it waited, and in which run."""
    run = suspended(policy, card)
    assert note_unanswered.fn(read_policy(policy)) == ()
    expired(run)

    done = watch(policy, 0.0).done

    (event,) = refusals(policy)
    assert done == (event.why,)
    silence = rf"Nobody answered for scorecard {card.digest[:12]} within 0\.000[23]\d* h, from "
    assert re.match(silence, event.why)
    assert (event.who, event.scorecard, event.model) == ("nobody", card.digest, "tiny")
    assert str(run.id) in event.origin
    assert watch(policy, 0.0).done == ()
    assert len(refusals(policy)) == 1
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(policy.read_text().replace('/live"', '/elsewhere"'))
    assert note_unanswered.fn(read_policy(elsewhere)) == ()


def test_the_next_promotion_writes_it_too(policy, card):
    """Started again, and again not answered: two refusals."""
    run = suspended(policy, card)
    expired(run)

    again = suspended(policy, card)

    assert len(refusals(policy)) == 1
    expired(again)
    assert len(note_unanswered.fn(read_policy(policy))) == 1
    assert len(refusals(policy)) == 2


@pytest.mark.parametrize("policy", [_A_DAY], indirect=True)
def test_what_was_answered_or_ended_by_hand_is_no_silence(policy, card):
    """A no is on record as a no, and a run that somebody ended was not waited out."""
    run, ended = suspended(policy, card), suspended(policy, card)
    resume_flow_run(run.id, run_input=_ANSWER)
    with pytest.raises(ApprovalError, match="Rejected by grace"):
        run.step()
    with get_client(sync_client=True) as client:
        by_hand = Failed(message="The flow was paused and never resumed.")
        client.set_flow_run_state(ended.id, by_hand, force=True)

    assert note_unanswered.fn(read_policy(policy)) == ()

    assert [event.why for event in refusals(policy)] == ["Rejected by grace: too late"]


@pytest.mark.parametrize("where", ["workspace", "audit log"])
def test_an_answer_that_did_not_reach_the_run_is_no_silence(policy, card, where):
    """Somebody answered in a shell that knew no Prefect server; the run expired all the same."""
    run = suspended(policy, card)
    answer = decision(card, decided_at=now())
    if where == "workspace":
        Workspace.here().save_decision(answer)
    else:
        record_decision(read_policy(policy).target.repository, answer, "tiny")
    expired(run)

    assert note_unanswered.fn(read_policy(policy)) == ()
    assert refusals(policy) == []


def test_an_answer_that_came_too_late_leaves_the_silence(policy, card):
    """Both are on record: nobody answered in time, and somebody did later."""
    run = suspended(policy, card)
    expired(run)
    Workspace.here().save_decision(decision(card, decided_at=now()))

    assert len(note_unanswered.fn(read_policy(policy))) == 1


@pytest.mark.parametrize("policy", [_FOUR_SECONDS], indirect=True)
def test_one_silence_hides_no_other(policy, card):
    """Two promotions of one scorecard that waited at the same time are two refusals."""
    first = suspended(policy, card)
    time.sleep(2.0)
    second = suspended(policy, card)
    time.sleep(1.5)
    expired(first)
    assert len(note_unanswered.fn(read_policy(policy))) == 1
    time.sleep(2.0)
    expired(second)

    assert len(note_unanswered.fn(read_policy(policy))) == 1
    assert len(refusals(policy)) == 2


def test_prefect_is_asked_little(policy, card, monkeypatch):
    """Not for what ended a month ago, and not again for what is written down."""
    expired(suspended(policy, card))
    rules = read_policy(policy)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.unanswered.now", lambda: now() + timedelta(days=31))
        assert note_unanswered.fn(rules) == ()
    assert len(note_unanswered.fn(rules)) == 1

    asked = []
    monkeypatch.setattr(SyncPrefectClient, "read_flow_run_states", lambda _, run: asked.append(run))
    assert note_unanswered.fn(rules) == ()
    assert asked == []
