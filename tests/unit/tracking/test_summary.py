"""Names, columns and notes of a qualification in MLflow."""

from enginegate.evidence import Outcome
from enginegate.tracking import summary
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict
from tests.fakes.qualification import plan, qualification

CARD = qualification()


def test_run_names_say_version_outcome_and_winner():
    """The parent's and the children's; a list of runs is read without opening one."""
    assert summary.run_name(CARD) == "digits v1: passed, onnxruntime-int8 wins"
    tied = CARD.model_copy(update={"tied": (FP32,)})
    assert summary.run_name(tied).endswith("wins (tied with 1)")
    without = qualification(winner=None, model_uri="file:model.pt2")
    assert summary.run_name(without) == "digits file:model.pt2: passed, no winner"
    assert summary.candidate_run_name(CARD, INT8) == "onnxruntime-int8: winner, v1"
    assert summary.candidate_run_name(CARD, plan("int8")) == "tensorrt-int8: failed, v1"


def test_columns_carry_units_and_intervals():
    """A rate at the search's ceiling is written as a lower bound."""
    columns = summary.table_tags(CARD, INT8, None)

    assert columns == {
        "outcome": "winner",
        "p99 ms": "6.25 (5.62 to 7.50)",
        "rate in SLO": "400/s",
        "change vs FP32": "-0.22 pp (-0.72 to +0.18)",
    }
    at_ceiling = CARD.benchmark(INT8).model_copy(update={"ceiling_per_s": 400.0})
    bounded = CARD.model_copy(update={"benchmarks": (at_ceiling,)})
    assert summary.table_tags(bounded, INT8, None)["rate in SLO"] == "≥ 400/s"


def test_outcome_names_the_gate_that_decided():
    """The first of the worst; what was not measured has no column."""
    assert summary.table_tags(CARD, plan("int8"), None)["outcome"] == "failed: accuracy_loss"
    assert summary.table_tags(CARD, plan("fp8"), None) == {"outcome": "failed: build"}


def test_engine_that_failed_says_so_first():
    """MLflow shows it as Ready beside a button that registers it."""
    note = summary.engine_note(CARD, plan("int8"))

    assert note.startswith("FAILED: accuracy_loss")
    assert "Do not register or serve it" in note
    assert summary.engine_name(CARD, plan("int8")) == "tensorrt-int8 failed"
    assert summary.engine_name(CARD, INT8) == "onnxruntime-int8"
    assert summary.engine_note(CARD, INT8) == "WINNER: 400/s, p99 6.25 (5.62 to 7.50) ms."


def test_note_says_what_is_in_the_way():
    """A child run's description opens with the outcome and lists what blocks it."""
    note = summary.candidate_note(CARD, plan("int8"))

    assert note.startswith("**failed**\n\n- failed: accuracy_loss on evaluation: accuracy loss")
    assert note.endswith("- not benchmarked")
    assert summary.candidate_note(CARD, FP32) == "**passed**: 200/s, p99 8.40 (7.56 to 10.08) ms.\n"
    skipped = CARD.model_copy(update={"unmeasured": {plan("int8").name: "verdict failed"}})
    note = summary.candidate_note(skipped, plan("int8"))
    assert note.endswith("- not benchmarked: verdict failed")


def test_result_in_one_sentence():
    """With the winner's numbers, or that there is none."""
    assert summary.result_sentence(CARD) == (
        "digits v1: onnxruntime-int8 wins, 400/s at p99 6.25 ms."
    )
    failed = scorecard(
        verdicts=(verdict(finding(Outcome.FAILED)),), benchmarks=(), winner=None, reason="none"
    )
    assert summary.result_sentence(failed) == (
        "digits v1: failed; 0 of 1 candidate passed every gate."
    )


def test_notes_show_a_reason_as_it_was_written():
    """A builder's or a model's words make no link, table or HTML in MLflow's Markdown."""
    named = finding(Outcome.FAILED, gate="build").model_copy(
        update={"reason": "see [here](http://example.com) <img src=x>", "scope": "engine"}
    )
    card = scorecard(verdicts=(verdict(named),), benchmarks=(), winner=None)

    for note in (summary.engine_note(card, INT8), summary.candidate_note(card, INT8)):
        assert r"see \[here\](http://example.com) \<img src=x>" in note
