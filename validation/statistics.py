"""Intervals, tests and sample sizes; nothing here knows about policies or findings.

Every interval is two-sided: at confidence 0.95 each end is wrong about 2.5 % of the time. A claim
of non-inferiority, made from one end, is therefore a one-sided test at 2.5 %: half the two-sided
level, as ICH E9 (section 5.5) prefers.

A share that is checked again and again (`surely`) is judged by e-values: an ordinary test at
every check is wrong far more often than it says. Under the hypothesis "the share was never above
the limit" an e-value exceeds ``1 / alpha`` at any check at all with a probability of at most
``alpha`` (Ville 1939), so a check may act on it at once. Each is the likelihood ratio of one
check's counts and all later ones, averaged over every share on the other side of the limit (Robbins
1970, Annals of Mathematical Statistics 41:1397-1409). Faults begin at some time, so one that begins
at every check is averaged too, check ``j`` with weight ``1 / (j (j + 1))``: an average of e-values
is one (Ramdas, Grünwald, Vovk and Shafer 2023, Statistical Science 38:576-601). A good past then
cannot hide a new fault.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.special import betaincc, betaln, logsumexp, ndtr, ndtri  # type: ignore[import-untyped]
from scipy.stats import binom, binomtest, quantile_test  # type: ignore[import-untyped]

POWER = 0.8  # chance of a decision that the sample sizes below aim for
_POWER_Z = float(ndtri(POWER))
_ALMOST_ONE = 1.0 - 1e-12
_MANY_LOST = 2000
_NEGLIGIBLE = 1e-12
_TIE = 1e-9  # counts that are as bad as those seen, up to rounding


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with a two-sided interval. All NaN without samples; an end may be infinite."""

    value: float
    low: float
    high: float
    samples: int


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Samples on which reference and candidate were each right or wrong.

    Attributes:
        lost: reference right, candidate wrong.
        gained: reference wrong, candidate right.
        samples: all of them, the concordant ones included.
    """

    lost: int
    gained: int
    samples: int

    @classmethod
    def of(cls, deltas: NDArray[Any]) -> "Pairs":
        """Counts from candidate minus reference correctness, shape ``(N,)``, each -1, 0 or 1."""
        return cls(int((deltas < 0).sum()), int((deltas > 0).sum()), len(deltas))


@dataclass(frozen=True, slots=True)
class Share:
    """How many of the samples have a property."""

    having: int
    samples: int

    @classmethod
    def of(cls, flags: NDArray[Any]) -> "Share":
        """Counts from booleans, shape ``(N,)``."""
        return cls(int(flags.sum()), len(flags))


def tango_z(
    lost: ArrayLike, gained: ArrayLike, samples: ArrayLike, loss: ArrayLike
) -> NDArray[np.float64]:
    """Score statistic of "the true loss is ``loss``" for paired proportions, elementwise.

    Tango (1998), "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design", Statistics in Medicine 17:891-908. The variance uses the maximum
    likelihood estimate restricted to the hypothesis, so zero discordant pairs are no special case.

    Returns:
        Positive when more was lost than ``loss``; standard normal under the hypothesis.
    """
    b, c, n, d = np.broadcast_arrays(*(np.asarray(x, float) for x in (lost, gained, samples, loss)))
    spread = np.sqrt(n * _score_variance(b, c, n, d))
    excess = b - c - n * d
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(excess == 0.0, 0.0, excess / spread)


def _score_variance(
    b: NDArray[np.float64], c: NDArray[np.float64], n: NDArray[np.float64], d: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Variance of one pair's loss when the true loss is ``d``."""
    return np.asarray(2.0 * _gained_rate(b, c, n, d) + d * (1.0 - d))


