"""What samples say about a check: counts of a column, their estimate and interval."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from validation.checks import GateCheck
from validation.resampling import Resampled, resampled_f1, resampled_numbers
from validation.score import paired_form
from validation.statistics import (
    Estimate,
    Pairs,
    Share,
    loss_interval,
    loss_p_value,
    quantile_interval,
    samples_to_decide_loss,
    samples_to_decide_share,
    share_interval,
    share_p_value,
)

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
    if column == "accuracy_delta" or (check.kind and paired_form(check.kind) == "binary"):
        return Pairs.of(values)
    if check.kind:
        return _resampled(check, values)
    if column == "top1_match":
        return Share.of(values)
    if column == "power":
        return resampled_numbers(values, "sqnr", check.confidence)
    return Tail.of(check, values)


def _resampled(check: GateCheck, values: NDArray[Any]) -> Resampled:
    if paired_form(check.kind) == "classes":
        return resampled_f1(values, check.confidence)
    kind = check.kind if check.kind in {"mae", "rmse"} else "mean"
    return resampled_numbers(values, kind, check.confidence)


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
