"""Confirms what the trials found: the best point with fresh seeds, in turns with what is live.

One trial decides nothing, it only says what to try next. A point that is refuted is stepped down
from, until one is shown to meet the SLO.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginegate.errors import NotLoadedError
from enginegate.evidence import Outcome, Rival
from enginegate.measurement import LatencySample, Percentile
from enginegate.measuring.p99 import (
    SequentialTest,
    SloDecision,
    clustering,
    decide_points,
    decide_pooled,
    lowest_refuted,
    pooled_p99,
)
from enginegate.search.queueing import QueueingModel
from enginegate.search.strategy import SearchState
from enginegate.search.trial_history import AIM, CapacityEstimate, TrialHistory, next_rate
from enginegate.search.trial_runner import Champion, TrialRunner
from enginegate.serving import ServingConfig

# Points that are confirmed at most; on a restless machine each costs seconds, and they get lower.
_MOST_POINTS = 9
# Share of a rate that was not confirmed, or that a rejected trial lets hope for, at which the last
# confirmation that fits is made: 0.9 ends without an answer twice as often, 0.7 gives away more.
_LAST_TRY = 0.8
# Where the first confirmation is the last that fits: a trial whose p99 is within this share of the
# limit is confirmed at its own rate, another at a share of it.
_CLEAR, _ONLY_TRY = 0.9, 0.9
# Requests sent beyond those that are judged: a tenth is warm-up, and arrivals vary.
_SPARE = 1.2
# Overload: a third past the answer is past every server's capacity; less than a fifth may not be.
_OVERLOAD, _LEAST_OVERLOAD = 1.35, 1.2
# Trials spent on what is live, whose capacity is only for comparison.
_CHAMPION_TRIALS = 4
# Standard deviations of a Poisson count that chance explains.
_DEVIATIONS = 3.0


@dataclass(frozen=True, slots=True)
class ConfirmedPoint:
    """The point that a search ended at; ``decision`` says whether it is confirmed.

    Attributes:
        throughput_per_s: answered a second, over all its runs together.
        p99: over all its runs together; None when that falls on a failure.
        decision: whether the SLO is shown to be met there.
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
        cls, runs: Sequence[LatencySample], decision: SloDecision, *, clustering: float = 1.0
    ) -> "ConfirmedPoint":
        """All runs of one point, with what was decided on them."""
        first = runs[0].measurement
        return cls(
            config=first.config,
            rate_per_s=first.rate_per_s,
            throughput_per_s=pooled_throughput_per_s(runs),
            p99=pooled_p99(runs),
            decision=decision,
            runs=tuple(runs),
            clustering=clustering,
        )


