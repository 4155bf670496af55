"""How the tail moves under a heavier mix than was recorded, because that is what breaks later.

The chosen configuration is measured at its confirmed rate three times: as recorded, in bursts of
the same mean rate, and with only the largest requests of the traffic. Shown to people; decides
nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from enginegate.evidence import Pattern
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import Arrivals, Load, Measurement
from enginegate.search.trial_runner import Measure
from enginegate.serving import ServingConfig

RECORDED, BURSTS, LARGE = "recorded", "bursts", "large together"
_LARGEST_SHARE = 0.1
_WORTH_TELLING_APART = 1.05


def heavier(
    measures: Mapping[str, Measure], config: ServingConfig, load: Load
) -> tuple[Pattern, ...]:
    """Measure the chosen configuration under each pattern; void measurements are left out.

    Args:
        measures: by pattern; ``recorded`` sends the traffic as it is, ``large together`` sends
            `largest` of it. What is missing is not measured.
        config: what was chosen.
        load: at its confirmed rate, with the recorded arrivals.
    """
    found = []
    for name, arrivals in _arrivals(load.arrivals).items():
        measure = measures.get(name) or (measures.get(RECORDED) if name == BURSTS else None)
        if measure is not None:
            made = measure(config, load.model_copy(update={"arrivals": arrivals})).measurement
            if not made.invalid:
                found.append(_pattern(name, made))
    return tuple(found)


def largest(traffic: Traffic) -> Traffic | None:
    """Only the largest tenth of the requests; None when they are about as large as the others."""
    sizes = sorted(traffic.requests, key=len)
    count = max(1, round(_LARGEST_SHARE * len(sizes)))
    if len(sizes[-count]) < _WORTH_TELLING_APART * len(sizes[len(sizes) // 2]):
        return None
    return replace(traffic, requests=tuple(sizes[-count:]))


def _arrivals(recorded: Arrivals) -> Mapping[str, Arrivals]:
    return MappingProxyType({RECORDED: recorded, BURSTS: "bursts", LARGE: recorded})


def _pattern(name: str, made: Measurement) -> Pattern:
    asked = made.completed + made.failed
    return Pattern(
        name=name,
        rate_per_s=made.rate_per_s,
        percentiles=made.percentiles,
        failed_share=made.failed / asked if asked else 0.0,
    )
