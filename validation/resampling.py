"""Intervals for scores that have no exact one: macro F1, RMSE, mean errors, SQNR.

The bootstrap with bias correction and acceleration (BCa) of Efron (1987), "Better bootstrap
confidence intervals", Journal of the American Statistical Association 82:171-185. Reference and
candidate are resampled together, so intervals are paired. Each score is a function of sums over
samples; more than `_ALONE` samples are pooled into `_GROUPS` random groups that are resampled in
their place (batch means), which leaves bias, spread and skew as they are to first order. Seeds are
fixed: the same samples give the same interval.

`scipy.stats.bootstrap` computes the same interval of a sample, and a test compares the two. It is
not used because it has no answer where all replicates are equal or some are infinite (a signal to
noise ratio without noise), and because sums by one cached matrix of weights serve thousands of
slices, and macro F1 of a thousand classes, in the time that it needs for one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

from validation.metrics.boxes import AveragePrecision, weight_blocks
from validation.metrics.class_counts import class_score, classes_of, of_classes
from validation.score import BITS, NONE
from validation.statistics import NO_ESTIMATE, Estimate, Pairs, loss_interval, samples_needed

Floats: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[Floats], Floats]

REPLICATES = 2000
# Of mAP, whose every replicate weighs all boxes again: 1,000 settle an end to a few per cent of the
# interval's width, 300 are the least that a 95 % interval is read from; so much work is a few
# seconds on one core.
_BOX_REPLICATES = 1000
_FEWEST_REPLICATES = 300
_MOST_WORK = 100_000_000
_LEFT_OUT = 200  # groups left out in turn, for the skew of mAP
_ALONE = 4000
_GROUPS = 2000
_SEED = 20


@dataclass(frozen=True, slots=True)
class Resampled:
    """A loss (or another number) with its BCa interval.

    Attributes:
        spread: its standard error, from the replicates.
        detail: both engines' own scores, in words.
    """

    estimate: Estimate
    spread: float
    detail: str = ""

    def p_value(self, margin: float) -> float:
        """Chance of a loss at least this high if the true one were ``margin`` (normal)."""
        excess = self.estimate.value - margin
        if self.estimate.samples == 0 or math.isnan(excess):
            return 1.0
        if math.isinf(self.spread):
            return 1.0
        if self.spread == 0.0 or math.isinf(excess):
            return 0.0 if excess > 0.0 else 1.0
        return float(ndtr(-excess / self.spread))

    def samples_to_decide(self, limit: float, confidence: float) -> int | None:
        """Samples that would put the interval on one side of ``limit``, if all stays as seen."""
        samples, gap = self.estimate.samples, limit - self.estimate.value
        if samples == 0 or not math.isfinite(gap + self.spread):
            return None
        variance = samples * self.spread**2
        return samples_needed(variance, variance, gap, confidence)


def _two_means(combine: Callable[[Floats, Floats], Floats]) -> Statistic:
    """A function of FP32's and the candidate's mean, from rows of (count, sum, sum)."""

    def statistic(sums: Floats) -> Floats:
        count = sums[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            return combine(sums[:, 1] / count, sums[:, 2] / count)

    return statistic


def _decibel(signal: Floats, noise: Floats) -> Floats:
    return np.where(noise == 0.0, np.inf, 10.0 * np.log10(signal / noise))


# Positive is worse, except for sqnr, which is no loss but a level in dB.
STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "mae": _two_means(lambda reference, candidate: candidate - reference),
        "rmse": _two_means(lambda reference, candidate: np.sqrt(candidate) - np.sqrt(reference)),
        "mean": _two_means(lambda reference, candidate: reference - candidate),
        "level": _two_means(lambda value, _: value),
        "sqnr": _two_means(_decibel),
    }
)


def resampled_numbers(column: NDArray[np.complex128], kind: str, confidence: float) -> Resampled:
    """A score of pairs of numbers, shape ``(N,)``; ``kind`` is a key of `STATISTICS`."""
    units = np.column_stack([np.ones(len(column)), column.real, column.imag])
    found = bootstrap(units, STATISTICS[kind], confidence)
    if len(column) == 0 or kind in {"sqnr", "level"}:
        return found
    root = math.sqrt if kind == "rmse" else float
    before, after = (root(part.mean()) for part in (column.real, column.imag))
    return Resampled(found.estimate, found.spread, f"FP32 {before:.4g}, candidate {after:.4g}")


def resampled_f1(codes: NDArray[np.int64], confidence: float) -> Resampled:
    """Loss of macro F1, from columns of packed classes (`validation.score`), shape ``(N,)``.

    Classes without a label in the data are left out of the mean. Where answers hardly differ a
    bootstrap has no width; the interval is therefore at least that of the accuracy lost.
    """
    if len(codes) == 0:
        return Resampled(NO_ESTIMATE, 0.0)
    labels, reference, candidate = codes >> 2 * BITS, (codes >> BITS) & NONE, codes & NONE
    classes = np.unique(labels)
    units = _class_counts(labels, reference, candidate, classes)
    found = bootstrap(units, _f1_loss, confidence, samples=len(codes))
    right = (candidate == labels).astype(np.int8) - (reference == labels).astype(np.int8)
    least = loss_interval(Pairs.of(right), confidence)
    width_low, width_high = least.value - least.low, least.high - least.value
    value = found.estimate.value
    low = min(found.estimate.low, value - width_low)
    high = max(found.estimate.high, value + width_high)
    before, after = (float(f1[0]) for f1 in _f1(units.sum(axis=0)[None, :]))
    detail = f"FP32 {before:.4g}, candidate {after:.4g}"
    return Resampled(Estimate(value, low, high, len(codes)), found.spread, detail)


def resampled_counts(
    column: NDArray[Any], kind: str, confidence: float, *, only: int | None = None
) -> Resampled:
    """Loss of a score that is made of counts by class (`validation.metrics.class_counts`).

    Args:
        column: shape ``(N, 5 C)``.
        kind: miou, dice, label_f1 or micro_f1.
        only: the class that counts; None: all that have labels.
    """
    if len(column) == 0 or not classes_of(column):
        return Resampled(NO_ESTIMATE, 0.0)
    units = of_classes(column, kind, only).astype(np.float64)

    def loss(sums: Floats) -> Floats:
        before, after = class_score(kind, sums)
        return before - after

    found = bootstrap(units, loss, confidence)
    before, after = (float(each[0]) for each in class_score(kind, units.sum(axis=0)[None, :]))
    detail = f"FP32 {before:.4g}, candidate {after:.4g}"
    return Resampled(found.estimate, found.spread, detail)


def own_counts(
    column: NDArray[Any], kind: str, confidence: float, *, only: int | None = None
) -> Estimate:
    """FP32's own score that is made of counts by class."""
    if len(column) == 0 or not classes_of(column):
        return NO_ESTIMATE
    units = of_classes(column, kind, only).astype(np.float64)
    statistic: Statistic = lambda sums: class_score(kind, sums)[0]  # noqa: E731
    return bootstrap(units, statistic, confidence).estimate


