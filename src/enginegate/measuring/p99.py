"""The 99th percentile: its value, its interval, and whether "p99 is within the limit" is shown.

Everything here is decided by counting. A request is over the limit or not, and a failed one is
over, so the number over is binomial, and "p99 is within the limit" is "at most 1 % are over".

- `percentiles`: nearest rank, with a distribution-free interval.
- `decide_fixed`: for a number of requests that was fixed before. The rule is MLPerf LoadGen's early
  stopping (loadgen/early_stopping.cc in mlcommons/inference, with tolerance 0): the limit is shown
  to be met once a server at exactly 1 % would rarely have done so well.
- `SequentialTest`: may be asked after every request, and still errs as rarely as it promises.
- `decide_pooled`: several runs together. A queue makes neighbours alike, so requests over the limit
  come in clusters and count for less than independent ones.
- `decide_on_server`: refutes the limit by the server's own time alone, where the limit is so short
  that the sender's time decides.
- `lowest_refuted`: the lowest rate that a configuration is shown not to sustain, which bounds its
  throughput in a comparison of two.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Outcome, PointDecision
from enginegate.measurement import P99, LatencySample, Percentile
from enginegate.policy.benchmarking import Slo
from enginegate.serving import ServingConfig

QUANTILES = (0.5, 0.9, 0.95, P99, 0.999)
# Fewer requests after the warm-up say nothing about a tail.
FEWEST_SAMPLES = 20

_INTERVAL_CONFIDENCE = 0.95
# More requests than anybody sends: a share over this close to the limit is called undecidable.
_MOST_REQUESTS = 1 << 24
# Beta(1/2, 1) below the limit: costs little when nothing is over. Beta(1/10, 1) above it: close to
# uniform in the logarithm, so that slightly and far too many over are both found early.
_PRIOR_BELOW, _PRIOR_ABOVE = 0.5, 0.1
# Long blocks see slow queues; short ones are more, and so steadier. The worst of both counts.
_BLOCKS_S = (0.25, 1.0)
# Fewer blocks say nothing of a variance: it would be off by more than half of itself.
_FEWEST_BLOCKS = 6
# The warm-up, at most a tenth of a run, has no latencies.
_MEASURED_SHARE = 0.9


def nearest_rank(latencies: NDArray[np.float64], quantile: float = P99) -> float:
    """The smallest value that at least that share does not exceed; infinite on a failure.

    Args:
        latencies: shape ``(N,)``, at least one, infinite for failures.
        quantile: in (0, 1).
    """
    rank = math.ceil(quantile * len(latencies)) - 1
    return float(np.partition(latencies, rank)[rank])


def percentiles(latencies_ms: NDArray[np.float64]) -> tuple[Percentile, ...]:
    """Those of `QUANTILES`; one that falls on a failure is left out: it has no value."""
    ordered_ms, count = np.sort(latencies_ms), len(latencies_ms)
    found = []
    for quantile in QUANTILES if count else ():
        value_ms = _at_rank(ordered_ms, math.ceil(quantile * count))
        if value_ms is None:
            continue
        low, high = interval_ranks(count, quantile, confidence=_INTERVAL_CONFIDENCE)
        found.append(
            Percentile(
                quantile=quantile,
                value_ms=value_ms,
                low_ms=_at_rank(ordered_ms, low),
                high_ms=_at_rank(ordered_ms, high),
                samples=count,
            )
        )
    return tuple(found)


def pooled_p99(runs: Sequence[LatencySample]) -> Percentile | None:
    """Over all requests of the runs; None when it falls on a failure."""
    latencies_ms = np.concatenate([run.latencies_ms for run in runs])
    return next((p for p in percentiles(latencies_ms) if p.quantile == P99), None)


def _at_rank(ordered_ms: NDArray[np.float64], rank: int | None) -> float | None:
    if rank is None or not np.isfinite(ordered_ms[rank - 1]):
        return None
    return float(ordered_ms[rank - 1])


class Ranks(NamedTuple):
    """Ranks (from 1) of the order statistics that bound a quantile; None: no such rank."""

    low: int | None
    high: int | None


def interval_ranks(count: int, quantile: float, *, confidence: float) -> Ranks:
    """Ranks between which a quantile lies with at least the given confidence, for any distribution.

    The number of samples below the true quantile is binomial (David and Nagaraja, Order
    Statistics, section 7.1); each side gets half of what may go wrong.
    """
    from scipy.special import bdtr  # type: ignore[import-untyped]  # noqa: PLC0415

    tail = (1.0 - confidence) / 2.0
    # Further out the tails are below 1e-14; of a million requests some thousand ranks are left.
    reach = 8.0 * math.sqrt(count * quantile * (1.0 - quantile)) + 8.0
    first = max(0, math.floor(count * quantile - reach))
    last = min(count, math.ceil(count * quantile + reach))
    below = bdtr(np.arange(first, last + 1), count, quantile)
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = first + int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return Ranks(low or None, high if high <= count else None)


@dataclass(frozen=True, slots=True)
class SloDecision:
    """Whether the limit is shown to be met, from the requests and those of them over it.

    Attributes:
        needed: about how many requests in all would decide if the share over stayed the same; None
            when decided, or when no number would do.
    """

    outcome: Outcome
    requests: int
    over: int
    needed: int | None = None


def decide_fixed(
    requests: int, over: int, *, confidence: float, quantile: float = P99
) -> SloDecision:
    """Judge "at most ``1 - quantile`` of requests are over the limit".

    Args:
        requests: how many were sent; fixed before.
        over: how many took longer than the limit, or failed.
        confidence: of either answer.
        quantile: that must be within the limit.

    Returns:
        PASSED when a share of ``1 - quantile`` would give so few over with a probability of at most
        ``1 - confidence``; FAILED when it would give so many with at most that; else INCONCLUSIVE.
    """
    if _shown(requests, over, confidence, quantile):
        return SloDecision(Outcome.PASSED, requests, over)
    if _refuted(requests, over, confidence, quantile):
        return SloDecision(Outcome.FAILED, requests, over)
    needed = _needed(requests, over, confidence, quantile)
    return SloDecision(Outcome.INCONCLUSIVE, requests, over, needed)


def fewest_requests(over: int, *, confidence: float, quantile: float = P99) -> int:
    """The fewest requests that show the limit is met with ``over`` of them over it."""
    low, high = over, max(1, over)
    while not _shown(high, over, confidence, quantile):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        shown = _shown(middle, over, confidence, quantile)
        low, high = (low, middle) if shown else (middle, high)
    return high


def _shown(requests: int, over: int, confidence: float, quantile: float) -> bool:
    return requests > over and _at_most(over, requests, 1.0 - quantile) <= 1.0 - confidence


def _refuted(requests: int, over: int, confidence: float, quantile: float) -> bool:
    return over > 0 and 1.0 - _at_most(over - 1, requests, 1.0 - quantile) <= 1.0 - confidence


def _at_most(count: int, trials: int, chance: float) -> float:
    """P[Bin(trials, chance) <= count]."""
    from scipy.special import bdtr  # noqa: PLC0415

    return float(bdtr(count, trials, chance))


def _needed(requests: int, over: int, confidence: float, quantile: float) -> int | None:
    if over == 0:
        return fewest_requests(0, confidence=confidence, quantile=quantile)
    share = over / requests
    within = share < 1.0 - quantile
    count = requests
    while count < _MOST_REQUESTS:
        count = math.ceil(count * 1.05) + 1
        expected = math.ceil(share * count) if within else math.floor(share * count)
        test = _shown if within else _refuted
        if test(count, expected, confidence, quantile):
            return count
    return None


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """A test of "at most ``1 - quantile`` of requests are over", valid after every request.

    `decide_fixed`, asked again and again until it says yes, would say yes too often. Over a whole
    run, however long, either wrong answer of this test comes with a probability of at most
    ``1 - confidence``. Whenever it says yes or no, `decide_fixed` says so of the same two numbers,
    so a p99 is never passed with fewer than LoadGen's 459 requests.

    Method: the one-sided beta-binomial mixture (Robbins, Annals of Mathematical Statistics 41 (5),
    1970; Howard, Ramdas, McAuliffe and Sekhon, Time-uniform, nonparametric, nonasymptotic
    confidence sequences, Annals of Statistics 49 (2), 2021). With ``b = 1 - quantile``, ``n``
    requests and ``k`` of them over, each share ``s < b`` has the likelihood ratio
    ``s^k (1-s)^(n-k) / (b^k (1-b)^(n-k))``. If the true share is ``b`` or more, that is a
    non-negative supermartingale that starts at 1, and so is its mean over any distribution of
    shares below ``b``. By Ville's inequality it ever reaches ``1 / (1 - confidence)`` with a
    probability of at most ``1 - confidence``: then ``b`` or more is rejected. The other side
    mirrors it.

    Requests are assumed to be independent. Near a server's capacity they are not, and a short run
    may see none of the bad times: in simulated M/D/1 queues of 70 % load whose true share over is
    2 %, a fifth of the runs that were allowed to end early ended with a yes. So near capacity a run
    ends early only when it is refuted (``refute_only``), and a yes is confirmed by a fixed number
    of requests from several seeds.

    Attributes:
        confidence: of either answer, over all times it is asked together.
        refute_only: never answers PASSED.
    """

    confidence: float
    quantile: float = P99
    refute_only: bool = False

    def decide(self, requests: int, over: int) -> Outcome:
        """PASSED when the limit is met, FAILED when it is not, else INCONCLUSIVE: go on.

        Args:
            requests: how many have come so far.
            over: how many of them took longer than the limit, or failed.
        """
        bound = 1.0 - self.quantile
        enough = -math.log1p(-self.confidence)
        within = over <= bound * requests
        # Within, no share below the bound explains the data better than a share of 0.
        if within and (self.refute_only or -requests * math.log1p(-bound) < enough):
            return Outcome.INCONCLUSIVE
        if _log_evidence(requests, over, bound, below=within) < enough:
            return Outcome.INCONCLUSIVE
        return Outcome.PASSED if within else Outcome.FAILED


def _log_evidence(requests: int, over: int, bound: float, *, below: bool) -> float:
    """Logarithm of the mixture's likelihood ratio over the shares on one side of the bound."""
    from scipy.special import betainc, betaincc  # noqa: PLC0415

    prior = _PRIOR_BELOW if below else _PRIOR_ABOVE
    a, b = prior + over, 1.0 + requests - over
    if below:
        mass, tail = math.log(prior) - prior * math.log(bound), betainc(a, b, bound)
    else:
        mass = math.log(prior) - math.log(-math.expm1(prior * math.log(bound)))
        tail = betaincc(a, b, bound)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    log_tail = math.log(tail) if tail > 0.0 else -math.inf
    at_bound = over * math.log(bound) + (requests - over) * math.log1p(-bound)
    return mass + log_beta + log_tail - at_bound


