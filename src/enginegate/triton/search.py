"""Finds the configuration that holds the SLO at the highest rate, then proves it.

First each configuration is offered rising rates, starting above the best one so far: it cannot win
otherwise. At the highest rate all are measured, and the lowest p99 wins. Then the best is measured
again with fresh seeds and judged by `slo.decide`; if it does not hold, the next best point is. One
measurement decides nothing, it only says what to try next. The order is fixed, so the same policy
asks the same questions. Not in scope: how a measurement is made (this file sends nothing), and the
words for people (findings.py).
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from enginegate.evidence import Finding, Load, Measurement, Outcome, Percentile, ServingConfig
from enginegate.policy import Search, Slo
from enginegate.triton.findings import Best, Found, slo_findings
from enginegate.triton.measure import Sampled, percentiles
from enginegate.triton.slo import P99, SloDecision, decide

Measure: TypeAlias = Callable[[ServingConfig, Load], Sampled]

_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """One measurement further."""

    step: Literal["search", "confirm"]
    done: int
    spent_s: float
    budget_s: float
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was found.

    Attributes:
        measurements: all, in the order they were made.
        chosen: the configuration that was confirmed; None if none was.
        throughput_at_slo_per_s: requests a second it was confirmed at; 0 if none was.
        p99: over all its confirming measurements together.
        findings: of the gates ``p99_ms`` and ``throughput``.
    """

    measurements: tuple[Measurement, ...]
    chosen: ServingConfig | None
    throughput_at_slo_per_s: float
    p99: Percentile | None
    findings: tuple[Finding, ...]

    @property
    def confirmed(self) -> bool:
        """Whether a configuration was shown to hold the SLO."""
        return self.chosen is not None


def search(
    measure: Measure,
    bounds: Search,
    slo: Slo,
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Progress], None] = lambda _: None,
) -> SearchResult:
    """Find and confirm the best configuration within the budget.

    Args:
        measure: serves a configuration under a load; its errors end the search.
        bounds: what to try, and how many seconds may be spent.
        slo: what must hold.
        clock: seconds, monotonic.
        progress: called after each measurement.

    Raises:
        ServerError: from ``measure``: the server died, or a model does not load.
    """
    run = _Run(measure, bounds, slo, clock, progress)
    run.climb()
    best = run.confirm()
    found = Found(
        best=best,
        measured=tuple(run.sampled),
        out_of_budget=run.out_of_budget,
        unusable=run.unusable,
    )
    confirmed = best is not None and best.decision.outcome is Outcome.PASSED
    return SearchResult(
        measurements=tuple(sampled.measurement for sampled in run.sampled),
        chosen=best.config if best and confirmed else None,
        throughput_at_slo_per_s=best.throughput_per_s if best and confirmed else 0.0,
        p99=best.p99 if best and confirmed else None,
        findings=slo_findings(found, bounds, slo),
    )


def configurations(bounds: Search) -> tuple[ServingConfig, ...]:
    """Everything to try: large batches first, and instances vary fastest."""
    sizes = sorted(set(bounds.max_batch_sizes), reverse=True)
    axes = itertools.product(sizes, dict.fromkeys(bounds.queue_delays_us), bounds.instances)
    return tuple(
        ServingConfig(max_batch_size=size, max_queue_delay_us=delay_us, instances=instances)
        for size, delay_us, instances in dict.fromkeys(axes)
    )