def resampled_boxes(
    column: Floats, kind: str, confidence: float, *, only: int | None = None
) -> Resampled:
    """Loss of mAP (`validation.metrics.boxes`): samples are drawn, with all boxes that they have.

    Args:
        column: shape ``(N, K)``.
        kind: map or map50.
        only: the class that counts; None: the mean over all that have labels.
    """
    judged = AveragePrecision(column, kind, only)
    if not judged.classes:
        return Resampled(NO_ESTIMATE, 0.0)

    def loss(weights: Floats) -> Floats:
        return judged.score(0, weights) - judged.score(1, weights)

    found = _bootstrap_weights(loss, len(column), judged.work, confidence)
    once = np.ones((1, len(column)))
    before, after = (float(judged.score(engine, once)[0]) for engine in range(2))
    detail = f"FP32 {before:.4g}, candidate {after:.4g}"
    return Resampled(found.estimate, found.spread, detail)


def own_boxes(column: Floats, kind: str, confidence: float, *, only: int | None = None) -> Estimate:
    """FP32's own mAP."""
    judged = AveragePrecision(column, kind, only)
    if not judged.classes:
        return NO_ESTIMATE
    statistic: Statistic = lambda weights: judged.score(0, weights)  # noqa: E731
    return _bootstrap_weights(statistic, len(column), judged.work, confidence).estimate


