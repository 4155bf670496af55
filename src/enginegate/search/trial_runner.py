"""Makes a search's measurements within its budget, and says how far it is."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from enginegate.errors import NotLoadedError
from enginegate.measurement import Arrivals, LatencySample, Load, Measurement
from enginegate.measuring.p99 import FEWEST_SAMPLES, SequentialTest
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.queueing import EngineTimes, ServiceTimeEstimate
from enginegate.search.space import Grid, seed_of
from enginegate.search.trial_history import OperatingPoint, PointStatus, TrialHistory
from enginegate.serving import ServingConfig

Step = Literal["search", "overload", "confirm", "champion"]

# A busy moment seldom spoils two measurements in a row; a third would buy little for its time.
_ATTEMPTS = 2
# Without the lowest rate there is no answer at all, so a busy moment is waited out.
_ATTEMPTS_AT_THE_LOWEST = 4
# Requests of a trial at a low rate, over the fewest that are valid: a tenth is warm-up, and chance
# varies arrivals.
_SPARE = 2.0
# A run that lasted less than this share of its load was ended early by its test.
_ENDED_EARLY = 0.9
# Guess of a measurement's overhead while none is known; too much would leave no room for the first.
_FIRST_OVERHEAD_S = 0.5
# Part of the budget that must have been left after the last trial, for rounding and timers.
_BUDGET_MARGIN = 0.02


class Measure(Protocol):
    """Serves one configuration under one load."""

    def __call__(
        self, config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
    ) -> LatencySample:
        """Measure; the load may end early once ``ends`` is decided.

        Raises:
            NotLoadedError: the model does not load in this configuration.
            ServerError: the server died, or does not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Champion:
    """What is live, on the same server.

    Attributes:
        measure: serves it.
        config: how it is served live.
        release: its number.
    """

    measure: Measure
    config: ServingConfig
    release: int


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """One measurement further.

    Attributes:
        left: about how many measurements are still to come.
        left_s: about how long they will take.
        cached: whether it was made earlier, and took no time now.
    """

    step: Step
    done: int
    spent_s: float
    budget_s: float
    measurement: Measurement
    left: int = 0
    left_s: float = 0.0
    cached: bool = False


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How every measurement of a search is made.

    Attributes:
        clock: seconds, monotonic.
        progress: called after each measurement.
        alone: the engine's own times, measured without a server; None where they are not known.
    """

    bounds: Search
    slo: Slo
    arrivals: Arrivals = "poisson"
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[SearchProgress], None] = lambda _: None
    alone: EngineTimes | None = None


@dataclass(slots=True)
class Budget:
    """What may still be measured, in time and in number.

    A measurement costs its load and an overhead: loading, warming up, the last answers. The first
    one also waits for the server to start, so it says nothing about the others' overhead.

    Attributes:
        exhausted: something that mattered was left out because it did not fit.
        left_out: a configuration was, because loading it did not fit.
        expected: about how many measurements are still to come, for people.
    """

    settings: SearchSettings
    done: int = 0
    expected: int = 0
    exhausted: bool = False
    left_out: bool = False
    started_s: float = field(init=False)
    _offered_s: float = 0.0
    _first_overhead_s: float = 0.0
    _last_s: float = 0.0
    _after_trial: tuple[int, float, float] | None = None

    def __post_init__(self) -> None:
        self.started_s = self.settings.clock()

    @property
    def spent_s(self) -> float:
        """Since the search began."""
        return self.settings.clock() - self.started_s

    @property
    def overhead_s(self) -> float:
        """Mean of the measurements after the first; until there are any, a guess."""
        others = self.done - 1
        if others < 1:
            return _FIRST_OVERHEAD_S
        return max(0.0, (self._last_s - self._first_overhead_s - self._offered_s) / others)

    def fits(self, *durations_s: float, loading_s: float = 0.0) -> bool:
        """Whether measurements of these durations still fit, and loading besides."""
        bounds = self.settings.bounds
        end_s = self._end_s(self.spent_s, self.overhead_s, durations_s) + loading_s
        return self.done + len(durations_s) <= bounds.max_measurements and end_s <= bounds.budget_s

    def left_room_for(self, *durations_s: float) -> bool:
        """Whether measurements of these durations would have fitted after the last trial.

        Where they would not, the search may have wanted them: it may have ended for the budget even
        if it ended by itself with its last seconds.
        """
        if self._after_trial is None:
            return True
        done, spent_s, overhead_s = self._after_trial
        bounds = self.settings.bounds
        end_s = self._end_s(spent_s, overhead_s, durations_s)
        return (
            end_s <= (1.0 - _BUDGET_MARGIN) * bounds.budget_s
            and done + len(durations_s) <= bounds.max_measurements
        )

    def _end_s(self, spent_s: float, overhead_s: float, durations_s: tuple[float, ...]) -> float:
        return spent_s + sum(durations_s) + len(durations_s) * overhead_s

    def count_failed_load(self) -> None:
        """Count a configuration that did not load."""
        self._count(0.0)

    def count(self, step: Step, sample: LatencySample) -> None:
        """Count one measurement and tell of it."""
        bounds = self.settings.bounds
        self._count(sample.measurement.sent_for_s)
        if step == "search":
            self._after_trial = self.done, self._last_s, self.overhead_s
        self.expected = max(0, min(self.expected - 1, bounds.max_measurements - self.done))
        left_s = self.expected * (self.spent_s / self.done)
        self.settings.progress(
            SearchProgress(
                step=step,
                done=self.done,
                spent_s=self.spent_s,
                budget_s=bounds.budget_s,
                measurement=sample.measurement,
                left=self.expected,
                left_s=min(left_s, max(0.0, bounds.budget_s - self.spent_s)),
                cached=sample.cached,
            )
        )

    def _count(self, offered_s: float) -> None:
        self._last_s = self.spent_s
        if not self.done:
            self._first_overhead_s = self._last_s - offered_s
        self.done += 1
        self._offered_s += offered_s


@dataclass(slots=True)
class TrialRunner:
    """Measures one engine, and keeps what it measured.

    Attributes:
        service_times: what each valid measurement says about them.
        reasons_invalid: of every measurement at a point that a trial or a confirmation wanted; ""
            if it was valid.
        too_fast_per_s: the lowest rate at which no measurement was valid: too fast to generate.
        late_first: where the generator was late once, before anything was measured.
    """

    measure: Measure
    settings: SearchSettings
    budget: Budget
    history: TrialHistory
    samples: list[LatencySample] = field(default_factory=list)
    service_times: list[ServiceTimeEstimate] = field(default_factory=list)
    reasons_invalid: dict[tuple[ServingConfig, float], list[str]] = field(default_factory=dict)
    too_fast_per_s: float | None = None
    late_first: tuple[ServingConfig, float] | None = None

    @property
    def grid(self) -> Grid:
        """The rates that may be offered, up to half way (in the logarithm) to an invalid one.

        Half way from the highest rate that was measured validly, so it rises as more are. A rate
        that was tried once only may be offered again after a valid one.
        """
        grid, too_fast_per_s = Grid.of(self.settings.bounds), self.too_fast_per_s
        if too_fast_per_s is None:
            return grid
        rates = (s.measurement.rate_per_s for s in self.samples if not s.measurement.invalid)
        valid = [rate for rate in rates if rate < too_fast_per_s]
        if valid and self.late_first is not None and self.late_first[1] == too_fast_per_s:
            return Grid(grid.low, max(grid.low, too_fast_per_s), grid.step)
        valid_per_s = max(valid, default=grid.low)
        highest = grid.at_most(math.sqrt(valid_per_s * too_fast_per_s))
        return Grid(grid.low, max(grid.low, valid_per_s, highest), grid.step)

    def loading_s(self, config: ServingConfig) -> float:
        """How long it takes to load another configuration than the last, and that one again after.

        As long as the slowest so far, each time: engines that are compiled code take most of a
        minute, and neither a trial nor what must be confirmed later fits a budget without that.
        """
        if not self.samples or self.samples[-1].measurement.config == config:
            return 0.0
        took_s = (sample.measurement.cold_start_s or 0.0 for sample in self.samples)
        return 2.0 * max(0.0, max(took_s) - self.budget.overhead_s)

    def run(
        self, step: Step, config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
    ) -> LatencySample:
        """One measurement, whatever it shows.

        Raises:
            NotLoadedError: the configuration does not load; that is noted.
            ServerError: from the measurement.
        """
        try:
            sample = self.measure(config, load, ends=ends)
        except NotLoadedError as error:
            self.history.load_errors.setdefault(config, str(error))
            self.budget.count_failed_load()
            raise
        self.samples.append(sample)
        invalid = sample.measurement.invalid
        if step != "overload":
            reasons = self.reasons_invalid.setdefault((config, load.rate_per_s), [])
            reasons.append(invalid[0] if invalid else "")
        estimate = None if invalid else ServiceTimeEstimate.of(sample)
        if estimate is not None:
            self.service_times.append(estimate)
        self.budget.count(step, sample)
        return sample

    def load(
        self, config: ServingConfig, rate_per_s: float, attempt: str, duration_s: float
    ) -> Load:
        """The load of that attempt: identical in every search with this seed."""
        base = self.settings.bounds.seed
        return Load(
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            seed=seed_of(base, config, rate_per_s, attempt),
            arrivals=self.settings.arrivals,
            order_seed=seed_of(base, config, rate_per_s, f"{attempt} order"),
        )

    def trial(
        self, config: ServingConfig, rate_per_s: float, *, ends: SequentialTest | None
    ) -> OperatingPoint | None:
        """Measure once; again when that was invalid, or ended early and undecided.

        While nothing was measured, a rate at which the generator is late is not tried again: a
        lower one gives an answer in that time, and a budget may end before the second.

        A measurement that was ended early for another SLO may decide nothing about this one.

        Returns:
            None: the rate cannot be made, or the configuration does not load.
        """
        bounds, slo = self.settings.bounds, self.settings.slo
        earlier = int((config, rate_per_s) == self.late_first)
        point, invalid = None, earlier
        attempts = _ATTEMPTS if rate_per_s > self.grid.low else _ATTEMPTS_AT_THE_LOWEST
        duration_s = max(bounds.measurement_s, _SPARE * FEWEST_SAMPLES / rate_per_s)
        for attempt in range(earlier, 2 * attempts):
            if attempt > earlier and not self.budget.fits(duration_s):
                break
            load = self.load(config, rate_per_s, f"search {attempt}", duration_s)
            try:
                sample = self.run("search", config, load, ends=ends)
            except NotLoadedError:
                return None
            if sample.measurement.invalid:
                invalid += 1
                if self._is_late_first(sample) or invalid >= attempts:
                    break
                continue
            point = self._add(sample)
            ended_early = sample.measurement.sent_for_s < _ENDED_EARLY * load.duration_s
            if point.status(slo) is not PointStatus.UNDECIDED or not ended_early:
                return point
        if point is None:
            self.too_fast_per_s = min(rate_per_s, self.too_fast_per_s or rate_per_s)
            if invalid > 1:
                self.late_first = None
        return point

    def _add(self, sample: LatencySample) -> OperatingPoint:
        """Keep a valid measurement; no rate up to its own is too fast to generate."""
        if sample.measurement.rate_per_s >= (self.too_fast_per_s or math.inf):
            self.too_fast_per_s = None
        return self.history.add(sample)

    def _is_late_first(self, sample: LatencySample) -> bool:
        """Note where the generator was late, above the lowest rate, before anything was valid."""
        measured, nothing_yet = sample.measurement, all(s.measurement.invalid for s in self.samples)
        if not (nothing_yet and measured.generator_limited):
            return False
        if measured.rate_per_s <= self.grid.low:
            return False
        self.late_first = measured.config, measured.rate_per_s
        return True
