"""A simulated Triton: same knobs, its own clock, and an optimum that is known by trying everything.

``python -m tests.fakes.simulated_triton`` prints the optimum of each profile (about a minute).
"""

import heapq
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from enginegate.errors import ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import LatencySample, Load, Measurement, Percentile, StageSplit
from enginegate.measuring.measure import throughput, warmup_s, without_warmup
from enginegate.measuring.validity import still_warming_up
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.space import configurations

LOAD_S = 2.0
GENERATOR_LATE = ("the generator was late",)


class SimulatedServer:
    """A dynamic batcher in virtual time: each batch takes ``base + item x size``, with jitter.

    ``now_s`` advances by each measurement and two seconds for its load. Set ``dies_after`` to make
    a later call fail, ``is_invalid`` to make a measurement invalid when it returns true,
    ``overload`` to let throughput collapse when more is offered than that many requests a second,
    ``noise`` to let each measurement as a whole run slower or faster (sigma of the logarithm of the
    factor).
    """

    def __init__(self, base_ms=4.0, item_ms=0.25, *, limit_ms=20.0, cores=None, outliers=0.0):
        self.base_s, self.item_s, self.cores = base_ms / 1e3, item_ms / 1e3, cores
        self.outliers, self.limit_ms = outliers, limit_ms
        self.now_s = 0.0
        self.calls = []
        self.loaded = None
        self.dies_after = None
        self.overload, self.noise = np.inf, 0.0
        self.is_invalid = lambda _config, _load: False

    def clock(self):
        return self.now_s

    def arrivals_s(self, load):
        source = np.random.default_rng(load.seed)
        count = int(load.rate_per_s * load.duration_s * 1.2) + 60
        due_s = np.cumsum(source.exponential(1.0 / load.rate_per_s, count))
        return due_s[due_s < load.duration_s]

    def batches(self, config, load):
        """Due times, and of each batch its size, its service and when it was done, in seconds."""
        source, due = np.random.default_rng([load.seed, 99]), self.arrivals_s(load)
        at, count = due.tolist(), len(due)
        pace = np.random.default_rng([load.seed, 7]).normal(0.0, self.noise)
        jitter = np.exp(source.normal(pace, 0.03, count)).tolist()
        extra = np.where(source.random(count) < self.outliers, 0.020, 0.0).tolist()
        most, delay = config.max_batch_size, config.max_queue_delay_us / 1e6
        free, ends, took, done = [0.0] * config.instances, [], [], []
        first = 0
        while first < count:
            start = max(free[0], at[first])
            if delay:
                full = first + most - 1
                filled = at[full] if full < count else np.inf
                start = max(start, min(filled, at[first] + delay))
            end = bisect_right(at, start, first, min(first + most, count))
            service = (self.base_s + self.item_s * (end - first)) * jitter[len(ends)]
            if self.cores:
                running = 1 + sum(moment > start for moment in free)
                service *= max(1.0, running / self.cores)
            ends.append(end)
            took.append(service + extra[len(took)])
            done.append(start + took[-1])
            heapq.heapreplace(free, done[-1])
            first = end
        return due, np.diff([0, *ends]), np.array(took), np.array(done)

    def latencies_ms(self, config, load):
        """Latency of every request, in order of arrival."""
        due_s, sizes, _, done_s = self.batches(config, load)
        return (np.repeat(done_s, sizes) - due_s) * 1e3

    def measure(self, config, load, *, ends=None):
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise ServerError("the server died")
        self.calls.append((config, load))
        due_s, sizes, took_s, done_s = self.batches(config, load)
        latencies_ms = (np.repeat(done_s, sizes) - due_s) * 1e3
        lasted_s = self._lasted_s(due_s, latencies_ms, load, ends)
        sent = int(np.searchsorted(due_s, lasted_s))
        self.now_s += lasted_s + LOAD_S
        rows = as_rows(load, due_s[:sent], latencies_ms[:sent] / 1e3, lasted_s)
        batches = int(np.searchsorted(np.cumsum(sizes), sent)) + 1
        slowdown = 0.5 if load.rate_per_s > self.overload else 1.0
        return sampled(
            config,
            load,
            without_warmup(rows).latencies_ms,
            invalid=self._invalid(config, rows),
            lasted_s=lasted_s,
            throughput_per_s=slowdown * throughput(rows),
            batches=(sizes[:batches], took_s[:batches] * 1e3),
            warm=int(without_warmup(rows).warm.sum()),
            warmup_s=warmup_s(load),
        )

    def _invalid(self, config, rows):
        """As `measure` would say of a run right after a load; or what ``is_invalid`` says."""
        just_loaded, self.loaded = config != self.loaded, config
        if self.is_invalid(config, rows.load):
            return GENERATOR_LATE
        return still_warming_up(rows, warmup_s(rows.load)) if just_loaded else ()

    def _lasted_s(self, due_s, latencies_ms, load, ends):
        answered_s = due_s + latencies_ms / 1e3
        moment_s = 0.5
        while ends is not None and moment_s < load.duration_s:
            seen = latencies_ms[(answered_s <= moment_s) & (due_s >= warmup_s(load))]
            over = int((seen > self.limit_ms).sum())
            if len(seen) >= 100 and ends.decide(len(seen), over) is not Outcome.INCONCLUSIVE:
                return moment_s
            moment_s *= 1.4
        return load.duration_s


