"""The approval gate: what lets a scorecard through, and what does not."""

import re
from datetime import timedelta

import pytest

from enginegate.approval_rules import approval_status, check_decision, may_not_reject, outdated
from enginegate.candidate import Candidate
from enginegate.decision import OnRecord
from enginegate.errors import ApprovalError
from enginegate.evidence import Outcome
from enginegate.policy.operating import Approval
from tests.fakes.evidence import (
    FP32,
    INT8,
    WHEN,
    benchmark,
    decision,
    finding,
    release,
    scorecard,
    verdict,
)

RULES = Approval(approvers=("ada", "grace"), expires_hours=72)
TWO = Approval(approvers=("ada", "grace", "joan"), required=2, expires_hours=72)
LENIENT = Approval(expires_hours=72, accept_inconclusive=True)
UNSURE = finding(Outcome.INCONCLUSIVE)
HOUR = timedelta(hours=1)


def answers(card, *given):
    """Decisions of (approver, answer, hours from WHEN) each."""
    return [
        decision(card, approver=who, answer=answer, decided_at=WHEN + hours * HOUR)
        for who, answer, hours in given
    ]


def test_fresh_approval_passes():
    """The decision that was given comes back, unchanged."""
    card = scorecard()
    given = decision(card)

    assert check_decision([given], card, RULES, now=WHEN + HOUR) == (given,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"answer": "reject"}, "Rejected by ada: margins", id="rejected"),
        pytest.param({"approver": "mallory"}, "names: ada, grace", id="not-an-approver"),
        pytest.param({"scorecard_sha256": "f" * 64}, "needs a new decision", id="other-scorecard"),
        pytest.param({"decided_at": WHEN - 73 * HOUR}, "stands for 72 h", id="expired"),
        pytest.param(
            {"decided_at": WHEN + timedelta(minutes=6)},
            "made at 2026-11-20T12:06:00.*it is 2026-11-20T12:00:00",
            id="from-the-future",
        ),
        pytest.param({"accepts": ("samples/evaluation",)}, "inconclusive", id="accepts-too-much"),
        pytest.param(
            {"candidate": Candidate.parse("tensorrt-fp8")}, "no engine", id="unknown-candidate"
        ),
    ],
)
def test_any_other_decision_is_refused(changes, message):
    """Each way a decision can be invalid is refused with its own reason."""
    card = scorecard()

    with pytest.raises(ApprovalError, match=message):
        check_decision([decision(card, **changes)], card, RULES, now=WHEN)


def test_small_clock_difference_is_tolerated():
    """Five minutes are: machines disagree."""
    card = scorecard()

    given = decision(card, decided_at=WHEN + timedelta(minutes=4))

    assert check_decision([given], card, RULES, now=WHEN) == (given,)


def test_no_decision_means_no():
    """Without a decision the message teaches the command that gives one."""
    card = scorecard()

    with pytest.raises(ApprovalError, match=f"enginegate approve {card.digest[:12]}"):
        check_decision([], card, RULES, now=WHEN)


@pytest.mark.parametrize(
    ("rules", "given", "approved_by", "missing"),
    [
        pytest.param(RULES, [("ada", "approve", 0)], ["ada"], 0, id="one-of-one"),
        pytest.param(RULES, [(" Ada ", "approve", 0)], [" Ada "], 0, id="case-and-spaces"),
        pytest.param(TWO, [("ada", "approve", 0)], ["ada"], 1, id="one-of-two"),
        pytest.param(
            TWO, [("ada", "approve", 0), ("ada", "approve", 1)], ["ada"], 1, id="one-person-twice"
        ),
        pytest.param(
            TWO,
            [("ada", "approve", 0), ("grace", "approve", 1)],
            ["ada", "grace"],
            0,
            id="two-of-two",
        ),
        pytest.param(
            TWO,
            [("ada", "approve", 0), ("mallory", "approve", 1)],
            ["ada"],
            1,
            id="second-is-not-named",
        ),
        pytest.param(
            RULES,
            [("ada", "reject", 0), ("ada", "approve", 1)],
            ["ada"],
            0,
            id="changed-mind-to-yes",
        ),
        pytest.param(RULES, [("ada", "approve", 0), ("ada", "reject", 1)], [], 1, id="to-no"),
        pytest.param(
            RULES, [("ada", "approve", 0), ("grace", "reject", 1)], [], 1, id="another-says-no"
        ),
        pytest.param(
            RULES, [("ada", "approve", 0), ("grace", "reject", 0)], [], 1, id="at-the-same-time"
        ),
        pytest.param(
            RULES,
            [("grace", "reject", 0), ("ada", "approve", 1)],
            ["ada"],
            0,
            id="yes-after-the-no",
        ),
        pytest.param(
            TWO,
            [("ada", "approve", 0), ("joan", "reject", 1), ("grace", "approve", 2)],
            ["grace"],
            1,
            id="a-no-voids-what-was-before-it",
        ),
        pytest.param(
            RULES,
            [("ada", "approve", 0), ("mallory", "reject", 1)],
            ["ada"],
            0,
            id="a-no-that-does-not-count",
        ),
        pytest.param(
            TWO,
            [("ada", "approve", -80), ("grace", "approve", 0)],
            ["grace"],
            1,
            id="one-has-expired",
        ),
    ],
)
def test_several_answers_add_up(rules, given, approved_by, missing):
    """The latest answer of each person counts, in whatever order the files were read."""
    card = scorecard()
    decisions = answers(card, *given)

    found = approval_status(reversed(decisions), card, rules, now=WHEN + 3 * HOUR)

    assert ([d.approver for d in found.approvals], found.missing) == (approved_by, missing)


