"""Answers to a scorecard: files, and what only the audit log knows of them."""

from datetime import timedelta

import pytest

from enginegate.approval_rules import approval_status
from enginegate.errors import ApprovalError
from enginegate.policy.operating import Approval
from enginegate.repository import AuditLog, AuditRecord, record_act, record_decision
from enginegate.repository.history.audit import answers_to
from tests.fakes.evidence import FP32, WHEN, decision, scorecard, sha

CARD = scorecard()


def happen(root, *events):
    """Events of (what, whose scorecard) each."""
    for event, card in events:
        record_act(
            root,
            AuditRecord(
                event=event, model="digits", who="ada", why="why", origin="here", scorecard=card
            ),
        )


def test_rejection_only_in_the_log_counts(tmp_path):
    """The workspace was lost, or was another machine's; one that is in both is one."""
    no = decision(CARD, answer="reject", reason="too early")
    yes = decision(CARD, approver="grace")
    for each in (no, yes):
        record_decision(tmp_path, each, "digits")

    lost = answers_to(CARD, [yes], tmp_path)
    both = answers_to(CARD, [no, yes], tmp_path)

    assert [(d.answer, d.approver, d.reason) for d in lost.decisions] == [
        ("approve", "grace", "margins are wide"),
        ("reject", "ada", "too early"),
    ]
    assert [lost.record.places[d.digest] for d in lost.decisions] == [1, 0]
    assert both.decisions == (no, yes)
    assert both.record.places == {no.digest: 0, yes.digest: 1}


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        pytest.param([("published", CARD.digest)], None, id="live"),
        pytest.param([("rolled back", sha("9"))], None, id="another-one-was-left"),
        pytest.param([("published", CARD.digest), ("rolled back", sha("9"))], 1, id="rolled-back"),
        pytest.param([("published", CARD.digest), ("withdrawn", None)], 1, id="withdrawn"),
        pytest.param([("promised", CARD.digest), ("withdrawn", None)], 1, id="only-promised"),
        pytest.param(
            [("published", CARD.digest), ("rolled back", sha("9")), ("rolled back", CARD.digest)],
            1,
            id="and-brought-back",
        ),
        pytest.param([("published", CARD.digest), ("published", sha("9"))], None, id="replaced"),
        pytest.param([("promised", CARD.digest), ("promised", sha("9"))], 1, id="another-promise"),
    ],
)
def test_rolled_back_approval_is_known(tmp_path, events, ended):
    """From the events after this very scorecard was published."""
    happen(tmp_path, *events)

    record = answers_to(CARD, [], tmp_path).record

    assert (record.ended[0] if record.ended else None) == ended
    if ended is not None:
        assert record.ended[1] == AuditLog(tmp_path).read()[ended].at


def test_approval_only_in_a_file_does_not_count(tmp_path):
    """Three written by hand satisfy nobody; one given by command does, a no needs no proof."""
    rules = Approval(approvers=("ada", "grace", "joan"), required=2, expires_hours=1)
    forged = [decision(CARD, approver=name) for name in ("grace", "joan")]
    given = decision(CARD)
    record_decision(tmp_path, given, "digits")

    answers = answers_to(CARD, [*forged, given], tmp_path)
    found = approval_status(answers.decisions, CARD, rules, now=WHEN, record=answers.record)

    assert ([d.approver for d in found.approvals], found.missing) == (["ada"], 1)
    assert [said.split(":")[0] for said in found.objections] == [
        "The approval by grace",
        "The approval by joan",
    ]
    assert "only a file in the workspace" in found.objections[0]
    no = decision(CARD, approver="grace", answer="reject")
    answers = answers_to(CARD, [given, no], tmp_path)
    assert approval_status(
        answers.decisions, CARD, rules, now=WHEN, record=answers.record
    ).rejection.startswith("Rejected by grace")


def test_forged_approval_hides_no_genuine_one(tmp_path):
    """A newer file with the same person's name changes nothing."""
    rules = Approval(expires_hours=24)
    given = decision(CARD)
    forged = decision(CARD, decided_at=WHEN + timedelta(hours=1), candidate=FP32)
    record_decision(tmp_path, given, "digits")

    answers = answers_to(CARD, [given, forged], tmp_path)
    found = approval_status(
        answers.decisions, CARD, rules, now=WHEN + timedelta(hours=2), record=answers.record
    )

    assert found.approvals == (given,)


@pytest.fixture
def at(monkeypatch):
    """Set the clock of the machine that writes the audit log."""

    def set_to(moment):
        class Clock:
            @staticmethod
            def now(**_):
                return moment

        monkeypatch.setattr("enginegate.repository.history.audit.datetime", Clock)
        return moment

    return set_to


def answered(root, card, rules, now, *given):
    answers = answers_to(card, given, root)
    return approval_status(answers.decisions, card, rules, now=now, record=answers.record)


HOUR = timedelta(hours=1)
RULES = Approval(expires_hours=72)


def test_clock_set_back_keeps_a_new_approval_valid(tmp_path, at):
    """The log has the order: after the no, after the rollback and after an older yes, it counts."""
    old = decision(CARD, approver="joan", decided_at=at(WHEN))
    record_decision(tmp_path, old, "digits")
    happen(tmp_path, ("published", CARD.digest), ("rolled back", sha("9")))
    no = decision(CARD, approver="grace", answer="reject", decided_at=at(WHEN))
    record_decision(tmp_path, no, "digits")
    back = at(WHEN - HOUR)
    yes = decision(CARD, decided_at=back)
    record_decision(tmp_path, yes, "digits")

    found = answered(tmp_path, CARD, RULES, back + timedelta(minutes=1), old, no, yes)

    assert (found.approvals, found.missing, found.rejection) == ((yes,), 0, "")


def test_approval_before_clock_change_says_why_it_is_invalid(tmp_path, at):
    """How old it is cannot be known; the same person's new one is the latest, and counts."""
    old = decision(CARD, decided_at=at(WHEN))
    record_decision(tmp_path, old, "digits")
    back = at(WHEN - HOUR)

    found = answered(tmp_path, CARD, RULES, back, old)
    assert "the clock of this machine was set back since" in found.objections[0]
    assert found.approvals == ()
    new = decision(CARD, decided_at=back)
    record_decision(tmp_path, new, "digits")

    assert answered(tmp_path, CARD, RULES, back, old, new).approvals == (new,)


def test_without_a_place_in_the_log_the_future_is_refused_with_the_reason(tmp_path):
    """Nothing says when it arrived, so a person must look."""
    no = decision(CARD, answer="reject", decided_at=WHEN + HOUR)

    with pytest.raises(ApprovalError, match="the clock of this machine was set back, or"):
        answered(tmp_path, CARD, RULES, WHEN, no)


def test_late_worker_puts_no_approval_after_a_rejection(tmp_path, at):
    """A form's answer is written down long after it was given: its place says nothing then."""
    no = decision(CARD, approver="grace", answer="reject", decided_at=at(WHEN + HOUR))
    record_decision(tmp_path, no, "digits")
    at(WHEN + HOUR / 2)
    yes = decision(CARD, decided_at=WHEN)
    record_decision(tmp_path, yes, "digits")

    found = answered(tmp_path, CARD, RULES, WHEN + 2 * HOUR, no, yes)

    assert found.approvals == ()
    assert found.rejection.startswith("Rejected by grace")