def _bootstrap_weights(
    statistic: Statistic, samples: int, work: int, confidence: float
) -> Resampled:
    """BCa interval of a number that is no function of sums, from weights of shape ``(R, N)``.

    Args:
        work: what one replicate costs, which bounds how many are made.
    """
    value = float(statistic(np.ones((1, samples)))[0])
    if samples == 1 or not math.isfinite(value):
        return Resampled(Estimate(value, -math.inf, math.inf, samples), math.inf)
    replicates = int(np.clip(_MOST_WORK // work, _FEWEST_REPLICATES, _BOX_REPLICATES))
    rng = np.random.default_rng(_SEED)
    drawn = []
    for block in weight_blocks(replicates, samples):
        rows = len(range(*block.indices(replicates)))
        weights = rng.multinomial(samples, np.full(samples, 1.0 / samples), size=rows)
        drawn.append(statistic(weights.astype(np.float64)))
    found = np.concatenate(drawn)
    group = np.random.default_rng(_SEED).permutation(samples) % min(samples, _LEFT_OUT)
    without = (group != np.arange(group.max() + 1)[:, None]).astype(np.float64)
    left_out = np.concatenate([statistic(without[b]) for b in weight_blocks(len(without), samples)])
    finite = found[np.isfinite(found)]
    if not len(finite) or not np.isfinite(left_out).all():
        return Resampled(Estimate(value, -math.inf, math.inf, samples), math.inf)
    low, high = _bca(value, finite, left_out, confidence)
    estimate = Estimate(value, min(low, value), max(high, value), samples)
    return Resampled(estimate, float(finite.std()))


def own_mean(values: Floats, confidence: float, *, squared: bool = False) -> Estimate:
    """One engine's mean of a score, shape ``(N,)``; squared: the root of a mean of squares."""
    root = np.sqrt if squared else np.asarray

    def statistic(sums: Floats) -> Floats:
        return np.asarray(root(sums[:, 1] / sums[:, 0]))

    units = np.column_stack([np.ones(len(values)), values])
    return bootstrap(units, statistic, confidence).estimate


def own_f1(codes: NDArray[np.int64], confidence: float) -> Estimate:
    """FP32's own macro F1, from columns of packed classes, shape ``(N,)``."""
    if len(codes) == 0:
        return NO_ESTIMATE
    labels, reference = codes >> 2 * BITS, (codes >> BITS) & NONE
    units = _class_counts(labels, reference, reference, np.unique(labels))
    statistic: Statistic = lambda sums: _f1(sums)[0]  # noqa: E731
    return bootstrap(units, statistic, confidence, samples=len(codes)).estimate


def bootstrap(
    units: Floats, statistic: Statistic, confidence: float, *, samples: int | None = None
) -> Resampled:
    """BCa interval of a function of sums.

    Args:
        units: what is resampled, shape ``(N, K)``: each sample's contribution to K sums.
        statistic: sums of shape ``(R, K)`` -> values of shape ``(R,)``.
        samples: how many samples the units are, if they are groups already.
    """
    count = len(units) if samples is None else samples
    if count == 0:
        return Resampled(NO_ESTIMATE, 0.0)
    total = units.sum(axis=0)
    value = float(statistic(total[None, :])[0])
    if not math.isfinite(value):
        return Resampled(Estimate(value, value, value, count), 0.0)
    if len(units) == 1:
        return Resampled(Estimate(value, -math.inf, math.inf, count), math.inf)
    pooled = units if len(units) <= _ALONE else _pooled(units)
    replicates = statistic(_weights(len(pooled), REPLICATES) @ pooled)
    left_out = statistic(total - pooled)
    low, high = _bca(value, replicates, left_out, confidence)
    finite = replicates[np.isfinite(replicates)]
    spread = float(finite.std()) if len(finite) else 0.0
    return Resampled(Estimate(value, min(low, value), max(high, value), count), spread)


def _bca(
    value: float, replicates: Floats, left_out: Floats, confidence: float
) -> tuple[float, float]:
    below = (replicates < value).mean() + 0.5 * (replicates == value).mean()
    edge = 1.0 / (len(replicates) + 1)
    bias = float(ndtri(np.clip(below, edge, 1.0 - edge)))
    pull = left_out.mean() - left_out
    cubes, squares = float((pull**3).sum()), float((pull**2).sum())
    acceleration = cubes / (6.0 * squares**1.5) if squares > 0.0 and math.isfinite(cubes) else 0.0
    ends = []
    for level in ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0):
        shifted = bias + float(ndtri(level))
        adjusted = float(ndtr(bias + shifted / (1.0 - acceleration * shifted)))
        ends.append(float(np.quantile(replicates, adjusted, method="inverted_cdf")))
    return ends[0], ends[1]


@functools.lru_cache(maxsize=2)  # many intervals of one sample size follow one another
def _weights(units: int, replicates: int) -> Floats:
    """How often each unit is drawn in each replicate, shape ``(replicates, units)``."""
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, units, size=(replicates, units))
    drawn += np.arange(replicates)[:, None] * units
    counts = np.bincount(drawn.ravel(), minlength=replicates * units)
    return counts.reshape(replicates, units).astype(np.float64)


