"""How the tail moves under a heavier mix than was recorded, because that is what breaks later.

The chosen configuration is measured at its confirmed rate three times: as recorded, in bursts of
the same mean rate, and with only the largest requests of the traffic. Shown to people; decides
nothing.
"""

from collections.abc import Mapping
from dataclasses import replace

from enginegate.evidence import Pattern
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import Arrivals, Load
from enginegate.search.trial_runner import Measure
from enginegate.serving import ServingConfig

RECORDED, BURSTS, LARGE = "recorded", "bursts", "large together"
# A tenth is few enough to be heavier than the mix, and enough to vary.
_LARGEST_SHARE = 0.1
# Requests whose sizes differ by less are about equal.
_LARGER = 1.05


def measure_mixes(
    measures: Mapping[str, Measure], config: ServingConfig, load: Load
) -> tuple[Pattern, ...]:
    """Measure the chosen configuration under each mix; invalid measurements are left out.

    Args:
        measures: by mix; ``recorded`` sends the traffic as it is, ``large together`` sends
            `largest_requests` of it. What is missing is not measured.
        config: what was chosen.
        load: at its confirmed rate, with the recorded arrivals.
    """
    mixes: list[tuple[str, str, Arrivals]] = [
        (RECORDED, RECORDED, load.arrivals),
        (BURSTS, RECORDED, "bursts"),
        (LARGE, LARGE, load.arrivals),
    ]
    patterns = []
    for name, traffic, arrivals in mixes:
        if traffic not in measures:
            continue
        heavier = load.model_copy(update={"arrivals": arrivals})
        measurement = measures[traffic](config, heavier).measurement
        if not measurement.invalid:
            answered = measurement.completed + measurement.failed
            patterns.append(
                Pattern(
                    name=name,
                    rate_per_s=measurement.rate_per_s,
                    percentiles=measurement.percentiles,
                    failed_share=measurement.failed / answered if answered else 0.0,
                )
            )
    return tuple(patterns)


def largest_requests(traffic: Traffic) -> Traffic | None:
    """Only the largest tenth of the requests; None when they are about as large as the others."""
    by_size = sorted(traffic.requests, key=len)
    count = max(1, round(_LARGEST_SHARE * len(by_size)))
    if len(by_size[-count]) < _LARGER * len(by_size[len(by_size) // 2]):
        return None
    return replace(traffic, requests=tuple(by_size[-count:]))
