"""Each candidate's latency against load."""

import pytest

from enginegate.report.decision_page import decision_page
from enginegate.report.decision_page.load_curve import (
    curve_of,
    load_curve_section,
    shown_config,
)
from tests.fakes.evidence import INT8, benchmark, scorecard
from tests.fakes.qualification import DIRECT, WAITING, plan, qualification

CARD = qualification()


def test_the_proposed_candidate_is_first():
    """The others follow in smaller pictures, those without measurements left out."""
    found = load_curve_section(CARD)

    assert found.first.candidate == "onnxruntime-int8"
    assert [curve.candidate for curve in found.others] == ["onnxruntime-fp32", "tensorrt-bf16"]
    assert load_curve_section(scorecard(benchmarks=(benchmark(),))) is None


def test_points_are_told_apart():
    """Chosen, and invalid whatever its configuration."""
    found = curve_of(CARD.benchmark(INT8), 25.0)

    assert [(p.load_per_s, p.kind) for p in found.points] == [
        (100.0, "chosen"),
        (200.0, "chosen"),
        (400.0, "chosen"),
        (800.0, "invalid"),
    ]
    assert found.chosen == (400.0, (6.25, 5.625, 7.5))
    assert found.points[0].p50_ms == CARD.benchmark(INT8).measurements[0].percentile(0.5).value_ms
    assert "invalid: the generator was late" in found.points[-1].words


def test_without_an_answer_the_nearest_configuration_is_shown():
    """An invalid measurement does not choose it."""
    measured = CARD.benchmark(INT8).model_copy(update={"chosen": None})

    assert shown_config(CARD.benchmark(plan("bf16"))) == DIRECT
    assert shown_config(measured) == WAITING
    assert curve_of(measured, 25.0).chosen is None


def test_the_lower_ceiling_is_drawn_and_named():
    """Who sets it is in the legend: the policy, or the sender."""
    rated = {"ceiling_per_s": 450.0}
    policy = CARD.benchmark(INT8).model_copy(update=rated)
    sender = policy.model_copy(update={"generator_limit_per_s": 420.0})

    assert curve_of(policy, 25.0).ceiling_per_s == 450.0
    assert curve_of(sender, 25.0).ceiling_per_s == 420.0
    assert "above 450/s the policy allows no trial" in meanings(policy)
    assert "from 420/s on the load generator, not the server, is the limit" in meanings(sender)


def test_the_legend_names_the_marks_that_are_there():
    """No key without a mark."""
    assert meanings(CARD.benchmark(INT8)) == [
        "p99, with its interval",
        "p50",
        "chosen, all its confirmations together",
        "invalid: decides nothing",
        "above this axis, or on failed requests",
    ]


def test_every_measurement_is_in_the_table():
    """Valid ones first, by load; an invalid one with its reason."""
    lines = load_curve_section(CARD).first.lines

    assert [line.load for line in lines] == ["100", "200", "400", "800"]
    assert lines[2].p99 == "6.25 (5.62 to 7.50)"
    assert lines[2].requests == "1,200"
    assert [line.note for line in lines[:3]] == ["", "", "chosen load"]
    assert lines[3].note.startswith("invalid: the generator was late")


def meanings(measured):
    card = CARD.model_copy(update={"benchmarks": (measured,)})
    return [key.meaning for key in load_curve_section(card).first.keys]


def test_one_load_is_no_curve():
    """Measurements are then one below the other, what was decided on first."""
    measured = CARD.benchmark(INT8)
    late = measured.measurements[-1]
    kept = measured.measurements[2]
    again = late.model_copy(update={"load": kept.load})
    card = CARD.model_copy(
        update={"benchmarks": (measured.model_copy(update={"measurements": (kept, again)}),)}
    )

    strip = load_curve_section(card).first.strip

    assert strip.load == "400/s"
    assert [row.p99 for row in strip.rows] == [
        "6.25 (5.62 to 7.50)",
        "6.25 (5.62 to 7.50)",
        "90.00 (81.00 to 108.00)",
    ]
    assert [row.is_chosen for row in strip.rows] == [True, False, False]
    assert 'href="#square"' in strip.rows[1].chart
    assert strip.rows[2].note.startswith("invalid: the generator was late")
    assert 'href="#right"' in strip.rows[2].chart
    assert load_curve_section(CARD).first.strip is None


@pytest.mark.parametrize("loads", [1, 25])
def test_a_long_search_stays_small(loads):
    """Eight candidates with 200 measurements each leave room for the rest of the page."""
    one = CARD.benchmark(INT8)
    measured = tuple(
        m.model_copy(update={"load": m.load.model_copy(update={"rate_per_s": 100.0 + n % loads})})
        for n, m in enumerate(one.measurements * 50)
    )
    candidates = [verdict.candidate for verdict in CARD.verdicts]
    benchmarks = tuple(
        one.model_copy(update={"candidate": candidate, "measurements": measured})
        for candidate in candidates
    )
    card = CARD.model_copy(update={"benchmarks": benchmarks})

    assert len(decision_page(card).encode()) < 150 * 1024
