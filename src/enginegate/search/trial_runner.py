"""Makes a search's measurements within its budget, and says how far it is."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from enginegate.errors import NotLoadedError
from enginegate.measurement import Arrivals, LatencySample, Load, Measurement
from enginegate.measuring.p99 import SequentialTest
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.service_time import ServiceTimeEstimate
from enginegate.search.space import Grid, seed_of
from enginegate.search.trial_history import OperatingPoint, PointStatus, TrialHistory
from enginegate.serving import ServingConfig

Step = Literal["search", "overload", "confirm", "champion"]

_ATTEMPTS = 2
# Without the lowest rate there is no answer at all, so a busy moment is waited out.
_ATTEMPTS_AT_THE_LOWEST = 4
_CUT_SHORT = 0.9
_MARGIN_S = 0.5


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
    """What is live, on the same bench.

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
        before: whether it was made earlier, and took no time now.
    """

    step: Step
    done: int
    spent_s: float
    budget_s: float
    measurement: Measurement
    left: int = 0
    left_s: float = 0.0
    before: bool = False


def quiet(_: SearchProgress) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a search measures: the same for every measurement.

    Attributes:
        clock: seconds, monotonic.
        progress: called after each measurement.
    """

    bounds: Search
    slo: Slo
    arrivals: Arrivals = "poisson"
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[SearchProgress], None] = quiet


@dataclass(slots=True)
class OverheadEstimate:
    """What measurements cost besides their load: loading, warming up, the last answers.

    The first one also waits for the server to start, so it says nothing about the others.

    Attributes:
        done: measurements so far.
    """

    done: int = 0
    _until_s: float = 0.0
    _offered_s: float = 0.0
    _first_s: float = 0.0

    def took(self, until_s: float, offered_s: float, *, count: int = 1) -> None:
        """Count one that ended at ``until_s`` of the search, with a load of ``offered_s``.

        Or several that ended by then, all but one of which did not load.
        """
        if not self.done:
            self._first_s = until_s - offered_s
        self.done += count
        self._until_s = until_s
        self._offered_s += offered_s

    @property
    def each_s(self) -> float:
        """Mean of those after the first; until there are any, a guess."""
        others = self.done - 1
        if others < 1:
            return _MARGIN_S
        return max(0.0, (self._until_s - self._first_s - self._offered_s) / others)


@dataclass(slots=True)
class Budget:
    """What may still be measured.

    Attributes:
        out: something that mattered was left out because it did not fit.
        expected: about how many measurements are still to come, for people.
    """

    terms: SearchSettings
    done: int = 0
    expected: int = 0
    out: bool = False
    started_s: float = field(init=False)
    _pace: OverheadEstimate = field(default_factory=OverheadEstimate)

    def __post_init__(self) -> None:
        self.started_s = self.terms.clock()

    @property
    def spent_s(self) -> float:
        """Since the search began."""
        return self.terms.clock() - self.started_s

    def fits(self, *durations_s: float) -> bool:
        """Whether measurements of these durations still fit, in time and in number."""
        bounds = self.terms.bounds
        needed_s = sum(durations_s) + len(durations_s) * self._pace.each_s
        return (
            self.spent_s + needed_s <= bounds.budget_s
            and self.done + len(durations_s) <= bounds.max_measurements
        )

    def refused(self) -> None:
        """Count a configuration that did not load."""
        self.done += 1
        self._pace.took(self.spent_s, 0.0)

    def took(self, step: Step, sampled: LatencySample, offered_s: float) -> None:
        """Count one measurement and tell of it."""
        bounds = self.terms.bounds
        self.done += 1
        self._pace.took(self.spent_s, offered_s)
        self.expected = max(0, min(self.expected - 1, bounds.max_measurements - self.done))
        left_s = self.expected * (self.spent_s / self.done)
        self.terms.progress(
            SearchProgress(
                step=step,
                done=self.done,
                spent_s=self.spent_s,
                budget_s=bounds.budget_s,
                measurement=sampled.measurement,
                left=self.expected,
                left_s=min(left_s, max(0.0, bounds.budget_s - self.spent_s)),
                before=sampled.cached,
            )
        )


