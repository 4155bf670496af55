"""How many requests were over a limit on the server alone, from totals and latencies.

Triton counts the time of all requests together, not of each. But no request was on the server for
longer than its client waited, so a total bounds a count: if no more than m requests had been over
the limit there, all the others could explain at most the limit each, and those m at most their own
latencies. A total that is more than that shows that there were more.

It is what is left to judge by where a limit is so short that the sender's own time decides.
"""

import math

import numpy as np
from numpy.typing import NDArray

from enginegate.measuring.cluster_adjusted import clustering
from enginegate.measuring.measure import LatencySample
from enginegate.measuring.p99 import SloDecision, decide
from enginegate.policy.benchmarking import Slo


def fewest_over(latencies_ms: NDArray[np.float64], total_ms: float, limit_ms: float) -> int:
    """The fewest requests that were on the server for longer than the limit.

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


def decide_on_server(runs: list[LatencySample], slo: Slo) -> SloDecision:
    """Judge runs by the server's own time alone: FAILED is sure, anything else says nothing.

    At the number of independent requests they are worth, as `pooled.judge`.
    """
    requests = sum(len(run.latencies_ms) for run in runs)
    over = sum(_over(run, slo.p99_ms) for run in runs)
    alike = clustering(runs, slo.p99_ms)
    worth = max(1, math.floor(requests / alike))
    decision = decide(worth, math.floor(over / alike), confidence=slo.confidence)
    return SloDecision(decision.outcome, requests, over, decision.needed)


def _over(run: LatencySample, limit_ms: float) -> int:
    """Those that failed, which no slow sender causes, and the fewest of the answered."""
    answered_ms = run.latencies_ms[np.isfinite(run.latencies_ms)]
    failed, stages = len(run.latencies_ms) - len(answered_ms), run.measurement.stages
    if stages is None or stages.judged_server_ms is None:
        return failed
    return failed + fewest_over(answered_ms, stages.judged_server_ms * len(answered_ms), limit_ms)
