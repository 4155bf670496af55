"""The report as people see it, whole."""

import io

import pytest
from rich.console import Console

from enginegate.evidence import Outcome
from enginegate.report import (
    approval_markdown,
    obstacles,
    print_approval,
    row_of,
    scorecard_markdown,
    scorecard_text,
    sentences,
)
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict
from tests.fakes.qualification import plan, qualification

SIZES = {FP32: 934_400, INT8: 255_000, plan("int8"): 3_500_000}


def test_terminal(is_golden):
    """The whole report in a terminal of 120 columns."""
    text = scorecard_text(qualification(), SIZES)

    assert is_golden(text, "report_terminal.txt")


def test_narrow_terminal_loses_nothing():
    """In 80 columns, which is what a log file gets, cells wrap and none is cut off."""
    text = scorecard_text(qualification(), SIZES, width=80)

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_winner(is_golden):
    """When nothing passed, the report says so, and no number is invented."""
    card = scorecard(
        verdicts=(verdict(finding(Outcome.ERRORED, remedy="Look at the log.")),),
        benchmarks=(),
        winner=None,
        reason="no candidate passed",
    )

    assert is_golden(scorecard_text(card), "report_without_winner.txt")


def test_approval_form(is_golden):
    """The form holds everything a person needs, and the digest that the answer binds to."""
    card = qualification(ledger_run="5d41402abc4b2a76b9719d911017c592")
    text = approval_markdown(card, SIZES)

    assert is_golden(text.replace(card.digest, "DIGEST"), "report_approval.md.txt")
    assert text.count(card.digest) == 1


def test_markdown_keeps_hostile_text_in_its_cell():
    """A builder's text cannot add columns, links or HTML to the form."""
    hostile = finding(Outcome.FAILED).model_copy(
        update={"reason": "a | b\n\n# [click](http://x) <script>"}
    )
    text = scorecard_markdown(scorecard(verdicts=(verdict(hostile),)))

    assert r"a \| b # \[click\](http://x) \<script>" in text


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        pytest.param(0.0, -0.004, 0.004, "+0.00 (-0.40 to +0.40)", id="no-change"),
        pytest.param(1e-6, None, None, "+0.00", id="too-small-to-show"),
        pytest.param(0.02, 0.01, 0.03, "-2.00 (-3.00 to -1.00)", id="loss-is-negative"),
        pytest.param(None, None, None, "n/a", id="not-measured"),
    ],
)
def test_accuracy_change(value, low, high, shown):
    """A loss is a negative change; its interval is turned round with it."""
    loss = finding(gate="accuracy_loss", value=value, low=low, high=high, unit="fraction")
    card = scorecard(verdicts=(verdict(loss),))

    assert row_of(card, INT8).accuracy == shown


def test_worst_slice_is_the_failed_one():
    """A slice that failed outranks one that lost more but passed its own limit."""
    passed = finding(gate="slice_accuracy_loss", value=0.09).model_copy(
        update={"scope": "evaluation/digit=1"}
    )
    failed = finding(Outcome.FAILED, gate="slice_accuracy_loss", value=0.05).model_copy(
        update={"scope": "evaluation/stroke=thin"}
    )
    card = scorecard(verdicts=(verdict(passed, failed),))

    assert row_of(card, INT8).worst_slice == "stroke=thin -5.00"


def test_same_obstacle_is_told_once():
    """Candidates that stopped for the same reason share one entry."""
    names = [obstacle.names for obstacle in obstacles(qualification())]

    assert names == [
        "tensorrt-fp32, tensorrt-tf32, tensorrt-fp16",
        "tensorrt-bf16",
        "tensorrt-int8",
        "tensorrt-fp8",
    ]


def test_passed_verdict_without_benchmark_is_explained():
    """A candidate that was never measured is not left without a reason."""
    (obstacle,) = obstacles(scorecard(benchmarks=()))

    assert obstacle.reasons == ("it was not benchmarked",)


def test_first_release_replaces_nothing():
    """The sentences say what is live now."""
    assert sentences(scorecard())[-1] == "It would replace nothing."
    assert sentences(qualification())[-1] == "It would replace release 3."


def test_approval_commands_name_the_scorecard():
    """What is printed can be typed as it is."""
    card, written = qualification(), io.StringIO()
    print_approval(card, Console(file=written, width=200))

    assert f"  enginegate approve {card.digest[:12]} --approver NAME" in written.getvalue()
