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
from collections.abc import Sequence

from enginegate.evidence import Finding, Outcome
from validation.checks import GateCheck
from validation.reading import CheckReading, Counts, finite, p_value
from validation.statistics import NO_ESTIMATE, Estimate, holm


def judge_number(check: GateCheck, value: float, samples: int) -> Finding:
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
    number = f"{check.rule.noun} {value:.4g} {relation_of(check, outcome)} {check.limit:g}"
    reason = number if check.gate == "samples" else f"{number}; {samples} samples"
    return finding_of(check, outcome, reason, estimate, limits=(value, value))


def judge(check: GateCheck, counts: Counts) -> Finding:
    """Judge an estimate by where its interval lies."""
    reading = CheckReading.of(check, counts)
    return _judge_reading(check, reading, outcome_of(check, reading.estimate))


def judge_family(members: Sequence[tuple[GateCheck, Counts]]) -> tuple[Finding, ...]:
    """Judge slices together, most harm first; the top of this file says what is controlled."""
    adjusted = holm([p_value(check, counts) for check, counts in members])
    harmed = []
    for (check, counts), chance in zip(members, adjusted, strict=True):
        reading = CheckReading.of(check, counts)
        outcome = outcome_of(check, reading.estimate)
        if outcome is Outcome.FAILED and chance > (1.0 - check.confidence) / 2.0:
            finding = _suspected(check, reading, len(members))
        else:
            finding = _judge_reading(check, reading, outcome)
        harmed.append((check.harm(reading.estimate.value), finding))
    return tuple(finding for _, finding in sorted(harmed, key=lambda pair: -pair[0]))


def errored(check: GateCheck, why: str) -> Finding:
    """The check itself broke, so nothing is known."""
    return finding_of(
        check,
        Outcome.ERRORED,
        f"could not be evaluated: {why}",
        NO_ESTIMATE,
        remedy="The fault is in the pipeline or its data, not in the candidate; see the evidence.",
    )


def worst_slice(findings: Sequence[Finding]) -> Finding | None:
    """The slice with the worst outcome and, among those, the most harm; None without slices."""
    slices = [f for f in findings if "/" in f.scope and f.value is not None and not f.of_fp32]
    return max(slices, key=lambda f: (f.outcome, _harm(f)), default=None)


def _harm(finding: Finding) -> float:
    beyond = (finding.value or 0.0) - (finding.limit or 0.0)
    return beyond if finding.relation == "<=" else -beyond


def outcome_of(check: GateCheck, estimate: Estimate) -> Outcome:
    """Passed or failed when the whole interval is on one side of the limit."""
    if estimate.samples == 0:
        return Outcome.INCONCLUSIVE
    best, worst = estimate.low, estimate.high
    if check.rule.relation == ">=":
        best, worst = worst, best
    if not check.allows(best):
        return Outcome.FAILED
    return Outcome.PASSED if check.allows(worst) else Outcome.INCONCLUSIVE


def _judge_reading(check: GateCheck, reading: CheckReading, outcome: Outcome) -> Finding:
    if reading.estimate.samples == 0:
        return _nothing(check)
    reason = _reason(check, reading, f"{relation_of(check, outcome)} {check.limit:g}")
    remedy = ""
    if outcome is Outcome.INCONCLUSIVE:
        remedy = "No number of samples like these would decide it; look at the limit."
        if reading.deciding_samples is not None:
            remedy = f"About {reading.deciding_samples} samples like these would decide it."
    return finding_of(
        check, outcome, reason, reading.estimate, limits=reading.would_pass, remedy=remedy
    )


def _nothing(check: GateCheck) -> Finding:
    reason, remedy = "there are no samples to judge", "Give data that has samples."
    return finding_of(check, Outcome.INCONCLUSIVE, reason, NO_ESTIMATE, remedy=remedy)


def _suspected(check: GateCheck, reading: CheckReading, slices: int) -> Finding:
    """A slice that would fail alone, but not after allowing for all that were looked at."""
    relation = relation_of(check, Outcome.FAILED)
    reason = _reason(
        check, reading, f"{relation} {check.limit:g}, not surely among {slices} slices"
    )
    remedy = "Add samples of this slice: alone it would have failed."
    return finding_of(
        check,
        Outcome.INCONCLUSIVE,
        reason,
        reading.estimate,
        limits=reading.would_pass,
        remedy=remedy,
    )


def _reason(check: GateCheck, reading: CheckReading, relation: str) -> str:
    estimate = reading.estimate
    return (
        f"{check.rule.noun} {estimate.value:.4g} ({100 * check.confidence:g} % interval "
        f"{estimate.low:.4g} to {estimate.high:.4g}) {relation}; "
        f"{', '.join(filter(None, (f'{estimate.samples} samples', reading.detail)))}"
    )


def relation_of(check: GateCheck, outcome: Outcome) -> str:
    """How the number stands to the limit, in a sentence."""
    if outcome is Outcome.PASSED:
        return check.rule.relation
    if outcome is Outcome.INCONCLUSIVE and check.gate != "samples":
        return "spans"
    return ">" if check.rule.relation == "<=" else "<"


def finding_of(
    check: GateCheck,
    outcome: Outcome,
    reason: str,
    estimate: Estimate,
    *,
    limits: tuple[float, float] = (math.nan, math.nan),
    remedy: str = "",
) -> Finding:
    """A finding with everything the check knows.

    Args:
        limits: what would just have passed, from above and from below.
        remedy: instead of the rule's own.
    """
    return Finding(
        gate=check.gate,
        scope=check.scope,
        outcome=outcome,
        reason=reason,
        value=finite(estimate.value),
        limit=check.limit,
        relation=check.rule.relation,
        unit=check.rule.unit,
        low=finite(estimate.low),
        high=finite(estimate.high),
        samples=estimate.samples,
        advisory=check.advisory,
        remedy="" if outcome is Outcome.PASSED else remedy or check.rule.remedy,
        would_pass=finite(limits[0] if check.rule.relation == "<=" else limits[1]),
    )
