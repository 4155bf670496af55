"""Why a search chose what it chose, field by field, and the points that nothing beats."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from enginegate.evidence import Point
from enginegate.measuring.p99 import pooled_p99
from enginegate.search.confirmed_point import ConfirmedPoint
from enginegate.search.trial_history import OperatingPoint, PointStatus, TrialHistory
from enginegate.serving import ServingConfig
from enginegate.wording import per_second

_MOST_TOLD = 6
_AXES: dict[str, Callable[[ServingConfig], object]] = {
    "max_batch_size": lambda config: config.max_batch_size,
    "preferred_batch_sizes": lambda config: config.preferred_batch_sizes,
    "max_queue_delay_us": lambda config: config.max_queue_delay_us,
    "instances": lambda config: config.instances,
    "gpus": lambda config: config.gpus,
}


def pareto(
    known: TrialHistory, confirmed: ConfirmedPoint | None, price_per_hour: float | None
) -> tuple[Point, ...]:
    """Held points that no other one equals or beats in rate, p99 and cost; highest rate first."""
    held = [
        probe
        for probe in known.points.values()
        if probe.runs
        and probe.standing(known.slo) is PointStatus.HELD
        and np.isfinite(probe.p99_ms)
    ]
    merits = [_merit(probe, price_per_hour) for probe in held]
    points = [
        _point(probe, price_per_hour, confirmed)
        for probe, merit in zip(held, merits, strict=True)
        if _is_confirmed(probe, confirmed) or not any(_beats(other, merit) for other in merits)
    ]
    return tuple(sorted(points, key=lambda point: -point.rate_per_s))


def reasons(
    known: TrialHistory, predicted: Mapping[ServingConfig, float], confirmed: ConfirmedPoint
) -> dict[str, str]:
    """Field of the configuration -> what its other values did: measured, predicted or refused."""
    said = {}
    for name, value_of in _AXES.items():
        chosen = value_of(confirmed.config)
        groups: dict[object, list[ServingConfig]] = {}
        for config in (*predicted, *known.refused):
            groups.setdefault(value_of(config), []).append(config)
        groups.pop(chosen, None)
        if groups:
            held = f"{_shown(chosen)} was confirmed at {per_second(confirmed.rate_per_s)}"
            said[name] = "; ".join([held, *_others(groups, known, predicted)])
        elif predicted:
            said[name] = f"{_shown(chosen)} is the only value in the search space"
    return said


def _others(
    groups: Mapping[object, list[ServingConfig]],
    known: TrialHistory,
    predicted: Mapping[ServingConfig, float],
) -> list[str]:
    """The measured values one by one, largest rate first; of the others what is expected."""
    measured, expected = [], []
    for value, configs in groups.items():
        held = [rate for config in configs if (rate := known.held(config)) is not None]
        rejected = [rate for config in configs if (rate := known.rejected(config)) is not None]
        if held:
            measured.append((max(held), f"{_shown(value)} held {per_second(max(held))} at most"))
        elif rejected:
            measured.append((0.0, f"{_shown(value)} did not hold {per_second(min(rejected))}"))
        elif all(config in known.refused for config in configs):
            measured.append((-1.0, f"{_shown(value)} does not load"))
        else:
            most = max(predicted[config] for config in configs if config in predicted)
            expected.append(
                (most, f"{_shown(value)} not measured: at most {per_second(most)} expected")
            )
    told = [text for _, text in sorted(measured, reverse=True)]
    likely = [text for _, text in sorted(expected, reverse=True)]
    more = len(likely) - _MOST_TOLD
    rest = [f"{more} others not measured: less expected"] if more > 0 else []
    return [*told, *likely[:_MOST_TOLD], *rest]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "none"
    return str(value)


class _Merit(NamedTuple):
    """What is better when it is larger."""

    rate_per_s: float
    minus_p99_ms: float
    minus_cost: float


def _merit(probe: OperatingPoint, price_per_hour: float | None) -> _Merit:
    cost = cost_per_million(probe.config, probe.rate_per_s, price_per_hour)
    return _Merit(probe.rate_per_s, -probe.p99_ms, -(cost or 0.0))


def _beats(other: _Merit, merit: _Merit) -> bool:
    """At least as good in all three, and better in one."""
    return other != merit and all(a >= b for a, b in zip(other, merit, strict=True))


def _is_confirmed(probe: OperatingPoint, confirmed: ConfirmedPoint | None) -> bool:
    at = (probe.config, probe.rate_per_s)
    return confirmed is not None and at == (confirmed.config, confirmed.rate_per_s)


def _point(
    probe: OperatingPoint, price_per_hour: float | None, confirmed: ConfirmedPoint | None
) -> Point:
    """A held point for people; the confirmed one with the p99 of its confirmations."""
    config, rate_per_s = probe.config, probe.rate_per_s
    if confirmed is not None and _is_confirmed(probe, confirmed):
        p99 = confirmed.p99
    else:
        p99 = pooled_p99(probe.runs)
    return Point(
        config=config,
        rate_per_s=rate_per_s,
        p99=p99,
        cost_per_million=cost_per_million(config, rate_per_s, price_per_hour),
        confirmed=_is_confirmed(probe, confirmed),
    )


def cost_per_million(
    config: ServingConfig, rate_per_s: float, price_per_hour: float | None
) -> float | None:
    """Of a million requests at that rate; None without a price."""
    if price_per_hour is None:
        return None
    return price_per_hour * max(1, len(config.gpus)) / 3600.0 / rate_per_s * 1e6
