"""Proves one point with fresh seeds, in turns with what is live, and looks just past it."""

import math
from dataclasses import dataclass, field

import numpy as np

from enginegate.errors import NotLoadedError
from enginegate.evidence import Outcome, Rival
from enginegate.measurement import LatencySample, Percentile
from enginegate.measuring.p99 import (
    P99,
    SequentialTest,
    SloDecision,
    clustering,
    decide_pooled,
    pooled_p99,
)
from enginegate.search.queueing import QueueingModel
from enginegate.search.trial_history import CapacityEstimate, TrialHistory, next_rate
from enginegate.search.trial_runner import Champion, TrialRunner
from enginegate.serving import ServingConfig

_SPARE = 1.2
_PAST, _LEAST_PAST = 1.35, 1.2
_CHAMPION_PROBES = 4
_DEVIATIONS = 3.0


def pooled_throughput_per_s(runs: list[LatencySample]) -> float:
    """Rate that was sent, times the share that was answered.

    The rate asked for where random arrivals alone explain the difference (three standard deviations
    of a Poisson count), so that chance does not decide a floor; else what was really sent.
    """
    latencies_ms = np.concatenate([run.latencies_ms for run in runs])
    answered = float(np.isfinite(latencies_ms).mean())
    asked_per_s = runs[0].measurement.rate_per_s
    lasted_s = sum(run.measurement.sent_for_s for run in runs)
    sent = sum(run.measurement.sent for run in runs)
    by_chance = _DEVIATIONS * math.sqrt(asked_per_s * lasted_s)
    if lasted_s <= 0.0 or abs(sent - asked_per_s * lasted_s) <= by_chance:
        return asked_per_s * answered
    return sent / lasted_s * answered


@dataclass(frozen=True, slots=True)
class ConfirmedPoint:
    """The point that a search ended at.

    Attributes:
        throughput_per_s: answered a second, over all its runs together.
        p99: over all its runs together; None when that falls on a failure.
        decision: whether the SLO is shown to hold there.
        clustering: by how much less its requests count, because neighbours are alike.
    """

    config: ServingConfig
    rate_per_s: float
    throughput_per_s: float
    p99: Percentile | None
    decision: SloDecision
    runs: tuple[LatencySample, ...]
    clustering: float = 1.0

    @classmethod
    def of(
        cls,
        runs: list[LatencySample],
        outcome: Outcome,
        decision: SloDecision,
        *,
        clustering: float = 1.0,
    ) -> "ConfirmedPoint":
        """All runs together, with the outcome that their judge came to."""
        first = runs[0].measurement
        return cls(
            config=first.config,
            rate_per_s=first.rate_per_s,
            throughput_per_s=pooled_throughput_per_s(runs),
            p99=pooled_p99(runs),
            decision=SloDecision(outcome, decision.requests, decision.over, decision.needed),
            runs=tuple(runs),
            clustering=clustering,
        )


@dataclass(frozen=True, slots=True)
class Overload:
    """What became of throughput just past the answer. Rates in requests/s."""

    rate_per_s: float
    throughput_per_s: float
    failed_share: float


