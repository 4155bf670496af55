"""Chooses which configuration to try next, and at which rate.

First the configuration with the largest batches and the most instances is followed to its capacity.
Then those that the queueing model expects above it are tried at a rate slightly above what it
sustains; one that sustains it becomes the best. Three in a row that do not end this, as no
prediction above does; while nothing was sustained at all, every configuration is tried at the
lowest rate, the smallest first.

The constants were chosen on simulated servers whose best configuration is known
(tests/fakes/simulated_triton.py): a search finds 97 % of the optimum in 15 measurements there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from enginegate.measuring.p99 import SequentialTest
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.queueing import CapacityInterval, QueueingModel, ServiceTimeEstimate
from enginegate.search.space import Grid, configurations, instances_of
from enginegate.search.trial_history import (
    AIM,
    WIDE,
    CapacityEstimate,
    OperatingPoint,
    PointStatus,
    TrialHistory,
    next_rate,
)
from enginegate.search.trial_runner import TrialRunner
from enginegate.serving import ServingConfig

# Share of saturation that is tried: within a few percent of it a queue does not settle in the time
# of a measurement, so rates seen there are refuted later. 0.93 finds 95 % of the optimum in 12
# measurements, 0.99 finds 99 % in 18.
_STEADY = 0.96
# Steps of the golden ratio spread any number of choices evenly.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
# A batch of at most that many requests is a request that runs alone, but for chance.
_ALONE = 1.25

# How far above its prediction a configuration may be: 1.3 tries more of them for nothing, 1.0
# saves two measurements and misses whatever the model expects too little of.
_OPTIMISM = 1.15
# Trials below this share of the expected capacity may end early on a yes as well: a higher share
# saves seconds, and believes more short runs (0.5 to 0.9 find the same optimum).
_FAR = 0.7
# A configuration this close to its expected capacity is left for another: 1.0 follows each to its
# end, for one or two measurements more; 1.15 leaves some too early.
_NEAR = 1.06
# Another configuration that may be this much better is tried at once: lower switches more often.
_BETTER = 1.5
# Challengers that fail in a row before the best is taken for it: 2 find half a percent less, 5 no
# more.
_MOST_FAILURES = 3
# Service times known before the model may say that nothing reaches the floor: it fits with two.
_TELLING = 3
# A challenger that failed at more than this multiple of what it must sustain gets a second trial:
# closer, the first has decided about it.
_AMBITIOUS = 1.5
# A trial this far above the best may take the time of a second confirmation: a lone one is made at
# a safer rate, which costs less than that (`Confirmation`).
_WORTH_A_SECOND = 1.15
# Share of the engine alone above which one process more gains less than it costs: the memory of an
# engine and a context, and a few trials.
_NOT_THE_LIMIT = 0.8
# Of a usual search; for people only.
_USUAL_TRIALS, _FEWEST_LEFT = 10, 2


@dataclass(slots=True)
class SearchState:
    """What is known and expected halfway through a search: measurements, and the model over them.

    Value is what the objective maximises: a rate, or a rate for each GPU that is paid for.
    """

    runner: TrialRunner
    space: tuple[ServingConfig, ...] = field(init=False)
    _fitted: tuple[tuple[int, int, int | None], QueueingModel] | None = field(
        init=False, default=None
    )

    def __post_init__(self) -> None:
        self.space = configurations(self.bounds, self._processes())

    def _processes(self) -> int:
        """The fewest that are expected to serve most of the engine, which are tried first."""
        alone, allowed = self.runner.settings.alone, sorted(set(self.bounds.processes))
        if alone is None or not alone.shared:
            return allowed[0]
        largest = configurations(self.bounds)[0]
        for processes in allowed:
            config = largest.model_copy(update={"processes": processes})
            if alone.served_per_s(config) >= _NOT_THE_LIMIT * alone.most_per_s(config):
                return processes
        return allowed[-1]

    @property
    def bounds(self) -> Search:
        """What to try."""
        return self.runner.settings.bounds

    @property
    def slo(self) -> Slo:
        """What must be met."""
        return self.runner.settings.slo

    @property
    def history(self) -> TrialHistory:
        """What was measured."""
        return self.runner.history

    @property
    def configs(self) -> tuple[ServingConfig, ...]:
        """What may be chosen: the search space without what does not load."""
        errors = self.history.load_errors
        return tuple(c for c in self.space if c not in errors) if errors else self.space

    @property
    def lowest_per_s(self) -> float:
        """The rate at which a configuration must fail before it is ruled out."""
        at = self.bounds.at_rate_per_s if self.bounds.objective == "latency" else None
        return at or self.bounds.min_rate_per_s

    @property
    def processes(self) -> int:
        """Of every configuration in the search space."""
        return self.space[0].processes

    def service_times(self, processes: int) -> list[ServiceTimeEstimate]:
        """What was measured with so many processes: one of several does not wait for itself."""
        return [e for e in self.runner.service_times if e.config.processes == processes]

    def model(self, processes: int | None = None) -> QueueingModel:
        """Fitted to everything measured so far with so many; None: as the space."""
        processes = processes or self.processes
        leader, estimates = self.leader(), self.service_times(processes)
        alike = leader is not None and leader.config.processes == processes
        around = instances_of(leader.config) if leader and alike else None
        key = (processes, len(estimates), around)
        if self._fitted is None or self._fitted[0] != key:
            alone = self.runner.settings.alone
            self._fitted = key, QueueingModel.fit(estimates, around=around, alone=alone)
        return self._fitted[1]

    def capacities(self) -> CapacityInterval | None:
        """Of every configuration, in their order; None while no service time is known."""
        if not self.service_times(self.processes) or not self.configs:
            return None
        return self.model().capacity(self.configs, self.slo.p99_ms)

    def predicted(self) -> dict[ServingConfig, float]:
        """The rate up to which the model expects each configuration to meet the SLO."""
        capacities = self.capacities()
        if capacities is None:
            return {}
        found = dict(zip(self.configs, map(float, capacities.expected), strict=True))
        tried = {config for config, _ in self.history.points if config not in found}
        return found | {config: self.estimate(config).expected for config in tried}

    def estimate(self, config: ServingConfig) -> CapacityEstimate:
        """The model's, or everything between the lowest and the highest rate."""
        grid, sustained = self.runner.grid, self.history.sustained(config)
        alone = self.runner.settings.alone
        times = self.service_times(config.processes)
        if not times and alone is not None and not self.history.of(config):
            expected_per_s = alone.expected_per_s(config, self.slo.p99_ms)
            return CapacityEstimate(expected_per_s, expected_per_s, expected_per_s)
        if not times:
            # Not one answer at a rate that was rejected: only the lowest can tell more.
            failed = self.history.unsustained(config) is not None
            high = grid.low if failed else grid.high
            return CapacityEstimate(grid.low, math.sqrt(grid.low * high), high)
        model, limit_ms = self.model(config.processes), self.slo.p99_ms
        if sustained is not None:
            seen_ms = self.history.points[config, sustained].p99_ms
            limit_ms *= model.p99_ms([config], sustained)[0] / seen_ms
        return CapacityEstimate.of(model.capacity([config], limit_ms), 0)

    def grid(self, config: ServingConfig) -> Grid:
        """Rates worth offering to a configuration: a steady tail needs a little idle time.

        Where nearly full batches were measured, its saturation is known.
        """
        grid = self.runner.grid
        times = self.service_times(config.processes)
        if not any(estimate.shows_saturation_of(config) for estimate in times):
            return grid
        model = self.model(config.processes)
        steady = grid.at_most(_STEADY * model.saturation_per_s(config))
        return Grid(grid.low, max(grid.low, min(grid.high, steady)), grid.step)

    def slack(self, config: ServingConfig) -> float:
        """The limit over p99 at the highest sustained rate; 1 when there is none."""
        sustained = self.history.sustained(config)
        if sustained is None:
            return 1.0
        return max(1.0, self.slo.p99_ms / self.history.points[config, sustained].p99_ms)

    def untried(self) -> tuple[ServingConfig, ...]:
        """What is not shown to fail at the lowest rate: the smallest first, the rest spread out."""
        if self.too_slow_alone() is not None:
            return ()
        smallest = min(self.space, key=lambda c: (instances_of(c), c.max_batch_size))
        places = {config: (place * _GOLDEN) % 1.0 for place, config in enumerate(self.space)}
        ordered = sorted(self.configs, key=lambda c: (c != smallest, places[c]))
        return tuple(c for c in ordered if not self.history.fails(c, self.lowest_per_s))

    def too_slow_alone(self) -> ServiceTimeEstimate | None:
        """A request that runs alone takes longer than the SLO; None: not seen.

        It was measured with the fewest instances at the lowest rate, and failed there. Larger
        batches and more instances make no request faster that has the server to itself.
        """
        fewest = min(instances_of(config) for config in self.space)
        for estimate in self.runner.service_times:
            alone = estimate.instances == fewest and estimate.batch <= _ALONE * estimate.items
            if (
                alone
                and estimate.service_ms > self.slo.p99_ms
                and estimate.rate_per_s <= self.lowest_per_s
                and self.history.fails(estimate.config, self.lowest_per_s)
            ):
                return estimate
        return None

    def leader(self) -> OperatingPoint | None:
        """The best sustained point; among equals the one with the lowest p99."""
        return max(
            self.history.best_points(),
            key=lambda point: (self.value(point.config, point.rate_per_s), -point.p99_ms),
            default=None,
        )

    def is_limited_by_processes(self, point: OperatingPoint) -> bool:
        """Whether the engine alone does much more than what was sustained of it."""
        alone = self.runner.settings.alone
        if alone is None or not alone.shared:
            return False
        return point.rate_per_s < _NOT_THE_LIMIT * alone.most_per_s(point.config)

    def value(self, config: ServingConfig, rate_per_s: float) -> float:
        """What the objective maximises: with ``cost``, the rate for each GPU that is paid for."""
        return rate_per_s / self._gpus_paid(config)

    def rate_to_beat(self, leader: OperatingPoint, config: ServingConfig) -> float:
        """What a configuration must sustain to be better than the best."""
        value = self.value(leader.config, leader.rate_per_s) * (1.0 + self.bounds.resolution)
        return self.runner.grid.at_least(value * self._gpus_paid(config))

    def _gpus_paid(self, config: ServingConfig) -> int:
        return max(1, len(config.gpus)) if self.bounds.objective == "cost" else 1


