"""Judging a sample while it grows: as often as one likes, with the error rate of a single look.

Gates elsewhere look once, at a sample of fixed size. Shadow traffic arrives, and whoever watches it
looks again and again; here the interval is a confidence sequence (`validation.sequential`), so the
chance that a sound release is ever failed, over all looks together, stays below the policy's.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Finding, Outcome
from validation.checks import GateCheck
from validation.gate import finding_of, outcome_of, relation_of
from validation.sequential import confidence_sequence


def judge_growing(check: GateCheck, values: NDArray[Any]) -> Finding:
    """Judge the samples that arrived so far, valid at every look.

    Args:
        check: of accuracy_loss, top1_agreement, a slice of either, or a right-or-wrong metric.
        values: the check's column (``check.rule.column``), in the order of arrival, all of them:
            leaving out earlier ones would be another look.

    Raises:
        ValueError: the check is of a number without known bounds.
    """
    if check.rule.column == "top1_match":
        bounds, losses = (0.0, 1.0), np.asarray(values, dtype=np.float64)
    elif check.rule.unit == "fraction" and values.dtype.kind in "ib":
        bounds, losses = (-1.0, 1.0), -np.asarray(values, dtype=np.float64)
    else:
        raise ValueError(f"{check.gate} has no bounds, so it cannot be judged while it grows")
    found = confidence_sequence(losses, bounds, check.confidence).last()
    outcome = outcome_of(check, found)
    reason = (
        f"{check.rule.noun} {found.value:.4g} ({100 * check.confidence:g} % interval at every look "
        f"{found.low:.4g} to {found.high:.4g}) {relation_of(check, outcome)} {check.limit:g}; "
        f"{found.samples} samples so far"
        if found.samples
        else "no samples have arrived"
    )
    remedy = "Look again when more samples have arrived." if outcome is Outcome.INCONCLUSIVE else ""
    limits = (found.high, found.low)
    return finding_of(check, outcome, reason, found, limits=limits, remedy=remedy)