MINUTE = 1 / 60


@pytest.mark.parametrize(
    ("given", "arrived", "approved_by"),
    [
        pytest.param(
            [("ada", "approve", 2 * MINUTE), ("grace", "reject", 0)], (), [], id="clocks-may-differ"
        ),
        pytest.param(
            [("ada", "approve", 2 * MINUTE), ("ada", "reject", 0)], (), [], id="of-one-person-too"
        ),
        pytest.param(
            [("ada", "approve", 1), ("grace", "reject", 0)], (0, 1), [], id="the-no-arrived-later"
        ),
        pytest.param(
            [("ada", "approve", 1), ("ada", "reject", 0)], (0, 1), [], id="their-own-did-too"
        ),
        pytest.param(
            [("ada", "approve", 2 * MINUTE), ("grace", "reject", 0)],
            (1, 0),
            ["ada"],
            id="the-yes-arrived-later",
        ),
        pytest.param(
            [("ada", "approve", 0), ("grace", "reject", 1)], (1, 0), [], id="a-late-worker"
        ),
    ],
)
def test_no_clock_puts_an_approval_behind_a_later_no(given, arrived, approved_by):
    """By the order of arrival where it is known; else a no reaches as far as clocks differ."""
    card = scorecard()
    decisions = answers(card, *given)
    places = {d.digest: place for d, place in zip(decisions, arrived, strict=False)}

    found = approval_status(decisions, card, RULES, now=WHEN + 2 * HOUR, record=OnRecord(places))

    assert [d.approver for d in found.approvals] == approved_by
    assert bool(found.rejection) != bool(approved_by)


@pytest.mark.parametrize("name", ["ada@host", "ADA", "ada"])
def test_rejection_counts_however_the_name_is_written(name):
    """Only a yes needs the very name of the policy; a stranger's no is named as one."""
    card = scorecard()
    decisions = answers(card, ("grace", "approve", 0), (name, "reject", 1))

    found = approval_status(decisions, card, RULES, now=WHEN + HOUR)

    assert found.rejection.startswith(f"Rejected by {name}")
    assert may_not_reject(name, RULES) == ""
    assert "ada, grace" in may_not_reject("mallory@host", RULES)


@pytest.mark.parametrize(
    ("hours", "place", "counts"),
    [(-1, None, False), (1, None, True), (1, 3, False), (1, 7, True), (-1, 7, False)],
)
def test_rollback_uses_up_the_approval(hours, place, counts):
    """A yes after the rollback counts, by the clock and by the order of arrival."""
    card = scorecard()
    (given,) = answers(card, ("ada", "approve", hours))
    places = {} if place is None else {given.digest: place}
    record = OnRecord(places, ended=(5, WHEN))

    found = approval_status([given], card, RULES, now=WHEN + 2 * HOUR, record=record)

    assert bool(found.approvals) is counts
    if not counts:
        with pytest.raises(ApprovalError, match="was rolled back"):
            check_decision([given], card, RULES, now=WHEN + 2 * HOUR, record=record)


@pytest.mark.parametrize("approver", ["ada", "Ada", "ada@laptop", "ada@host"])
def test_with_four_eyes_whoever_asked_cannot_approve(approver):
    """However the name is written; somebody else can."""
    rules = Approval(requester_may_approve=False, expires_hours=72)
    card = scorecard(requested_by="ada@host")

    with pytest.raises(ApprovalError, match="somebody else must approve"):
        check_decision([decision(card, approver=approver)], card, rules, now=WHEN)
    assert check_decision([decision(card, approver="grace")], card, rules, now=WHEN)


def test_with_four_eyes_an_unknown_requester_is_nobody_elses():
    """What cannot be shown does not hold."""
    rules = Approval(requester_may_approve=False, expires_hours=72)
    card = scorecard()

    with pytest.raises(ApprovalError, match="does not say who asked"):
        check_decision([decision(card)], card, rules, now=WHEN)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"winner": None}, id="no-winner"),
        pytest.param({"benchmarks": ()}, id="never-benchmarked"),
        pytest.param({"verdicts": (verdict(UNSURE),)}, id="inconclusive"),
        pytest.param({"benchmarks": (benchmark(outcome=Outcome.FAILED),)}, id="slo-missed"),
    ],
)
def test_only_a_passed_winner_can_be_approved(changes):
    """An approval cannot lift a candidate over its gates."""
    card = scorecard(**changes)

    with pytest.raises(ApprovalError, match="nothing to approve"):
        check_decision([decision(card)], card, RULES, now=WHEN)


