"""What is known of each configuration at each rate, and which rate to try next.

A configuration's capacity is the highest rate at which p99 is within the limit. It is taken for
granted that p99 rises with the rate: what was sustained above a rate that was not is not believed.
What was measured beats the model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from enginegate.evidence import Outcome
from enginegate.measurement import P99, LatencySample
from enginegate.measuring.p99 import SloDecision, decide_fixed, nearest_rank
from enginegate.policy.benchmarking import Slo
from enginegate.search.queueing import SATURATED, CapacityInterval, served_per_s
from enginegate.search.space import Grid
from enginegate.serving import ServingConfig

# Share of the requests that may be over at which a trial still counts as sustained: at 1.0 more
# confirmations fail, at 0.6 the search stops lower.
_LIKELY = 0.8
# A point at the very capacity is neither shown nor refuted, so trials stay this much below the
# expected one; 0.96 gives away throughput, 1.0 relies on a model that errs on the low side.
AIM = 0.985
# One step up at most: a model fitted far below says little of higher rates. 2 takes more steps, 5
# more often lands above capacity.
_MOST_GROWTH = 3.0
# An interval wider than this is halved in the logarithm, a narrower one believed (1.5 to 3: equal).
WIDE = 2.0
# p99 rises steeply near capacity, so slack in p99 is worth about its cube root in rate; a larger
# power overshoots where the model is wrong, a smaller one creeps.
_SLACK_EXPONENT = 1.0 / 3.0
# Share of what a saturated server answered at which its queue settles: 0.9 starts lower and needs
# one trial more, 0.98 is refuted more often.
_SETTLES = 0.94


class PointStatus(Enum):
    """What a measured point is good for: to go on above it, to stay below it, or neither."""

    SUSTAINED = "sustained"
    UNDECIDED = "undecided"
    REJECTED = "rejected"


@dataclass(slots=True)
class OperatingPoint:
    """One configuration at one rate, with every valid measurement there.

    Attributes:
        unconfirmed: a confirmation did not pass, whether it was refuted or decided nothing.
        refuted: a confirmation showed that the SLO is not met.
    """

    config: ServingConfig
    rate_per_s: float
    runs: list[LatencySample] = field(default_factory=list)
    unconfirmed: bool = False
    refuted: bool = False
    _decision: tuple[int, SloDecision] | None = field(default=None, repr=False)
    _p99_ms: tuple[int, float] | None = field(default=None, repr=False)

    def decision(self, slo: Slo) -> SloDecision:
        """On all measurements together."""
        if self._decision is None or self._decision[0] != len(self.runs):
            requests = sum(len(run.latencies_ms) for run in self.runs)
            over = sum(run.over(slo.p99_ms) for run in self.runs)
            self._decision = len(self.runs), decide_fixed(requests, over, confidence=slo.confidence)
        return self._decision[1]

    def status(self, slo: Slo) -> PointStatus:
        """Sustained when few enough requests are over that a confirmation is likely to pass."""
        if self.unconfirmed:
            return PointStatus.REJECTED
        decision = self.decision(slo)
        if decision.outcome is Outcome.FAILED:
            return PointStatus.REJECTED
        likely = decision.over <= _LIKELY * (1.0 - P99) * decision.requests
        return PointStatus.SUSTAINED if likely else PointStatus.UNDECIDED

    def fails(self, slo: Slo) -> bool:
        """Whether it is shown that the SLO is not met here."""
        return self.refuted or bool(self.runs and self.decision(slo).outcome is Outcome.FAILED)

    @property
    def p99_ms(self) -> float:
        """Over all measurements; infinite when it falls on a failure."""
        if self._p99_ms is None or self._p99_ms[0] != len(self.runs):
            latencies_ms = np.concatenate([run.latencies_ms for run in self.runs])
            self._p99_ms = len(self.runs), nearest_rank(latencies_ms)
        return self._p99_ms[1]


@dataclass(slots=True)
class TrialHistory:
    """Every point that was measured.

    Attributes:
        load_errors: configurations that did not load, with what the server said.
    """

    slo: Slo
    points: dict[tuple[ServingConfig, float], OperatingPoint] = field(default_factory=dict)
    configs: dict[ServingConfig, list[OperatingPoint]] = field(default_factory=dict)
    load_errors: dict[ServingConfig, str] = field(default_factory=dict)

    def add(self, sample: LatencySample) -> OperatingPoint:
        """Pool a valid measurement with what was measured at the same point."""
        point = self._at(sample.measurement.config, sample.measurement.rate_per_s)
        point.runs.append(sample)
        return point

    def reject(self, config: ServingConfig, rate_per_s: float, *, refuted: bool) -> None:
        """Note that a confirmation did not pass there, whatever the trials saw."""
        point = self._at(config, rate_per_s)
        point.unconfirmed, point.refuted = True, point.refuted or refuted

    def fails(self, config: ServingConfig, rate_per_s: float) -> bool:
        """Whether it does not load, or is shown not to meet the SLO at that rate or a lower one."""
        return config in self.load_errors or any(
            point.fails(self.slo) for point in self.of(config) if point.rate_per_s <= rate_per_s
        )

    def of(self, config: ServingConfig) -> list[OperatingPoint]:
        """The points of one configuration, in the order they were first measured."""
        return self.configs.get(config, [])

    def sustained(self, config: ServingConfig) -> float | None:
        """The highest sustained rate below every rejected one."""
        statuses = [(point.rate_per_s, point.status(self.slo)) for point in self.of(config)]
        rejected = (rate for rate, status in statuses if status is PointStatus.REJECTED)
        ceiling = min(rejected, default=math.inf)
        sustained = (rate for rate, status in statuses if status is PointStatus.SUSTAINED)
        return max((rate for rate in sustained if rate < ceiling), default=None)

    def unsustained(self, config: ServingConfig) -> float | None:
        """The lowest rate above the sustained one that was tried and not seen to be sustained."""
        sustained = self.sustained(config) or 0.0
        above = (point for point in self.of(config) if point.rate_per_s > sustained)
        return min(
            (p.rate_per_s for p in above if p.status(self.slo) is not PointStatus.SUSTAINED),
            default=None,
        )

    def below_rejected(self, config: ServingConfig) -> "Guess | None":
        """Where the capacity may be, by the lowest rejected rate; None while something else tells.

        A server that answered less than was offered settles a little below what it answered. One
        that kept up has its limit a little below that rate, by the cube root of p99.
        """
        if self.sustained(config) is not None:
            return None
        rejected = min(
            (point for point in self.of(config) if point.runs),
            key=lambda point: point.rate_per_s,
            default=None,
        )
        if rejected is None:
            return None
        served = max(served_per_s(run.measurement) for run in rejected.runs)
        if served < SATURATED * rejected.rate_per_s:
            return Guess(_SETTLES * served, saturated=True) if served > 0.0 else None
        slack = min(1.0, self.slo.p99_ms / rejected.p99_ms)
        return Guess(rejected.rate_per_s * slack**_SLACK_EXPONENT, saturated=False)

    def best_points(self) -> Iterator[OperatingPoint]:
        """The highest sustained point of each configuration that has one."""
        for config in self.configs:
            sustained = self.sustained(config)
            if sustained is not None and config not in self.load_errors:
                yield self.points[config, sustained]

    def _at(self, config: ServingConfig, rate_per_s: float) -> OperatingPoint:
        point = self.points.get((config, rate_per_s))
        if point is None:
            point = self.points[config, rate_per_s] = OperatingPoint(config, rate_per_s)
            self.configs.setdefault(config, []).append(point)
        return point


@dataclass(frozen=True, slots=True)
class Guess:
    """A rate that a configuration may sustain, by what it did at one that it did not.

    Attributes:
        saturated: it answered less than was offered there, so that it cannot do more than that.
    """

    rate_per_s: float
    saturated: bool


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """Where the model expects one configuration's capacity; equal numbers: nothing is open."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, interval: CapacityInterval, place: int) -> "CapacityEstimate":
        """That of one configuration."""
        ends = (interval.low, interval.expected, interval.high)
        return cls(*(float(rates[place]) for rates in ends))


