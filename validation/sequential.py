"""Looking at a sample while it grows: intervals that hold at every look, not just at the last one.

An ordinary 95 % interval that is looked at after every request misses the truth far more often than
5 % of the time: the next look is another chance to be wrong. A confidence sequence is a sequence of
intervals that all hold together with that confidence, so one may stop, alarm or go on at any look.

The one here is the predictable plug-in empirical Bernstein sequence of Waudby-Smith and Ramdas
(2024), "Estimating means of bounded random variables by betting", Journal of the Royal Statistical
Society B 86:1-27, theorem 2; Howard, Ramdas, McAuliffe and Sekhon (2021), Annals of Statistics
49:1055-1080, explain what it is for. It needs values within known bounds, and nothing else: no
normality, and any dependence that leaves the mean of the next value as it is.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from validation.statistics import NO_ESTIMATE, Estimate

_LARGEST_BET = 0.75


@dataclass(frozen=True, slots=True)
class ConfidenceSequence:
    """Interval of the mean after each of N values, in the order they arrived.

    Attributes:
        low: shape ``(N,)``, never falling.
        high: shape ``(N,)``, never rising.
        means: mean of the values so far, shape ``(N,)``.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    means: NDArray[np.float64]

    def last(self) -> Estimate:
        """The interval now; it may not hold the mean so far, when the values drifted."""
        if len(self.means) == 0:
            return NO_ESTIMATE
        now = (float(self.means[-1]), float(self.low[-1]), float(self.high[-1]))
        return Estimate(*now, samples=len(self.means))


def confidence_sequence(
    values: NDArray[Any], bounds: tuple[float, float], confidence: float
) -> ConfidenceSequence:
    """Intervals that hold the mean at every look at once.

    Args:
        values: shape ``(N,)``, in the order of arrival, each within ``bounds``.
        bounds: the least and the largest value there can be, known beforehand.
        confidence: that no interval of the whole sequence misses the mean.

    Raises:
        ValueError: a value is NaN or out of bounds.
    """
    low, high = bounds
    x = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    if not ((x >= 0.0) & (x <= 1.0)).all():
        raise ValueError(f"values must lie between {low:g} and {high:g}")
    count = np.arange(1, len(x) + 1)
    evidence = math.log(2.0 / (1.0 - confidence))
    # Means and variances that are used on a value come from the values before it.
    means = (0.5 + np.cumsum(x)) / (count + 1)
    before = np.concatenate([[0.5], means[:-1]])
    variances = (0.25 + np.cumsum((x - means) ** 2)) / (count + 1)
    known = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2.0 * evidence / (known * count * np.log1p(count)))
    bets = np.minimum(bets, _LARGEST_BET)
    risk = np.cumsum(4.0 * (x - before) ** 2 * (-np.log1p(-bets) - bets) / 4.0)
    staked = np.cumsum(bets)
    centre = np.cumsum(bets * x) / staked
    reach = (evidence + risk) / staked
    width = high - low
    return ConfidenceSequence(
        low=low + width * np.maximum.accumulate(np.maximum(centre - reach, 0.0)),
        high=low + width * np.minimum.accumulate(np.minimum(centre + reach, 1.0)),
        means=low + width * np.cumsum(x) / count,
    )
