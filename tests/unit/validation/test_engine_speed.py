"""What engines alone say about the winner: numbers, spread, and what held the faster one back."""

import pytest

from enginegate.candidate import Precision
from enginegate.evidence import EagerSpeed, Outcome
from tests.fakes.evidence import FP32, INT8, benchmark, engine_speed, scorecard, verdict
from validation.engine_speed import judge_engine_speeds

FAST = (1990.0, 2000.0, 2010.0)


def card(*speeds, loser=None, **changes):
    """INT8 won, FP32 passed as well."""
    fields = {
        "verdicts": (verdict(), verdict(candidate=FP32)),
        "benchmarks": (benchmark(), loser or benchmark(300.0, candidate=FP32)),
        "engine_speeds": speeds,
    }
    return scorecard(**(fields | changes))


def eager(*windows_per_s, precision=Precision.FP32, inputs_on="host"):
    made = engine_speed(INT8, *windows_per_s).model_dump(exclude={"candidate", "engine_sha256"})
    kept = {name: made[name] for name in ("device", "batches")}
    return EagerSpeed(**kept, precision=precision, library="torch 2.11.0", inputs_on=inputs_on)


def test_loser_that_is_faster_alone_is_pointed_out():
    """With both numbers, the factor and how often it was measured; it decides nothing."""
    (finding,) = judge_engine_speeds(card(engine_speed(), engine_speed(FP32, *FAST)))

    assert (finding.gate, finding.scope) == ("faster_alone", "onnxruntime-fp32")
    assert (finding.outcome, finding.advisory) == (Outcome.INCONCLUSIVE, True)
    assert finding.value == pytest.approx(2.0)
    assert finding.samples == 3
    assert "2,000 samples/s (1,990 to 2,010, batch 8) alone" in finding.reason
    assert "onnxruntime-int8 1,000 samples/s" in finding.reason
    assert finding.remedy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"generator_limit_per_s": 500.0}, "the generator was its limit", id="sender"),
        pytest.param({"ceiling_per_s": 300.0}, "highest rate that the policy", id="ceiling"),
        pytest.param({"cut_short": "the budget ended it"}, "the budget ended it", id="budget"),
        pytest.param({}, "where its time goes under load was not counted", id="not-counted"),
    ],
)
def test_it_is_said_what_held_the_faster_engine_back(changes, reason):
    """As the measurements under load have it."""
    loser = benchmark(300.0, candidate=FP32).model_copy(update=changes)

    (finding,) = judge_engine_speeds(card(engine_speed(), engine_speed(FP32, *FAST), loser=loser))

    assert reason in finding.reason


def test_overlapping_windows_are_a_tie():
    """A higher median within the spread shows nothing."""
    (finding,) = judge_engine_speeds(card(engine_speed(), engine_speed(FP32, 980, 1002, 1040)))

    assert finding.outcome is Outcome.PASSED
    assert "a tie" in finding.reason
    assert finding.remedy == ""


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"engine_speeds": (engine_speed(),)}, id="the-other-is-unknown"),
        pytest.param({"engine_speeds": (engine_speed(FP32, *FAST),)}, id="its-own-is-unknown"),
        pytest.param({"winner": None}, id="no-winner"),
        pytest.param(
            {"benchmarks": (benchmark(), benchmark(outcome=Outcome.FAILED, candidate=FP32))},
            id="the-other-failed",
        ),
        pytest.param(
            {"engine_speeds": (engine_speed(), engine_speed(FP32, *FAST, inputs_on="device"))},
            id="another-device",
        ),
    ],
)
def test_only_what_could_have_won_is_compared(changed):
    """On one kind of device."""
    speeds = {"engine_speeds": (engine_speed(), engine_speed(FP32, *FAST))}

    assert judge_engine_speeds(card(**(speeds | changed))) == ()


def test_engine_that_loses_to_eager_pytorch_is_pointed_out():
    """Each against its own precision where that was measured, else against FP32."""
    found = judge_engine_speeds(
        card(
            engine_speed(),
            engine_speed(FP32, 700, 710, 720),
            eager_speeds=(eager(*FAST), eager(750, 760, 770, precision=Precision.INT8)),
        )
    )

    (finding,) = found
    assert (finding.gate, finding.scope) == ("slower_than_eager", "onnxruntime-fp32")
    assert finding.value == pytest.approx(710 / 2000)
    assert "torch 2.11.0 makes 2,000 samples/s" in finding.reason
    assert finding.advisory


@pytest.mark.parametrize("baseline", [eager(995, 1005, 1020), eager(*FAST, inputs_on="device")])
def test_tie_with_eager_and_another_device_show_nothing(baseline):
    """Windows overlap, or the numbers are not comparable."""
    assert judge_engine_speeds(card(engine_speed(), eager_speeds=(baseline,))) == ()
