"""How well a throughput within the SLO is known: exactly, or between bounds.

That a rate does not hold is decided by the rule of the gate p99_ms (`Benchmark.decisions`): the
policy's confidence, at the number of independent requests that the measurements are worth.
"""

import math
from dataclasses import dataclass

from enginegate.evidence import Benchmark, Outcome
from enginegate.policy.benchmarking import Search

ROUNDING = 1.001
_BUDGET = "raise [search] budget_s and measurement_s, so that a rate just above it is decided"


@dataclass(frozen=True, slots=True)
class Throughput:
    """What is known of a throughput within the SLO, requests/s.

    Attributes:
        per_s: it is at least that.
        most_per_s: it is at most that; infinite when nothing above was shown not to hold.
        why_open: why it may be more, and what to do about it.
    """

    per_s: float
    most_per_s: float
    why_open: str = ""

    @classmethod
    def exact(cls, per_s: float) -> "Throughput":
        """As closely as the search tells rates apart."""
        return cls(per_s, per_s)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is left open."""
        return self.most_per_s <= self.per_s


def reached(found: Benchmark, bounds: Search) -> Throughput:
    """A benchmark's throughput; a rate far above that is shown not to hold only bounds it.

    One that was only not *seen* to hold (`rejected_rate_per_s`) does neither: another day it holds.
    """
    per_s, refuted = found.throughput_at_slo_per_s, _refuted_above(found)
    if found.cut_short:
        return Throughput(per_s, math.inf, found.cut_short)
    rejected = refuted if math.isfinite(refuted) else None
    return between(per_s, rejected, bounds, most_per_s=refuted)


def between(
    per_s: float, rejected: float | None, bounds: Search, *, most_per_s: float
) -> Throughput:
    """Exact where the rate that did not hold is within two of the search's resolutions."""
    near = per_s * (1.0 + bounds.resolution) ** 2 * ROUNDING
    if rejected is not None and rejected <= near:
        return Throughput.exact(per_s)
    why = "no rate just above it was refuted"
    return Throughput(per_s, max(per_s, most_per_s), f"{why}: {_BUDGET}")


def _refuted_above(found: Benchmark) -> float:
    """The lowest rate above the throughput that the chosen configuration is shown not to hold."""
    rates = (
        point.rate_per_s
        for point in found.decisions
        if point.config == found.chosen and point.outcome is Outcome.FAILED
    )
    return min((rate for rate in rates if rate > found.throughput_at_slo_per_s), default=math.inf)


def lowest_refuted(own: Benchmark, bounds: Search) -> float | None:
    """The lowest rate that is tried, if every configuration measured there is shown not to hold.

    That nothing was confirmed is not enough: it may only be known of higher rates.
    """
    latency = bounds.objective == "latency"
    lowest = bounds.ceiling_per_s if latency else bounds.min_rate_per_s
    failed = any(f.gate == "p99_ms" and f.outcome is Outcome.FAILED for f in own.findings)
    there = [
        point.outcome is Outcome.FAILED
        for point in own.decisions
        if point.rate_per_s <= lowest * ROUNDING
    ]
    return lowest if failed and there and all(there) else None


def at_top(known: Throughput, bounds: Search) -> bool:
    """Whether it is the highest rate that is tried, as closely as the search tells rates apart."""
    return known.per_s >= bounds.ceiling_per_s * (1.0 - bounds.resolution)
