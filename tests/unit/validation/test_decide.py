"""Which candidate wins."""

import pytest

from enginegate.evidence import Outcome
from tests.fakes.evidence import FP32, INT8, benchmark, finding, verdict
from validation.decide import choose


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
