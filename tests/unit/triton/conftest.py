"""A simulated Triton: same knobs, known optimum, its own clock."""

import heapq

import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.evidence import Measurement, StageSplit
from enginegate.policy import Search, Slo
from enginegate.triton.measure import Sampled, percentiles
from enginegate.triton.traffic import poisson


class SimulatedServer:
    """A dynamic batcher in virtual time: each batch takes 4 ms + 0.25 ms a sample, with jitter.

    ``now_s`` advances by each measurement and two seconds for its load. Set ``dies_after`` to make
    a later call fail, ``void`` to make a measurement invalid when it returns true.
    """

    def __init__(self, base_ms=4.0, item_ms=0.25):
        self.base_s, self.item_s = base_ms / 1e3, item_ms / 1e3
        self.now_s = 0.0
        self.calls = []
        self.dies_after = None
        self.void = lambda _config, _load: False

    def clock(self):
        return self.now_s

    def latencies_ms(self, config, load):
        """Latency of every request, in order of arrival."""
        source = np.random.default_rng([load.seed, 99])
        arrivals = list(poisson(load))
        free = [0.0] * config.instances
        took, index = [], 0
        while index < len(arrivals):
            start = max(heapq.heappop(free), arrivals[index])
            full = index + config.max_batch_size - 1
            filled = arrivals[full] if full < len(arrivals) else np.inf
            patience = arrivals[index] + config.max_queue_delay_us / 1e6
            start = max(start, min(filled, patience))
            end = index
            while end < len(arrivals) and end - index < config.max_batch_size:
                if arrivals[end] > start:
                    break
                end += 1
            service = self.base_s + self.item_s * (end - index)
            done = start + service * source.lognormal(0.0, 0.03)
            took += [(done - arrival) * 1e3 for arrival in arrivals[index:end]]
            heapq.heappush(free, done)
            index = end
        return np.array(took)

    def measure(self, config, load):
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise ServerError("the server died")
        self.calls.append((config, load))
        self.now_s += load.duration_s + 2.0
        return sampled(
            config,
            load,
            self.latencies_ms(config, load),
            invalid=("the generator was late",) if self.void(config, load) else (),
        )


def sampled(config, load, latencies_ms, invalid=()):
    failed = int(np.isinf(latencies_ms).sum())
    measurement = Measurement(
        config=config,
        load=load,
        invalid=invalid,
        sent=len(latencies_ms),
        completed=len(latencies_ms) - failed,
        failed=failed,
        throughput_per_s=(len(latencies_ms) - failed) / load.duration_s,
        percentiles=percentiles(latencies_ms),
        late_p99_ms=0.1,
        stages=StageSplit(
            queue_ms=6.1,
            compute_input_ms=0.1,
            compute_infer_ms=3.7,
            compute_output_ms=0.1,
            mean_batch_size=2.0,
        ),
        latencies_sha256="0" * 64,
    )
    return Sampled(measurement, latencies_ms)


@pytest.fixture
def simulated():
    """A simulated server."""
    return SimulatedServer()


@pytest.fixture
def make_sampled():
    """Makes a measurement from latencies."""
    return sampled


@pytest.fixture
def bounds():
    """A search space of eight configurations and eight rates."""
    return Search(
        max_batch_sizes=(1, 16),
        queue_delays_us=(0, 2000),
        instances=(1, 2),
        rates_per_s=(100, 200, 400, 800, 1600, 2400, 3200, 4800),
        measurement_s=5.0,
        budget_s=600.0,
    )


@pytest.fixture
def slo():
    """Twenty milliseconds at the 99th percentile."""
    return Slo(p99_ms=20.0, min_throughput_per_s=800.0, confidence=0.99, confirmations=3)