class SharedGpu(SimulatedServer):
    """Processes that take batches at once, and compute them in turns on one GPU.

    Each spends ``request_ms`` of its own on every request.
    """

    def __init__(self, base_ms, item_ms, *, request_ms, limit_ms=20.0):
        super().__init__(base_ms, item_ms, limit_ms=limit_ms)
        self.request_s = request_ms / 1e3

    def batches(self, config, load):
        due = self.arrivals_s(load)
        at, count = due.tolist(), len(due)
        free, gpu_free = [0.0] * config.processes, 0.0
        ends, took, done, first = [], [], [], 0
        while first < count:
            start = max(heapq.heappop(free), at[first])
            end = bisect_right(at, start, first, min(first + config.max_batch_size, count))
            own_s = self.request_s * (end - first) / 2
            computed = max(gpu_free, start + own_s) + self.base_s + self.item_s * (end - first)
            gpu_free = computed
            heapq.heappush(free, computed + own_s)
            ends.append(end)
            done.append(computed + own_s)
            took.append(done[-1] - start)
            first = end
        return due, np.diff([0, *ends]), np.array(took), np.array(done)


def as_rows(load, due_s, latency_s, lasted_s):
    """What a generator that is always on time has sent."""
    count = len(due_s)
    return LoadResult(
        load=load,
        due_s=due_s,
        sent_s=due_s,
        latency_s=latency_s,
        samples=np.zeros(count, np.int64),
        versions=np.full(count, "1"),
        errors={},
        cpu_share=0.0,
        lasted_s=lasted_s,
    )


def sampled(  # noqa: PLR0913 - a measurement has many fields
    config,
    load,
    latencies_ms,
    *,
    invalid=(),
    lasted_s=None,
    throughput_per_s=None,
    batches=None,
    warm=0,
    warmup_s=None,
):
    failed = int(np.isinf(latencies_ms).sum())
    rank = int(np.ceil(0.99 * len(latencies_ms))) - 1
    p99_ms = float(np.partition(latencies_ms, rank)[rank]) if len(latencies_ms) else np.inf
    percentile = Percentile(
        quantile=0.99,
        value_ms=p99_ms,
        low_ms=0.9 * p99_ms,
        high_ms=1.1 * p99_ms,
        samples=max(1, len(latencies_ms)),
    )
    if throughput_per_s is None:
        throughput_per_s = (len(latencies_ms) - failed) / load.duration_s
    measurement = Measurement(
        config=config,
        load=load,
        invalid=invalid,
        sent=warm + len(latencies_ms),
        completed=len(latencies_ms) - failed,
        failed=failed,
        throughput_per_s=throughput_per_s,
        percentiles=(percentile,) if np.isfinite(p99_ms) else (),
        late_p99_ms=0.1,
        stages=stages(*batches, latencies_ms) if batches else None,
        latencies_sha256="0" * 64,
        lasted_s=lasted_s,
        warmup_s=warmup_s,
        generator_limited=invalid == GENERATOR_LATE,
    )
    return LatencySample(measurement, latencies_ms)


