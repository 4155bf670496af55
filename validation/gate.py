"""Numbers and limits in, findings out. Pure: no files, no engines, no Great Expectations.

Every gate that has an interval is decided the same way. It passed when the whole interval is within
the limit, failed when the whole interval is beyond it, and is inconclusive between; the remedy then
says how many samples would decide.

Slices are judged as a family, and the two errors are controlled separately, because they differ:

- *Crying wolf*: a slice is failed only if its Holm-adjusted p value is significant too, so over all
  slices of one scope a false alarm is as rare as for a single gate, however many slices there are.
- *Letting a broken slice through*: each slice passes on its own interval, unadjusted. The verdict
  needs all of them to pass, so a broken one slips through no more often than in a single gate
  (intersection-union test; Berger 1982, Technometrics 24:295-300).

A slice that is bad, but not bad enough to be sure among so many, is inconclusive; it never passes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Finding, Outcome
from enginegate.policy import Gates
from validation.checks import FAMILIES, Check
from validation.statistics import (
    NO_ESTIMATE,
    Estimate,
    Pairs,
    Share,
    holm,
    loss_interval,
    loss_p_value,
    quantile_interval,
    samples_to_decide_loss,
    samples_to_decide_share,
    share_interval,
    share_p_value,
)

KL_QUANTILE = 0.99
_NAMED_SLICES = 8


@dataclass(frozen=True, slots=True)
class Tail:
    """The 99th percentile of N values, and how many of them are beyond the limit."""

    estimate: Estimate
    beyond: int

    @classmethod
    def of(cls, check: Check, values: NDArray[np.float64]) -> "Tail":
        """Percentile of values of shape ``(N,)``, limited from above; NaN counts as infinite."""
        known = np.where(np.isnan(values), np.inf, values)
        estimate = quantile_interval(known, KL_QUANTILE, check.confidence)
        return cls(estimate, int((known > check.limit).sum()))


Counts: TypeAlias = Pairs | Share | Tail


@dataclass(frozen=True, slots=True)
class Reading:
    """What the samples say about a check."""

    estimate: Estimate
    deciding_samples: int | None
    detail: str

    @classmethod
    def of(cls, check: Check, counts: Counts) -> "Reading":
        """Estimate, interval, and the sample size that would decide."""
        if isinstance(counts, Pairs):
            return cls(
                loss_interval(counts, check.confidence),
                samples_to_decide_loss(counts, check.limit, check.confidence),
                f"{counts.lost} lost, {counts.gained} gained",
            )
        if isinstance(counts, Share):
            return cls(
                share_interval(counts, check.confidence),
                samples_to_decide_share(counts, check.limit, check.confidence),
                f"{counts.samples - counts.having} differ",
            )
        samples = counts.estimate.samples
        within = Share(samples - counts.beyond, samples)
        return cls(
            counts.estimate,
            samples_to_decide_share(within, KL_QUANTILE, check.confidence),
            f"{counts.beyond} above the limit",
        )


def judge_number(check: Check, value: float, samples: int) -> Finding:
    """Judge a number that is exact for the samples at hand: a count, or a maximum.

    Too few samples is inconclusive, and so is any number from no samples; else NaN and whatever is
    beyond the limit failed.
    """
    estimate = Estimate(value, math.nan, math.nan, samples)
    if samples == 0:
        return _nothing(check)
    outcome = Outcome.INCONCLUSIVE if check.gate == "samples" else Outcome.FAILED
    if check.allows(value):
        outcome = Outcome.PASSED
    number = f"{check.rule.noun} {value:.4g} {_relation(check, outcome)} {check.limit:g}"
    reason = number if check.gate == "samples" else f"{number}; {samples} samples"
    return _finding(check, outcome, reason, estimate)


def judge(check: Check, counts: Counts) -> Finding:
    """Judge an estimate by where its interval lies."""
    reading = Reading.of(check, counts)
    return _judge_reading(check, reading, _outcome(check, reading.estimate))


def judge_family(members: Sequence[tuple[Check, Pairs | Share]]) -> tuple[Finding, ...]:
    """Judge slices together, most harm first; the top of this file says what is controlled."""
    adjusted = holm([_p_value(check, counts) for check, counts in members])
    harmed = []
    for (check, counts), p_value in zip(members, adjusted, strict=True):
        reading = Reading.of(check, counts)
        outcome = _outcome(check, reading.estimate)
        if outcome is Outcome.FAILED and p_value > (1.0 - check.confidence) / 2.0:
            finding = _suspected(check, reading, len(members))
        else:
            finding = _judge_reading(check, reading, outcome)
        harmed.append((check.harm(reading.estimate.value), finding))
    return tuple(finding for _, finding in sorted(harmed, key=lambda pair: -pair[0]))


def judge_slice_sizes(
    scope: str, sizes: Mapping[tuple[str, str], int], gates: Gates
) -> Finding | None:
    """Name the slices that are too small to judge; None without slices.

    Advisory: a note on what was not judged, so that nothing is dropped in silence.
    """
    if not sizes:
        return None
    need = gates.min_slice_samples
    small = [f"{column}={value} ({n})" for (column, value), n in sizes.items() if n < need]
    more = f" and {len(small) - _NAMED_SLICES} more" if len(small) > _NAMED_SLICES else ""
    reason = f"all {len(sizes)} slices have >= {need} samples"
    if small:
        named = ", ".join(small[:_NAMED_SLICES])
        reason = f"{len(small)} of {len(sizes)} slices have < {need} samples, so were not judged: "
        reason += named + more
    return Finding(
        gate="slice_samples",
        scope=scope,
        outcome=Outcome.INCONCLUSIVE if small else Outcome.PASSED,
        reason=reason,
        value=min(sizes.values()),
        limit=need,
        relation=">=",
        unit="samples",
        samples=sum(n for n in sizes.values() if n < need),
        advisory=True,
        remedy="Add samples of these slices, or merge them into larger ones." if small else "",
    )


def unlabelled(scope: str, gates: Gates) -> Finding:
    """Accuracy cannot be judged without labels: inconclusive, never passed."""
    return _finding(
        Check.of("accuracy_loss", scope, gates),
        Outcome.INCONCLUSIVE,
        f"the {scope} data has no labels, so accuracy was not measured",
        NO_ESTIMATE,
        remedy="Add an array named label to the data: one integer class a sample.",
    )


def errored(check: Check, why: str) -> Finding:
    """The check itself broke, so nothing is known."""
    return _finding(
        check,
        Outcome.ERRORED,
        f"could not be evaluated: {why}",
        NO_ESTIMATE,
        remedy="The fault is in the pipeline or its data, not in the candidate; see the evidence.",
    )


def worst_slice(findings: Sequence[Finding]) -> Finding | None:
    """The slice with the worst outcome and, among those, the most harm; None without slices."""
    slices = [f for f in findings if f.gate in FAMILIES and f.value is not None]
    return max(slices, key=lambda f: (f.outcome, _harm(f)), default=None)


def _harm(finding: Finding) -> float:
    beyond = (finding.value or 0.0) - (finding.limit or 0.0)
    return beyond if finding.relation == "<=" else -beyond


def _outcome(check: Check, estimate: Estimate) -> Outcome:
    if estimate.samples == 0:
        return Outcome.INCONCLUSIVE
    best, worst = estimate.low, estimate.high
    if check.rule.relation == ">=":
        best, worst = worst, best
    if not check.allows(best):
        return Outcome.FAILED
    return Outcome.PASSED if check.allows(worst) else Outcome.INCONCLUSIVE


def _p_value(check: Check, counts: Pairs | Share) -> float:
    if isinstance(counts, Pairs):
        return loss_p_value(counts, check.limit)
    return share_p_value(counts, check.limit)


def _judge_reading(check: Check, reading: Reading, outcome: Outcome) -> Finding:
    if reading.estimate.samples == 0:
        return _nothing(check)
    reason = _reason(check, reading, f"{_relation(check, outcome)} {check.limit:g}")
    remedy = ""
    if outcome is Outcome.INCONCLUSIVE:
        remedy = "No number of samples like these would decide it; look at the limit."
        if reading.deciding_samples is not None:
            remedy = f"About {reading.deciding_samples} samples like these would decide it."
    return _finding(check, outcome, reason, reading.estimate, remedy=remedy)


def _nothing(check: Check) -> Finding:
    reason, remedy = "there are no samples to judge", "Give data that has samples."
    return _finding(check, Outcome.INCONCLUSIVE, reason, NO_ESTIMATE, remedy=remedy)


def _suspected(check: Check, reading: Reading, slices: int) -> Finding:
    """A slice that would fail alone, but not after allowing for all that were looked at."""
    relation = _relation(check, Outcome.FAILED)
    reason = _reason(
        check, reading, f"{relation} {check.limit:g}, not surely among {slices} slices"
    )
    remedy = "Add samples of this slice: alone it would have failed."
    return _finding(check, Outcome.INCONCLUSIVE, reason, reading.estimate, remedy=remedy)


def _reason(check: Check, reading: Reading, relation: str) -> str:
    estimate = reading.estimate
    return (
        f"{check.rule.noun} {estimate.value:.4g} ({100 * check.confidence:g} % interval "
        f"{estimate.low:.4g} to {estimate.high:.4g}) {relation}; "
        f"{estimate.samples} samples, {reading.detail}"
    )


def _relation(check: Check, outcome: Outcome) -> str:
    if outcome is Outcome.PASSED:
        return check.rule.relation
    if outcome is Outcome.INCONCLUSIVE and check.gate != "samples":
        return "spans"
    return ">" if check.rule.relation == "<=" else "<"


def _finding(
    check: Check, outcome: Outcome, reason: str, estimate: Estimate, *, remedy: str = ""
) -> Finding:
    return Finding(
        gate=check.gate,
        scope=check.scope,
        outcome=outcome,
        reason=reason,
        value=_finite(estimate.value),
        limit=check.limit,
        relation=check.rule.relation,
        unit=check.rule.unit,
        low=_finite(estimate.low),
        high=_finite(estimate.high),
        samples=estimate.samples,
        advisory=check.advisory,
        remedy="" if outcome is Outcome.PASSED else remedy or check.rule.remedy,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
