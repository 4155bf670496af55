"""Chooses what to measure next, until no configuration promises more than the best one holds."""

import math
from dataclasses import dataclass

from enginegate.measuring.p99 import SequentialTest
from enginegate.search.confirmed_point import Confirmer
from enginegate.search.state import SearchState
from enginegate.search.trial_history import (
    AIM,
    CapacityEstimate,
    OperatingPoint,
    PointStatus,
    next_rate,
)
from enginegate.serving import ServingConfig

_OPTIMISM = 1.15
_FAR = 0.7
_NEAR = 1.06
_WIDE = 2.0
_BETTER = 1.5
_MOST_FAILURES = 3
_TELLING = 3
_AMBITIOUS = 1.5


@dataclass(slots=True)
class SearchStrategy:
    """The measurements before the confirmations; what these cost is kept in reserve."""

    view: SearchState
    confirmer: Confirmer
    floor_per_s: float = 0.0

    def explore(self) -> None:
        """Measure until no configuration promises more than the best one holds."""
        if self.view.bounds.objective == "latency":
            self._compare_latencies()
            return
        self._follow(self.view.configs[0], roughly=True)
        failures, again = 0, None
        while failures < _MOST_FAILURES or self._short():
            challenge = again or self._challenge(failures)
            if challenge is None:
                break
            config, rate_per_s = challenge
            leader = self.view.leader()
            probe = self._probe(config, rate_per_s)
            if probe is None and self._over():
                return
            again = None
            capped = leader is not None and leader.rate_per_s >= self.view.grid(config).high
            if probe is not None and probe.standing(self.view.slo) is PointStatus.HELD:
                self._follow(config, roughly=True)
                # Where no higher rate is asked, others can only be faster: a few are tried.
                failures = failures + 1 if capped else 0
            elif config not in self.view.known.refused:
                again = self._less(config, rate_per_s)
                failures += again is None
        self.close()

    def _short(self) -> bool:
        """Whether what is wanted is not reached yet, so that failures are no reason to stop."""
        leader = self.view.leader()
        return leader is None or leader.rate_per_s < self.view.slo.min_throughput_per_s

    def _less(self, config: ServingConfig, rate_per_s: float) -> tuple[ServingConfig, float] | None:
        """What a challenger that did not hold far more than it must is asked next."""
        leader = self.view.leader()
        if leader is None:
            return None
        needed = self._needed(leader, config)
        return (config, needed) if rate_per_s > _AMBITIOUS * needed else None

    def _needed(self, leader: OperatingPoint, config: ServingConfig) -> float:
        """What a configuration must hold to be better than the best."""
        better = self.view.value(leader) * (1.0 + self.view.bounds.resolution)
        return self.view.at_least(better * self.view.weight(config))

    def close(self) -> None:
        """Bisect the best configuration to its edge; with one rate only there is none."""
        leader = self.view.leader()
        if leader is not None and self.view.bounds.objective != "latency":
            self._follow(leader.config, roughly=False)

    def _follow(self, config: ServingConfig, *, roughly: bool) -> None:
        """Bisect one configuration to its edge; roughly: until another is the better question."""
        while config not in self.view.known.refused:
            known, grid = self.view.known, self.view.grid(config)
            held, rejected = known.held(config), known.rejected(config)
            if roughly and held is not None and self._near(config, held, rejected):
                return
            if self._hopeless():
                return
            following = next_rate(
                grid, held, rejected, self.view.guess(config), slack=self.view.slack(config)
            )
            # Asked before and no wiser: measurements contradict one another.
            asked = (config, following) in known.points
            if following is None or asked:
                return
            if self._probe(config, following) is None and self._over():
                return

    def _near(self, config: ServingConfig, held: float, rejected: float | None) -> bool:
        """Whether its edge is close, or another one's is expected far above."""
        guess, edges = self.view.guess(config), self.view.edges()
        if edges is not None and float(edges.high.max()) > _BETTER * max(guess.high, held):
            return True
        return held * _NEAR >= min(guess.expected, rejected or math.inf)

    def _probe(self, config: ServingConfig, rate_per_s: float) -> OperatingPoint | None:
        """One look, if it and the confirmations after it fit.

        None: they do not, which ends the search; or the configuration does not load; or the
        generator cannot make that rate, and the grid ends below it now. While nothing holds,
        nothing is kept for confirmations at the lowest rate: to refute it needs none.
        """
        terms, budget = self.view.prober.terms, self.view.prober.budget
        leader = self.view.leader()
        after = self.confirmer.cost_s(leader.rate_per_s if leader else rate_per_s)
        if leader is None and rate_per_s <= self.view.lowest_per_s and self.view.prober.sampled:
            after = []
        if not budget.fits(terms.bounds.measurement_s, *after):
            budget.out = True
            return None
        budget.expected = len(after) + self._outlook()
        return self.view.prober.probe(config, rate_per_s, ends=self._ends(config, rate_per_s))

    def _over(self) -> bool:
        """Whether the budget is spent, or no rate is left that the generator can make."""
        prober = self.view.prober
        cap = prober.cap_per_s
        return prober.budget.out or (cap is not None and cap <= prober.grid.low)

    def _ends(self, config: ServingConfig, rate_per_s: float) -> SequentialTest | None:
        """When a look may end early: far below the edge on any answer, near it only on a no."""
        slo = self.view.slo
        if self.view.bounds.objective == "latency":
            return None
        near = rate_per_s >= _FAR * self.view.guess(config).low
        return SequentialTest(slo.confidence, refute_only=near)

    def _outlook(self) -> int:
        """About how many looks are still to come, for people."""
        return max(2, 10 - len(self.view.prober.sampled))

    def _challenge(self, failures: int) -> tuple[ServingConfig, float] | None:
        """The most promising configuration that may beat the best, and what it must hold."""
        edges, leader = self.view.edges(), self.view.leader()
        if leader is None:
            return self._any_other(failures)
        if edges is None or self._hopeless():
            return None
        at = self.view.configs.index(leader.config)
        optimism = _OPTIMISM * max(1.0, leader.rate_per_s / float(edges.expected[at]))
        found: list[tuple[float, ServingConfig, float]] = []
        for place, config in enumerate(self.view.configs):
            rate = self._needed(leader, config)
            rejected = self.view.known.rejected(config)
            beaten = rejected is not None and rejected <= rate
            highest = min(float(edges.high[place]) * optimism, self.view.grid(config).high)
            if config == leader.config or highest < rate or beaten:
                continue
            offered = self._offer(CapacityEstimate.of(edges, place), rate, rejected)
            if (config, offered) not in self.view.known.points:
                found.append((highest / self.view.weight(config), config, offered))
        if not found:
            return None
        _, config, rate = max(found, key=lambda option: option[0])
        return config, rate

    def _offer(self, guess: CapacityEstimate, needed: float, rejected: float | None) -> float:
        """What a challenger is asked to hold: its expected edge, and never less than needed.

        One that did not hold more is asked for what is needed, which decides about it.
        """
        if rejected is not None:
            return needed
        wide = guess.high > _WIDE * max(guess.low, needed)
        aim = math.sqrt(needed * guess.high) if wide else guess.expected * AIM
        return max(needed, self.view.prober.grid.at_most(max(aim, needed)))

    def _any_other(self, failures: int) -> tuple[ServingConfig, float] | None:
        """Nothing held yet: a few of the highest predictions, then each at the lowest rate."""
        edges = self.view.edges()
        if edges is not None and failures < _MOST_FAILURES:
            unmeasured = [
                (float(edges.expected[place]), config)
                for place, config in enumerate(self.view.configs)
                if not self.view.known.of(config)
            ]
            if unmeasured:
                expected, config = max(unmeasured, key=lambda option: option[0])
                return config, self.view.prober.grid.at_most(expected * AIM)
        return self._lowest()

    def _lowest(self) -> tuple[ServingConfig, float] | None:
        """The next configuration that was not asked at the lowest rate; None when all were."""
        rate = self.view.lowest_per_s
        asked = self.view.known.points
        return next(((c, rate) for c in self.view.untried() if (c, rate) not in asked), None)

    def _compare_latencies(self) -> None:
        """The objective ``latency``: every configuration that may have the lowest p99, at one rate.

        The lowest prediction first; three in a row that are no better end it, once one has held.
        """
        rate = self.view.lowest_per_s
        failures, lowest_ms = 0, math.inf
        while failures < _MOST_FAILURES or self.view.leader() is None:
            config = self._quickest(rate, lowest_ms)
            if config is None and self.view.leader() is None:
                config, _ = self._lowest() or (None, rate)
            probe = self._probe(config, rate) if config else None
            if config in self.view.known.refused:
                continue
            if probe is None:
                return
            better = probe.p99_ms < lowest_ms * (1.0 - self.view.bounds.resolution)
            failures = 0 if better else failures + 1
            lowest_ms = min(lowest_ms, probe.p99_ms)

    def _quickest(self, rate_per_s: float, lowest_ms: float) -> ServingConfig | None:
        untried = [config for config in self.view.configs if not self.view.known.of(config)]
        if not untried or not self.view.prober.readings:
            return untried[0] if untried else None
        found_ms = self.view.model().p99_ms(untried, rate_per_s)
        place = int(found_ms.argmin())
        return untried[place] if found_ms[place] <= lowest_ms * _OPTIMISM else None

    def _hopeless(self) -> bool:
        """Whether no configuration can reach what the candidate must reach to matter."""
        edges = self.view.edges()
        if edges is None or len(self.view.prober.readings) < _TELLING:
            return False
        return float(edges.high.max()) * _OPTIMISM < self.floor_per_s
