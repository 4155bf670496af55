"""Numbers that no policy can mean: infinite, not a number, or beyond what anything here could do.

They are refused together with whatever else is wrong: the rest is checked without them. A limit
that decides a promotion has no largest value here: what is too loose is for its owner to say.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from enginegate.engine_kinds import engine_kinds

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_WEEK_S = 7 * _DAY_S
_YEAR_H = 366 * 24.0
_LARGEST: dict[str, tuple[float, str]] = {
    "approval.expires_hours": (_YEAR_H, "that is a year"),
    "approval.timeout_hours": (_YEAR_H, "that is a year"),
    "calibration.batch_size": (65_536, "rows are held in memory together"),
    "load.processes": (1024, "each is a process of this machine"),
    "load.timeout_s": (_HOUR_S, "that is an hour"),
    "repair.budget_s": (_WEEK_S, "that is a week"),
    "repair.max_builds": (10_000, "each takes minutes"),
    "retention.releases": (10_000, "each holds an engine"),
    "retention.shadow_days": (36_600, "a hundred years"),
    "retention.unused_days": (36_600, "a hundred years"),
    "search.budget_s": (_WEEK_S, "that is a week"),
    "search.gpus": (1023, "GPUs of one server"),
    "search.instances": (256, "each holds the engine in memory"),
    "search.max_batch_sizes": (65_536, "rows are held in memory together"),
    "search.max_measurements": (100_000, "each takes seconds"),
    "search.max_rate_per_s": (1e8, "requests a second of one server"),
    "search.measurement_s": (_DAY_S, "that is a day"),
    "search.preferred_batch_sizes": (65_536, "rows are held in memory together"),
    "search.processes": (16, "each holds the engine and a CUDA context in memory"),
    "search.queue_delays_us": (60e6, "that is a minute"),
    "serving.max_queue_size": (1e9, "requests are held in memory"),
    "serving.priority_levels": (1e6, "each is a queue"),
    "serving.queue_timeout_us": (_HOUR_S * 1e6, "that is an hour"),
    "serving.cuda_graph_batch_sizes": (65_536, "each keeps a graph and its buffers on the GPU"),
    "serving.warmup_batch_sizes": (65_536, "rows are held in memory together"),
    "serving.warmup_count": (100_000, "each is a run"),
    "shadow.max_mib": (1 << 20, "a tebibyte of text"),
    "shadow.max_samples": (1e8, "samples are kept on this disk"),
    "shadow.rate_per_s": (1e8, "requests a second of one server"),
    "slo.confirm_requests": (1e9, "requests that have to be sent"),
    "slo.confirmations": (1000, "each takes minutes"),
    "slo.p99_ms": (_HOUR_S * 1e3, "that is an hour"),
    "target.canary_s": (_WEEK_S, "that is a week"),
    "target.load_timeout_s": (_DAY_S, "that is a day"),
    "watch.look_s": (_DAY_S, "that is a day"),
    "watch.window_s": (_WEEK_S, "that is a week"),
}


def largest_values() -> dict[str, tuple[float, str]]:
    """The largest value of every key that has one, and why that one."""
    return _LARGEST | {
        f"{name}.{key}": limit
        for name, kind in engine_kinds().items()
        for key, limit in kind.largest.items()
    }


class Wrong(NamedTuple):
    """A key with the line that says what is wrong with its value."""

    key: str
    line: str


def impossible_numbers(raw: Any) -> tuple[Wrong, ...]:
    """Each number that cannot be meant: its key, its value, what is allowed.

    Args:
        raw: a policy as TOML gives it.
    """
    largest = largest_values()
    return tuple(line for key, value in _numbers(raw, "") for line in _wrong(key, value, largest))


def without(raw: Any, keys: frozenset[str], at: str = "") -> Any:
    """The same tables without these keys, written as in `Wrong.key`."""
    if not isinstance(raw, Mapping):
        return raw
    inner = {name: f"{at}.{name}" if at else str(name) for name in raw}
    kept = {name: each for name, each in raw.items() if inner[name] not in keys}
    return {name: without(each, keys, inner[name]) for name, each in kept.items()}


def mistyped_numbers(raw: Any, read: Any, key: str = "") -> Iterator[Wrong]:
    """Each number that was not written as one, but as a text or as true or false.

    Args:
        raw: a policy as TOML gives it.
        read: the same as it was understood.
        key: where both are.
    """
    if isinstance(raw, Mapping):
        for name, each in raw.items():
            fields = isinstance(read, BaseModel)
            value = getattr(read, str(name), None) if fields else dict(read or {}).get(name)
            yield from mistyped_numbers(each, value, f"{key}.{name}" if key else str(name))
    elif isinstance(raw, list | tuple) and isinstance(read, list | tuple):
        for before, after in zip(raw, read, strict=False):
            yield from mistyped_numbers(before, after, key)
    elif isinstance(raw, bool | str) and isinstance(read, int | float) and type(read) is not bool:
        yield Wrong(key, f"  {key}: must be a number (given: {raw!r:.80})")


def _wrong(key: str, value: float, limits: Mapping[str, tuple[float, str]]) -> Iterator[Wrong]:
    largest, why = limits.get(key, (math.inf, ""))
    if not math.isfinite(value):
        allowed = f"a finite number, at most {largest:,.12g}" if why else "a finite number"
        yield Wrong(key, f"  {key}: {value} cannot be meant; allowed is {allowed}")
    elif value > largest:
        allowed = f"at most {largest:,.12g} ({why})"
        yield Wrong(key, f"  {key}: {value:.12g} cannot be meant; allowed is {allowed}")


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Every number with the key that it is under; those of a list are under the list's key."""
    waiting = [(key, value)]
    while waiting:
        at, found = waiting.pop()
        if isinstance(found, dict):
            inner = [(f"{at}.{name}" if at else str(name), each) for name, each in found.items()]
            waiting += reversed(inner)
        elif isinstance(found, list | tuple):
            waiting += [(at, each) for each in reversed(found)]
        elif isinstance(found, int | float) and not isinstance(found, bool):
            yield at, _as_float(found)


def _as_float(number: float) -> float:
    """The number, or the largest there is: an integer may be larger than any float."""
    try:
        return float(number)
    except OverflowError:
        return sys.float_info.max if number > 0 else -sys.float_info.max
