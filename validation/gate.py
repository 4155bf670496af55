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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import ERRORS, Gates
from validation.agreement import OutputComparison
from validation.checks import MAXIMA, RULES, GateCheck, judged_sizes, unlimited
from validation.outputs import OutputSpec
from validation.resampling import (
    Resampled,
    resampled_boxes,
    resampled_counts,
    resampled_f1,
    resampled_numbers,
)
from validation.score import paired_form
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

_NAMED_SLICES = 8
_OPEN_LIMIT = {"<=": float("inf"), ">=": float("-inf")}
# FP32 varies where its answers differ by more than a coarse quantisation may round away; equal
# answers may differ by the rounding of a sum.
_VARIES, _ROUNDING = 1e-2, 1e-12
TAIL = 0.99  # of the samples are within a percentile's limit


@dataclass(frozen=True, slots=True)
class Tail:
    """The 99th percentile of N values (the 1st, if limited from below), and how many are beyond."""

    estimate: Estimate
    beyond: int

    @classmethod
    def of(cls, check: GateCheck, values: NDArray[np.float64]) -> "Tail":
        """Percentile of values of shape ``(N,)``; NaN counts as the worst there is."""
        above = check.rule.relation == "<="
        known = np.where(np.isnan(values), np.inf if above else -np.inf, values)
        quantile = TAIL if above else 1.0 - TAIL
        estimate = quantile_interval(known, quantile, check.confidence)
        within = known <= check.limit if above else known >= check.limit
        return cls(estimate, int((~within).sum()))


Counts: TypeAlias = Pairs | Share | Tail | Resampled


def counts_of(check: GateCheck, values: NDArray[Any]) -> Counts:
    """What a check's column holds, shape ``(N,)``, as its rule counts it."""
    column = check.rule.column
    if check.kind:
        return _metric_counts(check, values)
    if column == "accuracy_delta":
        return Pairs.of(values)
    if column == "top1_match":
        return Share.of(values)
    if column == "decision_agreement":
        return resampled_numbers(values.astype(np.complex128), "level", check.confidence)
    if column == "power":
        return resampled_numbers(values, "sqnr", check.confidence)
    return Tail.of(check, values)


def _metric_counts(check: GateCheck, values: NDArray[Any]) -> Counts:
    form, confidence = paired_form(check.kind), check.confidence
    if form == "binary":
        return Pairs.of(values)
    if form == "classes":
        return resampled_f1(values, confidence)
    if form in {"counts", "boxes"}:
        resampled = resampled_counts if form == "counts" else resampled_boxes
        return resampled(_stacked(values), check.kind, confidence, only=check.only)
    kind = check.kind if check.kind in ERRORS else "mean"
    return resampled_numbers(values, kind, confidence)


def _stacked(values: NDArray[Any]) -> NDArray[Any]:
    """Rows of a column that holds several numbers a sample, as one array ``(N, K)``."""
    if values.dtype != object:
        return values
    return np.stack(list(values)) if len(values) else np.empty((0, 0))


def p_value(check: GateCheck, counts: Counts) -> float:
    """Chance of counts at least this bad if the truth were exactly the limit."""
    if isinstance(counts, Pairs):
        return loss_p_value(counts, check.limit)
    if isinstance(counts, Share):
        return share_p_value(counts, check.limit)
    if isinstance(counts, Resampled):
        return counts.p_value(check.limit)
    raise TypeError("percentiles are not judged as a family")


@dataclass(frozen=True, slots=True)
class CheckReading:
    """What the samples say about a check."""

    estimate: Estimate
    deciding_samples: int | None
    detail: str

    @classmethod
    def of(cls, check: GateCheck, counts: Counts) -> "CheckReading":
        """Estimate, interval, and the sample size that would decide."""
        limit, confidence = check.limit, check.confidence
        if isinstance(counts, Pairs):
            return cls(
                loss_interval(counts, confidence),
                samples_to_decide_loss(counts, limit, confidence),
                f"{counts.lost} lost, {counts.gained} gained",
            )
        if isinstance(counts, Share):
            return cls(
                share_interval(counts, confidence),
                samples_to_decide_share(counts, limit, confidence),
                f"{counts.samples - counts.having} differ",
            )
        if isinstance(counts, Resampled):
            deciding = counts.samples_to_decide(limit, confidence)
            return cls(counts.estimate, deciding, counts.detail)
        samples = counts.estimate.samples
        within = Share(samples - counts.beyond, samples)
        side = "above" if check.rule.relation == "<=" else "below"
        return cls(
            counts.estimate,
            samples_to_decide_share(within, TAIL, confidence),
            f"{counts.beyond} {side} the limit",
        )

    @property
    def would_pass(self) -> tuple[float, float]:
        """The limits that would just have passed: from above, and from below."""
        return self.estimate.high, self.estimate.low


def finite(value: float) -> float | None:
    """A number for a record, which holds no NaN or infinity."""
    return value if math.isfinite(value) else None


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


def judge_counts(check: GateCheck, counts: Counts) -> Finding:
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
        of_error=check.kind in ERRORS,
    )


