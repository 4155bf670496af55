"""Which checks the policy asks for."""

import pytest

from validation.checks import RULES, GateCheck, checks_for, slice_sizes


def test_labelled_evaluation(comparison_of, gates):
    """With labels, accuracy is checked on everything and on each slice that is large enough."""
    comparison = comparison_of([False] * 100, digit=["3"] * 60 + ["8"] * 40)

    checks = checks_for(comparison, gates)

    assert [(check.gate, check.scope) for check in checks] == [
        ("samples", "evaluation"),
        ("nonfinite", "evaluation"),
        ("accuracy_loss", "evaluation"),
        ("top1_agreement", "evaluation"),
        ("kl_p99", "evaluation"),
        ("max_abs_error", "evaluation"),
        ("slice_accuracy_loss", "evaluation/digit=3"),
        ("slice_accuracy_loss", "evaluation/digit=8"),
    ]


def test_unlabelled_shadow(comparison_of, gates):
    """Without labels, agreement takes the place of accuracy; small slices are left out."""
    comparison = comparison_of(
        [False] * 100, scope="shadow", labelled=False, digit=["3"] * 61 + ["8"] * 39
    )

    checks = checks_for(comparison, gates)

    assert [(check.gate, check.scope) for check in checks][2:] == [
        ("top1_agreement", "shadow"),
        ("kl_p99", "shadow"),
        ("max_abs_error", "shadow"),
        ("slice_top1_agreement", "shadow/digit=3"),
    ]


def test_slice_sizes(comparison_of):
    """Every slice of every column is counted."""
    comparison = comparison_of([False] * 3, digit=["3", "3", "8"], ink=["a", "a", "a"])

    assert slice_sizes(comparison) == {("digit", "3"): 2, ("digit", "8"): 1, ("ink", "a"): 3}


@pytest.mark.parametrize(
    ("gate", "limit"),
    [
        ("samples", 400),
        ("nonfinite", 0),
        ("accuracy_loss", 0.02),
        ("slice_accuracy_loss", 0.10),
        ("top1_agreement", 0.97),
        ("slice_top1_agreement", 0.90),
        ("kl_p99", 0.05),
        ("max_abs_error", 1.0),
    ],
)
def test_limits_come_from_the_policy(gates, gate, limit):
    """Each gate takes its limit and confidence from the policy."""
    check = GateCheck.of(gate, "evaluation", gates)

    assert check.limit == pytest.approx(limit)
    assert check.confidence == 0.95
    assert not check.advisory


def test_agreement_of_a_slice_is_never_stricter_than_overall(gates):
    """A slice is small, so it is not held to more than the whole."""
    loose = gates.model_copy(update={"min_top1_agreement": 0.5})

    assert GateCheck.of("slice_top1_agreement", "shadow", loose).limit == 0.5


@pytest.fixture
def every_limit(gates):
    """The limits with every one of them set."""
    further = {
        "max_rel_error": 0.9,
        "max_p99_abs_error": 0.5,
        "max_p99_rel_error": 0.1,
        "min_sqnr_db": 30.0,
        "min_cosine_p1": 0.99,
        "min_decision_agreement": 0.9,
    }
    return gates.model_copy(update=further)


@pytest.mark.parametrize("gate", RULES)
def test_advisory(every_limit, gate):
    """Any gate can be made advisory by name, and no other becomes so."""
    trial = every_limit.model_copy(update={"advisory": frozenset({gate})})

    advisory = {name for name in RULES if GateCheck.of(name, "evaluation", trial).advisory}

    assert advisory == {gate}


@pytest.mark.parametrize("gate", RULES)
def test_nan_is_never_allowed(every_limit, gate):
    """No limit lets NaN through, whichever way it points."""
    assert not GateCheck.of(gate, "evaluation", every_limit).allows(float("nan"))
