"""Whom flows tell of what: over a real HTTP receiver, and with everything wrong that can be."""

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from enginegate.errors import ServerError, TamperedError
from enginegate.evidence import Finding, Outcome
from enginegate.notifications import ApprovalRequest, NoticeLedger, ledger
from enginegate.policy import read_policy
from enginegate.repository import Layout, LiveRepository
from enginegate.repository.history.broken_promises import (
    Acknowledgement,
    acknowledge,
    record_broken,
)
from enginegate.workspace import Workspace, now
from flows import notices
from tests.fakes.evidence import decision, scorecard
from tests.fakes.inbox import PASSWORD, TOKEN, inbox
from tests.fakes.live_triton import FakeTriton, package_in
from tests.fakes.watch_checks import watch_check

ROOT = Path(__file__).parents[3]


@pytest.fixture
def room(monkeypatch):
    """A receiver that ENGINEGATE_NOTIFY names."""
    with inbox() as made:
        monkeypatch.setenv("ENGINEGATE_NOTIFY", made.address)
        yield made


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A project in whose repository release 1 is live."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    monkeypatch.setattr(ledger, "_CLAIM", ledger.timedelta(0))
    path = Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))
    root = read_policy(path).target.repository
    root.mkdir(parents=True)
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    repository.publish(package_in(tmp_path, 0.0), expected=None)
    return path


def watched(policy, error=None):
    """What a run of the watch tells people at its end."""
    rules = read_policy(policy)
    notices.notify_of_watch(rules.live_tables, policy, Workspace.of(rules), error)


def broken_check(policy, number):
    """A failed check of the live release, in the audit log."""
    rules = read_policy(policy)
    release = Layout(rules.target.repository, "digits").release(1)
    late = Finding(gate="server_time", scope="live", outcome=Outcome.FAILED, reason="9 ms > 3 ms")
    check = watch_check(late, number=number, version=1, release_sha256=release.digest)
    record_broken(rules.target.repository, check)


def test_each_thing_is_told_when_it_begins_and_when_it_ends(policy, room):
    """Whatever the runs of the watch between say."""
    watched(policy)
    assert room.titles == ["digits: release 1 is live (published)"]

    for number in range(1, 4):
        watched(policy, ServerError(f"check {number}: http://ada:{PASSWORD}@host is dead"))
    assert room.titles[1:] == ["digits: what is live could not be measured"]
    assert "check 1: http://***@\u200bhost is dead" in room.posted[1]["message"]

    for number in range(1, 4):
        broken_check(policy, number)
        watched(policy)
    assert room.titles[2:] == ["digits: release 1 broke its promise, and 1 more"]
    both = room.posted[2]["message"]
    assert "digits: release 1 broke its promise\nAt check 1" in both
    assert "digits: the watch is well again\nIt is over" in both
    assert "server_time: 9 ms > 3 ms" in both
    assert f"enginegate acknowledge {policy} --release 1 --reason WHY" in both

    acknowledge(
        read_policy(policy).target.repository, "digits", Acknowledgement("ada", "known, moved")
    )
    watched(policy)
    watched(policy)
    assert room.titles[3:] == ["digits: the broken promise of release 1 was acknowledged"]
    assert "By ada: known, moved" in room.posted[3]["message"]


def test_whoever_wants_no_alerts_gets_no_broken_promises(policy, room):
    """on_failure = "nothing" keeps the check and says nothing; what cannot be measured is told."""
    policy.write_text(f'{policy.read_text()}\n[watch]\non_failure = "nothing"\n')
    broken_check(policy, 1)

    watched(policy, ServerError("dead"))

    (told,) = room.posted
    assert "broke its promise" not in told["message"]
    assert "could not be measured" in told["message"]