def _groups(samples: int) -> NDArray[np.int64]:
    """The group of each sample, shape ``(N,)``: random, and of equal size to within one."""
    order = np.random.default_rng(_SEED).permutation(samples)
    return np.asarray(order % _GROUPS, dtype=np.int64)


def _pooled(units: Floats) -> Floats:
    groups = _groups(len(units))
    columns = [np.bincount(groups, column, minlength=_GROUPS) for column in units.T]
    return np.column_stack(columns)


def _class_counts(
    labels: NDArray[Any], reference: NDArray[Any], candidate: NDArray[Any], classes: NDArray[Any]
) -> Floats:
    """Per unit and class: labels, then FP32's hits and choices, then the candidate's."""
    units = len(labels) if len(labels) <= _ALONE else _GROUPS
    rows = np.arange(units) if units == len(labels) else _groups(len(labels))

    def count(chosen: NDArray[Any], flags: NDArray[np.bool_]) -> Floats:
        place = np.minimum(np.searchsorted(classes, chosen), len(classes) - 1)
        kept = flags & (classes[place] == chosen)
        cells = rows[kept] * len(classes) + place[kept]
        return np.bincount(cells, minlength=units * len(classes)).reshape(units, -1).astype(float)

    every = np.ones(len(labels), dtype=np.bool_)
    parts = [count(labels, every)]
    for chosen in (reference, candidate):
        parts += [count(chosen, chosen == labels), count(chosen, every)]
    return np.concatenate(parts, axis=1)


def _f1_loss(sums: Floats) -> Floats:
    before, after = _f1(sums)
    return before - after


def _f1(sums: Floats) -> tuple[Floats, Floats]:
    """Macro F1 of FP32 and of the candidate, each of shape ``(R,)``."""
    labels, *rest = np.split(sums, 5, axis=1)
    found = []
    for hits, choices in (rest[:2], rest[2:]):
        both = labels + choices
        f1 = np.divide(2.0 * hits, both, out=np.full_like(both, np.nan), where=both > 0.0)
        found.append(np.nanmean(f1, axis=1))
    return found[0], found[1]