def decide_pooled(runs: Sequence[LatencySample], slo: Slo) -> SloDecision:
    """Judge runs together, at the number of independent requests they are worth.

    As with clustered samples (Kish, Survey Sampling, 1965, section 5.4) counts are divided by how
    much more they vary over time than independent ones would.
    """
    requests = sum(len(run.latencies_ms) for run in runs)
    over = sum(run.over(slo.p99_ms) for run in runs)
    design = clustering(runs, slo.p99_ms)
    decision = decide_fixed(
        max(1, math.floor(requests / design)), math.ceil(over / design), confidence=slo.confidence
    )
    needed = None if decision.needed is None else math.ceil(decision.needed * design)
    return SloDecision(decision.outcome, requests, over, needed)


def clustering(runs: Sequence[LatencySample], limit_ms: float) -> float:
    """Variance over mean of the requests over the limit in each block of time; 1: independent."""
    return max(1.0, *(_clustering(runs, limit_ms, block_s) for block_s in _BLOCKS_S))


def _clustering(runs: Sequence[LatencySample], limit_ms: float, block_s: float) -> float:
    counts = [
        float((~(block <= limit_ms)).sum())
        for run in runs
        for block in np.array_split(
            run.latencies_ms,
            max(1, int(run.measurement.sent_for_s * _MEASURED_SHARE / block_s)),
        )
    ]
    mean = float(np.mean(counts)) if counts else 0.0
    if len(counts) < _FEWEST_BLOCKS or mean == 0.0:
        return 1.0
    return float(np.var(counts, ddof=1)) / mean