@dataclass(slots=True)
class _Run:
    measure: Measure
    bounds: Search
    slo: Slo
    clock: Callable[[], float]
    progress: Callable[[Progress], None]
    sampled: list[Sampled] = field(default_factory=list)
    held: dict[ServingConfig, int] = field(default_factory=dict)
    out_of_budget: bool = False
    unusable: bool = False
    started_s: float = field(init=False)
    seeds: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.seeds = itertools.count(self.bounds.seed + 1)

    def climb(self) -> None:
        """Fill ``held``: the highest rate (its place in the list) each configuration held."""
        rates = self.bounds.rates_per_s
        for config in configurations(self.bounds):
            first = min(max(self.held.values(), default=-1) + 1, len(rates) - 1)
            for place in range(first, len(rates)):
                if not self._affordable(1 + self.slo.confirmations):
                    self.out_of_budget = True
                    return
                if not self._holds(config, rates[place]):
                    break
                self.held[config] = place

    def confirm(self) -> Best | None:
        """The best point that is shown to hold; else the best undecided, else the last refuted."""
        undecided: Best | None = None
        refuted: Best | None = None
        for config, rate_per_s in self._points():
            best = self._prove(config, rate_per_s)
            if best is None and self.out_of_budget:
                break
            if best is None:
                continue
            if best.decision.outcome is Outcome.PASSED:
                return best
            if best.decision.outcome is Outcome.FAILED:
                refuted = best
                continue
            undecided = undecided or best
            if best.decision.over == 0:
                # A lower rate sends even fewer requests, so it cannot decide either.
                break
        return undecided or refuted

    def _points(self) -> list[tuple[ServingConfig, float]]:
        """Every point that held or lies below one that did, highest rate first, then lowest p99."""
        measured = {(s.measurement.config, s.measurement.load.rate_per_s): s for s in self.sampled}
        points = [
            (config, rate_per_s)
            for config, place in self.held.items()
            for rate_per_s in self.bounds.rates_per_s[: place + 1]
        ]

        def rank(point: tuple[ServingConfig, float]) -> tuple[float, float]:
            known = measured.get(point)
            p99 = known.measurement.percentile(P99) if known else None
            return -point[1], p99.value_ms if p99 else np.inf

        return sorted(points, key=rank)

    def _prove(self, config: ServingConfig, rate_per_s: float) -> Best | None:
        """Measure with fresh seeds and look; if undecided but close, as often again and look again.

        None if nothing was usable. Each of the two looks has the policy's confidence by itself.
        """
        kept: list[Sampled] = []
        wanted = self.slo.confirmations
        for runs in itertools.count():
            if runs >= wanted:
                if wanted > self.slo.confirmations or not self._worth_more(kept):
                    break
                wanted *= 2
            if not self._affordable(1):
                self.out_of_budget = True
                break
            sampled = self._one("confirm", config, rate_per_s, next(self.seeds))
            if sampled.measurement.invalid:
                self.unusable = True
                continue
            kept.append(sampled)
            if self._judge([sampled]).outcome is Outcome.FAILED:
                break
        return self._best(kept) if kept else None

    def _worth_more(self, kept: list[Sampled]) -> bool:
        """Whether as many measurements again would probably decide."""
        if len(kept) < self.slo.confirmations:
            return True
        decision = self._judge(kept)
        return decision.needed is not None and decision.needed <= 2 * decision.requests

    def _best(self, kept: list[Sampled]) -> Best:
        """The pooled judgement; one refuted measurement refutes all, too few cannot pass."""
        pooled, single = self._judge(kept), self._judge(kept[-1:])
        outcome = Outcome.FAILED if single.outcome is Outcome.FAILED else pooled.outcome
        if outcome is Outcome.PASSED and len(kept) < self.slo.confirmations:
            outcome = Outcome.INCONCLUSIVE
        latencies_ms = np.concatenate([sampled.latencies_ms for sampled in kept])
        first = kept[0].measurement
        answered = float(np.isfinite(latencies_ms).mean())
        return Best(
            config=first.config,
            rate_per_s=first.load.rate_per_s,
            throughput_per_s=first.load.rate_per_s * answered,
            p99=next((p for p in percentiles(latencies_ms) if p.quantile == P99), None),
            decision=SloDecision(outcome, pooled.requests, pooled.over, pooled.needed),
            runs=tuple(kept),
        )

    def _holds(self, config: ServingConfig, rate_per_s: float) -> bool:
        """Whether one measurement stays within the SLO; a void one is repeated once."""
        seed = self.bounds.seed
        for _ in range(_ATTEMPTS):
            sampled = self._one("search", config, rate_per_s, seed)
            if not sampled.measurement.invalid:
                over = sampled.over(self.slo.p99_ms)
                return over <= (1.0 - P99) * len(sampled.latencies_ms)
            if not self._affordable(1 + self.slo.confirmations):
                break
            seed = next(self.seeds)
        self.unusable = True
        return False

    def _judge(self, kept: list[Sampled]) -> SloDecision:
        requests = sum(len(sampled.latencies_ms) for sampled in kept)
        over = sum(sampled.over(self.slo.p99_ms) for sampled in kept)
        return decide(requests, over, confidence=self.slo.confidence)

    def _one(
        self, step: Literal["search", "confirm"], config: ServingConfig, rate: float, seed: int
    ) -> Sampled:
        load = Load(rate_per_s=rate, duration_s=self.bounds.measurement_s, seed=seed)
        sampled = self.measure(config, load)
        self.sampled.append(sampled)
        spent_s = self.clock() - self.started_s
        self.progress(
            Progress(step, len(self.sampled), spent_s, self.bounds.budget_s, sampled.measurement)
        )
        return sampled

    def _affordable(self, count: int) -> bool:
        """Whether so many more measurements fit the budget, at what they have cost so far."""
        spent_s = self.clock() - self.started_s
        each_s = max(self.bounds.measurement_s, spent_s / max(len(self.sampled), 1))
        return spent_s + count * each_s <= self.bounds.budget_s