def pooled_throughput_per_s(runs: Sequence[LatencySample]) -> float:
    """Rate that was sent, times the share that was answered.

    The rate asked for where random arrivals alone explain the difference, so that chance does not
    decide a floor; else what was really sent.
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
class Overload:
    """What became of throughput past the answer. Rates in requests/s."""

    rate_per_s: float
    throughput_per_s: float
    failed_share: float


@dataclass(slots=True)
class Confirmation:
    """The confirmations of one search; with a champion, in turns with it.

    Attributes:
        unusable: some confirming measurement was invalid, and so was its repetition.
        cautious: the last confirmation was made far below what may be sustained, for the budget.
    """

    state: SearchState
    champion: Champion | None = None
    unusable: bool = False
    cautious: bool = False
    _live_runs: list[LatencySample] = field(default_factory=list)
    _live: TrialRunner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.champion is not None:
            settings, budget = self.state.runner.settings, self.state.runner.budget
            history = TrialHistory(settings.slo)
            self._live = TrialRunner(self.champion.measure, settings, budget, history)

    def durations_s(self, rate_per_s: float) -> list[float]:
        """Of everything that one more confirmed answer takes; the last is the one past it."""
        count = self.state.slo.confirmations * (2 if self.champion else 1)
        return [self._duration_s(rate_per_s)] * count + [self.state.bounds.measurement_s]

    def _duration_s(self, rate_per_s: float) -> float:
        """Of one confirmation: long enough for its share of the requests, warm-up on top."""
        share = self.state.slo.confirm_requests / self.state.slo.confirmations
        return max(self.state.bounds.measurement_s, _SPARE * share / rate_per_s)

    def confirm_best(self, follow_leader: Callable[[], None]) -> ConfirmedPoint | None:
        """The best point that is confirmed; else the best undecided, else the last refuted.

        Args:
            follow_leader: finds the capacity of the configuration that is the best by now.
        """
        state, budget = self.state, self.state.runner.budget
        undecided: ConfirmedPoint | None = None
        refuted: ConfirmedPoint | None = None
        for _ in range(_MOST_POINTS):
            point = self._next_point()
            if point is None:
                break
            config, rate_per_s = point
            once_s = self.durations_s(rate_per_s)[:-1]
            if not budget.fits(*once_s):
                budget.exhausted = True
                break
            is_last = not budget.fits(*once_s, *once_s)
            result = self._confirm(config, rate_per_s, is_last=is_last)
            outcome = result.decision.outcome if result else None
            if outcome is Outcome.PASSED:
                return result
            state.history.reject(config, rate_per_s, refuted=outcome is Outcome.FAILED)
            leader = state.leader()
            if leader is not None and leader.config != config:
                follow_leader()
            if result is None:
                continue
            if outcome is Outcome.FAILED:
                refuted = result
                continue
            undecided = undecided or result
            if result.decision.over == 0:
                # A lower rate sends even fewer requests, so it cannot decide either.
                break
        return undecided or refuted or self._unconfirmed()

    def _unconfirmed(self) -> ConfirmedPoint | None:
        """The best point that the trials saw, when nothing could be confirmed in the budget."""
        leader = self.state.leader()
        if leader is None or not leader.runs:
            return None
        decision = leader.decision(self.state.slo)
        return ConfirmedPoint.of(leader.runs, _with_outcome(decision, Outcome.INCONCLUSIVE))

    def _next_point(self) -> tuple[ServingConfig, float] | None:
        """What to confirm next: the best sustained point, or one resolution below a refuted one.

        With the objective ``latency``, the sustained point of the lowest p99, at the one rate.
        """
        state, history = self.state, self.state.history
        if state.bounds.objective == "latency":
            points = (p for p in history.best_points() if p.rate_per_s == state.lowest_per_s)
            quickest = min(points, key=lambda point: point.p99_ms, default=None)
            return (quickest.config, quickest.rate_per_s) if quickest else None
        options: list[tuple[float, float, ServingConfig, float]] = []
        for config in history.configs:
            if config in history.load_errors:
                continue
            highest, sustained = state.grid(config).high, history.sustained(config)
            rate, p99_ms = None, math.inf
            if sustained is not None:
                rate, p99_ms = min(sustained, highest), history.points[config, sustained].p99_ms
            unconfirmed = (p.rate_per_s for p in history.of(config) if p.unconfirmed)
            rejected = min(unconfirmed, default=None)
            if rejected is not None:
                lower = min(self._below(config, rejected), highest)
                if (rate or 0.0) < lower < rejected:
                    rate, p99_ms = lower, state.slo.p99_ms
            elif rate is None and state.runner.budget.exhausted:
                rate = self._hoped_for(config)
            if rate is not None:
                options.append((state.value(config, rate), -p99_ms, config, rate))
        if not options:
            return None
        _, _, config, rate = max(options, key=lambda option: option[:2])
        return config, self._cautious_at_last(config, rate)

    def _hoped_for(self, config: ServingConfig) -> float | None:
        """A rate for a configuration of which nothing is sustained, once no trial fits any more."""
        guess = self.state.history.below_rejected(config)
        grid = self.state.runner.grid
        if guess is None or self.state.history.fails(config, grid.low):
            return None
        self.cautious = True
        return grid.at_most(_LAST_TRY * guess.rate_per_s)

    def _cautious_at_last(self, config: ServingConfig, rate_per_s: float) -> float:
        """The rate, or one that is likelier to be confirmed if this is the last that fits."""
        state, points = self.state, self.state.history.points
        once = self.durations_s(rate_per_s)[:-1]
        if state.runner.budget.fits(*once, *once):
            return rate_per_s
        unconfirmed = [p for p in points.values() if p.unconfirmed]
        rejected = min((p.rate_per_s for p in unconfirmed if p.config == config), default=None)
        if rejected is not None:
            rate_per_s, share = min(rate_per_s, rejected), _LAST_TRY
        elif unconfirmed:
            share = _LAST_TRY
        elif (tried := points.get((config, rate_per_s))) and tried.runs:
            share = 1.0 if tried.p99_ms <= _CLEAR * state.slo.p99_ms else _ONLY_TRY
        else:
            return rate_per_s
        self.cautious = self.cautious or share < 1.0
        return state.runner.grid.at_most(share * rate_per_s)

    def _below(self, config: ServingConfig, rejected: float) -> float:
        """One resolution below a rejected rate; further each time, and where less was served."""
        times = sum(point.unconfirmed for point in self.state.history.points.values())
        served_per_s = min(
            (
                sample.measurement.throughput_per_s
                for sample in self.state.runner.samples
                if sample.measurement.config == config and sample.measurement.rate_per_s == rejected
            ),
            default=rejected,
        )
        grid = self.state.runner.grid
        stepped = grid.beside(rejected, -max(2, 2 ** (times - 1)))
        return min(stepped, grid.at_most(served_per_s * AIM))

    def _confirm(
        self, config: ServingConfig, rate_per_s: float, *, is_last: bool
    ) -> ConfirmedPoint | None:
        """Measure with fresh seeds and decide; if that is close, add what decides, once.

        None if nothing was usable. Each of the two decisions has the policy's confidence by itself.
        What is added leaves time to confirm a lower rate, unless there is none anyway.
        """
        self._live_runs = []
        slo = self.state.slo
        runs = self._runs(config, rate_per_s, range(slo.confirmations))
        if len(runs) == slo.confirmations:
            missing = self._missing(runs)
            once_s = self.durations_s(rate_per_s)[:-1]
            if is_last or self.state.runner.budget.fits(*once_s[:1] * missing, *once_s):
                more = slo.confirmations + missing
                runs += self._runs(config, rate_per_s, range(slo.confirmations, more))
        if not runs:
            return None
        decision = decide_pooled(runs, slo)
        few = len(runs) < slo.confirmations or decision.requests < slo.confirm_requests
        if decide_pooled(runs[-1:], slo).outcome is Outcome.FAILED:
            # One refuted measurement refutes all.
            decision = _with_outcome(decision, Outcome.FAILED)
        elif decision.outcome is Outcome.PASSED and few:
            decision = _with_outcome(decision, Outcome.INCONCLUSIVE)
        return ConfirmedPoint.of(runs, decision, clustering=clustering(runs, slo.p99_ms))

    def _runs(self, config: ServingConfig, rate_per_s: float, turns: range) -> list[LatencySample]:
        """Valid measurements, up to the first that is refuted, or to the end of the budget.

        An invalid one is repeated once; if that is invalid too, this rate is given up.
        """
        runs: list[LatencySample] = []
        for turn in turns:
            sample = self._run(config, rate_per_s, f"confirm {turn}")
            if sample is not None and sample.measurement.invalid:
                sample = self._run(config, rate_per_s, f"confirm {turn} again")
            if sample is None or sample.measurement.invalid:
                self.unusable = self.unusable or sample is not None
                break
            runs.append(sample)
            if decide_pooled([sample], self.state.slo).outcome is Outcome.FAILED:
                break
        return runs

    def _run(self, config: ServingConfig, rate_per_s: float, attempt: str) -> LatencySample | None:
        """One confirmation, the champion first under the same arrivals.

        None: it does not fit, or does not load any more.
        """
        runner, duration_s = self.state.runner, self._duration_s(rate_per_s)
        if not runner.budget.fits(*[duration_s] * (2 if self.champion else 1)):
            runner.budget.exhausted = True
            return None
        load = runner.load(config, rate_per_s, attempt, duration_s)
        if self.champion is not None and self._live is not None:
            live = self._live.run("champion", self.champion.config, load)
            if not live.measurement.invalid:
                self._live_runs.append(live)
                self._live.history.add(live)
        try:
            return runner.run("confirm", config, load)
        except NotLoadedError:
            return None

    def _missing(self, runs: list[LatencySample]) -> int:
        """How many runs more would probably decide; 0 when decided, or hopeless."""
        slo = self.state.slo
        decision = decide_pooled(runs, slo)
        wanted = max(decision.needed or 0, slo.confirm_requests)
        refuted = decide_pooled(runs[-1:], slo).outcome is Outcome.FAILED
        if refuted or wanted > 2 * decision.requests:
            return 0
        return max(0, math.ceil(len(runs) * (wanted / decision.requests - 1.0)))

    def overload(self, confirmed: ConfirmedPoint) -> Overload | None:
        """Offer a third more than was confirmed; None when that cannot be offered."""
        runner, duration_s = self.state.runner, self.state.bounds.measurement_s
        rate = min(_OVERLOAD * confirmed.rate_per_s, runner.grid.high)
        if rate < _LEAST_OVERLOAD * confirmed.rate_per_s or not runner.budget.fits(duration_s):
            return None
        load = runner.load(confirmed.config, rate, "overload", duration_s)
        sample = runner.run("overload", confirmed.config, load)
        measurement = sample.measurement
        if measurement.invalid:
            return None
        runner.history.add(sample)
        answered = max(1, measurement.completed + measurement.failed)
        return Overload(
            measurement.rate_per_s, measurement.throughput_per_s, measurement.failed / answered
        )

    def rival(self, confirmed: ConfirmedPoint) -> Rival | None:
        """The champion at the same rate, turn by turn; None when there is none."""
        if self.champion is None or self._live is None or not self._live_runs:
            return None
        theirs = _p99s_ms(self._live_runs)
        config, rate_per_s = self.champion.config, confirmed.rate_per_s
        sustained_per_s = self._champion_rate(self._live, config, rate_per_s)
        points = decide_points(self._live.samples, self.state.slo)
        return Rival(
            release=self.champion.release,
            rate_per_s=rate_per_s,
            candidate_p99_ms=_p99s_ms(confirmed.runs),
            champion_p99_ms=theirs,
            noise_ms=max(theirs) - min(theirs),
            champion_throughput_per_s=sustained_per_s,
            champion_rejected_per_s=lowest_refuted(points, config),
        )

    def _champion_rate(self, live: TrialRunner, config: ServingConfig, rate_per_s: float) -> float:
        """The highest rate up to the confirmed one that the champion sustains; 0: none seen."""
        slo, history = self.state.slo, live.history
        for _ in range(_CHAMPION_TRIALS):
            sustained, unsustained = history.sustained(config), history.unsustained(config)
            if sustained is not None and sustained >= rate_per_s:
                break
            if not live.service_times or not live.budget.fits(self.state.bounds.measurement_s):
                break
            capacity = QueueingModel.fit(live.service_times).capacity([config], slo.p99_ms)
            estimate = CapacityEstimate.of(capacity, 0)
            following = next_rate(live.grid, sustained, unsustained, estimate)
            test = SequentialTest(slo.confidence, refute_only=True)
            if following is None or live.trial(config, following, ends=test) is None:
                break
        return history.sustained(config) or 0.0


def _with_outcome(decision: SloDecision, outcome: Outcome) -> SloDecision:
    return SloDecision(outcome, decision.requests, decision.over, decision.needed)


def _p99s_ms(runs: Sequence[LatencySample]) -> tuple[float, ...]:
    """Of each run; one that falls on a failure is as long as the run lasted."""
    p99s = ((run.measurement.p99, run.measurement.load.duration_s) for run in runs)
    return tuple(p99.value_ms if p99 else duration_s * 1e3 for p99, duration_s in p99s)