def stages(sizes, took_ms, latencies_ms):
    infer_ms = float((sizes * took_ms).sum() / sizes.sum())
    return StageSplit(
        queue_ms=max(0.0, float(latencies_ms.mean()) - infer_ms) if len(latencies_ms) else 0.0,
        compute_input_ms=0.0,
        compute_infer_ms=infer_ms,
        compute_output_ms=0.0,
        mean_batch_size=float(sizes.mean()),
        batches=dict(sorted(Counter(sizes.tolist()).items())),
        client_ms=0.0,
        judged_server_ms=float(np.mean(latencies_ms[np.isfinite(latencies_ms)])),
    )


@dataclass(frozen=True)
class Profile:
    """A service, its SLO, and the highest rate (requests/s) at which some configuration meets it.

    ``best_per_s`` was found by bisecting every configuration with 20 s of simulated traffic.
    """

    base_ms: float
    item_ms: float
    p99_ms: float
    best_per_s: float
    cores: int | None = None
    outliers: float = 0.0
    measurement_s: float = 6.0

    def server(self):
        return SimulatedServer(
            self.base_ms,
            self.item_ms,
            limit_ms=self.p99_ms,
            cores=self.cores,
            outliers=self.outliers,
        )

    def bounds(self, seed):
        return Search(
            max_batch_sizes=(1, 2, 4, 8, 16, 32),
            queue_delays_us=(0, 1000, 5000),
            instances=(1, 2, 3, 4),
            min_rate_per_s=40,
            max_rate_per_s=14_000,
            resolution=0.02,
            measurement_s=self.measurement_s,
            budget_s=900.0,
            max_measurements=40,
            seed=seed,
        )

    def slo(self):
        return Slo(p99_ms=self.p99_ms, min_throughput_per_s=40, confidence=0.99)

    @cache  # noqa: B019 - profiles live as long as the tests
    def over(self, config, rate_per_s, seconds=20.0):
        """Share of requests over the limit in long traffic, the start left out."""
        load = Load(rate_per_s=rate_per_s, duration_s=seconds, seed=1)
        latencies_ms = self.server().latencies_ms(config, load)
        return float((latencies_ms[len(latencies_ms) // 20 :] > self.p99_ms).mean())

    def violates(self, config, rate_per_s):
        """Whether p99 is above the limit; a short trial settles most, a long one the rest."""
        return self.over(config, rate_per_s) > 0.01 and self.over(config, rate_per_s, 200.0) > 0.01

    def edge_per_s(self, config):
        low, high = 1.0, 1.02e3 * config.instances * config.max_batch_size / self.base_ms
        for _ in range(14):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.over(config, middle) <= 0.01 else (low, middle)
        return low


PROFILES = {
    "slow": Profile(20.0, 1.0, 120.0, 2406.0, outliers=0.01),
    "fast": Profile(4.0, 0.25, 20.0, 10_249.0, measurement_s=5.0),
    "two cores": Profile(5.0, 1.0, 100.0, 1692.0, cores=2),
}

if __name__ == "__main__":
    for name, profile in PROFILES.items():
        edges = {config: profile.edge_per_s(config) for config in configurations(profile.bounds(0))}
        best = max(edges, key=edges.get)
        print(f"{name}: {edges[best]:.0f}/s with {best}")  # noqa: T201