def decide_on_server(runs: Sequence[LatencySample], slo: Slo) -> SloDecision:
    """Judge runs by the server's own time alone: FAILED is sure, anything else says nothing."""
    requests = sum(len(run.latencies_ms) for run in runs)
    over = sum(_over_on_server(run, slo.p99_ms) for run in runs)
    design = clustering(runs, slo.p99_ms)
    independent = max(1, math.floor(requests / design))
    decision = decide_fixed(independent, math.floor(over / design), confidence=slo.confidence)
    return replace(decision, requests=requests, over=over)


def _over_on_server(run: LatencySample, limit_ms: float) -> int:
    """Requests that failed, which no slow sender causes, and the fewest of the answered."""
    answered_ms = run.latencies_ms[np.isfinite(run.latencies_ms)]
    failed, stages = len(run.latencies_ms) - len(answered_ms), run.measurement.stages
    if stages is None or stages.judged_server_ms is None:
        return failed
    return failed + fewest_over(answered_ms, stages.judged_server_ms * len(answered_ms), limit_ms)


def fewest_over(latencies_ms: NDArray[np.float64], total_ms: float, limit_ms: float) -> int:
    """The fewest requests that were on the server for longer than the limit.

    Triton counts the time of all requests together. No request was on the server for longer than
    its client waited, so a total bounds a count: if no more than m requests had been over the limit
    there, all others could explain at most the limit each, and those m their own latencies.

    Args:
        latencies_ms: of answered requests at the client, shape ``(N,)``, finite.
        total_ms: what they took on the server, all together, or less.
        limit_ms: of each.
    """
    unexplained_ms = total_ms - float(np.minimum(latencies_ms, limit_ms).sum())
    if unexplained_ms <= 0.0:
        return 0
    excess_ms = np.sort(np.maximum(latencies_ms - limit_ms, 0.0))[::-1]
    most = int(np.searchsorted(np.cumsum(excess_ms), unexplained_ms, side="left")) + 1
    return min(most, len(latencies_ms))


def decide_points(samples: Iterable[LatencySample], slo: Slo) -> tuple[PointDecision, ...]:
    """Judge every point that was measured validly, all its runs together; in order of time."""
    points: dict[tuple[ServingConfig, float], list[LatencySample]] = {}
    for run in samples:
        measurement = run.measurement
        if not measurement.invalid and len(run.latencies_ms):
            points.setdefault((measurement.config, measurement.rate_per_s), []).append(run)
    decided = ((*point, decide_pooled(runs, slo)) for point, runs in points.items())
    return tuple(
        PointDecision(
            config=config,
            rate_per_s=rate_per_s,
            outcome=decision.outcome,
            requests=decision.requests,
            over=decision.over,
        )
        for config, rate_per_s, decision in decided
    )


def lowest_refuted(
    points: Iterable[PointDecision], config: ServingConfig | None, *, above_per_s: float = 0.0
) -> float | None:
    """The lowest rate above another that a configuration is shown not to sustain; None: none."""
    refuted = (
        point.rate_per_s
        for point in points
        if point.config == config and point.outcome is Outcome.FAILED
    )
    return min((rate for rate in refuted if rate > above_per_s), default=None)
