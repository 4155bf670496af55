"""Live answers against FP32's, live inputs against calibration's: numbers in, findings out."""

import numpy as np
import pytest

from enginegate.evidence import Outcome
from enginegate.policy.operating import Watch
from tests.fakes.evidence import sha
from tests.fakes.watch_checks import watch_check
from validation.drift import Drift
from validation.live import count_agreement, judge_agreement, judge_live_drift

RULES = Watch(min_requests=100, max_pending=50)
PASSED, INCONCLUSIVE, FAILED, _ = Outcome


def agreement(bad_by_slice, samples=100, past=()):
    agrees = np.ones(samples * len(bad_by_slice), np.bool_)
    names = np.repeat(sorted(bad_by_slice), samples)
    for place, name in enumerate(sorted(bad_by_slice)):
        agrees[place * samples : place * samples + bad_by_slice[name]] = False
    counts = count_agreement(agrees, {"light": names}, 200)
    return {f.gate: f for f in judge_agreement(counts, RULES, past)}, counts


@pytest.mark.parametrize(
    ("bad", "overall", "slices"),
    [
        ({"day": 0, "night": 0}, PASSED, PASSED),
        ({"day": 2, "night": 3}, INCONCLUSIVE, PASSED),
        ({"day": 40, "night": 40}, FAILED, FAILED),
        ({f"s{n:02d}": 0 for n in range(30)} | {"night": 25}, PASSED, FAILED),
    ],
)
def test_agreement_in_all_and_by_slice(bad, overall, slices):
    """A slice that surely disagrees fails though the whole is well above the limit."""
    found, _ = agreement(bad)

    assert (found["agreement"].outcome, found["slice_agreement"].outcome) == (overall, slices)
    if slices is FAILED and overall is PASSED:
        assert "light=night" in found["slice_agreement"].reason


def test_slice_columns_with_too_many_values_are_not_cut():
    """A column of user names is no slice."""
    names = np.array([f"user-{n}" for n in range(50)])

    counts = count_agreement(np.ones(50, np.bool_), {"user": names}, 10)

    assert [count.what for count in counts] == ["agreement"]


@pytest.mark.parametrize(
    ("psi", "p_value", "max_drift", "tests", "outcome", "advisory"),
    [
        (3.0, 1e-9, 0.25, 0, FAILED, False),
        (3.0, 1e-9, None, 0, INCONCLUSIVE, True),
        (0.1, 1e-9, 0.25, 0, PASSED, False),
        (3.0, 0.2, 0.25, 0, PASSED, False),
        (3.0, 1e-3, 0.25, 0, FAILED, False),
        (3.0, 1e-3, 0.25, 9, PASSED, False),
    ],
)
def test_drift_fails_at_a_stated_limit_only(psi, p_value, max_drift, tests, outcome, advisory):
    """And the same evidence weighs less at the tenth sample than at the first."""
    drifts = (Drift("x", "mean", psi, 0.5, p_value),)
    rules = Watch(max_drift=max_drift)
    past = [watch_check(number=n, sample=sha("c")) for n in range(1, tests + 1)]

    found = judge_live_drift(drifts, (100, 100), rules, past)

    assert (found.outcome, found.advisory) == (outcome, advisory)
