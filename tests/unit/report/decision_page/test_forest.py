"""Every candidate in one row of a forest plot."""

import pytest

from enginegate.charts.intervals import Interval
from enginegate.evidence import Outcome
from enginegate.report.decision_page import decision_page
from enginegate.report.decision_page.forest import forest_section
from tests.fakes.evidence import FP32, INT8, benchmark, finding, scorecard, verdict
from tests.fakes.qualification import plan, qualification


def emulated(candidate):
    loss = finding(gate="accuracy_loss", value=0.001, limit=0.01, unit="fraction")
    cannot = finding(Outcome.INCONCLUSIVE, gate="runnable")
    shown = loss.model_copy(update={"scope": "emulated", "advisory": True})
    return verdict(cannot, shown, candidate=candidate)


def rows(card):
    return {row.candidate: row for row in forest_section(card).rows}


def test_intervals_are_turned_into_changes():
    """A loss of 0.2 points is a change of -0.2; its ends change places; so does the margin."""
    row = rows(qualification())["onnxruntime-int8"]

    assert row.accuracy == pytest.approx(Interval(-0.2176, -0.7176, 0.1824), abs=1e-4)
    assert row.margin == -1.0
    assert (row.samples, row.requests) == (919, 1200)
    assert row.p99 == pytest.approx((6.25, 5.625, 7.5))
    assert "the whole interval is within the margin of -1" in row.accuracy_chart


def test_order():
    """The winner, what ties with it, the others by outcome; what did not run here is last."""
    card = qualification(tied=(INT8, FP32))

    names = [row.candidate for row in forest_section(card).rows]

    assert names[:2] == ["onnxruntime-int8", "onnxruntime-fp32"]
    assert names[2:4] == ["tensorrt-bf16", "tensorrt-int8"]
    assert set(names[4:]) == {f"tensorrt-{p}" for p in ("fp32", "tf32", "fp16", "fp8")}


def test_ties_are_named():
    """A tied row says with whom; the winner is the proposed one."""
    found = rows(qualification(tied=(INT8, FP32)))

    assert found["onnxruntime-fp32"].marks == ("tied with onnxruntime-int8",)
    assert found["onnxruntime-int8"].marks == ("proposed",)


def test_fill_says_how_surely_it_decides():
    """Solid decided, hatched inconclusive, hollow emulated."""
    open_question = finding(Outcome.INCONCLUSIVE, gate="accuracy_loss", value=0.02, limit=0.01)
    card = scorecard(
        verdicts=(
            verdict(finding(gate="accuracy_loss", value=0.0, limit=0.01)),
            verdict(open_question, candidate=FP32),
            emulated(plan("fp16")),
        )
    )

    found = rows(card)

    assert 'class="bar solid"' in found["onnxruntime-int8"].accuracy_chart
    assert 'class="bar hatched"' in found["onnxruntime-fp32"].accuracy_chart
    assert 'class="bar hollow"' in found["tensorrt-fp16"].accuracy_chart
    assert found["tensorrt-fp16"].marks == ("emulated: decides nothing",)
    assert not found["tensorrt-fp16"].decides


def test_a_rate_at_the_ceiling_is_a_lower_bound():
    """It is written and drawn as one, and says so in words."""
    measured = benchmark().model_copy(update={"ceiling_per_s": 400.0})
    row = rows(scorecard(benchmarks=(measured,)))["onnxruntime-int8"]

    assert row.rate_text == "≥ 400"
    assert "#right" in row.rate_chart
    assert "a lower bound" in row.rate_chart


def test_what_was_not_measured_is_not_drawn():
    """No bar stands for a missing number."""
    row = rows(qualification())["tensorrt-fp8"]

    assert (row.accuracy_chart, row.p99_chart, row.rate_chart) == (None, None, None)
    assert (row.accuracy_text, row.p99_text, row.rate_text) == ("n/a", "n/a", "n/a")


def test_a_metric_without_a_unit_has_none():
    """The heading of a regression's column names the metric alone."""
    r2 = finding(gate="r2_loss", value=0.2, low=0.1, high=0.3, limit=0.5, relation="<=")
    card = scorecard(verdicts=(verdict(r2),))

    row = rows(card)["onnxruntime-int8"]

    assert row.accuracy == pytest.approx((-0.2, -0.3, -0.1))
    assert "Change of R²<" in decision_page(card)


def test_an_error_grows_to_the_right():
    """More error is a positive change, in its unit, with the margin on its side."""
    grown = {"value": 0.2, "low": 0.1, "high": 0.3, "limit": 0.5, "relation": "<=", "unit": "°C"}
    mae = finding(gate="mae_loss", of_error=True, **grown)
    card = scorecard(verdicts=(verdict(mae),))

    row = rows(card)["onnxruntime-int8"]

    assert row.accuracy == pytest.approx((0.2, 0.1, 0.3))
    assert row.margin == 0.5
    page = decision_page(card)
    assert "Change of MAE, °C<" in page
    assert "the whole interval is within the margin of 0.5" in page
