"""Checks: what failed first, what was not judged above all, headroom from the end that decides."""

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome
from enginegate.report.decision_page.checks import checks_section, share_left
from tests.fakes.decision_cases import failure, on_cpu
from tests.fakes.evidence import benchmark, finding, scorecard, verdict
from tests.fakes.qualification import qualification


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        pytest.param({"value": 20.0, "limit": 100.0, "relation": "<="}, 0.8, id="upper"),
        pytest.param(
            {"value": 20.0, "high": 60.0, "limit": 100.0, "relation": "<="}, 0.4, id="interval"
        ),
        pytest.param({"value": 120.0, "limit": 100.0, "relation": "<="}, -0.2, id="broken"),
        pytest.param(
            {"value": 1.0, "low": 0.95, "limit": 0.9, "relation": ">=", "unit": "fraction"},
            0.5,
            id="share",
        ),
        pytest.param(
            {"value": 900.0, "limit": 200.0, "relation": ">=", "unit": "samples"}, None, id="count"
        ),
        pytest.param({"value": 0.0, "limit": 0.0, "relation": "<="}, None, id="none-allowed"),
        pytest.param({"limit": 3.0, "relation": "<="}, None, id="without-a-value"),
    ],
)
def test_headroom_is_counted_from_the_end_that_decides(fields, left):
    """The worse end of the interval, as the gate does."""
    found = share_left(finding(**fields))

    assert found == (None if left is None else pytest.approx(left))


def test_what_was_not_judged_stands_above_all_checks():
    """Seven of thirteen slices without a verdict is a warning, once, with what to do."""
    shown = checks_section(on_cpu())

    (missing,) = shown.not_judged
    assert missing.what == "7 of 13 traffic slices, too small"
    assert "digit=8 (18)" in missing.reason
    assert missing.remedy
    told = [line.name for each in shown.candidates for line in each.warnings]
    assert "Slices are large enough" not in told


def test_failures_are_open_with_their_remedies():
    """Nobody has to unfold what speaks against a candidate."""
    shown = checks_section(failure().scorecard)

    failed = [each for each in shown.candidates if each.outcome == "failed"]
    assert failed
    assert all(each.open for each in failed)
    assert all(line.remedy for each in failed for line in each.blocking if line.outcome == "failed")


def test_every_gate_of_the_proposed_candidate_is_shown():
    """With value and limit; a gate's slices are one line, that of the least headroom."""
    card = on_cpu()
    shown = checks_section(card).candidates[0]
    passed = card.verdict(card.winner).findings

    assert shown.names == "onnxruntime-int8"
    assert {"Accuracy loss", "Accuracy loss, 13 slices", "p99 latency"} <= {
        line.name for line in shown.lines
    }
    assert len(shown.lines) < len(passed)
    tightest = next(line for line in shown.lines if line.name == "Accuracy loss, 13 slices")
    slices = [f for f in passed if f.gate == "slice_accuracy_loss"]
    least = min(share_left(f) for f in slices)
    assert tightest.left == pytest.approx(least)
    assert "tightest digit=" in tightest.data


def test_candidates_that_end_for_the_same_reason_are_one_group():
    """Three engines that no device here runs are one line, not three."""
    names = [each.names for each in checks_section(qualification()).candidates]

    assert "tensorrt-fp32, tensorrt-tf32, tensorrt-fp16" in names


def test_emulated_numbers_are_no_warnings():
    """What decides nothing asks for no attention."""
    candidate = Candidate.parse("tensorrt-fp16")
    emulated = finding(Outcome.FAILED, gate="kl_p99", advisory=True, remedy="do this")
    runs = finding(Outcome.INCONCLUSIVE, gate="runnable")
    card = scorecard(
        verdicts=(
            verdict(),
            verdict(
                runs,
                emulated.model_copy(update={"scope": "emulated"}),
                candidate=candidate,
            ),
        ),
        benchmarks=(benchmark(),),
    )

    other = checks_section(card).candidates[1]
    assert other.names == "tensorrt-fp16"
    assert other.warnings == ()
    assert other.summary == "1 inconclusive"
