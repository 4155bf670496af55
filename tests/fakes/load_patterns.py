"""A load pattern as another package would add it: a schedule and a model of its parameters."""

import math

from pydantic import Field

from enginegate.loadgen.schedule import LoadPattern
from enginegate.records import Record

_RISE_S = 10.0


class RampParameters(Record):
    """Its own fields in a policy's [load] arrivals."""

    start_share: float = Field(default=0.5, gt=0.0, le=1.0, description="of the rate, at the start")


def ramp_schedule(load, start_share):
    """Gaps that shrink over ten seconds from those of a share of the rate to those of all of it."""
    at_s = 0.0
    while math.isfinite(at_s):
        yield at_s
        share = start_share + (1.0 - start_share) * min(at_s / _RISE_S, 1.0)
        at_s += 1.0 / (load.rate_per_s * share)


RAMP = LoadPattern(ramp_schedule, RampParameters)
