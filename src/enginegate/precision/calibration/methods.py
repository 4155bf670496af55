"""Which range of an activation gets the quantised levels: pure, over histograms.

- ``max``: the smallest and largest value seen; nothing is clipped.
- ``percentile``: 99.99 % of the values; the rest is clipped.
- ``entropy``: the threshold whose 128 levels lose least information, by the method of TensorRT
  (Migacz, "8-bit inference with TensorRT", GTC 2017; NVIDIA's pytorch-quantization is the
  reference): magnitudes in 2048 bins, the bin of zeros not counted.

A histogram's width is a power of two and doubles by merging neighbours, so it is exact however the
values are cut into batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array

BINS_A_SIDE = 4096
_ENTROPY_BINS = 2048
_LEVELS = 128
_STRIDE = 4
_PERCENTILE = 0.9999
# Values counted at a time: their scaled copy and their places fit into a second-level cache.
_PIECE = 1 << 15
_MOST_SINGLE = 2.0**64


class ActivationRange(NamedTuple):
    """Smallest and largest value that keep a level of their own; zero lies between."""

    low: float
    high: float

    @property
    def magnitude(self) -> float:
        """The larger of the two ends' distances from zero."""
        return max(-self.low, self.high)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the values seen so far.

    Attributes:
        low: smallest value.
        high: largest value.
        limit: the bins cover ``-limit`` to ``limit``; a power of two, or 0 before any value but 0.
        counts: shape ``(2 * BINS_A_SIDE,)``.
        nonfinite: how many NaN and Inf were seen; they are in no bin.
    """

    low: float
    high: float
    limit: float
    counts: NDArray[np.int64]
    nonfinite: int = 0

    @classmethod
    def empty(cls) -> "Histogram":
        """Nothing seen yet."""
        return cls(0.0, 0.0, 0.0, np.zeros(2 * BINS_A_SIDE, np.int64))

    def add(self, values: Array) -> "Histogram":
        """Count more values, of any shape."""
        flat = values.reshape(-1)
        finite = _finite(flat)
        low = min(self.low, float(finite.min(initial=0.0)))
        high = max(self.high, float(finite.max(initial=0.0)))
        limit = max(self.limit, _power_above(max(-low, high)))
        if limit == 0.0:
            counts = self.counts.copy()
            counts[BINS_A_SIDE] += len(finite)
        else:
            counts = _widened(self, limit) + _counted(finite, limit)
        return Histogram(low, high, limit, counts, self.nonfinite + len(flat) - len(finite))

    def merge(self, other: "Histogram") -> "Histogram":
        """Both together."""
        limit = max(self.limit, other.limit)
        counts = _widened(self, limit) + _widened(other, limit)
        return Histogram(
            min(self.low, other.low),
            max(self.high, other.high),
            limit,
            counts,
            self.nonfinite + other.nonfinite,
        )


def _finite(flat: Array) -> Array:
    """Those that are neither NaN nor Inf; the array itself where all are, as is usual."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is finite only if all its parts are; it may overflow all the same.
        if np.isfinite(flat.sum(dtype=np.float64)):
            return flat
    return np.asarray(flat[np.isfinite(flat)])


def _counted(values: Array, limit: float) -> NDArray[np.int64]:
    """Values in each bin, a piece at a time that stays in the processor's cache.

    The bins' width is a power of two, so scaling is exact, in the values' own type where the
    product can neither overflow nor vanish.
    """
    scale, single = BINS_A_SIDE / limit, values.dtype == np.float32
    exact = np.float32 if single and 1.0 <= scale <= _MOST_SINGLE else np.float64
    counts = np.zeros(2 * BINS_A_SIDE, np.int64)
    scaled, place = np.empty(_PIECE, exact), np.empty(_PIECE, np.intp)
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        size = len(piece)
        np.multiply(piece, exact(scale), out=scaled[:size])
        np.floor(scaled[:size], out=scaled[:size])
        np.add(scaled[:size], BINS_A_SIDE, out=place[:size], casting="unsafe")
        counts += np.bincount(place[:size], minlength=2 * BINS_A_SIDE)
    return counts


def _power_above(value: float) -> float:
    """The smallest power of two above a value; 0 for 0."""
    return 0.0 if value == 0.0 else math.ldexp(1.0, math.frexp(value)[1])


def _widened(histogram: Histogram, limit: float) -> NDArray[np.int64]:
    counts = histogram.counts
    if histogram.limit == 0.0 or limit == 0.0:
        return counts
    for _ in range(round(math.log2(limit / histogram.limit))):
        inner = counts.reshape(-1, 2).sum(axis=1)
        counts = np.pad(inner, BINS_A_SIDE // 2)
    return counts


def whole(histogram: Histogram) -> ActivationRange:
    """Everything that was seen."""
    return ActivationRange(histogram.low, histogram.high)


def percentile(histogram: Histogram) -> ActivationRange:
    """The middle 99.99 % of the values, never more than was seen."""
    seen = np.cumsum(histogram.counts)
    tail = (1.0 - _PERCENTILE) / 2.0 * seen[-1]
    first = int(np.searchsorted(seen, tail, side="right"))
    last = int(np.searchsorted(seen, seen[-1] - tail))
    return _within(histogram, _edge(histogram, first), _edge(histogram, last + 1))


def entropy(histogram: Histogram) -> ActivationRange:
    """The threshold of least Kullback-Leibler divergence, applied to both sides."""
    magnitudes = histogram.counts[BINS_A_SIDE:] + histogram.counts[:BINS_A_SIDE][::-1]
    width = histogram.limit / BINS_A_SIDE
    used = int(whole(histogram).magnitude / width) + 1 if width else 0
    if used <= _LEVELS or not magnitudes[1:].any():
        return whole(histogram)
    merged = max(1, used // _ENTROPY_BINS)
    used = -(-used // merged) * merged
    counts = np.pad(magnitudes, (0, merged))[:used].reshape(-1, merged).sum(axis=1).astype(float)
    counts[0] = counts[1]
    ends = np.unique(np.r_[np.arange(_LEVELS, len(counts), _STRIDE), len(counts)])
    losses = [_loss(counts, int(end)) for end in ends]
    threshold = float(ends[int(np.argmin(losses))]) * merged * width
    return _within(histogram, -threshold, threshold)


def _loss(counts: NDArray[np.float64], end: int) -> float:
    """KL(values clipped at bin ``end`` || the same in 128 levels), in nats."""
    from scipy.special import rel_entr  # type: ignore[import-untyped]  # noqa: PLC0415

    clipped = counts[:end].copy()
    clipped[-1] += counts[end:].sum()
    level = np.minimum(np.arange(end) * _LEVELS // end, _LEVELS - 1)
    filled = counts[:end] > 0
    mass = np.bincount(level, counts[:end], minlength=_LEVELS)
    share = np.bincount(level, filled, minlength=_LEVELS)
    spread = np.where(filled, mass[level] / np.maximum(share[level], 1), 0.0)
    p, q = clipped / clipped.sum(), spread / max(spread.sum(), 1.0)
    return float(rel_entr(p, np.maximum(q, 1e-12)).sum())


def _edge(histogram: Histogram, bin_index: int) -> float:
    return (bin_index - BINS_A_SIDE) / BINS_A_SIDE * histogram.limit


def _within(histogram: Histogram, low: float, high: float) -> ActivationRange:
    return ActivationRange(max(min(low, 0.0), histogram.low), min(max(high, 0.0), histogram.high))


METHODS: dict[str, Callable[[Histogram], ActivationRange]] = {
    "max": whole,
    "entropy": entropy,
    "percentile": percentile,
}
