"""Which points are confirmed, and in which order: the best first, then what lies below it."""

import math
from dataclasses import dataclass

from enginegate.evidence import Outcome
from enginegate.search.confirmed_point import ConfirmedPoint, Confirmer
from enginegate.search.state import SearchState
from enginegate.search.strategy import SearchStrategy
from enginegate.search.trial_history import AIM, OperatingPoint
from enginegate.serving import ServingConfig

_MOST_POINTS = 9


@dataclass(slots=True)
class Confirmation:
    """The confirmations of one search."""

    view: SearchState
    confirmer: Confirmer
    hunt: SearchStrategy

    def prove(self) -> ConfirmedPoint | None:
        """The best point that is shown to hold; else the best undecided, else the last refuted."""
        undecided: ConfirmedPoint | None = None
        refuted: ConfirmedPoint | None = None
        for _ in range(_MOST_POINTS):
            point = self._next_point()
            if point is None:
                break
            config, rate_per_s = point
            if not self._fits(rate_per_s):
                break
            best = self.confirmer.confirm(config, rate_per_s)
            if best is not None and best.decision.outcome is Outcome.PASSED:
                return best
            failed = best is not None and best.decision.outcome is Outcome.FAILED
            self.view.known.refute(config, rate_per_s, shown=failed)
            self._look_again(config)
            if best is None:
                continue
            if best.decision.outcome is Outcome.FAILED:
                refuted = best
                continue
            undecided = undecided or best
            if best.decision.over == 0 or self.view.prober.budget.out:
                # A lower rate sends even fewer requests, so it cannot decide either.
                break
        return undecided or refuted or self._unconfirmed()

    def _look_again(self, refuted: ServingConfig) -> None:
        """Where another configuration is the best now, find its edge before confirming it."""
        leader = self.view.leader()
        if leader is not None and leader.config != refuted:
            self.hunt.close()

    def _next_point(self) -> tuple[ServingConfig, float] | None:
        """What to confirm next: the best held point, or one resolution below a refuted one.

        With the objective ``latency``, the held point of the lowest p99, at the one rate.
        """
        if self.view.bounds.objective == "latency":
            quickest = self._quickest(self.view.lowest_per_s)
            return (quickest.config, quickest.rate_per_s) if quickest else None
        known, slo = self.view.known, self.view.slo
        found: list[tuple[float, float, ServingConfig, float]] = []
        for config in known.configs:
            if config in known.refused:
                continue
            refuted = min((p.rate_per_s for p in known.of(config) if p.refuted), default=None)
            held = known.held(config)
            p99_ms = known.points[config, held].p99_ms if held is not None else math.inf
            rate = min(held, self.view.grid(config).high) if held is not None else None
            if refuted is not None:
                stepped = min(self._below(config, refuted), self.view.grid(config).high)
                if stepped < refuted and stepped > (rate or 0.0):
                    rate, p99_ms = stepped, slo.p99_ms
            if rate is not None:
                value = rate / self.view.weight(config)
                found.append((value, -p99_ms, config, rate))
        if not found:
            return None
        _, _, config, rate = max(found, key=lambda option: option[:2])
        return config, rate

    def _quickest(self, rate_per_s: float) -> OperatingPoint | None:
        held = (p for p in self.view.known.holding() if p.rate_per_s == rate_per_s)
        return min(held, key=lambda probe: probe.p99_ms, default=None)

    def _below(self, config: ServingConfig, refuted: float) -> float:
        """One resolution below a refuted rate; further each time, and where less was served."""
        times = sum(probe.refuted for probe in self.view.known.points.values())
        runs = [
            run.measurement
            for run in self.view.prober.sampled
            if (run.measurement.config, run.measurement.rate_per_s) == (config, refuted)
        ]
        served = min((run.throughput_per_s for run in runs), default=refuted)
        grid = self.view.prober.grid
        return min(grid.beside(refuted, -max(2, 2 ** (times - 1))), grid.at_most(served * AIM))

    def _unconfirmed(self) -> ConfirmedPoint | None:
        """The best point that the search saw, when nothing could be confirmed in the budget."""
        leader = self.view.leader()
        if leader is None or not leader.runs:
            return None
        return ConfirmedPoint.of(leader.runs, Outcome.INCONCLUSIVE, leader.judged(self.view.slo))

    def _fits(self, rate_per_s: float) -> bool:
        """Whether the confirmations at that rate fit; if not, the budget has ended the search."""
        fits = self.view.prober.budget.fits(*self.confirmer.cost_s(rate_per_s)[:-1])
        self.view.prober.budget.out = self.view.prober.budget.out or not fits
        return fits