def test_dead_receiver_fails_nothing_and_gets_it_later(policy, room, caplog):
    """The next watch sends what nobody took; no log has anything of its address."""
    room.status = 500
    watched(policy, ServerError("dead"))
    assert "receiver 1 (json) of ENGINEGATE_NOTIFY did not get a message" in caplog.text
    assert "HTTP 500" in caplog.text

    room.status = 200
    watched(policy, ServerError("dead"))

    assert room.titles == ["digits: what is live could not be measured, and 1 more"]
    for secret in (TOKEN, PASSWORD):
        assert secret not in caplog.text
        kept = [path.read_text() for path in Path(".enginegate/notices").glob("*.json")]
        assert secret not in "".join(kept)


@pytest.mark.parametrize("damaged", [".enginegate-audit.jsonl", ".enginegate-current.digits.json"])
def test_repository_that_cannot_be_read_is_told_all_the_same(policy, room, damaged):
    """Nothing that may be the fault itself is read before people are told of it."""
    (read_policy(policy).target.repository / damaged).write_text("{}\n")

    watched(policy, TamperedError(f"{damaged} was changed"))

    (title,) = room.titles
    assert title == "digits: the live repository is not as it should be"


def test_approval_that_waits_is_told_once_and_not_after_an_answer(policy, room):
    """A scorecard that nobody may approve asks nobody; one that was answered meanwhile neither."""
    rules, workspace = read_policy(policy), Workspace.here()
    card = scorecard(model="digits", model_uri="models:/digits/3")
    for each in (card, card, scorecard(winner=None)):
        notices.notify_of_question(each, rules, policy, workspace)

    assert room.titles == ["digits v3 waits for an approval"]
    message = room.posted[0]["message"]
    assert f"enginegate approve {card.digest[:12]} --reason WHY" in message
    assert f"enginegate promote {policy} {card.digest[:12]}" in message

    room.status = 500
    other = scorecard(model="digits", model_uri="models:/digits/4")
    notices.notify_of_question(other, rules, policy, workspace)
    workspace.save_decision(decision(other).model_copy(update={"decided_at": now()}))
    room.status = 200
    watched(policy)

    assert room.titles[1:] == ["digits: release 1 is live (published)"]


def test_second_approver_is_asked_once_the_receiver_is_back(policy, room):
    """The first answer ends the first question, and not one that was asked after it."""
    rules, workspace = read_policy(policy), Workspace.here()
    card = scorecard(model="digits", model_uri="models:/digits/3")
    question = ApprovalRequest("first", now() - timedelta(hours=1), "p", until=now(), missing=2)
    first = decision(card).model_copy(update={"decided_at": now()})
    room.status = 500

    notices.notify_of_form(card, question, rules.live_tables, workspace)
    workspace.save_decision(first)
    second = replace(question, question="second", asked_at=now(), missing=1)
    notices.notify_of_form(card, second, rules.live_tables, workspace)
    room.status = 200
    watched(policy)

    (told,) = room.posted
    assert told["message"].count("digits v3 waits for an approval") == 1
    assert "1 person must approve" in told["message"]


@pytest.mark.parametrize("setting", [None, TOKEN])
def test_nothing_is_written_where_nobody_can_be_told(policy, monkeypatch, caplog, setting):
    """No receiver costs nothing; one that is none is said, but not what stands there."""
    if setting is not None:
        monkeypatch.setenv("ENGINEGATE_NOTIFY", setting)

    watched(policy, ServerError("dead"))
    notices.notify_of_releases(read_policy(policy).live_tables, Workspace.here())

    assert not Path(".enginegate/notices").exists()
    assert ("must hold addresses of Apprise" in caplog.text) == (setting is not None)
    assert TOKEN not in caplog.text


def test_fault_in_a_library_ends_no_flow(policy, room, monkeypatch, caplog):
    """Its words may hold an address, so that its kind alone is logged."""

    def fault(*_):
        raise RuntimeError(room.address)

    monkeypatch.setattr(NoticeLedger, "claim", fault)

    watched(policy, ServerError("dead"))

    assert "nobody was told of what the watch found: RuntimeError" in caplog.text
    assert TOKEN not in caplog.text
