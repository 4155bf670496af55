import threading
import time

import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.evidence import Load, ServingConfig
from enginegate.triton.deploy import deployed
from enginegate.triton.steady import SteadyTraffic
from enginegate.triton.traffic import Traffic, run_load

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


@pytest.mark.usefixtures("scale")
def test_offered_rate_and_every_reply(server, traffic, samples):
    """At 200/s the generator keeps its schedule, and each reply is checked against its sample."""
    wrong = []

    def check(sample, reply):
        if not np.array_equal(reply.outputs["y"], 2 * samples[sample]["x"]):
            wrong.append(sample)

    result = run_load(
        server.grpc, traffic, Load(rate_per_s=200, duration_s=3.0, seed=7), on_reply=check
    )

    asked, taken = np.ptp(result.due_s), np.ptp(result.sent_s)
    assert abs(asked / taken - 1) < 0.01
    assert abs(len(result.due_s) / 600 - 1) < 4 / np.sqrt(600)
    assert (result.failed, result.errors, wrong) == (0, {}, [])
    assert set(result.versions) == {"1"}
    assert set(result.samples) == set(range(len(samples)))
    assert result.cpu_share < 0.9


def _closed_loop(client, model, samples, count):
    """One client that waits for each answer before it asks again: blind to what piles up."""
    took_s = []
    for index in range(count):
        start = time.perf_counter()
        client.infer(model, samples[index % len(samples)])
        took_s.append(time.perf_counter() - start)
    return np.quantile(took_s, 0.99)


def test_a_stalling_server_is_charged_for_what_piled_up(server, client, scale_model, samples):
    """A server that stops for 500 ms shows it in the p99; a closed loop does not see it."""
    config = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
    model = scale_model("stalling", stall_every=300, stall_ms=500)
    with deployed(server, model) as deployment:
        deployment.serve(config)
        result = run_load(
            server.grpc, Traffic.of("stalling", samples), Load(rate_per_s=200, duration_s=3, seed=3)
        )
        closed_p99_s = _closed_loop(client, "stalling", samples, 400)

    open_p99_s = np.quantile(result.latency_s, 0.99)
    assert 0.4 < open_p99_s < 0.9
    assert np.quantile(result.latency_s, 0.9) > 0.1
    assert closed_p99_s < 0.1


def test_failures_are_kept_as_infinite(server, samples):
    """Requests that fail stay in the record, with their status, and never look fast."""
    result = run_load(
        server.grpc, Traffic.of("nobody", samples), Load(rate_per_s=100, duration_s=0.5, seed=1)
    )

    assert result.failed == len(result.due_s) > 20
    assert np.isinf(result.latency_s).all()
    assert result.errors == {"NOT_FOUND": result.failed}


def test_a_request_past_its_deadline_has_failed(server, scale_model, samples):
    """No answer in time is a failure, however late it would have come."""
    traffic = Traffic.of("sleeping", samples, timeout_s=0.05)
    with deployed(server, scale_model("sleeping", sleep_ms=200)) as deployment:
        deployment.serve(ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1))
        result = run_load(server.grpc, traffic, Load(rate_per_s=40, duration_s=0.5, seed=1))

    assert result.errors == {"DEADLINE_EXCEEDED": len(result.due_s)}


def test_no_connection_is_an_error(traffic, monkeypatch):
    """A load that could not be sent at all is an error, not a bad measurement."""
    monkeypatch.setattr("enginegate.triton.traffic._CONNECT_S", 0.3)

    with pytest.raises(ServerError, match=r"No connection to Triton at 127\.0\.0\.1:1"):
        run_load("127.0.0.1:1", traffic, Load(rate_per_s=10, duration_s=0.5, seed=1))
    with (
        pytest.raises(ServerError, match="No connection"),
        SteadyTraffic("127.0.0.1:1", traffic, rate_per_s=10),
    ):
        pass


@pytest.mark.usefixtures("scale")
def test_loads_run_in_threads(server, traffic):
    """Two loads at once, in threads that are not the main one, both succeed."""
    results = []
    load = Load(rate_per_s=50, duration_s=0.6, seed=1)
    threads = [
        threading.Thread(target=lambda: results.append(run_load(server.grpc, traffic, load)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [result.failed for result in results] == [0, 0]


@pytest.mark.usefixtures("scale")
def test_what_a_check_raises_ends_the_run(server, traffic):
    """An error raised while checking a reply comes out as it is."""

    def refuse(sample, _reply):
        raise AssertionError(f"sample {sample}")

    with pytest.raises(AssertionError, match="sample"):
        run_load(
            server.grpc, traffic, Load(rate_per_s=100, duration_s=0.5, seed=1), on_reply=refuse
        )


def test_steady_traffic_sees_a_reload_and_loses_nothing(server, scale_model, samples):
    """Background traffic goes on through a reload and reports counts, versions and gaps."""
    traffic = Traffic.of("swapped", samples)
    with deployed(server, scale_model("swapped")) as deployment:
        deployment.serve(ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1))
        with SteadyTraffic(server.grpc, traffic, rate_per_s=100) as steady:
            deployment.serve(ServingConfig(max_batch_size=4, max_queue_delay_us=0, instances=1))
            time.sleep(0.3)
            during = steady.report()
        report = steady.report()

    assert (report.failed, report.errors) == (0, {})
    assert report.versions == {"1": report.sent}
    assert report.sent > 100
    assert during.sent <= report.sent
    assert 0 < report.p99_ms < 1000
    assert report.longest_gap_ms < 1000
    assert len(steady.result().latency_s) == report.sent


def test_steady_traffic_notices_an_outage(server, client, scale_model, samples):
    """Unload then load, which drops requests, is seen: failures are counted with their status."""
    traffic = Traffic.of("dropped", samples)
    config = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
    with deployed(server, scale_model("dropped")) as deployment:
        deployment.serve(config)
        with SteadyTraffic(server.grpc, traffic, rate_per_s=100) as steady:
            client.unload("dropped")
            client.load("dropped", deployment.model.config(config))
            time.sleep(0.2)
        report = steady.report()

    assert report.failed > 10
    assert sum(report.errors.values()) == report.failed
