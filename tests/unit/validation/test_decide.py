"""Which candidate wins."""

import pytest

from enginegate.evidence import Outcome
from tests.fakes.evidence import FP32, INT8, benchmark, finding, verdict
from validation.decide import choose, choose_served


def both(**int8):
    return [verdict(candidate=FP32), verdict(finding(**int8), candidate=INT8)]


def test_the_fastest_that_passed_wins():
    """Throughput within the SLO decides, and the reason names it."""
    choice = choose(both(), [benchmark(300, candidate=FP32), benchmark(500, candidate=INT8)])

    assert choice.winner == INT8
    assert "500 requests/s" in choice.reason
    assert "2 candidates that passed" in choice.reason


def test_at_equal_throughput_the_lower_p99_wins():
    """Two that hold the same rate are told apart by their tail."""
    measured = [benchmark(candidate=FP32, p99_ms=9.0), benchmark(candidate=INT8, p99_ms=8.0)]

    assert choose(both(), measured).winner == INT8


@pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.FAILED, Outcome.ERRORED])
def test_a_faster_candidate_that_did_not_pass_cannot_win(outcome):
    """Neither its verdict nor its benchmark may be anything but passed."""
    fast, slow = benchmark(900, candidate=INT8), benchmark(100, candidate=FP32)
    missed = benchmark(900, candidate=INT8, outcome=outcome)

    assert choose(both(outcome=outcome), [slow, fast]).winner == FP32
    assert choose(both(), [slow, missed]).winner == FP32


def test_a_candidate_that_was_not_measured_cannot_win():
    """A gate that did not run is not a gate that passed."""
    choice = choose([verdict()], [])

    assert choice.winner is None
    assert "onnxruntime-int8 inconclusive" in choice.reason


def test_without_candidates_there_is_no_winner():
    """And the reason says so."""
    assert choose([], []).reason == "No candidate passed every gate: there was none."


@pytest.mark.parametrize(
    ("objective", "winner"),
    [
        pytest.param("throughput", FP32, id="highest-rate"),
        pytest.param("cost", INT8, id="lowest-cost"),
        pytest.param("latency", INT8, id="lowest-p99"),
    ],
)
def test_the_objective_decides(objective, winner):
    """What best means is the policy's to say, and the reason says it."""
    costly = benchmark(500, candidate=FP32, p99_ms=9.0).model_copy(update={"cost_per_million": 2.0})
    cheap = benchmark(400, candidate=INT8, p99_ms=8.0).model_copy(update={"cost_per_million": 1.0})

    assert choose(both(), [costly, cheap], objective=objective).winner == winner


def test_without_a_price_the_tail_decides_on_cost():
    """Nothing is cheaper than anything, so the lower p99 wins; a known price beats none."""
    slow, quick = benchmark(candidate=FP32, p99_ms=9.0), benchmark(candidate=INT8, p99_ms=8.0)
    priced = slow.model_copy(update={"cost_per_million": 2.0})

    assert choose(both(), [slow, quick], objective="cost").winner == INT8
    assert choose(both(), [priced, quick], objective="cost").winner == FP32


def test_without_verdicts_the_best_served_is_named_with_a_warning():
    """Serving alone says nothing about right answers; nothing passed is said with each outcome."""
    choice = choose_served([benchmark(500), benchmark(300, candidate=FP32)], "throughput")
    failed = [benchmark(500, outcome=Outcome.FAILED)]

    assert choice.winner == INT8
    assert "Accuracy was not judged" in choice.reason
    assert choose_served(failed, "throughput").reason.endswith("onnxruntime-int8 failed.")
    assert choose_served([], "throughput").winner is None
