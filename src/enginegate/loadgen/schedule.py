"""Load patterns: when requests are due, seconds from the start; and in which order they are sent.

A pattern is one entry of `PATTERNS`: its schedule, and a model of its own parameters where it has
any. An installed package adds one by an entry point in the group ``enginegate.load_patterns``.
Not in scope: keeping to a schedule (worker_load.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from enginegate.errors import InputError
from enginegate.measurement import Arrivals, Load
from enginegate.messages import explain_validation
from enginegate.records import Record

Times = Iterator[float]

_GROUP = "enginegate.load_patterns"
_BLOCK = 1024
_BURST_S = 0.1
_BURST_EVERY_S = 1.0
_MIN_RECORDED = 2


class NoParameters(Record):
    """A pattern without parameters of its own."""


@dataclass(frozen=True, slots=True)
class LoadPattern:
    """How requests are spread over time.

    Attributes:
        schedule: called with the load and the pattern's parameters by name; ascending times from 0
            on, at the load's mean rate, without end. A function of its arguments alone.
        parameters: what a policy may set besides the name.
        replays: whether ``schedule`` also takes ``recorded_s``, recorded arrival times from 0.
        is_steady: whether every part of a run has the mean rate, up to chance.
    """

    schedule: Callable[..., Times]
    parameters: type[Record] = NoParameters
    replays: bool = False
    is_steady: bool = True


def poisson(load: Load) -> Times:
    """A Poisson process: exponential gaps, as many independent users make them."""
    return _exponential(load.seed, load.rate_per_s)


def constant(load: Load) -> Times:
    """Equal gaps; the seed sets only where in the first gap the first request falls."""
    gap_s = 1.0 / load.rate_per_s
    first_s = float(np.random.default_rng(load.seed).uniform(0.0, gap_s))
    return (first_s + number * gap_s for number in itertools.count())


def bursts(load: Load) -> Times:
    """A Poisson process at ten times the rate in the first tenth of each second, then silence."""
    for on_s in _exponential(load.seed, load.rate_per_s * _BURST_EVERY_S / _BURST_S):
        number, within_s = divmod(on_s, _BURST_S)
        yield number * _BURST_EVERY_S + within_s


def replay(load: Load, recorded_s: NDArray[np.float64]) -> Times:
    """The recording at another speed, again and again, from a place that the seed draws.

    The recording is a ring: its last arrival is followed by its first after one mean gap (the
    seam), so that every round takes ``N / rate`` and the mean rate is the load's.
    """
    count = len(recorded_s)
    mean_gap_s = recorded_s[-1] / (count - 1)
    gaps_s = np.append(np.diff(recorded_s), mean_gap_s) / (mean_gap_s * load.rate_per_s)
    first = int(np.random.default_rng(load.seed).integers(count))
    at_s = 0.0
    for gap_s in itertools.cycle(np.roll(gaps_s, -first).tolist()):
        yield at_s
        at_s += gap_s


PATTERNS: dict[str, LoadPattern] = {
    "poisson": LoadPattern(poisson),
    "constant": LoadPattern(constant),
    "bursts": LoadPattern(bursts, is_steady=False),
    "replay": LoadPattern(replay, replays=True),
}


def load_pattern(arrivals: Arrivals) -> LoadPattern:
    """The pattern that a policy or a load names, its parameters checked.

    Raises:
        InputError: there is no such pattern, or it does not take these parameters.
    """
    name, parameters = _split(arrivals)
    if name not in PATTERNS:
        PATTERNS.update({each.name: each.load() for each in entry_points(group=_GROUP, name=name)})
    if name not in PATTERNS:
        raise InputError(
            f"There is no load pattern {name!r}. Use one of {', '.join(PATTERNS)}, or install the "
            f"package that adds it (an entry point in the group {_GROUP})."
        )
    try:
        PATTERNS[name].parameters.model_validate(parameters)
    except ValidationError as error:
        explained = explain_validation(error, PATTERNS[name].parameters)
        raise InputError(f"The load pattern {name!r} does not take this:\n{explained}") from error
    return PATTERNS[name]


def due_times(
    load: Load, recorded_s: Sequence[float] | None = None, pattern: LoadPattern | None = None
) -> Times:
    """Times at which requests are due, ascending from 0, until the load's duration is over.

    Args:
        load: pattern, rate, duration and seed.
        recorded_s: recorded arrival times, seconds from the first, ascending; for a replay.
        pattern: the load's, in a process that may not know it by name.

    Raises:
        InputError: there is no such pattern, or its parameters or recorded times are unusable.
    """
    pattern = pattern or load_pattern(load.arrivals)
    given = pattern.parameters.model_validate(_split(load.arrivals)[1])
    arguments = {name: getattr(given, name) for name in type(given).model_fields}
    if pattern.replays:
        arguments["recorded_s"] = _offsets(recorded_s)
    times = pattern.schedule(load, **arguments)
    return itertools.takewhile(lambda at_s: at_s < load.duration_s, times)


def shuffled(count: int, seed: int) -> Iterator[int]:
    """Indices without end: every one once in each round, shuffled anew."""
    source = np.random.default_rng(seed)
    while True:
        yield from source.permutation(count).tolist()


def batches(count: int, sizes: tuple[int, ...], seed: int) -> Iterator[list[int]]:
    """Rows of each request: whole rounds of the sizes, until every row was used.

    Args:
        count: of rows.
        sizes: of requests, each as often as it is named.
        seed: of the sizes' order and the rows'.

    Raises:
        InputError: a size is below 1, or there is none.
    """
    if not sizes or min(sizes) < 1:
        raise InputError(f"Batch sizes {sizes} cannot be sent: name at least one, each 1 or more.")
    if set(sizes) == {1}:
        yield from ([row] for row in range(count))
        return
    rows = shuffled(count, seed)
    used, source = 0, np.random.default_rng(seed)
    while used < count:
        for size in source.permutation(sizes).tolist():
            yield [next(rows) for _ in range(size)]
        used += sum(sizes)


def _split(arrivals: Arrivals) -> tuple[str, dict[str, object]]:
    if isinstance(arrivals, str):
        return arrivals, {}
    return arrivals.name, dict(arrivals.model_extra or {})


def _exponential(seed: int, rate_per_s: float) -> Times:
    source = np.random.default_rng(seed)
    at_s = 0.0
    while True:
        for gap_s in source.exponential(1.0 / rate_per_s, _BLOCK).tolist():
            at_s += gap_s
            yield at_s


def _offsets(recorded_s: Sequence[float] | None) -> NDArray[np.float64]:
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