@dataclass(slots=True)
class SearchStrategy:
    """The trials before the confirmations; what these cost is kept in reserve.

    Attributes:
        confirmation_s: durations of everything that one more confirmed answer at a rate takes.
        floor_per_s: a candidate that cannot reach this is not searched to its capacity.
    """

    state: SearchState
    confirmation_s: Callable[[float], list[float]]
    floor_per_s: float = 0.0

    def explore(self) -> None:
        """Try configurations until none promises more than the best one sustains."""
        if self.state.bounds.objective == "latency":
            self._compare_latencies()
        else:
            self._try_configurations()
            self._try_more_processes()
        budget = self.state.runner.budget
        budget.exhausted = budget.exhausted or budget.left_out

    def _try_configurations(self) -> None:
        first = self.state.configs[0]
        self._follow(first, roughly=True)
        if self._exhausted() and self._may_be_confirmed(first):
            return  # what is left is for a confirmation of what the rejected trial lets hope for
        failures, second_trial = 0, None
        while failures < _MOST_FAILURES or self._below_wanted():
            challenge = second_trial or self._challenge(failures)
            if challenge is None:
                break
            config, rate_per_s = challenge
            leader = self.state.leader()
            point = self._trial(config, rate_per_s)
            if point is None and self._exhausted():
                return
            if point is None and self.state.runner.budget.left_out:
                break
            second_trial = None
            capped = leader is not None and leader.rate_per_s >= self.state.grid(config).high
            if point is not None and point.status(self.state.slo) is PointStatus.SUSTAINED:
                self._follow(config, roughly=True)
                # Where no higher rate is asked, others can only be faster: a few are tried.
                failures = failures + 1 if capped else 0
            elif config not in self.state.history.load_errors:
                second_trial = self._second_trial(config, rate_per_s)
                failures += second_trial is None
        self.follow_leader()

    def _try_more_processes(self) -> None:
        """Let more processes share each GPU, while they are the limit and one more serves more."""
        state = self.state
        more = {count for count in state.bounds.processes if count > state.processes}
        for processes in sorted(more):
            leader = state.leader()
            if leader is None or self._exhausted() or not state.is_limited_by_processes(leader):
                return
            config = leader.config.model_copy(
                update={"processes": processes, "instances": min(state.bounds.instances)}
            )
            point = self._trial(config, state.rate_to_beat(leader, config))
            if point is None or point.status(state.slo) is not PointStatus.SUSTAINED:
                return
            self._follow(config, roughly=False)

    def _may_be_confirmed(self, config: ServingConfig) -> bool:
        """Whether a rejected trial lets hope for a rate whose confirmation fits the budget.

        Where it does not, the lowest rate may still be refuted, which is an answer too.
        """
        guess = self.state.history.below_rejected(config)
        if guess is None or guess.rate_per_s <= self.state.lowest_per_s:
            return False
        runner = self.state.runner
        took_ms = (e.service_ms for e in runner.service_times if e.config == config)
        if min(took_ms, default=0.0) > self.state.slo.p99_ms:
            return False
        return self.state.runner.budget.fits(*self.confirmation_s(guess.rate_per_s)[:-1])

    def follow_leader(self) -> None:
        """Find the capacity of the best configuration; with one rate only there is none."""
        leader = self.state.leader()
        if leader is not None and self.state.bounds.objective != "latency":
            self._follow(leader.config, roughly=False)

    def _below_wanted(self) -> bool:
        """Whether what is wanted is not reached yet, so that failures are no reason to stop."""
        leader = self.state.leader()
        return leader is None or leader.rate_per_s < self.state.slo.min_throughput_per_s

    def _second_trial(
        self, config: ServingConfig, rate_per_s: float
    ) -> tuple[ServingConfig, float] | None:
        """The next rate to try for a challenger whose first rate was too ambitious."""
        leader = self.state.leader()
        if leader is None:
            return None
        needed = self.state.rate_to_beat(leader, config)
        return (config, needed) if rate_per_s > _AMBITIOUS * needed else None

    def _follow(self, config: ServingConfig, *, roughly: bool) -> None:
        """Try rates up to a configuration's capacity; roughly: until another is more promising."""
        state, history = self.state, self.state.history
        while config not in history.load_errors:
            sustained, unsustained = history.sustained(config), history.unsustained(config)
            estimate = state.estimate(config)
            if roughly and sustained is not None:
                near = sustained * _NEAR >= min(estimate.expected, unsustained or math.inf)
                if near or self._another_is_better(max(estimate.high, sustained)):
                    return
            if self._hopeless():
                return
            rate_per_s = next_rate(
                state.grid(config),
                sustained,
                unsustained,
                estimate,
                slack=state.slack(config),
                guess=history.below_rejected(config),
            )
            # Tried before and no wiser: measurements contradict one another.
            if rate_per_s is None or (config, rate_per_s) in history.points:
                return
            if self._trial(config, rate_per_s) is None and (
                self._exhausted() or self.state.runner.budget.left_out
            ):
                return

    def _another_is_better(self, rate_per_s: float) -> bool:
        """Whether the capacity of another configuration may be far above a rate."""
        capacities = self.state.capacities()
        return capacities is not None and float(capacities.high.max()) > _BETTER * rate_per_s

    def _trial(self, config: ServingConfig, rate_per_s: float) -> OperatingPoint | None:
        """One trial, if it and the confirmations after it fit.

        Once something is sustained, time is kept to confirm a second point too, as the first may be
        refuted; but for a trial that may win more than that. While nothing is, nothing is kept for
        confirmations at the lowest rate: to refute it needs none.

        Returns:
            None: they do not fit, which ends the search; or would but for loading the
            configuration, which is left out then; or it does not load; or the generator cannot
            make that rate, and the grid ends below it now.
        """
        runner, leader = self.state.runner, self.state.leader()
        reserve_s = self.confirmation_s(leader.rate_per_s if leader else rate_per_s)
        if leader is not None and rate_per_s < _WORTH_A_SECOND * leader.rate_per_s:
            reserve_s = reserve_s[:-1] + reserve_s
        if leader is None and rate_per_s <= self.state.lowest_per_s and runner.samples:
            reserve_s = []
        planned_s = [self.state.bounds.measurement_s, *reserve_s]
        if not runner.budget.fits(*planned_s):
            runner.budget.exhausted = True
            return None
        if not runner.budget.fits(*planned_s, loading_s=runner.loading_s(config)):
            runner.budget.left_out = True
            return None
        trials_left = max(_FEWEST_LEFT, _USUAL_TRIALS - len(runner.samples))
        runner.budget.expected = len(reserve_s) + trials_left
        return runner.trial(config, rate_per_s, ends=self._early_end(config, rate_per_s))

    def _exhausted(self) -> bool:
        """Whether the budget is spent, or no rate is left that the generator can make."""
        runner = self.state.runner
        limit = runner.too_fast_per_s
        return runner.budget.exhausted or (limit is not None and limit <= runner.grid.low)

    def _early_end(self, config: ServingConfig, rate_per_s: float) -> SequentialTest | None:
        """When a trial may end early: far below capacity on any answer, near it when refuted."""
        if self.state.bounds.objective == "latency":
            return None
        near = rate_per_s >= _FAR * self.state.estimate(config).low
        return SequentialTest(self.state.slo.confidence, refute_only=near)

    def _challenge(self, failures: int) -> tuple[ServingConfig, float] | None:
        """The most promising configuration that may beat the best, and the rate to try it at."""
        state, capacities, leader = self.state, self.state.capacities(), self.state.leader()
        if leader is None:
            return self._first_sustained(failures)
        if capacities is None or self._hopeless():
            return None
        expected_per_s = float(capacities.expected[state.configs.index(leader.config)])
        optimism = _OPTIMISM * max(1.0, leader.rate_per_s / expected_per_s)
        challengers: list[tuple[float, ServingConfig, float]] = []
        for place, config in enumerate(state.configs):
            needed = state.rate_to_beat(leader, config)
            unsustained = state.history.unsustained(config)
            beaten = unsustained is not None and unsustained <= needed
            highest = min(float(capacities.high[place]) * optimism, state.grid(config).high)
            if config == leader.config or highest < needed or beaten:
                continue
            estimate = CapacityEstimate.of(capacities, place)
            rate_per_s = needed if unsustained is not None else self._bold_rate(estimate, needed)
            if (config, rate_per_s) not in state.history.points:
                challengers.append((state.value(config, highest), config, rate_per_s))
        if not challengers:
            return None
        _, config, rate_per_s = max(challengers, key=lambda challenger: challenger[0])
        return config, rate_per_s

    def _bold_rate(self, estimate: CapacityEstimate, needed: float) -> float:
        """The first rate for a challenger: its expected capacity, never less than it needs."""
        wide = estimate.high > WIDE * max(estimate.low, needed)
        aim = math.sqrt(needed * estimate.high) if wide else estimate.expected * AIM
        return max(needed, self.state.runner.grid.at_most(max(aim, needed)))

    def _first_sustained(self, failures: int) -> tuple[ServingConfig, float] | None:
        """While nothing is: a few of the highest predictions, then each at the lowest rate."""
        untried = {c: r for c, r in self.state.predicted().items() if not self.state.history.of(c)}
        if untried and failures < _MOST_FAILURES:
            config = max(untried, key=untried.__getitem__)
            return config, self.state.runner.grid.at_most(untried[config] * AIM)
        return self._at_lowest_rate()

    def _at_lowest_rate(self) -> tuple[ServingConfig, float] | None:
        """The next configuration that was not tried at the lowest rate; None when all were."""
        rate, points = self.state.lowest_per_s, self.state.history.points
        return next(((c, rate) for c in self.state.untried() if (c, rate) not in points), None)

    def _compare_latencies(self) -> None:
        """The objective ``latency``: try every configuration that may have the lowest p99.

        At one rate, the lowest prediction first; three in a row that are no better end it, once one
        has met the SLO.
        """
        state, rate = self.state, self.state.lowest_per_s
        failures, lowest_ms = 0, math.inf
        while failures < _MOST_FAILURES or state.leader() is None:
            config = self._quickest(rate, lowest_ms)
            if config is None and state.leader() is None:
                config, _ = self._at_lowest_rate() or (None, rate)
            point = self._trial(config, rate) if config else None
            if config in state.history.load_errors:
                continue
            if point is None:
                return
            better = point.p99_ms < lowest_ms * (1.0 - state.bounds.resolution)
            failures = 0 if better else failures + 1
            lowest_ms = min(lowest_ms, point.p99_ms)

    def _quickest(self, rate_per_s: float, lowest_ms: float) -> ServingConfig | None:
        """The untried configuration of the lowest predicted p99, if it may be below the best."""
        untried = [config for config in self.state.configs if not self.state.history.of(config)]
        if not untried or not self.state.runner.service_times:
            return untried[0] if untried else None
        predicted_ms = self.state.model().p99_ms(untried, rate_per_s)
        place = int(predicted_ms.argmin())
        return untried[place] if predicted_ms[place] <= lowest_ms * _OPTIMISM else None

    def _hopeless(self) -> bool:
        """Whether no configuration can reach what the candidate must reach to matter."""
        capacities = self.state.capacities()
        if capacities is None or len(self.state.runner.service_times) < _TELLING:
            return False
        return float(capacities.high.max()) * _OPTIMISM < self.floor_per_s