def _gained_rate(
    b: NDArray[np.float64], c: NDArray[np.float64], n: NDArray[np.float64], d: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Likeliest rate of gained pairs if the true loss is ``d``; Tango's quadratic for q21."""
    linear = (2.0 * n - b + c) * d - b - c
    root = np.sqrt(np.maximum(linear**2 + 8.0 * n * c * d * (1.0 - d), 0.0))
    return np.asarray(np.maximum((root - linear) / (4.0 * n), 0.0))


def loss_interval(pairs: Pairs, confidence: float) -> Estimate:
    """Accuracy lost, as a fraction of the samples, with Tango's score interval.

    Compared with its rivals in Fagerland, Lydersen and Laake (2014), Statistics in Medicine
    33:2850-2875. Negative values mean that the candidate is better.
    """
    if pairs.samples == 0:
        return NO_ESTIMATE
    lost, gained, n = pairs.lost, pairs.gained, pairs.samples
    return Estimate(
        value=(lost - gained) / n,
        low=-_upper_loss(gained, lost, n, confidence),
        high=_upper_loss(lost, gained, n, confidence),
        samples=n,
    )


@functools.lru_cache(maxsize=4096)  # slices of equal size repeat the same few counts
def _upper_loss(lost: int, gained: int, samples: int, confidence: float) -> float:
    critical = _z(confidence)

    def excess(loss: float) -> float:
        return float(tango_z(lost, gained, samples, loss)) + critical

    if excess(_ALMOST_ONE) >= 0.0:
        return 1.0
    return float(brentq(excess, (lost - gained) / samples, _ALMOST_ONE, xtol=1e-12))


@functools.lru_cache(maxsize=4096)
def loss_p_value(pairs: Pairs, margin: float) -> float:
    """Chance of counts at least this bad if the true loss were exactly ``margin``.

    The score statistic, with its distribution computed from the trinomial at the likeliest rates
    under that hypothesis (the estimated p value of Lloyd 2008, "Exact p-values for discrete models
    obtained by estimation and maximization", Australian and New Zealand Journal of Statistics
    50:329-345). Far out in the tail, where Holm's method looks, the normal limit is twice too small
    for slices of a hundred samples; it is used only where so many are lost that it is right.
    """
    if pairs.samples == 0:
        return 1.0
    counts = (pairs.lost, pairs.gained, pairs.samples, margin)
    seen = float(tango_z(*counts))
    gained = float(_gained_rate(*(np.asarray(x, float) for x in counts)))
    lost = min(gained + margin, 1.0)
    if pairs.samples * lost > _MANY_LOST:
        return float(ndtr(-seen))
    b, c = (_likely(pairs.samples, rate) for rate in (lost, gained))
    chance_b = binom.pmf(b, pairs.samples, lost)
    rest = gained / (1.0 - lost) if lost < 1.0 else 0.0
    chance_c = binom.pmf(c[None, :], pairs.samples - b[:, None], min(rest, 1.0))
    beyond = tango_z(b[:, None], c[None, :], pairs.samples, margin) >= seen - _TIE
    return float(min((chance_b[:, None] * chance_c * beyond).sum(), 1.0))


def _likely(samples: int, rate: float) -> NDArray[np.int64]:
    """Counts of a binomial with all but a negligible part of its probability."""
    low, high = (int(binom.ppf(p, samples, rate)) for p in (_NEGLIGIBLE, 1.0 - _NEGLIGIBLE))
    return np.arange(max(low, 0), high + 1)


def share_interval(share: Share, confidence: float) -> Estimate:
    """A share with Wilson's score interval (1927), as SciPy computes it."""
    if share.samples == 0:
        return NO_ESTIMATE
    found = binomtest(share.having, share.samples).proportion_ci(confidence, method="wilson")
    return Estimate(
        share.having / share.samples, float(found.low), float(found.high), share.samples
    )


def share_p_value(share: Share, limit: float) -> float:
    """Chance of a share at least this low if the true one were exactly ``limit`` (binomial)."""
    return 1.0 if share.samples == 0 else float(binom.cdf(share.having, share.samples, limit))


def quantile_interval(values: NDArray[np.float64], quantile: float, confidence: float) -> Estimate:
    """A quantile with the distribution-free interval between two order statistics.

    Conover (1999), Practical Nonparametric Statistics, section 3.2, as SciPy computes it. An end
    that the sample is too small to give is infinite: the upper end of a 99th percentile needs 368
    samples at confidence 0.95. Values may be infinite, not NaN.
    """
    if len(values) == 0:
        return NO_ESTIMATE
    test = quantile_test(values, q=0.0, p=quantile)
    low, high = test.confidence_interval(confidence)
    return Estimate(
        value=float(np.quantile(values, quantile, method="inverted_cdf")),
        low=-math.inf if math.isnan(low) else float(low),
        high=math.inf if math.isnan(high) else float(high),
        samples=len(values),
    )


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """P values adjusted so that comparing each with alpha keeps the family-wise error at alpha.

    Holm (1979), "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6:65-70. Valid whatever the dependence, so slices may overlap.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def samples_to_decide_loss(pairs: Pairs, margin: float, confidence: float) -> int | None:
    """Samples that would put the interval on one side of ``margin``, if the rates stay as seen.

    The score test solved for n, aiming at POWER. None when no number would: nothing was seen, or
    the loss seen is the margin itself.
    """
    if pairs.samples == 0:
        return None
    counts = (pairs.lost, pairs.gained, pairs.samples, margin)
    limit_variance = float(_score_variance(*(np.asarray(x, float) for x in counts)))
    loss = (pairs.lost - pairs.gained) / pairs.samples
    seen_variance = (pairs.lost + pairs.gained) / pairs.samples - loss**2
    return samples_needed(limit_variance, seen_variance, margin - loss, confidence)


def samples_to_decide_share(share: Share, limit: float, confidence: float) -> int | None:
    """The same for a share against ``limit``."""
    if share.samples == 0:
        return None
    seen = share.having / share.samples
    return samples_needed(limit * (1.0 - limit), seen * (1.0 - seen), limit - seen, confidence)


def samples_needed(
    limit_variance: float, seen_variance: float, gap: float, confidence: float
) -> int | None:
    """Samples that decide a mean with these variances of one sample, aiming at POWER.

    Args:
        limit_variance: if the truth is the limit.
        seen_variance: if it is what was seen.
        gap: between the two.
    """
    spread = _z(confidence) * math.sqrt(limit_variance) + _POWER_Z * math.sqrt(seen_variance)
    return None if gap == 0.0 or spread == 0.0 else math.ceil((spread / gap) ** 2)


def _z(confidence: float) -> float:
    return float(ndtri((1.0 + confidence) / 2.0))


class Seen(NamedTuple):
    """What one check counted.

    Attributes:
        number: of the check, from 1; never given twice.
        samples: how many were examined.
        having: how many of them have the property.
    """

    number: int
    samples: int
    having: int


def surely(
    seen: Sequence[Seen], side: Literal["above", "below"], limit: float, *, alpha: float
) -> bool:
    """Whether the share has been shown to be on one side of the limit, at this check or an earlier.

    Args:
        seen: checks in order; leaving out the oldest only loses evidence.
        side: what is to be shown.
        limit: a share in [0, 1].
        alpha: chance of ever saying so wrongly, over all checks together.
    """
    return log_evidence(seen, side, limit) >= -math.log(alpha)


def log_evidence(seen: Sequence[Seen], side: Literal["above", "below"], limit: float) -> float:
    """Natural logarithm of the e-value now; infinite when one count refutes a limit of 0 or 1."""
    if not seen:
        return 0.0
    number, samples, having = (np.array(column, np.float64) for column in zip(*seen, strict=True))
    if side == "below":
        having, limit = samples - having, 1.0 - limit
    since, found = (np.cumsum(column[::-1])[::-1] for column in (samples, having))
    if limit <= 0.0:
        return math.inf if found[0] > 0 else 0.0
    if limit >= 1.0:
        return 0.0
    weights = -np.log(number) - np.log1p(number)
    # Faults that have not begun yet: what is left of the weights, at an e-value of 1.
    waiting = -math.log(number[-1] + 1.0)
    return float(logsumexp([*(weights + _log_ratio(since, found, limit)), waiting]))


def _log_ratio(
    samples: NDArray[np.float64], having: NDArray[np.float64], limit: float
) -> NDArray[np.float64]:
    """Likelihood of counts averaged over the shares in (limit, 1), over that at the limit."""
    a, b = having + 1.0, samples - having + 1.0
    # A tail too small for a number is no evidence at all.
    tail = np.maximum(betaincc(a, b, limit), np.finfo(np.float64).tiny)
    averaged = betaln(a, b) + np.log(tail) - math.log1p(-limit)
    return np.asarray(averaged - having * math.log(limit) - (samples - having) * math.log1p(-limit))
