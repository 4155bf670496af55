"""Measurements are kept by content, and only what is missing is measured."""

import numpy as np
import pytest

from enginegate.benchmark.measurement_cache import CacheKey, MeasurementCache
from enginegate.measurement import LatencySample, Load, Measurement
from enginegate.measuring.p99 import SequentialTest, percentiles
from enginegate.measuring.raw_requests import RawRequests, save_raw_requests
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.search import search
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from tests.fakes.evidence import sha

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
LOAD = Load(rate_per_s=200.0, duration_s=10.0, seed=1)
ENDS = SequentialTest(0.99)


class Counting:
    """A server whose p99 grows with the rate; counts what is asked of it."""

    def __init__(self, folder, *, invalid=(), ended_after=None, sent_late_ms=0.0):
        self.folder, self.invalid, self.ended_after = folder, invalid, ended_after
        self.sent_late_ms = sent_late_ms
        self.asked = []

    def __call__(self, config, load, *, ends=None):
        self.asked.append((config, load))
        lasted_s = load.duration_s
        if ends is not None and self.ended_after is not None:
            lasted_s = self.ended_after
        count = int(load.rate_per_s * lasted_s)
        due_s = np.arange(count) / load.rate_per_s
        source = np.random.default_rng(load.seed)
        late_s = self.sent_late_ms / 1e3
        latency_s = source.gamma(4.0, load.rate_per_s / 1e5, count) + late_s
        requests = RawRequests(due_s, due_s + late_s, latency_s, np.zeros(count, bool))
        latencies_ms = requests.latencies_ms
        return LatencySample(
            Measurement(
                config=config,
                load=load,
                invalid=self.invalid,
                sent=count,
                completed=count,
                failed=0,
                throughput_per_s=load.rate_per_s,
                percentiles=percentiles(latencies_ms),
                late_p99_ms=self.sent_late_ms or 5.5,
                stages=None,
                latencies_sha256=save_raw_requests(requests, self.folder),
                lasted_s=lasted_s,
            ),
            latencies_ms,
        )


@pytest.fixture
def cache(tmp_path):
    return MeasurementCache(tmp_path / "measurements", tmp_path / "latencies")


def key(**changes):
    fields = {
        "files": {"model.onnx": sha("e")},
        "backend": "python",
        "server": "Triton 2.51.0",
        "machine": "2 x EPYC",
        "options": ServingOptions(),
        "traffic": sha("7"),
        "sending": "grpc",
    }
    return CacheKey(**(fields | changes))


def cached_on(cache, fake, *, limit_ms=40.0, **changes):
    return cache.measure_with(fake, key(**changes), limit_ms=limit_ms)


def test_equal_measurement_is_made_once(cache):
    """What comes back is what was measured, raw latencies included."""
    server = Counting(cache.latencies)

    first = cached_on(cache, server)(CONFIG, LOAD)
    again = cached_on(cache, server)(CONFIG, LOAD)

    assert len(server.asked) == 1
    assert (first.cached, again.cached) == (False, True)
    assert again.measurement == first.measurement
    assert again.latencies_ms.tolist() == first.latencies_ms.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"files": {"model.onnx": sha("d")}}, id="engine"),
        pytest.param({"server": "Triton 2.52.0"}, id="server"),
        pytest.param({"machine": "4 x EPYC"}, id="machine"),
        pytest.param({"options": ServingOptions(max_queue_size=8)}, id="options"),
        pytest.param({"traffic": sha("8")}, id="traffic"),
        pytest.param({"sending": "http"}, id="sending"),
        pytest.param({"gpu": True}, id="device"),
        pytest.param({"settings": BackendSettings(cuda_provider={"use_tf32": "0"})}, id="settings"),
    ],
)
def test_every_field_of_the_key_counts(cache, changes):
    """A measurement is never used for something else than it was made on."""
    server = Counting(cache.latencies)
    cached_on(cache, server)(CONFIG, LOAD)

    cached_on(cache, server, **changes)(CONFIG, LOAD)

    assert len(server.asked) == 2


def test_configuration_and_load_count(cache):
    """So does every field of them, the seed included."""
    server = Counting(cache.latencies)
    measure = cached_on(cache, server)

    for load in (LOAD, LOAD.model_copy(update={"seed": 2})):
        for config in (CONFIG, CONFIG.model_copy(update={"instances": 2})):
            measure(config, load)

    assert len(server.asked) == 4


