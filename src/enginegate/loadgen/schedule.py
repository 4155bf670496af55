"""When requests are due: schedules in seconds from the start, each a function of its load alone.

And how nearly one was kept. Not in scope: keeping to it (sending.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.errors import InputError
from enginegate.measurement import Arrivals, Load

Times = Iterator[float]

_BLOCK = 1024
_BURST_S = 0.1
_BURST_EVERY_S = 1.0
_MIN_RECORDED = 2
_PARTS = 4


def arrivals(load: Load, recorded_s: Sequence[float] | None = None) -> Times:
    """Times at which requests are due, ascending from 0, until the load's duration is over.

    Args:
        load: kind, rate, duration and seed.
        recorded_s: recorded arrival times, seconds from the first, ascending; for ``replay``.

    Raises:
        InputError: a replay without recorded times, or of times that cannot be replayed.
    """
    if load.arrivals == "replay":
        return _until(load.duration_s, _replayed(load, _checked(recorded_s)))
    return _KINDS[load.arrivals](load)


def achieved_share(due_s: NDArray[np.float64], sent_s: NDArray[np.float64]) -> float:
    """Rate sent over rate asked for; 1 is perfect, also of fewer than two moments.

    Between the least late request of the first quarter and that of the last: one late request at
    either end says nothing about the rate.
    """
    if not len(due_s):
        return 1.0
    late_s, quarter = sent_s - due_s, max(1, len(due_s) // _PARTS)
    first = int(np.argmin(late_s[:quarter]))
    last = len(due_s) - quarter + int(np.argmin(late_s[-quarter:]))
    asked_s = due_s[last] - due_s[first]
    if asked_s <= 0.0:
        return 1.0
    return float(asked_s / max(sent_s[last] - sent_s[first], 1e-9))


def poisson(load: Load) -> Times:
    """A Poisson process: exponential gaps, as many independent users make them."""
    return _until(load.duration_s, _exponential(load.seed, load.rate_per_s))


def constant(load: Load) -> Times:
    """Equal gaps; the seed sets only where in the first gap the first request falls."""
    gap_s = 1.0 / load.rate_per_s
    first_s = float(np.random.default_rng(load.seed).uniform(0.0, gap_s))
    return _until(load.duration_s, (first_s + number * gap_s for number in itertools.count()))


def bursts(load: Load) -> Times:
    """A Poisson process at ten times the rate in the first tenth of each second, then silence."""
    factor = _BURST_EVERY_S / _BURST_S
    on_s = _exponential(load.seed, load.rate_per_s * factor)
    return _until(load.duration_s, map(_in_burst, on_s))


_KINDS: dict[Arrivals, Callable[[Load], Times]] = {
    "poisson": poisson,
    "constant": constant,
    "bursts": bursts,
}


def _in_burst(on_s: float) -> float:
    number, within_s = divmod(on_s, _BURST_S)
    return number * _BURST_EVERY_S + within_s


def _exponential(seed: int, rate_per_s: float) -> Times:
    source = np.random.default_rng(seed)
    at_s = 0.0
    while True:
        for gap_s in source.exponential(1.0 / rate_per_s, _BLOCK).tolist():
            at_s += gap_s
            yield at_s


def _replayed(load: Load, recorded_s: NDArray[np.float64]) -> Times:
    """The recording at another speed, again and again, from a place that the seed draws.

    The recording is a ring: its last arrival is followed by its first after one mean gap (the
    seam), so that every turn takes ``N / rate`` and the mean rate is the one asked for.
    """
    count = len(recorded_s)
    mean_gap_s = recorded_s[-1] / (count - 1)
    gaps_s = np.append(np.diff(recorded_s), mean_gap_s) / (mean_gap_s * load.rate_per_s)
    first = int(np.random.default_rng(load.seed).integers(count))
    at_s = 0.0
    for gap_s in itertools.cycle(np.roll(gaps_s, -first).tolist()):
        yield at_s
        at_s += gap_s


def _checked(recorded_s: Sequence[float] | None) -> NDArray[np.float64]:
    times_s: NDArray[np.float64] = np.asarray(recorded_s or (), np.float64)
    if len(times_s) < _MIN_RECORDED:
        raise InputError(
            f"A replay needs recorded arrival times; this traffic has {len(times_s)}.\n"
            "Take the traffic from a shadow sample that was recorded from live requests, or choose "
            "poisson, constant or bursts."
        )
    gaps_s = np.diff(times_s)
    if not np.isfinite(times_s).all() or (gaps_s < 0).any() or times_s[-1] <= times_s[0]:
        raise InputError(
            f"The {len(times_s)} recorded arrival times cannot be replayed: they must be finite, "
            "ascending, and not all the same. Record the sample again."
        )
    offsets_s: NDArray[np.float64] = times_s - times_s[0]
    return offsets_s


def _until(end_s: float, times: Iterator[Any]) -> Times:
    return itertools.takewhile(lambda at_s: at_s < end_s, times)
