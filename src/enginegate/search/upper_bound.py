"""One look just past a confirmed rate, where the search stopped without a refutation close above.

It stops below a configuration's capacity, because a queue does not settle near it. A comparison of
throughputs needs to know that little more than the answer does not hold.
"""

import math
from dataclasses import replace

from enginegate.evidence import Outcome
from enginegate.measurement import Arrivals, LatencySample, Load
from enginegate.measuring.p99 import decide_points
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.search import SearchResult
from enginegate.search.space import seed_of
from enginegate.search.trial_runner import Measure

# In resolutions of the search: as exact as it is, and, where that much more may hold, a bound.
_STEPS = (2, 4)


def confirm_upper_bound(
    found: SearchResult, measure: Measure, bounds: Search, slo: Slo, *, arrivals: Arrivals
) -> SearchResult:
    """The same, with a measurement or two slightly above the answer where none was that close.

    A rate that is shown not to hold there is the one that did not hold.

    Args:
        found: what a search ended in.
        measure: of the same engine.
        bounds: of that search; nothing above its highest rate is offered.
        slo: what must hold.
        arrivals: how requests are spaced.

    Raises:
        ServerError: from ``measure``.
    """
    if found.chosen is None or bounds.objective == "latency":
        return found
    for steps in _STEPS:
        past = found.throughput_at_slo_per_s * (1.0 + bounds.resolution) ** steps
        known = _refuted_above(found)
        if past > bounds.max_rate_per_s or known <= past:
            break
        load = Load(
            rate_per_s=past,
            duration_s=bounds.measurement_s,
            seed=seed_of(bounds.seed, found.chosen, past, "just past"),
            arrivals=arrivals,
            order_seed=seed_of(bounds.seed, found.chosen, past, "just past order"),
        )
        found = _with(found, measure(found.chosen, load), slo)
    return found


def _with(found: SearchResult, sampled: LatencySample, slo: Slo) -> SearchResult:
    made, decided = sampled.measurement, decide_points([sampled], slo)
    refuted = any(decision.outcome is Outcome.FAILED for decision in decided)
    rejected = found.rejected_rate_per_s
    if refuted:
        rejected = min(made.rate_per_s, made.rate_per_s if rejected is None else rejected)
    return replace(
        found,
        measurements=(*found.measurements, made),
        decisions=(*found.decisions, *decided),
        rejected_rate_per_s=rejected,
    )


def _refuted_above(found: SearchResult) -> float:
    """The lowest rate above the answer that its configuration is shown not to hold."""
    rates = (
        point.rate_per_s
        for point in found.decisions
        if point.config == found.chosen and point.outcome is Outcome.FAILED
    )
    return min((rate for rate in rates if rate > found.throughput_at_slo_per_s), default=math.inf)
