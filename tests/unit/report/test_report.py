"""The report as people see it, whole."""

import io

import pytest
from rich.console import Console

from enginegate.errors import InputError
from enginegate.evidence import Outcome
from enginegate.report import (
    approval_markdown,
    candidates_named,
    explain,
    obstacles,
    print_approval,
    print_explained,
    row_of,
    scorecard_markdown,
    scorecard_text,
    sentences,
)
from enginegate.report.content import change_heading, columns_of, one_line, speed_sentence
from tests.fakes.evidence import FP32, INT8, benchmark, engine_speed, finding, scorecard, verdict
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


def test_explained(is_golden):
    """Each verdict in words: what decided it, by how much, and what to do."""
    card = qualification()

    assert is_golden(explain(card).replace(card.digest[:12], "DIGEST"), "report_explained.txt")


def test_explanation_opens_with_ten_lines():
    """Which, what may be approved, its numbers, every candidate's outcome, and what to type."""
    opening = explain(qualification()).partition("\n\n")[0].splitlines()
    text = "\n".join(opening)

    assert len(opening) <= 10
    assert "is up for approval" in opening[1]
    assert all(verdict.candidate.name in text for verdict in qualification().verdicts)
    assert opening[-1].endswith("--only blocking")


def test_only_what_blocks_is_explained():
    """Candidates with the same obstacle share one entry; what passed is left out."""
    text = explain(qualification(), blocking=True)

    details = text.partition("\n\n")[2]
    assert "tensorrt-fp32, tensorrt-tf32, tensorrt-fp16: INCONCLUSIVE" in details
    assert "tensorrt-int8: FAILED" in details
    assert "What to do: Calibrate on data that looks like this." in details
    assert "What is in order" not in details
    assert "onnxruntime" not in details


def test_one_candidate_is_explained():
    """An unknown name is refused with those there are."""
    card = qualification()
    only = candidates_named(card, [INT8.name])

    details = explain(card, only=only).partition("\n\n")[2]
    nothing = explain(card, only=only, blocking=True)

    assert details.startswith("onnxruntime-int8: PASSED")
    assert "tensorrt" not in details
    assert nothing.endswith("Nothing blocks what was asked for.\n")
    with pytest.raises(InputError, match=r"no candidate 'onnx'. It has: onnxruntime-fp32, "):
        candidates_named(card, ["onnx"])


@pytest.mark.parametrize("width", [60, 80])
def test_explanation_keeps_its_indentation(width):
    """Further lines of a finding are below its first word; the command is in one line."""
    console = Console(width=width, file=io.StringIO())
    card = qualification()

    print_explained(card, console)

    lines = console.file.getvalue().splitlines()
    assert f"Only what blocks: enginegate explain {card.digest[:12]} --only blocking" in lines
    assert all(len(line) <= width for line in lines if "enginegate explain" not in line)
    first = next(n for n, line in enumerate(lines) if line.startswith("    - Slices within"))
    assert lines[first + 1].startswith("      ")


def test_explained_without_a_winner():
    """Nothing to approve is said first, and a broken check is not a failed one."""
    broken = verdict(finding(Outcome.ERRORED, gate="kl_p99", remedy="Look at the log."))
    text = explain(scorecard(verdicts=(broken,), benchmarks=(), winner=None, reason="none passed"))

    assert "There is nothing to approve: none passed" in text
    assert "What could not be found out:\n    - kl p99 on evaluation: 900 >= 200" in text
    assert "      What to do: Look at the log." in text


def test_explained_limits_and_trials():
    """A failed gate says which limit would have passed; an advisory one is told apart."""
    low = finding(
        Outcome.FAILED,
        gate="sqnr",
        value=17.5,
        limit=20.0,
        relation=">=",
        unit="dB",
        would_pass=17.2,
    )
    trial = finding(Outcome.FAILED, gate="cosine_p1", advisory=True)
    text = explain(scorecard(verdicts=(verdict(low, trial),)))

    assert (
        "Its signal to noise ratio against FP32 is 17.5 dB on the labelled data; at least 20 dB"
        in text
    )
    assert "A limit of 17.2 dB would have let it through." in text
    assert "Shown only, decides nothing:\n    - cosine p1 on evaluation" in text


def test_regression_is_told_in_its_own_unit():
    """An error that grows is a positive change, with its slices; it is no accuracy."""
    of_error = {"of_error": True, "unit": "EUR"}
    loss = finding(gate="mae_loss", value=0.25, low=0.2, high=0.3, **of_error)
    part = finding(gate="slice_mae_loss", value=0.5, **of_error).model_copy(
        update={"scope": "evaluation/site=north"}
    )
    card = scorecard(verdicts=(verdict(loss, part),))

    row = row_of(card, INT8)

    assert (row.accuracy, row.worst_slice) == ("+0.25 (+0.2 to +0.3)", "site=north +0.5")
    assert "MAE changed by +0.25 (+0.2 to +0.3) EUR over 0 samples" in sentences(card)[2]
    assert columns_of(card)[2] == "MAE vs FP32, EUR"
    for text in (scorecard_text(card), scorecard_markdown(card)):
        assert "MAE vs FP32, EUR" in text
        assert "acc." not in text


