"""The heat map of slices and candidates."""

import pytest

from enginegate.evidence import Outcome
from enginegate.report.decision_page.slices import slices_section
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict
from tests.fakes.qualification import plan


def loss(part, value, *, scope="evaluation", samples=90, limit=0.1, outcome=Outcome.PASSED):
    found = finding(
        outcome,
        gate="slice_accuracy_loss",
        value=value,
        low=value - 0.02,
        high=value + 0.03,
        limit=limit,
        relation="<=",
        unit="fraction",
        samples=samples,
    )
    return found.model_copy(update={"scope": f"{scope}/{part}"})


def agreement(part, value, limit=0.9):
    return loss(part, value, scope="shadow", limit=limit).model_copy(
        update={"gate": "slice_top1_agreement", "relation": ">="}
    )


def only(*findings, candidate=INT8):
    return slices_section(scorecard(verdicts=(verdict(*findings, candidate=candidate),)))


def cell(*findings):
    return only(*findings).groups[0].rows[0].cells[0]


def test_a_cell_has_change_interval_and_count():
    """A loss of 2.2 points is a change of -2.2, and its ends change places."""
    found = cell(loss("digit=8", 0.022, samples=89))

    assert (found.text, found.interval, found.samples) == ("-2.2", "-5.2 to -0.2", 89)


@pytest.mark.parametrize(
    ("value", "shade"), [(-0.01, 0), (0.0, 0), (0.01, 1), (0.03, 2), (0.06, 3), (0.1, 4), (0.12, 5)]
)
def test_shade_is_the_share_of_the_margin(value, shade):
    """Nothing lost is the lightest, and beyond the margin the darkest."""
    assert cell(loss("digit=8", value)).shade == shade


@pytest.mark.parametrize(("value", "shade"), [(1.0, 0), (0.98, 1), (0.92, 4), (0.85, 5)])
def test_agreement_is_shaded_by_what_is_missing(value, shade):
    """Of ten points that may differ, two are a fifth."""
    found = cell(agreement("digit=8", value))

    assert (found.text, found.shade) == (f"{100 * value:.1f}", shade)


@pytest.mark.parametrize(
    ("outcome", "mark"),
    [(Outcome.PASSED, ""), (Outcome.INCONCLUSIVE, "?"), (Outcome.FAILED, "✕")],
)
def test_outcome_is_a_mark(outcome, mark):
    """It is not told by the shade alone."""
    assert cell(loss("digit=8", 0.02, outcome=outcome)).mark == mark


def test_slices_come_in_the_order_of_their_names():
    """digit=10 follows digit=9."""
    found = only(*(loss(part, 0.0) for part in ("digit=10", "stroke=thin", "digit=9")))

    assert [row.name for row in found.groups[0].rows] == ["digit=9", "digit=10", "stroke=thin"]


def test_the_worst_slices_are_shown_where_there_are_too_many():
    """A failed one is among them, whatever others lost; the count of the rest is told."""
    many = [loss(f"user={n}", n / 1000) for n in range(60)]
    many.append(loss("user=99", 0.001, outcome=Outcome.FAILED))

    group = only(*many).groups[0]

    assert len(group.rows) + group.hidden == 61
    assert group.rows[-1].name == "user=99"
    assert "user=59" in [row.name for row in group.rows]
    assert "user=0" not in [row.name for row in group.rows]


def test_columns_are_candidates_winner_first():
    """An emulation stands beside what was run, and is marked as one."""
    card = scorecard(
        verdicts=(
            verdict(loss("digit=8", 0.01, scope="emulated"), candidate=plan("fp16")),
            verdict(loss("digit=8", 0.0), candidate=FP32),
            verdict(loss("digit=8", 0.02), candidate=INT8),
            verdict(candidate=plan("fp8")),
        )
    )

    found = slices_section(card)

    assert [column.precision for column in found.groups[0].columns] == ["int8", "fp32", "fp16"]
    assert [column.is_emulated for column in found.groups[0].columns] == [False, False, True]
    assert [c.text for c in found.groups[0].rows[0].cells] == ["-2.0", "0", "-1.0"]
    assert found.missing == ("tensorrt-fp8",)


def test_data_sets_are_told_apart():
    """Loss on labelled data and agreement on traffic have tables and limits of their own."""
    found = only(loss("digit=8", 0.02), agreement("digit=8", 0.98))

    assert [(group.heading, group.limits) for group in found.groups] == [
        (
            "Accuracy change against FP32, percentage points, on labelled data",
            "margin -10.0",
        ),
        ("Answers equal to FP32's, %, on recorded traffic", "at least 90.0"),
    ]


def test_what_was_not_judged_is_said():
    """Too small slices have no cell, so that a sentence names them."""
    small = finding(Outcome.INCONCLUSIVE, gate="slice_samples", advisory=True).model_copy(
        update={"scope": "shadow", "reason": "7 of 13 slices have < 60 samples"}
    )

    found = only(loss("digit=8", 0.0), small)

    assert found.too_small == ("recorded traffic: 7 of 13 slices have < 60 samples",)
    assert only(finding()) is None