def test_invalid_measurement_is_not_kept(cache):
    """It says nothing, so it is made again."""
    server = Counting(cache.latencies, invalid=("the generator was late",))
    measure = cached_on(cache, server)

    measure(CONFIG, LOAD)
    measure(CONFIG, LOAD)

    assert len(server.asked) == 2


@pytest.mark.parametrize("part", ["measurements", "latencies"])
def test_damaged_file_is_measured_again(cache, tmp_path, part):
    """Record or raw latencies: what is not what it was is not believed."""
    server = Counting(cache.latencies)
    whole = cached_on(cache, server)(CONFIG, LOAD)
    for path in (tmp_path / part).iterdir():
        path.write_bytes(path.read_bytes()[:-20])

    again = cached_on(cache, server)(CONFIG, LOAD)

    assert len(server.asked) == 2
    assert again.measurement == whole.measurement
    assert cached_on(cache, server)(CONFIG, LOAD).measurement == whole.measurement
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("limit_ms", "ends", "measured"),
    [
        pytest.param(40.0, ENDS, 1, id="same-limit"),
        pytest.param(400.0, ENDS, 1, id="decided-there-too"),
        pytest.param(20.0, ENDS, 2, id="open-there"),
        pytest.param(40.0, None, 2, id="the-whole-run-is-wanted"),
    ],
)
def test_run_ended_early_is_reused_where_it_decides(cache, limit_ms, ends, measured):
    """Another limit may need the rest of it; p99 is 20 ms here."""
    server = Counting(cache.latencies, ended_after=5.0)
    cached_on(cache, server)(CONFIG, LOAD, ends=ENDS)

    cached_on(cache, server, limit_ms=limit_ms)(CONFIG, LOAD, ends=ends)

    assert len(server.asked) == measured


def test_lateness_deciding_a_shorter_limit_is_measured_again(cache):
    """A p99 of 20 ms, sent 4 ms late: within 40 ms either way, and within 22 ms but for that."""
    server = Counting(cache.latencies, sent_late_ms=4.0)
    cached_on(cache, server)(CONFIG, LOAD)

    cached_on(cache, server, limit_ms=35.0)(CONFIG, LOAD)
    assert len(server.asked) == 1

    cached_on(cache, server, limit_ms=22.0)(CONFIG, LOAD)
    assert len(server.asked) == 2


def test_generator_too_late_for_a_shorter_limit_is_measured_again(cache):
    """It was 5.5 ms late, which a limit of 40 ms allows, and one of 20 ms does not."""
    server = Counting(cache.latencies)
    cached_on(cache, server)(CONFIG, LOAD)

    cached_on(cache, server, limit_ms=20.0)(CONFIG, LOAD)

    assert len(server.asked) == 2


def searched(cache, server, p99_ms):
    bounds = Search(
        max_batch_sizes=(8,),
        queue_delays_us=(0, 1000),
        instances=(1, 2),
        min_rate_per_s=100,
        max_rate_per_s=900,
        measurement_s=10,
        budget_s=10_000,
    )
    slo = Slo(p99_ms=p99_ms, min_throughput_per_s=100, confidence=0.95, confirm_requests=3000)
    return search(cached_on(cache, server, limit_ms=p99_ms), bounds, slo)


def test_second_search_measures_nothing(cache):
    """Kill and resume repeats nothing, and ends at the same answer."""
    server = Counting(cache.latencies)
    first = searched(cache, server, 40.0)
    asked = len(server.asked)

    again = searched(cache, server, 40.0)

    assert first.chosen is not None
    assert asked == len(set(server.asked))
    assert len(server.asked) == asked
    assert (again.chosen, again.throughput_at_slo_per_s) == (
        first.chosen,
        first.throughput_at_slo_per_s,
    )


def test_moved_slo_measures_only_what_is_missing(cache):
    """Raw latencies are decided on again; only rates that nobody asked about are new."""
    server = Counting(cache.latencies)
    first = searched(cache, server, 40.0)
    before = set(server.asked)

    moved = searched(cache, server, 60.0)

    new = server.asked[len(before) :]
    assert moved.throughput_at_slo_per_s > first.throughput_at_slo_per_s
    assert before.isdisjoint(new)
    assert len(new) < len(moved.measurements)