def next_rate(
    grid: Grid,
    sustained: float | None,
    unsustained: float | None,
    estimate: CapacityEstimate,
    *,
    slack: float = 1.0,
    guess: Guess | None = None,
) -> float | None:
    """The next rate to try on the way to one configuration's capacity; None once close enough.

    Close enough is two steps of the grid, which is the policy's resolution. A wide estimate is
    halved in the logarithm, unless a rejected rate says more; a narrow one is taken, slightly
    below, but never above what a saturated server answered. Where the model expects the capacity
    below what was sustained, the slack there says how far to go on.

    Args:
        grid: rates that may be offered.
        sustained: highest rate that was sustained, if any.
        unsustained: lowest rate above it that was not, if any.
        estimate: what the model expects.
        slack: the limit over p99 at the sustained rate, >= 1.
        guess: what a rejected rate says, while none is sustained.
    """
    close = math.exp(2.0 * grid.step) * (1.0 + 1e-4)
    if sustained is not None and (
        sustained >= grid.high or (unsustained and unsustained <= sustained * close)
    ):
        return None
    if unsustained is not None and unsustained <= grid.low:
        return None
    wide = estimate.high > WIDE * estimate.low
    target = math.sqrt(estimate.low * estimate.high) if wide else estimate.expected * AIM
    if guess is not None and (wide or (guess.saturated and guess.rate_per_s < target)):
        target = guess.rate_per_s
    lowest = grid.beside(sustained, 2) if sustained is not None else grid.low
    highest = grid.beside(unsustained, -2) if unsustained is not None else grid.high
    if sustained is not None:
        highest = min(highest, sustained * _MOST_GROWTH)
        target = max(target, sustained * slack**_SLACK_EXPONENT)
    if sustained is not None and unsustained is not None and not lowest <= target <= highest:
        target = math.sqrt(sustained * unsustained)
        lowest, highest = grid.beside(sustained, 1), grid.beside(unsustained, -1)
    rate = grid.at_most(min(max(target, lowest), highest))
    return max(rate, grid.beside(sustained, 1)) if sustained is not None else rate
