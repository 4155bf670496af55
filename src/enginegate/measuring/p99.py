"""Whether "the 99th percentile is within the limit" has been shown, refuted, or neither.

The rule is MLPerf LoadGen's early stopping (loadgen/early_stopping.cc in mlcommons/inference, with
tolerance 0): each request is over the limit or not, so the number over is binomial, and a share
over of at most ``1 - quantile`` is shown once a server at exactly that share would rarely have
done so well. A failed request counts as over. The rule assumes independent requests; a queue makes
neighbours alike, so confirm with several seeds.
"""

import math
from dataclasses import dataclass

from enginegate.evidence import Outcome

P99 = 0.99
_MOST = 1 << 24


@dataclass(frozen=True, slots=True)
class SloDecision:
    """What R requests of which O were over the limit say.

    Attributes:
        needed: about how many requests in all would decide if the share over stayed the same; None
            when decided, or when no number would do.
    """

    outcome: Outcome
    requests: int
    over: int
    needed: int | None = None


def decide(requests: int, over: int, *, confidence: float, quantile: float = P99) -> SloDecision:
    """Judge "at most ``1 - quantile`` of requests are over the limit".

    Args:
        requests: how many were sent.
        over: how many took longer than the limit, or failed.
        confidence: of either answer, e.g. 0.99.
        quantile: e.g. 0.99 for a p99.

    Returns:
        PASSED when a share of ``1 - quantile`` would give so few over with a probability of at most
        ``1 - confidence``; FAILED when it would give so many with at most that; else INCONCLUSIVE.
    """
    if _shown(requests, over, confidence=confidence, quantile=quantile):
        return SloDecision(Outcome.PASSED, requests, over)
    if _refuted(requests, over, confidence=confidence, quantile=quantile):
        return SloDecision(Outcome.FAILED, requests, over)
    needed = _needed(requests, over, confidence=confidence, quantile=quantile)
    return SloDecision(Outcome.INCONCLUSIVE, requests, over, needed)


def fewest_requests(over: int, *, confidence: float, quantile: float = P99) -> int:
    """The fewest requests that show the limit held with ``over`` of them over it."""
    low, high = over, max(1, over)
    while not _shown(high, over, confidence=confidence, quantile=quantile):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        shown = _shown(middle, over, confidence=confidence, quantile=quantile)
        low, high = (low, middle) if shown else (middle, high)
    return high


def _shown(requests: int, over: int, *, confidence: float, quantile: float) -> bool:
    return requests > over and _at_most(over, requests, 1.0 - quantile) <= 1.0 - confidence


def _refuted(requests: int, over: int, *, confidence: float, quantile: float) -> bool:
    return over > 0 and 1.0 - _at_most(over - 1, requests, 1.0 - quantile) <= 1.0 - confidence


def _at_most(count: int, trials: int, chance: float) -> float:
    """P[Bin(trials, chance) <= count]."""
    from scipy.special import bdtr  # type: ignore[import-untyped]  # noqa: PLC0415

    return float(bdtr(count, trials, chance))


def _needed(requests: int, over: int, *, confidence: float, quantile: float) -> int | None:
    if over == 0:
        return fewest_requests(0, confidence=confidence, quantile=quantile)
    share = over / requests
    within = share < 1.0 - quantile
    count = requests
    while count < _MOST:
        count = math.ceil(count * 1.05) + 1
        expected = math.ceil(share * count) if within else math.floor(share * count)
        test = _shown if within else _refuted
        if test(count, expected, confidence=confidence, quantile=quantile):
            return count
    return None
