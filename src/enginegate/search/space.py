"""What a search may choose from: configurations, rates on a fixed grid, and seeds.

All three follow from the policy alone, so that the same policy asks for the same trials: what was
measured before is found again, also after a kill and under another SLO.
"""

import itertools
import math
from dataclasses import dataclass

from enginegate.policy.benchmarking import Search
from enginegate.records import canonical_json, sha256_bytes
from enginegate.serving import ServingConfig

# A seed fits a signed 32-bit integer, which every generator takes.
_SEEDS = 1 << 31


def configurations(bounds: Search, processes: int = 0) -> tuple[ServingConfig, ...]:
    """Everything to try: large batches first, then many instances, then short delays.

    With the objective ``cost`` and several GPUs, fewer of them are tried too.

    Args:
        bounds: what may be chosen from.
        processes: of every configuration; 0: the fewest that are allowed. Several run one batch at
            a time each, so more instances would add nothing.
    """
    processes = processes or min(bounds.processes)
    instances = {min(bounds.instances)} if processes > 1 else set(bounds.instances)
    placements = [bounds.gpus]
    if bounds.objective == "cost" and bounds.gpus:
        placements = [bounds.gpus[:count] for count in range(len(bounds.gpus), 0, -1)]
    axes = itertools.product(
        sorted(set(bounds.max_batch_sizes), reverse=True),
        sorted(instances, reverse=True),
        sorted(set(bounds.queue_delays_us)),
        dict.fromkeys(bounds.preferred_batch_sizes),
        placements,
    )
    return tuple(
        ServingConfig(
            max_batch_size=size,
            max_queue_delay_us=delay_us,
            instances=count,
            preferred_batch_sizes=preferred,
            gpus=gpus,
            processes=processes,
        )
        for size, count, delay_us, preferred, gpus in axes
        if all(wanted <= size for wanted in preferred)
    )


def instances_of(config: ServingConfig) -> int:
    """Over all GPUs it names, and all processes."""
    return config.instances * config.processes * max(1, len(config.gpus))


def largest_batch(config: ServingConfig) -> int:
    """The largest batch that Triton forms: the largest preferred one where some are preferred."""
    if not config.dynamic_batching:
        return 1
    return max(config.preferred_batch_sizes or (config.max_batch_size,))


@dataclass(frozen=True, slots=True)
class Grid:
    """Rates a search may offer, evenly spaced in the logarithm, two steps to one resolution."""

    low: float
    high: float
    step: float

    @classmethod
    def of(cls, bounds: Search) -> "Grid":
        """Between the policy's lowest and highest rate."""
        return cls(
            bounds.min_rate_per_s, bounds.max_rate_per_s, math.log1p(bounds.resolution) / 2.0
        )

    def at_most(self, rate_per_s: float) -> float:
        """The largest rate that is not above; the lowest of all when every one is."""
        if rate_per_s >= self.high:
            return self.high
        places = math.floor(math.log(max(rate_per_s, self.low) / self.low) / self.step + 1e-6)
        return self._at(places)

    def at_least(self, rate_per_s: float) -> float:
        """The lowest rate that is not below; the highest of all when every one is."""
        below = self.at_most(rate_per_s)
        return below if below >= rate_per_s * (1.0 - 1e-6) else self.beside(below, 1)

    def beside(self, rate_per_s: float, steps: int) -> float:
        """So many steps above a rate (below, when negative)."""
        if rate_per_s >= self.high and steps < 0:
            rate_per_s, steps = self._at(self._last), steps + 1
        places = round(math.log(rate_per_s / self.low) / self.step)
        return self._at(places + steps)

    @property
    def _last(self) -> int:
        return max(0, math.ceil(math.log(self.high / self.low) / self.step - 1e-6) - 1)

    def _at(self, places: int) -> float:
        if places > self._last:
            return self.high
        return float(f"{self.low * math.exp(max(places, 0) * self.step):.6g}")


def seed_of(base: int, config: ServingConfig, rate_per_s: float, attempt: str) -> int:
    """A seed of its own for each measurement, the same in every search with that base."""
    named = [base, config.digest, f"{rate_per_s:.6g}", attempt]
    return int(sha256_bytes(canonical_json(named))[:12], 16) % _SEEDS