def notes_on(comparison: OutputComparison, gates: Gates, asked: OutputSpec) -> tuple[Finding, ...]:
    """Every note on one comparison."""
    scope, sizes = comparison.scope, judged_sizes(comparison, gates, asked)
    found = [
        judge_slice_sizes(scope, sizes, gates),
        _constant_reference(comparison, gates),
        _constant_answers(comparison, gates),
    ]
    found += [
        _too_many_values(comparison, column, gates, most=asked.max_values)
        for column in comparison.slices
    ]
    if scope.partition(":")[0] == "evaluation":
        if comparison.top1_reference is not None and comparison.correct_reference is None:
            found.append(unlabelled(scope, gates))
        found += [
            _unscored(name, asked, scope, gates)
            for name in asked.metrics
            if name not in comparison.scores
        ]
    if len(comparison):
        found += [_measured(gate, comparison, gates) for gate in unlimited(comparison, gates)]
    return tuple(note for note in found if note is not None)


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
    return finding_of(
        GateCheck.of("accuracy_loss", scope, gates),
        Outcome.INCONCLUSIVE,
        f"the {scope} data has no labels, so accuracy was not measured",
        NO_ESTIMATE,
        remedy="Add an array named label to the data: one integer class a sample.",
    )


def _unscored(name: str, asked: OutputSpec, scope: str, gates: Gates) -> Finding:
    metric = asked.metrics[name]
    output = metric.output or asked.output or "OUTPUT"
    named = f"label.{output}" if asked.alone else f"label or label.{output}"
    return finding_of(
        GateCheck.of_metric(name, metric, scope, gates),
        Outcome.INCONCLUSIVE,
        f"the {scope} data has no labels for it, so {name} was not measured",
        NO_ESTIMATE,
        remedy=f"Add an array named {named} to the data: what the output should be.",
    )


def _too_many_values(
    comparison: OutputComparison, column: str, gates: Gates, *, most: int
) -> Finding | None:
    """A column such as a user's name cuts the data into crumbs: it is not judged."""
    values = len(np.unique(comparison.slices[column]))
    if values <= most:
        return None
    return Finding(
        gate="slice_values",
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"slice column {column} has {values} values > {most}, so it was not judged",
        value=values,
        limit=most,
        relation="<=",
        unit="values",
        samples=len(comparison),
        advisory="slice_values" in gates.advisory,
        remedy="Group its values, take the column out of the data, or raise slices.max_values.",
    )


def _constant_reference(comparison: OutputComparison, gates: Gates) -> Finding | None:
    """FP32 that answers the same to everything shows nothing about a candidate."""
    power = comparison.power
    if power is None or len(power) < 2 or np.ptp(power.real) > 0.0:  # noqa: PLR2004 - one sample cannot vary
        return None
    return Finding(
        gate="constant_reference",
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"FP32's output has the same size on all {len(power)} samples",
        samples=len(power),
        advisory="constant_reference" in gates.advisory,
        remedy="Look at the inputs: preprocessing, or one sample repeated. Give data that varies.",
    )


def _constant_answers(comparison: OutputComparison, gates: Gates) -> Finding | None:
    """A candidate that answers the same to everything computes nothing, whatever it agrees with.

    Where most samples are of one class, such an answer may lose little accuracy.
    """
    projection = comparison.projection
    if projection is None or not len(projection) or comparison.nonfinite.any():
        return None
    own, found = projection.real, projection.imag
    varies = np.ptp(own) > _VARIES * np.abs(own).max()
    if not varies or np.ptp(found) > _ROUNDING * np.abs(found).max():
        return None
    return Finding(
        gate="constant_answers",
        scope=comparison.scope,
        outcome=Outcome.FAILED,
        reason=f"the candidate gives one and the same answer to all {len(found)} samples, and "
        "FP32 does not",
        samples=len(found),
        advisory="constant_answers" in gates.advisory,
        remedy="The engine does not compute the model. Build it again; if it is the same again, "
        "report it with the engine to whoever makes its builder.",
    )


def _measured(gate: str, comparison: OutputComparison, gates: Gates) -> Finding:
    """A number that the policy sets no limit for: shown, and never decides."""
    rule = RULES[gate]
    check = GateCheck(
        gate, comparison.scope, _OPEN_LIMIT[rule.relation], gates.confidence, advisory=True
    )
    values = comparison.columns()[rule.column]
    if gate in MAXIMA:
        value = float(values.max())
        ends = (value, value)
        low, high = None, None
    else:
        estimate = CheckReading.of(check, counts_of(check, values)).estimate
        value, ends = estimate.value, (estimate.high, estimate.low)
        low, high = finite(estimate.low), finite(estimate.high)
    return Finding(
        gate=gate,
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"{rule.noun} {value:.4g}; the policy sets no limit; {len(comparison)} samples",
        value=finite(value),
        relation=rule.relation,
        unit=rule.unit,
        low=low,
        high=high,
        samples=len(comparison),
        advisory=True,
        remedy="Shown only. Limit it under [gates] in the policy, and it decides.",
        would_pass=finite(ends[0] if rule.relation == "<=" else ends[1]),
    )