@dataclass(slots=True)
class Confirmer:
    """Confirms points of one engine; with a champion, in turns with it.

    Attributes:
        turns: p99 (ms) of the champion at each confirmed rate, one for each turn.
        unusable: some confirming measurement was void.
    """

    prober: TrialRunner
    champion: Champion | None = None
    turns: list[LatencySample] = field(default_factory=list)
    unusable: bool = False
    opponent: TrialRunner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.champion is not None:
            terms = self.prober.terms
            self.opponent = TrialRunner(
                self.champion.measure, terms, self.prober.budget, TrialHistory(terms.slo)
            )

    @property
    def in_a_turn(self) -> int:
        """Measurements of one turn."""
        return 2 if self.champion else 1

    def duration_s(self, rate_per_s: float) -> float:
        """How long one confirmation lasts: its share of the requests, warm-up on top."""
        slo, bounds = self.prober.terms.slo, self.prober.terms.bounds
        share = slo.confirm_requests / slo.confirmations
        return max(bounds.measurement_s, _SPARE * share / rate_per_s)

    def cost_s(self, rate_per_s: float) -> list[float]:
        """Durations of everything that one more confirmed answer takes."""
        count = self.prober.terms.slo.confirmations * self.in_a_turn
        return [self.duration_s(rate_per_s)] * count + [self.prober.terms.bounds.measurement_s]

    def confirm(self, config: ServingConfig, rate_per_s: float) -> ConfirmedPoint | None:
        """Measure with fresh seeds and look; if undecided but close, add what decides, look again.

        None if nothing was usable. Each of the two looks has the policy's confidence by itself.
        """
        self.turns = []
        wanted = self.prober.terms.slo.confirmations
        kept = self._turns(config, rate_per_s, range(wanted))
        if len(kept) == wanted:
            kept += self._turns(config, rate_per_s, range(wanted, wanted + self._missing(kept)))
        return self._best(kept) if kept else None

    def _turns(self, config: ServingConfig, rate_per_s: float, turns: range) -> list[LatencySample]:
        """Valid measurements, up to the first that is refuted, or to the end of the budget.

        A void one is repeated once; if that is void too, this rate is given up.
        """
        kept: list[LatencySample] = []
        for turn in turns:
            sampled = self._turn(config, rate_per_s, f"confirm {turn}")
            if sampled is not None and sampled.measurement.invalid:
                sampled = self._turn(config, rate_per_s, f"confirm {turn} again")
            if sampled is None or sampled.measurement.invalid:
                self.unusable = self.unusable or sampled is not None
                break
            kept.append(sampled)
            if decide_pooled([sampled], self.prober.terms.slo).outcome is Outcome.FAILED:
                break
        return kept

    def _missing(self, kept: list[LatencySample]) -> int:
        """How many turns more would probably decide; 0 when decided, or hopeless."""
        slo = self.prober.terms.slo
        decision = decide_pooled(kept, slo)
        wanted = max(decision.needed or 0, slo.confirm_requests)
        if (
            decide_pooled(kept[-1:], slo).outcome is Outcome.FAILED
            or wanted > 2 * decision.requests
        ):
            return 0
        return max(0, math.ceil(len(kept) * (wanted / decision.requests - 1.0)))

    def overload(self, best: ConfirmedPoint) -> Overload | None:
        """Offer a third more than was confirmed; None when that cannot be offered."""
        rate = min(_PAST * best.rate_per_s, self.prober.grid.high)
        duration_s = self.prober.terms.bounds.measurement_s
        if rate < _LEAST_PAST * best.rate_per_s or not self.prober.budget.fits(duration_s):
            return None
        load = self.prober.load(best.config, rate, "overload", duration_s)
        sampled = self.prober.take("overload", best.config, load)
        found = sampled.measurement
        if found.invalid:
            return None
        self.prober.known.add(sampled)
        asked = max(1, found.completed + found.failed)
        return Overload(found.rate_per_s, found.throughput_per_s, found.failed / asked)

    def rival(self, best: ConfirmedPoint) -> Rival | None:
        """The champion at the same rate, turn by turn; None when there is none."""
        if self.champion is None or not self.turns:
            return None
        ours, theirs = _p99s(list(best.runs)), _p99s(self.turns)
        return Rival(
            release=self.champion.release,
            rate_per_s=best.rate_per_s,
            candidate_p99_ms=ours,
            champion_p99_ms=theirs,
            noise_ms=max(theirs) - min(theirs),
            champion_throughput_per_s=self._champion_rate(best.rate_per_s),
        )

    def _turn(self, config: ServingConfig, rate_per_s: float, attempt: str) -> LatencySample | None:
        """One confirmation, the champion first under the same arrivals.

        None: it does not fit, or does not load any more.
        """
        prober, duration_s = self.prober, self.duration_s(rate_per_s)
        if not prober.budget.fits(*[duration_s] * self.in_a_turn):
            prober.budget.out = True
            return None
        load = prober.load(config, rate_per_s, attempt, duration_s)
        if self.champion is not None and self.opponent is not None:
            live = self.opponent.take("champion", self.champion.config, load)
            if not live.measurement.invalid:
                self.turns.append(live)
                self.opponent.known.add(live)
        try:
            return prober.take("confirm", config, load)
        except NotLoadedError:
            return None

    def _champion_rate(self, rate_per_s: float) -> float:
        """The highest rate up to ``rate_per_s`` at which the champion held; 0: none seen."""
        if self.champion is None or self.opponent is None:
            return 0.0
        opponent, config = self.opponent, self.champion.config
        for _ in range(_CHAMPION_PROBES):
            held, rejected = opponent.known.held(config), opponent.known.rejected(config)
            if held is not None and held >= rate_per_s:
                break
            if not opponent.readings or not opponent.budget.fits(
                opponent.terms.bounds.measurement_s
            ):
                break
            edges = QueueingModel.fit(opponent.readings).edges([config], opponent.terms.slo.p99_ms)
            following = next_rate(opponent.grid, held, rejected, CapacityEstimate.of(edges, 0))
            if (
                following is None
                or opponent.probe(
                    config,
                    following,
                    ends=SequentialTest(opponent.terms.slo.confidence, refute_only=True),
                )
                is None
            ):
                break
        return opponent.known.held(config) or 0.0

    def _best(self, kept: list[LatencySample]) -> ConfirmedPoint:
        """The pooled judgement; one refuted measurement refutes all, too few cannot pass."""
        slo = self.prober.terms.slo
        pooled = decide_pooled(kept, slo)
        outcome = pooled.outcome
        if decide_pooled(kept[-1:], slo).outcome is Outcome.FAILED:
            outcome = Outcome.FAILED
        few = len(kept) < slo.confirmations or pooled.requests < slo.confirm_requests
        if outcome is Outcome.PASSED and few:
            outcome = Outcome.INCONCLUSIVE
        alike = clustering(kept, slo.p99_ms)
        return ConfirmedPoint.of(kept, outcome, pooled, clustering=alike)


def _p99s(runs: list[LatencySample]) -> tuple[float, ...]:
    """Of each run, in ms; one that falls on a failure is as long as the run lasted."""
    found = []
    for run in runs:
        p99 = run.measurement.percentile(P99)
        load = run.measurement.load
        found.append(p99.value_ms if p99 else load.duration_s * 1e3)
    return tuple(found)