@dataclass(slots=True)
class TrialRunner:
    """Measures one engine, and keeps what it measured.

    Attributes:
        cap_per_s: the lowest rate at which no measurement was valid, e.g. for a slow generator.
        readings: what each valid measurement says about service times.
    """

    measure: Measure
    terms: SearchSettings
    budget: Budget
    known: TrialHistory
    sampled: list[LatencySample] = field(default_factory=list)
    readings: list[ServiceTimeEstimate] = field(default_factory=list)
    cap_per_s: float | None = None

    @property
    def grid(self) -> Grid:
        """The rates that may be offered, up to half way (in the logarithm) to one that is void.

        Half way from the highest rate that was measured validly, so it rises as more are.
        """
        grid, cap_per_s = Grid.of(self.terms.bounds), self.cap_per_s
        if cap_per_s is None:
            return grid
        rates = (s.measurement.rate_per_s for s in self.sampled if not s.measurement.invalid)
        valid_per_s = max((rate for rate in rates if rate < cap_per_s), default=grid.low)
        highest = grid.at_most(math.sqrt(valid_per_s * cap_per_s))
        return Grid(grid.low, max(grid.low, valid_per_s, highest), grid.step)

    def take(
        self,
        step: Step,
        config: ServingConfig,
        load: Load,
        *,
        ends: SequentialTest | None = None,
    ) -> LatencySample:
        """One measurement, whatever it says.

        Raises:
            NotLoadedError: the configuration does not load; that is noted.
            ServerError: from the measurement.
        """
        try:
            sampled = self.measure(config, load, ends=ends)
        except NotLoadedError as error:
            self.known.refuse(config, str(error))
            self.budget.refused()
            raise
        self.sampled.append(sampled)
        reading = None if sampled.measurement.invalid else ServiceTimeEstimate.of(sampled)
        if reading is not None:
            self.readings.append(reading)
        lasted_s = sampled.measurement.lasted_s
        self.budget.took(step, sampled, load.duration_s if lasted_s is None else lasted_s)
        return sampled

    def load(
        self, config: ServingConfig, rate_per_s: float, attempt: str, duration_s: float
    ) -> Load:
        """The load of that attempt: the same one in every search."""
        base = self.terms.bounds.seed
        return Load(
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            seed=seed_of(base, config, rate_per_s, attempt),
            arrivals=self.terms.arrivals,
            order_seed=seed_of(base, config, rate_per_s, f"{attempt} order"),
        )

    def probe(
        self, config: ServingConfig, rate_per_s: float, *, ends: SequentialTest | None
    ) -> OperatingPoint | None:
        """Look once; again when it was void, or cut short undecided.

        None: the rate cannot be made, or the configuration does not load.

        A measurement that was ended early for another SLO may decide nothing about this one.
        """
        bounds, slo = self.terms.bounds, self.terms.slo
        probe, void = None, 0
        attempts = _ATTEMPTS if rate_per_s > self.grid.low else _ATTEMPTS_AT_THE_LOWEST
        for attempt in range(2 * attempts):
            if attempt and not self.budget.fits(bounds.measurement_s):
                break
            load = self.load(config, rate_per_s, f"search {attempt}", bounds.measurement_s)
            try:
                sampled = self.take("search", config, load, ends=ends)
            except NotLoadedError:
                return None
            if sampled.measurement.invalid:
                void += 1
                if void == attempts:
                    break
                continue
            probe = self.known.add(sampled)
            if probe.standing(slo) is not PointStatus.UNDECIDED or not _cut_short(sampled):
                return probe
        if probe is None:
            self.cap_per_s = min(rate_per_s, self.cap_per_s or rate_per_s)
        return probe


def _cut_short(sampled: LatencySample) -> bool:
    measured = sampled.measurement
    return (
        isinstance(measured.load, Load)
        and measured.lasted_s is not None
        and measured.lasted_s < _CUT_SHORT * measured.load.duration_s
    )
