"""A share that is looked at again and again: when has it surely been too high?

An ordinary test at every look is wrong far more often than it says. What is computed here is an
e-value: under the hypothesis "the share was never above the limit" it exceeds ``1 / alpha`` at any
look at all with a probability of at most ``alpha`` (Ville 1939), so a look may act on it at once.

Each e-value is the likelihood ratio of one look's counts and all later ones, averaged over every
share on the other side of the limit (Robbins 1970, "Statistical methods related to the law of the
iterated logarithm", Annals of Mathematical Statistics 41:1397-1409). Faults begin at some time, so
one that begins at every look is averaged too, look ``j`` with weight ``1 / (j (j + 1))``: an
average of e-values is one (Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics and
safe anytime-valid inference", Statistical Science 38:576-601). A good past then cannot hide a new
fault.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincc, betaln, logsumexp  # type: ignore[import-untyped]


class Seen(NamedTuple):
    """What one look counted.

    Attributes:
        number: of the look, from 1; never given twice.
        samples: how many were looked at.
        having: how many of them have the property.
    """

    number: int
    samples: int
    having: int


def surely(
    seen: Sequence[Seen], side: Literal["above", "below"], limit: float, *, alpha: float
) -> bool:
    """Whether the share has been shown to be on one side of the limit, at this look or an earlier.

    Args:
        seen: looks in order; leaving out the oldest only loses evidence.
        side: what is to be shown.
        limit: a share in [0, 1].
        alpha: chance of ever saying so wrongly, over all looks together.
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
