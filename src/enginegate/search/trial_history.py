"""What is known of each configuration at each rate, and where to look for its edge next.

The edge is the highest rate at which p99 holds the SLO. It is taken for granted that p99 rises with
the rate: what held above a rate that did not is not believed. What was measured beats the model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from enginegate.evidence import Outcome
from enginegate.measurement import LatencySample
from enginegate.measuring.p99 import P99, SloDecision, decide, nearest_rank
from enginegate.policy.benchmarking import Slo
from enginegate.search.queueing import CapacityInterval
from enginegate.search.space import Grid
from enginegate.serving import ServingConfig

_LIKELY = 0.8
AIM = 0.985
_MOST_GROWTH = 3.0
_WIDE = 2.0
_SLOPE = 1.0 / 3.0


class PointStatus(Enum):
    """What a measured point is good for: to go on above it, to stay below it, or neither."""

    HELD = "held"
    UNDECIDED = "undecided"
    REJECTED = "did not hold"


@dataclass(slots=True)
class OperatingPoint:
    """One configuration at one rate, with every valid measurement there.

    Attributes:
        refuted: a confirmation did not hold, or decided nothing.
        shown: a confirmation showed that it does not hold.
    """

    config: ServingConfig
    rate_per_s: float
    runs: list[LatencySample] = field(default_factory=list)
    refuted: bool = False
    shown: bool = False
    _judged: tuple[int, SloDecision] | None = field(default=None, repr=False)
    _p99_ms: tuple[int, float] | None = field(default=None, repr=False)

    def judged(self, slo: Slo) -> SloDecision:
        """All measurements together."""
        if self._judged is None or self._judged[0] != len(self.runs):
            requests = sum(len(run.latencies_ms) for run in self.runs)
            over = sum(run.over(slo.p99_ms) for run in self.runs)
            self._judged = len(self.runs), decide(requests, over, confidence=slo.confidence)
        return self._judged[1]

    def standing(self, slo: Slo) -> PointStatus:
        """Held when no more than four fifths are over of what may be: more is seldom confirmed."""
        if self.refuted:
            return PointStatus.REJECTED
        decision = self.judged(slo)
        if decision.outcome is Outcome.FAILED:
            return PointStatus.REJECTED
        likely = decision.over <= _LIKELY * (1.0 - P99) * decision.requests
        return PointStatus.HELD if likely else PointStatus.UNDECIDED

    def fails(self, slo: Slo) -> bool:
        """Whether it is shown that the SLO does not hold here."""
        return self.shown or bool(self.runs and self.judged(slo).outcome is Outcome.FAILED)

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
        refused: configurations that did not load, with what the server said.
    """

    slo: Slo
    points: dict[tuple[ServingConfig, float], OperatingPoint] = field(default_factory=dict)
    configs: dict[ServingConfig, list[OperatingPoint]] = field(default_factory=dict)
    refused: dict[ServingConfig, str] = field(default_factory=dict)

    def add(self, sampled: LatencySample) -> OperatingPoint:
        """Pool a valid measurement with what was measured at the same point."""
        probe = self._at(sampled.measurement.config, sampled.measurement.rate_per_s)
        probe.runs.append(sampled)
        return probe

    def refute(self, config: ServingConfig, rate_per_s: float, *, shown: bool) -> None:
        """A confirmation did not hold there, whatever the search saw; shown: it was decided."""
        probe = self._at(config, rate_per_s)
        probe.refuted, probe.shown = True, probe.shown or shown

    def refuse(self, config: ServingConfig, said: str) -> None:
        """It does not load, so it is no choice any more."""
        self.refused.setdefault(config, said)

    def fails(self, config: ServingConfig, rate_per_s: float) -> bool:
        """Whether it does not load, or is shown not to hold at that rate or a lower one."""
        return config in self.refused or any(
            probe.fails(self.slo) for probe in self.of(config) if probe.rate_per_s <= rate_per_s
        )

    def of(self, config: ServingConfig) -> list[OperatingPoint]:
        """The points of one configuration, in the order they were first measured."""
        return self.configs.get(config, [])

    def held(self, config: ServingConfig) -> float | None:
        """The highest rate that held below every one that did not."""
        standings = [(probe.rate_per_s, probe.standing(self.slo)) for probe in self.of(config)]
        failed = (rate for rate, standing in standings if standing is PointStatus.REJECTED)
        ceiling = min(failed, default=math.inf)
        held = (rate for rate, standing in standings if standing is PointStatus.HELD)
        return max((rate for rate in held if rate < ceiling), default=None)

    def rejected(self, config: ServingConfig) -> float | None:
        """The lowest rate above the highest held one that was not seen to hold."""
        held = self.held(config) or 0.0
        others = (probe for probe in self.of(config) if probe.rate_per_s > held)
        return min(
            (p.rate_per_s for p in others if p.standing(self.slo) is not PointStatus.HELD),
            default=None,
        )

    def holding(self) -> Iterator[OperatingPoint]:
        """The best held point of each configuration that has one."""
        for config in self.configs:
            held = self.held(config)
            if held is not None and config not in self.refused:
                yield self.points[config, held]

    def _at(self, config: ServingConfig, rate_per_s: float) -> OperatingPoint:
        found = self.points.get((config, rate_per_s))
        if found is None:
            found = self.points[config, rate_per_s] = OperatingPoint(config, rate_per_s)
            self.configs.setdefault(config, []).append(found)
        return found


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """Where the model expects an edge; equal numbers where nothing is left open."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, edges: CapacityInterval, place: int) -> "CapacityEstimate":
        """That of one configuration."""
        return cls(float(edges.low[place]), float(edges.expected[place]), float(edges.high[place]))


def next_rate(
    grid: Grid,
    held: float | None,
    rejected: float | None,
    guess: CapacityEstimate,
    *,
    slack: float = 1.0,
) -> float | None:
    """The rate to offer next on the way to one configuration's edge; None once it is close enough.

    Close enough is two steps of the grid, which is the policy's resolution. A wide guess is halved
    in the logarithm; a narrow one is taken, slightly below, because a point at the very edge is
    neither shown to hold nor refuted. Where the model expects the edge below what held, the slack
    there says how far to go on.

    Args:
        grid: rates that may be offered.
        held: highest rate that held, if any did.
        rejected: lowest rate above it that did not, if any.
        guess: what the model expects.
        slack: the limit over p99 where it held, >= 1.
    """
    closing = math.exp(2.0 * grid.step) * (1.0 + 1e-4)
    if held is not None and (held >= grid.high or (rejected and rejected <= held * closing)):
        return None
    if rejected is not None and rejected <= grid.low:
        return None
    wide = guess.high > _WIDE * guess.low
    target = math.sqrt(guess.low * guess.high) if wide else guess.expected * AIM
    lowest = grid.beside(held, 2) if held is not None else grid.low
    highest = grid.beside(rejected, -2) if rejected is not None else grid.high
    if held is not None:
        highest = min(highest, held * _MOST_GROWTH)
        target = max(target, held * slack**_SLOPE)
    if held is not None and rejected is not None and not lowest <= target <= highest:
        target = math.sqrt(held * rejected)
        lowest, highest = grid.beside(held, 1), grid.beside(rejected, -1)
    rate = grid.at_most(min(max(target, lowest), highest))
    return max(rate, grid.beside(held, 1)) if held is not None else rate
