import numpy as np
import pytest

from enginegate.benchmark.deployment import deploy
from enginegate.errors import InputError, ServerError
from enginegate.loadgen import perf_analyzer
from enginegate.loadgen.traffic import Traffic, Transport, run_load
from enginegate.measurement import ClosedLoad, Load
from enginegate.serving import ServingConfig

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]
needs_program = pytest.mark.skipif(
    perf_analyzer.find_perf_analyzer() is None,
    reason="no perf_analyzer: name it with PERF_ANALYZER (in the wheel of tritonclient 2.51.0)",
)
LOAD = Load(rate_per_s=100, duration_s=1.0, seed=5)


@needs_program
@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_both_drivers_send_the_same_load(server, traffic, protocol):
    """The same requests at the same times in the same order; every one is answered."""
    address = server.http if protocol == "http" else server.grpc
    ours = run_load(address, traffic, LOAD, sending=Transport(protocol=protocol))
    theirs = perf_analyzer.run_perf_analyzer(address, traffic, LOAD, protocol=protocol)

    assert np.array_equal(ours.due_s, theirs.due_s)
    assert (theirs.failed, theirs.generator.driver) == (0, "perf_analyzer")
    assert theirs.late_s.min() == 0
    assert (theirs.latency_s > 0).all()
    once = len(traffic.requests)
    assert np.array_equal(ours.samples[:once], theirs.samples[:once])


def summary(result):
    """Mean time between answers, and the two percentiles, after the first tenth."""
    later = result.latency_s[result.due_s > 0.1 * result.load.duration_s]
    gap_s = (result.due_s + result.latency_s).max() / len(result.due_s)
    return np.array([gap_s, np.quantile(later, 0.5), np.quantile(later, 0.99)])


@needs_program
def test_both_drivers_measure_the_same(server, scale_model, samples):
    """p50, p99 and throughput within 10 %, by the least disturbed of up to five tries."""
    load = Load(rate_per_s=20, duration_s=2.5, seed=5)
    with deploy(server, scale_model("compared", sleep_ms=25)) as deployment:
        deployment.serve(ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1))
        traffic = Traffic.of("compared", samples)
        ours = theirs = np.full(3, np.inf)
        for _ in range(5):
            ours = np.minimum(ours, summary(run_load(server.grpc, traffic, load)))
            found = perf_analyzer.run_perf_analyzer(server.grpc, traffic, load)
            theirs = np.minimum(theirs, summary(found))
            if np.allclose(theirs, ours, rtol=0.1):
                break

    assert np.allclose(theirs, ours, rtol=0.1), (ours, theirs)


@needs_program
@pytest.mark.usefixtures("scale")
def test_fresh_seed_is_another_order(server, traffic):
    """As our own driver: a load's order seed goes before the traffic's."""
    loads = [LOAD.model_copy(update={"duration_s": 0.4, "order_seed": seed}) for seed in (1, 2)]

    ours = [run_load(server.grpc, traffic, load).samples for load in loads]
    theirs = [perf_analyzer.run_perf_analyzer(server.grpc, traffic, load).samples for load in loads]

    once = min(len(traffic.requests), len(ours[0]))
    assert not np.array_equal(theirs[0][:once], theirs[1][:once])
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one[:once], other[:once])


@needs_program
@pytest.mark.usefixtures("scale")
def test_closed_loop_has_that_many_clients(server, traffic):
    """So many clients, for about as long as asked."""
    result = perf_analyzer.run_perf_analyzer(
        server.grpc, traffic, ClosedLoad(clients=2, duration_s=0.6, seed=1)
    )

    assert 0.4 < result.lasted_s < 6.0
    assert (result.failed, len(result.due_s) > 20) == (0, True)


@needs_program
def test_it_stops_at_a_failure(server, samples):
    """It cannot count failures, so they are an error, with what it said."""
    with pytest.raises(ServerError, match=r"(?s)nobody.*stops at the first request that fails"):
        perf_analyzer.run_perf_analyzer(server.grpc, Traffic.of("nobody", samples), LOAD)


def test_traffic_it_cannot_send(tmp_path):
    """Mixed batch sizes, and a program that is not there, are refused with what to do."""
    mixed = [{"x": np.zeros((size, 4), np.float32)} for size in (1, 2)]
    program = tmp_path / "perf_analyzer"
    with pytest.raises(InputError, match=r"batch sizes \[1, 2\]"):
        perf_analyzer.run_perf_analyzer("127.0.0.1:1", Traffic.of("m", mixed), LOAD, binary=program)
    with pytest.raises(ServerError, match="No such file"):
        perf_analyzer.run_perf_analyzer(
            "127.0.0.1:1", Traffic.of("m", mixed[:1]), LOAD, binary=program
        )


def test_without_the_program(monkeypatch, traffic):
    """Where there is none, the error says where to get it."""
    monkeypatch.delenv("PERF_ANALYZER", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerError, match=r"(?s)no perf_analyzer.*tritonclient 2\.51\.0"):
        perf_analyzer.run_perf_analyzer("127.0.0.1:1", traffic, LOAD)
