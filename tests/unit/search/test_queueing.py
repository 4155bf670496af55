from dataclasses import replace

import numpy as np
import pytest

from enginegate.measurement import Load
from enginegate.search.queueing import EngineTimes, QueueingModel, ServiceTimeEstimate
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


def test_waiting_inside_a_pipeline_is_no_service_time():
    """Where counters say that one stream computed three times as long as it was there for."""
    config = LARGE.model_copy(update={"instances": 1})
    load = Load(rate_per_s=1500, duration_s=10.0, seed=3)
    sample = PROFILES["slow"].server().measure(config, load)
    plain = ServiceTimeEstimate.of(sample)
    stages = sample.measurement.stages
    piped = stages.model_copy(update={"compute_infer_ms": 3 * stages.compute_infer_ms})
    measurement = sample.measurement.model_copy(update={"stages": piped})

    estimate = ServiceTimeEstimate.of(replace(sample, measurement=measurement))

    assert plain.busy == pytest.approx(1.0, abs=0.2)
    assert estimate.busy == pytest.approx(1.0)
    assert estimate.service_ms == pytest.approx(plain.service_ms / plain.busy)


def test_no_counters_no_estimate(make_sampled):
    """A server whose counters are not known teaches the model nothing."""
    load = Load(rate_per_s=100, duration_s=1, seed=0)

    assert ServiceTimeEstimate.of(make_sampled(LARGE, load, np.full(50, 5.0))) is None


class TestEngineTimes:
    """What an engine computes alone, as the start of what serving may do."""

    def test_fits_a_fixed_part_and_a_part_for_each_sample(self):
        """As service times are; both never negative."""
        found = EngineTimes.fit({1: 4.25, 8: 6.0, 32: 12.0})

        assert (found.fixed_ms, found.item_ms) == pytest.approx((4.0, 0.25))
        assert EngineTimes.fit({1: 3.0, 8: 2.0}).item_ms == 0.0
        assert EngineTimes.fit({1: 1.0, 8: 9.0}).fixed_ms == 0.0

    def test_one_batch_size_is_no_line(self):
        """Nothing is guessed from it."""
        assert EngineTimes.fit({8: 6.0}) is None
        assert EngineTimes.fit({}) is None

    def test_instances_of_one_device_are_together_as_fast_as_one(self):
        """On a GPU; on a processor they are expected to be faster, but not so many times."""
        one, four = (
            ServingConfig(max_batch_size=32, max_queue_delay_us=0, instances=count)
            for count in (1, 4)
        )
        times = {1: 4.25, 32: 12.0}
        shared, own = EngineTimes.fit(times, shared=True), EngineTimes.fit(times)

        alone_per_s = 32 * 1e3 / 12.0
        assert own.expected_per_s(one, 500.0) == pytest.approx(alone_per_s, rel=0.01)
        assert shared.expected_per_s(one, 500.0) == pytest.approx(0.95 * alone_per_s, rel=0.01)
        assert shared.expected_per_s(four, 500.0) == pytest.approx(
            shared.expected_per_s(one, 500.0), rel=0.1
        )
        assert 1.5 < own.expected_per_s(four, 500.0) / own.expected_per_s(one, 500.0) < 4.0

    def test_requests_of_several_samples_are_fewer(self):
        """Rates are requests a second."""
        config = ServingConfig(max_batch_size=32, max_queue_delay_us=0, instances=1)
        one = EngineTimes.fit({1: 4.25, 32: 12.0}).expected_per_s(config, 500.0)
        four = EngineTimes.fit({1: 4.25, 32: 12.0}, items=4.0).expected_per_s(config, 500.0)

        assert four == pytest.approx(one / 4.0)

    @pytest.mark.parametrize("service_ms", [8.0, 4.0])
    def test_splits_explain_what_was_measured(self, service_ms):
        """Whatever serving adds, and wherever, a batch of that size took that long."""
        splits = EngineTimes(4.0, 0.25).splits(8.0, service_ms)

        assert len(splits) == (3 if service_ms > 6.0 else 1)
        for fixed, item in splits:
            assert fixed >= 0.0
            assert item >= 0.0
            assert fixed + 8.0 * item == pytest.approx(service_ms)
