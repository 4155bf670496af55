"""Several runs at one point taken together: what they decide, and what was served."""

import math
from collections.abc import Iterable

import numpy as np

from enginegate.evidence import PointDecision
from enginegate.measuring.measure import LatencySample
from enginegate.measuring.p99 import SloDecision, decide
from enginegate.policy.benchmarking import Slo
from enginegate.serving import ServingConfig

_SETTLED = 0.9
_FEWEST_BLOCKS = 6
_SPANS_S = (0.25, 1.0)
_DEVIATIONS = 3.0


def throughput_per_s(runs: list[LatencySample]) -> float:
    """Rate that was sent, times the share that was answered.

    The rate asked for where random arrivals alone explain the difference (three standard deviations
    of a Poisson count), so that chance does not decide a floor; else what was really sent.
    """
    latencies_ms = np.concatenate([run.latencies_ms for run in runs])
    answered = float(np.isfinite(latencies_ms).mean())
    asked_per_s, lasted_s = runs[0].measurement.rate_per_s, sum(map(_lasted_s, runs))
    sent = sum(run.measurement.sent for run in runs)
    by_chance = _DEVIATIONS * math.sqrt(asked_per_s * lasted_s)
    if lasted_s <= 0.0 or abs(sent - asked_per_s * lasted_s) <= by_chance:
        return asked_per_s * answered
    return sent / lasted_s * answered


def judge(runs: list[LatencySample], slo: Slo) -> SloDecision:
    """Judge runs together, at the number of independent requests they are worth.

    A queue makes neighbours alike, so requests over the limit come in clusters. As with clustered
    samples (Kish, Survey Sampling, 1965, section 5.4) counts are divided by how much more they vary
    over time than independent ones would.
    """
    requests = sum(len(run.latencies_ms) for run in runs)
    over = sum(run.over(slo.p99_ms) for run in runs)
    alike = clustering(runs, slo.p99_ms)
    decision = decide(
        max(1, math.floor(requests / alike)), math.ceil(over / alike), confidence=slo.confidence
    )
    needed = None if decision.needed is None else math.ceil(decision.needed * alike)
    return SloDecision(decision.outcome, requests, over, needed)


def decisions(sampled: Iterable[LatencySample], slo: Slo) -> tuple[PointDecision, ...]:
    """What every point that was measured validly shows, all its runs together; in order of time."""
    points: dict[tuple[ServingConfig, float], list[LatencySample]] = {}
    for run in sampled:
        made = run.measurement
        if not made.invalid and len(run.latencies_ms):
            points.setdefault((made.config, made.rate_per_s), []).append(run)
    return tuple(
        _decided(config, rate, judge(runs, slo)) for (config, rate), runs in points.items()
    )


def _decided(config: ServingConfig, rate_per_s: float, decision: SloDecision) -> PointDecision:
    return PointDecision(
        config=config,
        rate_per_s=rate_per_s,
        outcome=decision.outcome,
        requests=decision.requests,
        over=decision.over,
    )


def clustering(runs: list[LatencySample], limit_ms: float) -> float:
    """Variance over mean of the requests over the limit in each span of time; 1 when independent.

    The largest over several spans: long ones see slow queues, short ones are more and so steadier.
    """
    return max(1.0, *(_clustering(runs, limit_ms, span_s) for span_s in _SPANS_S))


def _clustering(runs: list[LatencySample], limit_ms: float, span_s: float) -> float:
    counts = [
        float((~(block <= limit_ms)).sum())
        for run in runs
        for block in np.array_split(
            run.latencies_ms, max(1, int(_lasted_s(run) * _SETTLED / span_s))
        )
    ]
    mean = float(np.mean(counts)) if counts else 0.0
    if len(counts) < _FEWEST_BLOCKS or mean == 0.0:
        return 1.0
    return float(np.var(counts, ddof=1)) / mean


def _lasted_s(run: LatencySample) -> float:
    lasted_s = run.measurement.lasted_s
    return run.measurement.load.duration_s if lasted_s is None else lasted_s
