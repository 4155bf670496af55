"""The example decisions are such as a qualification makes."""

import pytest

from enginegate.evidence import Outcome, Scorecard, contradictions
from tests.fakes.decision_cases import DecisionCase, decision_cases


@pytest.mark.parametrize("case", decision_cases(), ids=lambda case: case.name)
def test_a_case_is_consistent_and_readable(case: DecisionCase):
    """Nothing on it contradicts its numbers, and it is the same after a way through JSON."""
    card = case.scorecard

    assert list(contradictions(card)) == []
    assert Scorecard.model_validate_json(card.pretty_json()) == card


def test_the_cases_end_as_they_are_called():
    """A win stands alone, a tie has a rival, a failure has no winner, a rollback names what is."""
    cases = {case.name: case for case in decision_cases()}
    win, failed = cases["clear-win"].scorecard, cases["failure"].scorecard

    assert win.winner is not None
    assert win.tied == ()
    assert cases["tie"].scorecard.tied
    assert failed.winner is None
    assert {failed.outcome(v.candidate) for v in failed.verdicts} == {Outcome.FAILED}
    assert cases["rolled-back"].events[-1].event == "rolled back"
    assert len(cases["eight-candidates"].scorecard.verdicts) == 8