def unsure_card(*findings, **changes):
    """INT8 failed, FP32 is inconclusive: nothing won."""
    judged = (
        verdict(finding(Outcome.FAILED)),
        verdict(*(findings or (UNSURE,)), candidate=FP32),
    )
    fields = {"verdicts": judged, "winner": None, "reason": "nothing passed"}
    measured = (benchmark(), benchmark(candidate=FP32))
    return scorecard(**(fields | {"benchmarks": measured} | changes))


def test_inconclusive_candidate_can_be_accepted_by_policy():
    """With exactly its inconclusive findings; the scorecard's winner stays what it was."""
    card = unsure_card()
    given = decision(card, candidate=FP32, accepts=("samples/evaluation",))

    assert check_decision([given], card, LENIENT, now=WHEN) == (given,)
    assert card.winner is None


@pytest.mark.parametrize(
    ("card", "rules", "changes", "message"),
    [
        pytest.param(unsure_card(), RULES, {}, "nothing to approve", id="not-allowed"),
        pytest.param(
            unsure_card(), LENIENT, {"accepts": ()}, "it accepts nothing", id="accepts-too-little"
        ),
        pytest.param(
            unsure_card(),
            LENIENT,
            {"accepts": ("samples/evaluation", "x/y")},
            "x/y",
            id="accepts-too-much",
        ),
        pytest.param(
            unsure_card(), LENIENT, {"candidate": INT8}, "failed; that can never", id="failed"
        ),
        pytest.param(unsure_card(), LENIENT, {"candidate": None}, "names no candidate", id="none"),
        pytest.param(
            unsure_card(
                finding(Outcome.ERRORED), benchmarks=(benchmark(candidate=FP32),), winner=None
            ),
            LENIENT,
            {},
            "nothing to approve",
            id="errored",
        ),
        pytest.param(
            unsure_card(benchmarks=()), LENIENT, {}, "nothing to approve", id="never-benchmarked"
        ),
    ],
)
def test_failed_candidate_cannot_be_accepted(card, rules, changes, message):
    """A failed or broken candidate never, an inconclusive one only as the policy says."""
    fields = {"candidate": FP32, "accepts": ("samples/evaluation",)} | changes

    with pytest.raises(ApprovalError, match=message):
        check_decision([decision(card, **fields)], card, rules, now=WHEN)


def test_people_must_approve_the_same_candidate():
    """Two approvals of two things are one approval of each."""
    card = scorecard(
        verdicts=(verdict(), verdict(candidate=FP32)),
        benchmarks=(benchmark(), benchmark(candidate=FP32)),
    )
    rules = Approval(required=2, expires_hours=72)
    given = [decision(card), decision(card, approver="grace", candidate=FP32)]

    with pytest.raises(ApprovalError, match="approved another candidate"):
        check_decision(given, card, rules, now=WHEN)
    winner = decision(card, approver="joan", candidate=INT8, decided_at=WHEN + HOUR)
    assert check_decision([*given, winner], card, rules, now=WHEN + HOUR) == (given[0], winner)


def test_changed_evidence_changes_the_digest():
    """One number more or less is another scorecard, so an old approval no longer fits."""
    before = scorecard()

    after = scorecard(benchmarks=(benchmark(399.0, candidate=INT8),))

    assert after.digest != before.digest


@pytest.mark.parametrize(
    ("changes", "live", "message"),
    [
        ({"replaces": None}, None, ""),
        ({"replaces": 2}, {"version": 2}, ""),
        (
            {"replaces": 1},
            {"version": 2, "engine_sha256": "d" * 64},
            "release 1.*is release 2",
        ),
        ({"replaces": None}, {"version": 2, "engine_sha256": "d" * 64}, "nothing was live; now it"),
        ({"replaces": 1}, None, "while release 1 was live; now it is nothing"),
        ({"replaces": 1}, {"version": 2, "engine_sha256": "e" * 64}, "release 1.*is release 2"),
        ({"replaces": 1}, {"version": 2, "scorecard_sha256": scorecard(replaces=1).digest}, ""),
        ({"policy_sha256": "f" * 64}, None, "policy has changed.*Qualify again"),
    ],
)
def test_scorecard_is_outdated_by_later_changes(changes, live, message):
    """Other rules, or another release live than then, unless it was this scorecard's promotion."""
    card = scorecard(**changes)
    there = release(**live, model_uri=card.model_uri) if live else None

    why = outdated(card, None, policy_sha256=scorecard().policy_sha256, live=there)

    assert re.search(message, why) if message else why == ""
    if not message or "policy" not in message:
        assert not outdated(
            card, None, policy_sha256=scorecard().policy_sha256, live=there, known=False
        )
