"""Why a search chose what it chose, field by field, and the points that nothing beats."""

from collections.abc import Callable, Mapping

import numpy as np

from enginegate.evidence import Point
from enginegate.measuring.p99 import pooled_p99
from enginegate.messages import per_second
from enginegate.search.confirmation import ConfirmedPoint
from enginegate.search.trial_history import OperatingPoint, PointStatus, TrialHistory
from enginegate.serving import ServingConfig

# Values of a field that were only predicted; more make the line longer, not clearer.
_MOST_PREDICTED = 6
_AXES: dict[str, Callable[[ServingConfig], object]] = {
    "max_batch_size": lambda config: config.max_batch_size,
    "preferred_batch_sizes": lambda config: config.preferred_batch_sizes,
    "max_queue_delay_us": lambda config: config.max_queue_delay_us,
    "instances": lambda config: config.instances,
    "processes": lambda config: config.processes,
    "gpus": lambda config: config.gpus,
}
_FEWEST = "fewer are expected to serve less than 80 % of the engine alone"


def pareto_points(
    history: TrialHistory, confirmed: ConfirmedPoint | None, price_per_hour: float | None
) -> tuple[Point, ...]:
    """Sustained points that no other equals or beats in rate, p99 and cost; highest rate first.

    The confirmed one is always among them, with the p99 of its confirmations.
    """
    sustained = [
        point
        for point in history.points.values()
        if point.runs
        and point.status(history.slo) is PointStatus.SUSTAINED
        and np.isfinite(point.p99_ms)
    ]
    merits = [_merit(point, price_per_hour) for point in sustained]
    points = []
    for point, merit in zip(sustained, merits, strict=True):
        chosen = confirmed is not None and (point.config, point.rate_per_s) == (
            confirmed.config,
            confirmed.rate_per_s,
        )
        if chosen or not any(_beats(other, merit) for other in merits):
            points.append(
                Point(
                    config=point.config,
                    rate_per_s=point.rate_per_s,
                    p99=confirmed.p99 if confirmed and chosen else pooled_p99(point.runs),
                    cost_per_million=_cost_per_million(point, price_per_hour),
                    confirmed=chosen,
                )
            )
    return tuple(sorted(points, key=lambda point: -point.rate_per_s))


def _merit(point: OperatingPoint, price_per_hour: float | None) -> tuple[float, float, float]:
    """Rate, p99 and cost; each is better when it is larger."""
    return point.rate_per_s, -point.p99_ms, -(_cost_per_million(point, price_per_hour) or 0.0)


def _beats(other: tuple[float, ...], merit: tuple[float, ...]) -> bool:
    """At least as good in all, and better in one."""
    return other != merit and all(a >= b for a, b in zip(other, merit, strict=True))


def _cost_per_million(point: OperatingPoint, price_per_hour: float | None) -> float | None:
    """Of a million requests at the point's rate; None without a price."""
    if price_per_hour is None:
        return None
    return price_per_hour * max(1, len(point.config.gpus)) / 3600.0 / point.rate_per_s * 1e6


def reasons(
    history: TrialHistory, predicted: Mapping[ServingConfig, float], confirmed: ConfirmedPoint
) -> dict[str, str]:
    """Field of the configuration -> what its other values did: measured, predicted or refused."""
    by_field = {}
    for name, value_of in _AXES.items():
        chosen = value_of(confirmed.config)
        groups: dict[object, list[ServingConfig]] = {}
        for config in (*predicted, *history.load_errors):
            groups.setdefault(value_of(config), []).append(config)
        groups.pop(chosen, None)
        if groups:
            held = f"{_text(chosen)} was confirmed at {per_second(confirmed.rate_per_s)}"
            by_field[name] = "; ".join([held, *_others(groups, history, predicted)])
        elif predicted and name != "processes":
            by_field[name] = f"{_text(chosen)} is the only value in the search space"
        elif confirmed.config.processes > 1:
            by_field[name] = f"{_text(chosen)}: {_FEWEST}"
    return by_field


def _others(
    groups: Mapping[object, list[ServingConfig]],
    history: TrialHistory,
    predicted: Mapping[ServingConfig, float],
) -> list[str]:
    """The measured values one by one, largest rate first; of the others what is expected."""
    measured, expected = [], []
    for value, configs in groups.items():
        rates = [rate for config in configs if (rate := history.sustained(config)) is not None]
        failed = [rate for config in configs if (rate := history.unsustained(config)) is not None]
        if rates:
            measured.append(
                (max(rates), f"{_text(value)} sustained {per_second(max(rates))} at most")
            )
        elif failed:
            measured.append((0.0, f"{_text(value)} did not sustain {per_second(min(failed))}"))
        elif all(config in history.load_errors for config in configs):
            measured.append((-1.0, f"{_text(value)} does not load"))
        else:
            most = max(predicted[config] for config in configs if config in predicted)
            expected.append(
                (most, f"{_text(value)} not measured: at most {per_second(most)} expected")
            )
    likely = [text for _, text in sorted(expected, reverse=True)]
    more = len(likely) - _MOST_PREDICTED
    return [
        *(text for _, text in sorted(measured, reverse=True)),
        *likely[:_MOST_PREDICTED],
        *([f"{more} others not measured: less expected"] if more > 0 else []),
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "none"
    return str(value)
