"""What is known and expected halfway through a search: measurements, and the model over them."""

import math
from dataclasses import dataclass, field

from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.queueing import CapacityInterval, QueueingModel
from enginegate.search.service_time import ServiceTimeEstimate, instances_of
from enginegate.search.space import Grid, configurations
from enginegate.search.trial_history import CapacityEstimate, OperatingPoint, TrialHistory
from enginegate.search.trial_runner import TrialRunner
from enginegate.serving import ServingConfig

_STEADY = 0.96
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_ALONE = 1.25


@dataclass(slots=True)
class SearchState:
    """The view of a search on its configurations.

    Value is what the objective maximises: a rate, or a rate for each GPU that is paid for.
    """

    prober: TrialRunner
    space: tuple[ServingConfig, ...] = field(init=False)
    _fitted: tuple[tuple[int, int | None], QueueingModel] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.space = configurations(self.bounds)

    @property
    def configs(self) -> tuple[ServingConfig, ...]:
        """What may be chosen: the search space without what does not load."""
        refused = self.known.refused
        return tuple(c for c in self.space if c not in refused) if refused else self.space

    @property
    def bounds(self) -> Search:
        """What to try."""
        return self.prober.terms.bounds

    @property
    def slo(self) -> Slo:
        """What must hold."""
        return self.prober.terms.slo

    @property
    def known(self) -> TrialHistory:
        """What was measured."""
        return self.prober.known

    def predicted(self) -> dict[ServingConfig, float]:
        """The rate up to which the model expects each configuration to hold."""
        edges = self.edges()
        if edges is None:
            return {}
        return {
            config: float(rate) for config, rate in zip(self.configs, edges.expected, strict=True)
        }

    def edges(self) -> CapacityInterval | None:
        """Of every configuration, in their order; None while no service time is known."""
        if not self.prober.readings or not self.configs:
            return None
        return self.model().edges(self.configs, self.slo.p99_ms)

    def guess(self, config: ServingConfig) -> CapacityEstimate:
        """The model's, or everything between the lowest and the highest rate."""
        grid = self.prober.grid
        if not self.prober.readings:
            # Not one answer at a rate that was rejected: only the lowest can tell more.
            failed = self.known.rejected(config) is not None
            high = grid.low if failed else grid.high
            return CapacityEstimate(grid.low, math.sqrt(grid.low * high), high)
        model, limit_ms = self.model(), self.slo.p99_ms
        held = self.known.held(config)
        if held is not None:
            seen_ms = self.known.points[config, held].p99_ms
            limit_ms *= model.p99_ms([config], held)[0] / seen_ms
        return CapacityEstimate.of(model.edges([config], limit_ms), 0)

    def grid(self, config: ServingConfig) -> Grid:
        """Rates worth offering to a configuration: a steady tail needs a little idle time.

        Where nearly full batches were measured, the capacity is known. Within a few percent of it
        a queue does not settle in the time of a measurement, so nothing seen there would last.
        """
        grid = self.prober.grid
        if not any(reading.tells_capacity_of(config) for reading in self.prober.readings):
            return grid
        steady = grid.at_most(_STEADY * self.model().capacity_per_s(config))
        return Grid(grid.low, max(grid.low, min(grid.high, steady)), grid.step)

    def slack(self, config: ServingConfig) -> float:
        """The limit over p99 at the highest rate that held; 1 when none did."""
        held = self.known.held(config)
        if held is None:
            return 1.0
        seen_ms = self.known.points[config, held].p99_ms
        return max(1.0, self.slo.p99_ms / seen_ms)

    @property
    def lowest_per_s(self) -> float:
        """The rate at which a configuration must fail before it is ruled out."""
        at = self.bounds.at_rate_per_s if self.bounds.objective == "latency" else None
        return at or self.bounds.min_rate_per_s

    def untried(self) -> tuple[ServingConfig, ...]:
        """What is not shown to fail at the lowest rate: the smallest first, the rest spread out."""
        if self.too_slow_alone() is not None:
            return ()
        smallest = min(self.space, key=lambda c: (instances_of(c), c.max_batch_size))
        places = {config: (place * _GOLDEN) % 1.0 for place, config in enumerate(self.space)}
        ordered = sorted(self.configs, key=lambda c: (c != smallest, places[c]))
        return tuple(c for c in ordered if not self.known.fails(c, self.lowest_per_s))

    def too_slow_alone(self) -> ServiceTimeEstimate | None:
        """A request that runs alone takes longer than the SLO; None: not seen.

        It was measured with the fewest instances at the lowest rate, and failed there. Larger
        batches and more instances make no request faster that has the server to itself.
        """
        fewest = min(instances_of(config) for config in self.space)
        for reading in self.prober.readings:
            alone = reading.instances == fewest and reading.batch <= _ALONE * reading.items
            if (
                alone
                and reading.service_ms > self.slo.p99_ms
                and reading.rate_per_s <= self.lowest_per_s
                and self.known.fails(reading.config, self.lowest_per_s)
            ):
                return reading
        return None

    def leader(self) -> OperatingPoint | None:
        """The best point that held; among equals the one with the lowest p99."""
        held = list(self.known.holding())
        return max(held, key=lambda probe: (self.value(probe), -probe.p99_ms), default=None)

    def value(self, probe: OperatingPoint) -> float:
        """What the objective maximises."""
        return probe.rate_per_s / self.weight(probe.config)

    def weight(self, config: ServingConfig) -> int:
        """GPUs that are paid for, where the objective is cost."""
        return max(1, len(config.gpus)) if self.bounds.objective == "cost" else 1

    def at_least(self, rate_per_s: float) -> float:
        """The lowest rate of the grid that is not below."""
        below = self.prober.grid.at_most(rate_per_s)
        return below if below >= rate_per_s * (1.0 - 1e-6) else self.prober.grid.beside(below, 1)

    def model(self) -> QueueingModel:
        """Fitted to everything measured so far."""
        leader = self.leader()
        around = leader.config.instances * max(1, len(leader.config.gpus)) if leader else None
        key = (len(self.prober.readings), around)
        if self._fitted is None or self._fitted[0] != key:
            self._fitted = key, QueueingModel.fit(self.prober.readings, around=around)
        return self._fitted[1]
