"""How fast a model is alone: batch size by batch size, warm, back to back, in windows of time.

What is run is given (`Runner.bound`), and so is the clock; how many runs make a window, and when
the time is spent, is decided here from seconds alone. A server, its queue and its copies are not
part of it: how much of this speed serving delivers is another question (`benchmark/`).
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from enginegate.data import Tensors
from enginegate.errors import EnginegateError, tool_errors
from enginegate.evidence import BatchSpeed

Repeat: TypeAlias = Callable[[int], float]
Bind: TypeAlias = Callable[[Tensors], AbstractContextManager[Repeat]]

# A window of the longer length has hundreds of launches on a GPU, so that one interruption of the
# host is not its result; longer ones leave fewer windows in the same time. Where time is short
# windows are shorter, but never so short that a timer's slice decides them.
_WINDOW_S, _SHORTEST_WINDOW_S = 0.1, 0.02
# The median of five is not moved by two disturbed ones; of fewer than three there is no spread.
_WINDOWS, _FEWEST_WINDOWS = 5, 3
# Share of a batch size's time for warming up: clocks rise and libraries choose algorithms in it.
_WARM_SHARE, _WARM_S = 0.25, 0.25
# Between batch sizes that are measured by default: speed changes little within a factor of four.
_STEP, _FIRST = 4, 8


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was measured, and what was not.

    Attributes:
        batches: ascending.
        unmeasured: batch sizes without a number and why, in one sentence; empty: there is none.
    """

    batches: tuple[BatchSpeed, ...]
    unmeasured: str = ""


def sweep_sizes(largest: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """1, 8, 32, 128 … up to the largest, which is the last one; and those wanted, ascending."""
    sizes, size = {1, largest}, _FIRST
    while size < largest:
        sizes.add(size)
        size *= _STEP
    return tuple(sorted(sizes | {size for size in wanted if size < largest}))


def window_runs(run_s: float, window_s: float = _WINDOW_S) -> int:
    """How many runs fill one window."""
    return max(1, math.ceil(window_s / run_s)) if run_s > 0.0 else 1


def window_length_s(left_s: float) -> float:
    """How long one window is to be, so that all of them fit the time that is left if they can."""
    return min(_WINDOW_S, max(_SHORTEST_WINDOW_S, left_s / (_WINDOWS + 1)))


def windows_that_fit(run_s: float, left_s: float, window_s: float = _WINDOW_S) -> int:
    """How many windows are measured in the time that is left; 0: too few to be believed."""
    fit = int(left_s / (run_s * window_runs(run_s, window_s))) if run_s > 0.0 else _WINDOWS
    return min(_WINDOWS, fit) if fit >= _FEWEST_WINDOWS else 0


def sweep_batches(
    bind: Bind,
    rows: Callable[[int], Tensors],
    sizes: Sequence[int],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    at_largest: Callable[[], None] = lambda: None,
) -> Sweep:
    """Measure ascending batch sizes, each with a fair share of the time that is left.

    A size that fails, or is too slow for its time, ends it: larger ones would do no better.

    Args:
        bind: of the runner.
        rows: so many real samples.
        sizes: ascending.
        limit_s: for all of them.
        clock: seconds, monotonic.
        at_largest: called after the runs of the largest size so far, its inputs still bound: what
            a library allocates only when it runs is there by then.
    """
    left_s = _time_left(clock, limit_s)
    found: list[BatchSpeed] = []
    for place, size in enumerate(sizes):
        names = ", ".join(map(str, sizes[place:]))
        expected_s = size / found[-1].samples_per_s if found and found[-1].samples_per_s else 0.0
        if left_s() <= (_FEWEST_WINDOWS + 2) * expected_s:
            return Sweep(tuple(found), _no_time(names, expected_s))
        try:
            with tool_errors(f"batch {size}"), bind(rows(size)) as repeat:
                speed = _measure(repeat, size, left_s, len(sizes) - place)
                at_largest()
        except EnginegateError as error:
            return Sweep(tuple(found), f"batch {names}: not measured, because {error}")
        if isinstance(speed, float):
            return Sweep(tuple(found), _no_time(names, speed))
        found.append(speed)
    return Sweep(tuple(found))


def _time_left(clock: Callable[[], float], limit_s: float) -> Callable[[], float]:
    end_s = clock() + limit_s
    return lambda: end_s - clock()


def _no_time(names: str, run_s: float) -> str:
    return (
        f"batch {names}: a run takes about {run_s:.3g} s, and {_FEWEST_WINDOWS} windows of it do "
        "not fit the time for one engine alone"
    )


def _measure(
    repeat: Repeat, size: int, left_s: Callable[[], float], sizes_left: int
) -> BatchSpeed | float:
    """The speed at one batch size; or how long a run takes, where too few windows fit."""
    share_s = left_s() / sizes_left
    share_left_s = _after(left_s, share_s)
    first_s = repeat(1)
    run_s = repeat(1) if first_s < share_left_s() else first_s
    warm_s = min(_WARM_S, _WARM_SHARE * share_s)
    while 0.0 < run_s < warm_s and share_left_s() > share_s - warm_s:
        count = window_runs(run_s, warm_s / 4.0)
        run_s = repeat(count) / count
    # A size may take more than its share while there is time: what follows is left out by name.
    window_s = window_length_s(share_left_s())
    windows = windows_that_fit(run_s, share_left_s(), window_s) or windows_that_fit(
        run_s, left_s(), window_s
    )
    if not windows:
        return run_s
    count = window_runs(run_s, window_s)
    times_s = [repeat(count) for _ in range(windows)]
    speeds = tuple(float(f"{size * count / max(each, 1e-9):.6g}") for each in times_s)
    return BatchSpeed(batch_size=size, windows_per_s=speeds, runs=count)


def _after(left_s: Callable[[], float], share_s: float) -> Callable[[], float]:
    """What is left of a share of the time that starts now."""
    spare_s = left_s() - share_s
    return lambda: left_s() - spare_s
