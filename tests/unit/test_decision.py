"""The approval gate: what lets a scorecard through, and what does not."""

from datetime import timedelta

import pytest

from enginegate.decision import check_decision
from enginegate.errors import ApprovalError
from enginegate.evidence import Outcome
from enginegate.policy import Approval
from tests.fakes.evidence import INT8, WHEN, benchmark, decision, finding, scorecard, verdict

RULES = Approval(approvers=("ada", "grace"), expires_hours=72)


def test_a_fresh_approval_of_this_scorecard_passes():
    """The decision that was given comes back, unchanged."""
    card = scorecard()
    given = decision(card)

    assert check_decision(given, card, RULES, now=WHEN + timedelta(hours=1)) is given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"answer": "reject"}, "Rejected by ada", id="rejected"),
        pytest.param({"approver": "mallory"}, "ada, grace", id="not-an-approver"),
        pytest.param({"scorecard_sha256": "f" * 64}, "needs a new decision", id="other-scorecard"),
        pytest.param({"decided_at": WHEN - timedelta(hours=73)}, "stands for 72 h", id="expired"),
        pytest.param(
            {"decided_at": WHEN + timedelta(hours=2)}, "approve again", id="from-the-future"
        ),
    ],
)
def test_any_other_decision_is_refused(changes, message):
    """Each way a decision can be invalid is refused with its own reason."""
    card = scorecard()

    with pytest.raises(ApprovalError, match=message):
        check_decision(decision(card, **changes), card, RULES, now=WHEN)


def test_no_decision_means_no():
    """Without a decision the message teaches the command that gives one."""
    card = scorecard()

    with pytest.raises(ApprovalError, match=f"enginegate approve {card.digest[:12]}"):
        check_decision(None, card, RULES, now=WHEN)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"winner": None}, id="no-winner"),
        pytest.param({"benchmarks": ()}, id="never-benchmarked"),
        pytest.param({"verdicts": (verdict(finding(Outcome.INCONCLUSIVE)),)}, id="inconclusive"),
        pytest.param({"benchmarks": (benchmark(outcome=Outcome.FAILED),)}, id="slo-missed"),
    ],
)
def test_only_a_passed_winner_can_be_approved(changes):
    """An approval cannot lift a candidate over its gates."""
    card = scorecard(**changes)

    with pytest.raises(ApprovalError, match="nothing to approve"):
        check_decision(decision(card), card, RULES, now=WHEN)


def test_changed_evidence_changes_the_digest():
    """One number more or less is another scorecard, so an old approval no longer fits."""
    before = scorecard()

    after = scorecard(benchmarks=(benchmark(399.0, candidate=INT8),))

    assert after.digest != before.digest
