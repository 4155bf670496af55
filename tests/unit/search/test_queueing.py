import numpy as np
import pytest

from enginegate.measurement import Load
from enginegate.search.queueing import QueueingModel, ServiceTimeEstimate
from enginegate.serving import ServingConfig
from tests.fakes.simulated_triton import PROFILES, SimulatedServer

LARGE = ServingConfig(max_batch_size=32, max_queue_delay_us=0, instances=4)

# Found by bisection, 15 s of simulated traffic at each step.
SIMULATED_EDGES = {
    ("slow", 4, 2, 0): 308,
    ("slow", 4, 2, 5000): 308,
    ("slow", 4, 4, 0): 645,
    ("slow", 4, 4, 5000): 653,
    ("slow", 32, 2, 0): 1169,
    ("slow", 32, 2, 5000): 1169,
    ("slow", 32, 4, 0): 2413,
    ("slow", 32, 4, 5000): 2413,
    ("fast", 4, 2, 0): 1449,
    ("fast", 4, 2, 5000): 1470,
    ("fast", 4, 4, 0): 3096,
    ("fast", 4, 4, 5000): 3096,
    ("fast", 32, 2, 0): 4416,
    ("fast", 32, 2, 5000): 4416,
    ("fast", 32, 4, 0): 9854,
    ("fast", 32, 4, 5000): 10262,
}


def _reading(server, config, rate_per_s):
    load = Load(rate_per_s=rate_per_s, duration_s=10.0, seed=3)
    return ServiceTimeEstimate.of(server.measure(config, load))


def test_service_times_are_recovered():
    """Two loads with different batches give back the 20 ms a batch and 1 ms a sample."""
    server = PROFILES["slow"].server()

    model = QueueingModel.fit([_reading(server, LARGE, rate) for rate in (400, 1500)])

    # One call in a hundred takes 20 ms more, which is 0.2 ms on average.
    assert model.service.fixed == pytest.approx(20.2, abs=0.5)
    assert model.service.item == pytest.approx(1.0, abs=0.05)
    assert model.saturation_per_s(LARGE) == pytest.approx(4 * 32 / 0.0522, rel=0.02)


@pytest.mark.parametrize("name", ["slow", "fast"])
@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("delay_us", [0, 5000])
def test_capacities_are_predicted_closely(name, size, instances, delay_us):
    """From two moderate loads on one configuration, the edge of any other is within a fifth."""
    profile = PROFILES[name]
    server, config = (
        profile.server(),
        ServingConfig(max_batch_size=size, max_queue_delay_us=delay_us, instances=instances),
    )
    full = 4e3 * 32 / (profile.base_ms + 32 * profile.item_ms)
    readings = [_reading(server, LARGE, share * full) for share in (0.2, 0.6)]
    alone = ServingConfig(max_batch_size=32, max_queue_delay_us=0, instances=1)
    readings.append(_reading(server, alone, 0.1 * full))

    edges = QueueingModel.fit(readings).capacity([config], profile.p99_ms)

    truth = SIMULATED_EDGES[name, size, instances, delay_us]
    assert edges.expected[0] == pytest.approx(truth, rel=0.21)


def test_unmeasured_capacity_is_an_interval():
    """One load leaves the split of service times open: the prediction spans every possible one."""
    server = PROFILES["slow"].server()
    one = QueueingModel.fit([_reading(server, LARGE, 400)])
    two = QueueingModel.fit([_reading(server, LARGE, rate) for rate in (400, 1500)])

    wide, narrow = one.capacity([LARGE], 120.0), two.capacity([LARGE], 120.0)

    assert wide.low[0] < narrow.expected[0] < wide.high[0]
    assert narrow.low[0] == narrow.high[0]


def test_instances_that_share_a_processor_are_learned():
    """Until a second number of instances is measured, both extremes are possible."""
    server = SimulatedServer(20.0, 1.0, cores=1, limit_ms=300.0)
    alone = LARGE.model_copy(update={"instances": 1})
    before = [_reading(server, LARGE, rate) for rate in (300, 500)]

    unknown = QueueingModel.fit(before).capacity([alone], 300.0)
    known = QueueingModel.fit([*before, _reading(server, alone, 450)]).capacity([alone], 300.0)

    assert unknown.high[0] > 2.0 * unknown.low[0]
    assert known.high[0] == pytest.approx(known.low[0], rel=0.01)
    assert known.expected[0] == pytest.approx(32 / 0.052, rel=0.1)


def test_no_counters_no_estimate(make_sampled):
    """A server whose counters are not known teaches the model nothing."""
    load = Load(rate_per_s=100, duration_s=1, seed=0)

    assert ServiceTimeEstimate.of(make_sampled(LARGE, load, np.full(50, 5.0))) is None
