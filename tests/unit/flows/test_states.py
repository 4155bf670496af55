"""Names of how flows end, and what an automation must know of them."""

from pathlib import Path

import pytest
import yaml

from enginegate.errors import ApprovalError, RejectedError, RepositoryError, ServerError
from enginegate.evidence import Outcome
from enginegate.watch.log import PromiseBrokenError, WatchResult
from flows.states import (
    ENDS_OF_WATCH,
    end_of_failed_watch,
    end_of_qualification,
    end_of_refusal,
    end_of_watch,
)
from tests.fakes.evidence import benchmark, finding, scorecard, verdict
from tests.fakes.watch_checks import watch_check

AUTOMATIONS = Path(__file__).parents[3] / "automations"


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (Outcome.INCONCLUSIVE, "Inconclusive"),
        (Outcome.FAILED, "Nothing passed"),
        (Outcome.ERRORED, "Nothing passed"),
    ],
)
def test_qualification_without_winner_says_why(outcome, name):
    """Evidence that is missing is told from evidence against."""
    card = scorecard(
        verdicts=(verdict(finding(outcome)),),
        benchmarks=(benchmark(),),
        winner=None,
        reason="no candidate passed",
    )

    assert end_of_qualification(card) == (name, "no winner: no candidate passed")
    assert end_of_qualification(scorecard())[0] == "Completed"


def test_watch_ends_by_its_newest_check():
    """Nothing to check is not a kept promise."""
    ends = [
        end_of_watch(WatchResult((), checks))[0]
        for checks in (
            (),
            (watch_check(finding()),),
            (watch_check(finding()), watch_check(finding(Outcome.INCONCLUSIVE), number=2)),
        )
    ]

    assert ends == ["Nothing live", "Completed", "Inconclusive"]


def test_errors_have_names():
    """A no is told from nobody's answer; what could not be measured from a broken promise."""
    broken = PromiseBrokenError("p99", WatchResult((), ()))

    assert end_of_failed_watch(broken) == "Broken promise"
    assert end_of_failed_watch(ServerError("away")) == "Not measured"
    assert end_of_failed_watch(RepositoryError("changed")) == "Failed"
    assert end_of_refusal(RejectedError("by grace")) == "Rejected"
    assert end_of_refusal(ApprovalError("nobody")) == "Not approved"
    assert end_of_refusal(RepositoryError("changed")) == "Failed"


def test_silent_watch_is_told_from_one_that_ends_by_another_name():
    """Prefect's event carries the state's name, so the automation lists every one."""
    shipped = yaml.safe_load((AUTOMATIONS / "watch-silent.yaml").read_text())

    assert set(shipped["trigger"]["expect"]) == {f"prefect.flow-run.{n}" for n in ENDS_OF_WATCH}
