"""Requests before, during and after each swap, and how much slower the ones during it were."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lab.figures import percentile_ms
from enginegate.loadgen.background_load import BackgroundLoad

Floats = NDArray[np.float64]
PHASES = ("before", "during", "after")
_RESAMPLES, _SEED = 1000, 0
_P99 = 0.99


@dataclass(frozen=True, slots=True)
class Swap:
    """One promotion or rollback; times are of ``time.perf_counter``.

    Attributes:
        calm_s: how long nothing was done before it, and after it.
    """

    what: str
    began_s: float
    ended_s: float
    calm_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests around one swap: when they were due, relative to its begin, and their latencies."""

    swap: Swap
    due_s: dict[str, Floats]
    latency_s: dict[str, Floats]


def seen(clients: BackgroundLoad, swaps: Sequence[Swap]) -> list[Seen]:
    """Each swap's requests, by when they were due."""
    result = clients.result
    due_s, latency_s = clients.start_s + result.due_s, result.latency_s
    found = []
    for swap in swaps:
        masks = {
            "before": (due_s >= swap.began_s - swap.calm_s) & (due_s < swap.began_s),
            "during": (due_s >= swap.began_s) & (due_s < swap.ended_s),
            "after": (due_s >= swap.ended_s) & (due_s < swap.ended_s + swap.calm_s),
        }
        found.append(
            Seen(
                swap,
                {phase: due_s[mask] - swap.began_s for phase, mask in masks.items()},
                {phase: latency_s[mask] for phase, mask in masks.items()},
            )
        )
    return found


def rows(found: Sequence[Seen]) -> list[dict[str, Any]]:
    """Percentiles by kind of swap and phase, and p99 over that before, with its interval."""
    table = []
    for what in sorted({each.swap.what for each in found}):
        own = [each for each in found if each.swap.what == what]
        for phase in PHASES:
            latency_s = _pooled(own, phase)
            low, high = _ratio_interval(own, phase)
            table.append(
                {
                    "swap": what,
                    "phase": phase,
                    "requests": len(latency_s),
                    "p50_ms": percentile_ms(latency_s, 0.5),
                    "p99_ms": percentile_ms(latency_s, _P99),
                    "max_ms": percentile_ms(latency_s, 1.0),
                    "p99_over_before": _ratio(own, phase),
                    "low": low,
                    "high": high,
                }
            )
    return table


def lasted_ms(found: Sequence[Seen]) -> dict[str, dict[str, float]]:
    """How long swaps of each kind took."""
    kinds = sorted({each.swap.what for each in found})
    return {what: _durations(found, what) for what in kinds}


def _durations(found: Sequence[Seen], what: str) -> dict[str, float]:
    lasted = np.array([s.swap.ended_s - s.swap.began_s for s in found if s.swap.what == what])
    return {
        "count": float(len(lasted)),
        "median_ms": percentile_ms(lasted, 0.5),
        "max_ms": percentile_ms(lasted, 1.0),
    }


def _ratio_interval(own: Sequence[Seen], phase: str) -> tuple[float, float]:
    """95 % interval of the ratio, by resampling whole swaps: requests in one are not independent.

    Percentile bootstrap (Efron, 1979).
    """
    source = np.random.default_rng(_SEED)
    drawn = [
        _ratio([own[index] for index in source.integers(len(own), size=len(own))], phase)
        for _ in range(_RESAMPLES)
    ]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _ratio(own: Sequence[Seen], phase: str) -> float:
    before_ms = percentile_ms(_pooled(own, "before"), _P99)
    return percentile_ms(_pooled(own, phase), _P99) / before_ms


def _pooled(own: Sequence[Seen], phase: str) -> Floats:
    return np.concatenate([each.latency_s[phase] for each in own])