@pytest.mark.parametrize(
    ("gate", "unit", "heading"),
    [
        pytest.param("accuracy_loss", "fraction", "acc. vs FP32, pp", id="accuracy"),
        pytest.param("miou_loss", "fraction", "mIoU vs FP32, pp", id="segmentation"),
        pytest.param("map_loss", "fraction", "mAP vs FP32, pp", id="detection"),
        pytest.param("r2_loss", "", "R² vs FP32", id="regression"),
        pytest.param("my_own_score_loss", "", "my own score vs FP32", id="own"),
    ],
)
def test_tables_name_the_score_of_the_task(gate, unit, heading):
    loss = finding(gate=gate, unit=unit, value=0.01, low=0.0, high=0.02)

    assert change_heading(scorecard(verdicts=(verdict(loss),))) == heading


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
    card = qualification(mlflow_run="5d41402abc4b2a76b9719d911017c592")
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


def test_tie_and_ceiling_are_marked():
    """A tie is no win, and the highest rate that may be tried is a lower bound."""
    held = benchmark(800).model_copy(update={"ceiling_per_s": 800.0})
    card = scorecard(
        verdicts=(verdict(), verdict(candidate=FP32)),
        benchmarks=(held, held.model_copy(update={"candidate": FP32})),
        tied=(FP32,),
    )

    assert row_of(card, INT8).candidate == "onnxruntime-int8 (winner)"
    assert row_of(card, FP32).candidate == "onnxruntime-fp32 (tied)"
    assert row_of(card, FP32).throughput == "≥ 800"
    assert any("it sustained ≥ 800 requests a second" in sentence for sentence in sentences(card))
    assert "is tied with onnxruntime-int8: the measurements do not tell" in explain(card)
    assert "Serving it handles ≥ 800 requests a second" in explain(card)


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


def test_unbenchmarked_candidate_says_why():
    """In the terminal, in Markdown and in words; not as one more reason against it."""
    failed = verdict(finding(Outcome.FAILED, gate="accuracy_loss"))
    why = "verdict failed (accuracy_loss)"
    card = scorecard(
        verdicts=(failed,), benchmarks=(), winner=None, unmeasured={"onnxruntime-int8": why}
    )

    assert f"not benchmarked: {why}" in scorecard_text(card)
    assert f"not benchmarked: {why}" in scorecard_markdown(card)
    assert f"It was not benchmarked: {why}." in explain(card)


def test_long_reason_is_cut_at_a_word_with_a_reference():
    """The explanation has all of it."""
    reason = "a builder said a great deal " * 30
    judged = (verdict(finding(Outcome.FAILED).model_copy(update={"reason": reason})),)
    card = scorecard(verdicts=judged, winner=None, reason="none passed")

    shown, explained = scorecard_text(card), explain(card)

    assert "… (`enginegate explain` shows all of it)" in " ".join(shown.split())
    assert "great deal " * 3 not in shown
    assert reason.strip() in explained


def test_long_reason_of_one_word_is_kept():
    """A path without a space is shown as far as it goes."""
    assert one_line("/" + "x" * 500).startswith("/xxx")


def test_served_share_of_the_engine_is_beside_the_rate():
    """In the table, and in words with the spread of what was measured."""
    card = scorecard(engine_speeds=(engine_speed(),))

    assert row_of(card, INT8).throughput == "400 (40% of engine)"
    (said,) = (sentence for sentence in sentences(card) if "Alone" in sentence)
    assert "1,000 samples/s at a batch of 8 (median of 3 windows, 990 to 1,010" in said
    assert "40% of that is served" in said
    assert said in explain(card)


def test_tiny_share_is_not_called_nothing():
    """A rate that the policy caps low is little of a fast engine."""
    card = scorecard(engine_speeds=(engine_speed(INT8, 1e6, 1e6, 1e6),))

    assert row_of(card, INT8).throughput == "400 (<1% of engine)"


def test_unmeasured_batch_sizes_are_said():
    """What is missing of a sweep is part of it."""
    found = engine_speed(unmeasured="batch 128: a run takes about 3 s")

    assert speed_sentence(found, None).endswith("Not measured: batch 128: a run takes about 3 s.")
    assert speed_sentence(engine_speed(batches=()), None) == ""


def test_finding_about_speed_names_its_candidate():
    """It may be about another one than the winner, whose sentences it follows."""
    reason = "9,122 samples/s alone, and torch makes 9,546 samples/s: 0.96 times as fast"
    slower = finding(Outcome.INCONCLUSIVE, gate="slower_than_eager").model_copy(
        update={"scope": FP32.name, "reason": reason, "advisory": True}
    )
    faster = slower.model_copy(
        update={"gate": "faster_alone", "reason": f"{FP32} is faster alone than {INT8}"}
    )

    said = sentences(scorecard(speed_findings=(slower, faster)))

    assert f"{FP32}: {reason}." in said
    assert f"{FP32} is faster alone than {INT8}." in said
