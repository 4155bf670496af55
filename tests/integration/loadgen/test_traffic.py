import itertools
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from enginegate.benchmark.deployment import deploy
from enginegate.benchmark.generator_baseline import do_nothing
from enginegate.errors import InputError, ServerError
from enginegate.loadgen import shared_memory
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.grpc_message import encode_request
from enginegate.loadgen.traffic import EarlyEnd, Traffic, Transport, run_load
from enginegate.measurement import ClosedLoad, Load
from enginegate.measuring.p99 import nearest_rank
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.client import SharedRegion

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


PLAIN = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


def test_offered_rate(server):
    """At 500/s against a model that does nothing the rate is met within 1 %.

    By the least late send of the first and of the last quarter: a stall makes some sends late, a
    wrong rate makes all of them later and later.
    """
    with deploy(server, do_nothing("nothing")) as deployment:
        deployment.serve(PLAIN)
        traffic = Traffic.of("nothing", [{"x": np.zeros((1, 64), np.uint8)}])
        result = run_load(server.grpc, traffic, Load(rate_per_s=500, duration_s=1.2, seed=7))

    late_s, quarter = result.late_s, len(result.late_s) // 4
    grown_s = late_s[-quarter:].min() - late_s[:quarter].min()
    assert abs(grown_s) < 0.01 * np.ptp(result.due_s)
    assert abs(len(result.due_s) / 600 - 1) < 4 / np.sqrt(600)
    assert (result.failed, result.errors, result.lasted_s) == (0, {}, 1.2)


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("memory", ["none", "system"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_every_way_to_travel(server, client, traffic, samples, protocol, memory):
    """Every reply belongs to its sample; shared memory is given back, here and at the server."""
    before, wrong = set(client.shared_memory()), []

    def check(sample, reply):
        if not np.array_equal(reply.outputs["y"], 2 * samples[sample]["x"]):
            wrong.append(sample)

    result = run_load(
        server.http if protocol == "http" else server.grpc,
        traffic,
        Load(rate_per_s=250, duration_s=0.4, seed=7),
        on_reply=check,
        sending=Transport(protocol=protocol, shared_memory=memory, control=server.grpc),
    )

    assert (result.failed, result.errors, wrong) == (0, {}, [])
    assert set(result.versions) == {"1"}
    assert set(result.samples) == set(range(len(samples)))
    assert 0 < result.cpu_share < 0.9
    assert set(client.shared_memory()) <= before


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_outputs_are_written_to_shared_memory(server, samples, protocol, monkeypatch):
    """Where no reply is checked, answers lie where the requests said, each at its own place."""
    written, forget = {}, shared_memory._unregister

    def read_before(client, region):
        written[region.name] = Path("/dev/shm", region.name).read_bytes()  # noqa: S108
        forget(client, region)

    monkeypatch.setattr(shared_memory, "_unregister", read_before)
    result = run_load(
        server.http if protocol == "http" else server.grpc,
        Traffic.of("scale", samples),
        Load(rate_per_s=250, duration_s=0.6, seed=7),
        sending=Transport(protocol=protocol, shared_memory="system", control=server.grpc),
    )

    (memory,) = written.values()
    every = np.frombuffer(memory, np.float32).reshape(len(samples), 2, 16)[:, :, :4]
    assert result.failed == 0
    assert set(result.versions) == {"1"}
    assert np.array_equal(every[:, 0], np.concatenate([sample["x"] for sample in samples]))
    assert np.array_equal(every[:, 1], 2 * every[:, 0])


def test_shared_memory_is_given_back_after_a_failure(server, client, scale_model, samples):
    """What ends the run early leaves nothing registered, once what is under way was answered."""

    def refuse(_sample, _reply):
        raise AssertionError

    before, load = set(client.shared_memory()), Load(rate_per_s=100, duration_s=0.6, seed=1)
    sending = Transport(shared_memory="system")
    with deploy(server, scale_model("sleeping", sleep_ms=200)) as deployment:
        deployment.serve(PLAIN)
        with pytest.raises(AssertionError):
            run_load(
                server.grpc,
                Traffic.of("sleeping", samples),
                load,
                on_reply=refuse,
                sending=sending,
            )

        assert set(client.shared_memory()) <= before


def test_memory_of_a_killed_run_is_forgotten_at_the_next_start(server, client):
    """The server lists it for as long as it runs; that of a run that is alive stays."""
    request = encode_request("m", {"x": np.zeros((1, 4), np.float32)})
    with subprocess.Popen(["sleep", "600"]) as dying:
        dead = f"enginegate-load-{shared_memory._owner(dying.pid)}-dead"
        dying.kill()
    living = f"enginegate-load-{shared_memory._owner(os.getpid())}-living"
    with ExitStack() as stack:
        for name in (dead, living):
            stack.enter_context(shared_memory._system_memory(name, 64, ()))
            client.share_memory(SharedRegion(name, 64))
        with shared_memory.in_shared_memory(server.grpc, (request,), "system"):
            listed = set(client.shared_memory())
        client.forget_memory(SharedRegion(living, 64))
        (shared_memory._SYSTEM / dead).touch()  # for its owner here, who did not die

    assert {living} <= listed
    assert dead not in listed


@pytest.mark.usefixtures("scale")
def test_mixed_batch_sizes(server):
    """Requests of different sizes travel in one load, and each gets its own number of answers."""
    source = np.random.default_rng(0)
    mixed = [{"x": source.normal(size=(n, 4)).astype(np.float32)} for n in (1, 3, 8, 2)]
    sizes = set()
    run_load(
        server.grpc,
        Traffic.of("scale", mixed),
        Load(rate_per_s=100, duration_s=0.2, seed=1),
        on_reply=lambda sample, reply: sizes.add((sample, len(reply.outputs["y"]))),
    )

    assert sizes == {(0, 1), (1, 3), (2, 8), (3, 2)}


def test_stalling_server_is_charged_for_the_requests_that_piled_up(server, scale_model, samples):
    """A server that stops for 500 ms shows it in the p99; a closed loop does not see it."""
    with deploy(server, scale_model("stalling", stall_every=150, stall_ms=500)) as deployment:
        deployment.serve(PLAIN)
        traffic = Traffic.of("stalling", samples)
        result = run_load(server.grpc, traffic, Load(rate_per_s=200, duration_s=1.5, seed=3))
    # A machine on which a request takes 20 ms stalls once as well.
    with deploy(server, scale_model("halting", stall_every=40, stall_ms=500)) as deployment:
        deployment.serve(PLAIN)
        traffic = Traffic.of("halting", samples)
        closed = run_load(server.grpc, traffic, ClosedLoad(clients=1, duration_s=1.5, seed=3))

    assert 0.3 < np.quantile(result.latency_s, 0.99) < 0.9
    assert np.quantile(result.latency_s, 0.8) > 0.1
    assert closed.latency_s.max() > 0.4
    assert np.quantile(closed.latency_s, 0.95) < 0.1


@pytest.mark.usefixtures("scale")
def test_clients_wait_for_their_answers(server, traffic):
    """In a closed loop as many requests are under way as there are clients, and never more."""
    result = run_load(server.grpc, traffic, ClosedLoad(clients=3, duration_s=0.4, seed=1))

    done_s = result.due_s + result.latency_s
    assert len(result.due_s) > 30
    busy = [int(((result.due_s <= at) & (done_s > at)).sum()) for at in np.linspace(0.05, 0.35, 50)]
    assert max(busy) == 3
    assert result.failed == 0


@pytest.mark.usefixtures("scale")
def test_recorded_gaps_are_sent(server, samples):
    """A replay sends the recorded gaps, at the rate asked for."""
    recorded = (0.0, 0.01, 0.02, 0.12, 0.13, 0.33)
    traffic = Traffic.of("scale", samples, arrivals_s=recorded)
    load = Load(rate_per_s=5 / 0.33, duration_s=0.6, seed=0, arrivals="replay")

    result = run_load(server.grpc, traffic, load)

    gaps_s = itertools.chain(np.diff(recorded), [0.33 / 5])
    turn = np.array(sorted(gaps_s))
    assert np.allclose(np.sort(np.diff(result.due_s)[:6]), turn)
    assert np.median(np.abs(np.diff(result.sent_s) - np.diff(result.due_s))) < 0.02


@pytest.mark.usefixtures("scale")
def test_several_processes_send_one_schedule(server, traffic):
    """Requests, their times and their order are the same as from one process; all are answered."""
    load = Load(rate_per_s=300, duration_s=0.7, seed=4)

    one = run_load(server.grpc, traffic, load, sending=Transport(processes=1))
    two = run_load(server.grpc, traffic, load, sending=Transport(processes=2))

    assert two.generator.processes == 2
    assert np.array_equal(one.due_s, two.due_s)
    assert np.array_equal(one.samples, two.samples)
    assert (two.failed, set(two.versions)) == (0, {"1"})
    assert (two.late_s >= 0).all()


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("processes", [1, 2])
def test_decided_run_ends_early(server, traffic, processes):
    """It stops soon after the decision, and what was sent until then is whole and answered."""
    seen = []

    def decided(settled, over):
        seen.append((settled, over))
        return settled >= 200

    result = run_load(
        server.grpc,
        traffic,
        Load(rate_per_s=400, duration_s=60.0, seed=4),
        ends=EarlyEnd(limit_s=0.05, skip_s=0.1, decided=decided),
        sending=Transport(processes=processes),
    )

    assert 0.6 < result.lasted_s < 20.0
    assert seen[-1][0] >= 200 > seen[0][0]
    whole = run_load(server.grpc, traffic, result.load.model_copy(update={"duration_s": 0.3}))
    assert np.array_equal(whole.due_s, result.due_s[: len(whole.due_s)])
    assert result.due_s[-1] < result.lasted_s
    assert len(result.due_s) == pytest.approx(400 * result.lasted_s, rel=0.25)
    assert result.failed == 0


@pytest.mark.usefixtures("scale")
def test_load_that_cannot_be_made_is_visible(server, traffic):
    """A generator that is too slow says so: rate not met, sends late, processor to blame or not."""
    result = run_load(
        server.grpc,
        traffic,
        Load(rate_per_s=400, duration_s=0.4, seed=1),
        on_reply=lambda _sample, _reply: time.sleep(0.02),
    )

    assert result.achieved_share < 0.9
    assert np.quantile(result.late_s, 0.99) > 0.05


@pytest.mark.usefixtures("scale")
def test_clock_that_is_set_changes_nothing(server, traffic, monkeypatch):
    """A wall clock that jumps by hours moves no latency, no schedule and no end."""
    jumps = itertools.cycle([0.0, 7200.0, -7200.0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))

    result = run_load(server.grpc, traffic, Load(rate_per_s=100, duration_s=0.4, seed=1))

    assert result.failed == 0
    assert 0 <= result.late_s.min() <= result.late_s.max() < 10
    assert 0 < result.latency_s.min() <= result.latency_s.max() < 10


def test_impossible_transport_is_refused(traffic):
    """Memory is not shared with other machines, nor replies checked from several processes."""
    load = Load(rate_per_s=10, duration_s=0.1, seed=1)
    with pytest.raises(InputError, match=r"192\.0\.2\.1 is not this machine"):
        run_load("192.0.2.1:8001", traffic, load, sending=Transport(shared_memory="system"))
    over_http = Transport(protocol="http", shared_memory="system")
    with pytest.raises(InputError, match="gRPC address"):
        run_load("127.0.0.1:8000", traffic, load, sending=over_http)
    with pytest.raises(InputError, match="one process only"):
        run_load("127.0.0.1:1", traffic, load, on_reply=print, sending=Transport(processes=2))
    with pytest.raises(InputError, match="recorded arrival times"):
        run_load("127.0.0.1:1", traffic, load.model_copy(update={"arrivals": "replay"}))


def test_failures_are_kept_as_infinite(server, samples):
    """Requests that fail stay in the record, with their status, and never look fast."""
    result = run_load(
        server.grpc, Traffic.of("nobody", samples), Load(rate_per_s=100, duration_s=0.5, seed=1)
    )

    assert result.failed == len(result.due_s) > 20
    assert np.isinf(result.latency_s).all()
    assert result.errors == {"NOT_FOUND": result.failed}


def test_late_and_rejected_requests_are_failures(server, scale_model, samples):
    """No answer in time, or turned away at a full queue (which no counter of the server shows)."""
    load = Load(rate_per_s=100, duration_s=0.4, seed=1)
    with deploy(server, scale_model("failing", sleep_ms=100)) as deployment:
        one = ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)
        deployment.serve(one, ServingOptions(max_queue_size=1))
        patient = run_load(server.grpc, Traffic.of("failing", samples), load)
        hasty = run_load(server.grpc, Traffic.of("failing", samples, timeout_s=0.03), load)

    assert patient.errors == {"UNAVAILABLE": patient.failed}
    assert 10 < patient.failed < len(patient.due_s)
    assert hasty.failed == len(hasty.due_s) == sum(hasty.errors.values())
    assert set(hasty.errors) == {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def test_no_connection_is_an_error(traffic, monkeypatch):
    """A load that could not be sent at all is an error, not a bad measurement."""
    monkeypatch.setattr("enginegate.loadgen.worker_load._CONNECT_S", 0.3)

    with pytest.raises(ServerError, match=r"No connection to Triton at 127\.0\.0\.1:1"):
        run_load("127.0.0.1:1", traffic, Load(rate_per_s=10, duration_s=0.5, seed=1))
    with (
        pytest.raises(ServerError, match="No connection"),
        BackgroundLoad("127.0.0.1:1", traffic, rate_per_s=10),
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


@pytest.mark.long
@pytest.mark.usefixtures("scale")
def test_loads_that_end_together_leave_one_another_alone(server, traffic):
    """Sending processes that one load leaves are taken by another at that moment."""

    def send(seed):
        return run_load(server.grpc, traffic, Load(rate_per_s=100, duration_s=0.04, seed=seed))

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert {result.failed for result in threads.map(send, range(8))} == {0}


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize(
    "load",
    [Load(rate_per_s=100, duration_s=5, seed=1), ClosedLoad(clients=2, duration_s=5, seed=1)],
    ids=str,
)
def test_error_of_on_reply_ends_the_run(server, traffic, load):
    """An error raised while checking a reply comes out as it is."""

    def refuse(sample, _reply):
        raise AssertionError(f"sample {sample}")

    with pytest.raises(AssertionError, match="sample"):
        run_load(server.grpc, traffic, load, on_reply=refuse)


def test_background_load_sees_a_reload_and_loses_nothing(server, scale_model, samples):
    """Background traffic goes on through a reload and reports counts, versions and gaps."""
    traffic = Traffic.of("swapped", samples)
    with deploy(server, scale_model("swapped")) as deployment:
        deployment.serve(ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1))
        with BackgroundLoad(server.grpc, traffic, rate_per_s=100) as load:
            deployment.serve(ServingConfig(max_batch_size=4, max_queue_delay_us=0, instances=1))
            time.sleep(0.3)
            during = load.report()
        report = load.report()

    assert (report.failed, report.errors) == (0, {})
    assert report.versions == {"1": report.sent}
    assert report.sent > 20
    assert during.sent <= report.sent
    assert report.longest_gap_ms < 1000
    latencies_s = load.result.latency_s
    assert len(latencies_s) == report.sent
    assert 0 < nearest_rank(latencies_s) < 1.0


def test_background_load_counts_an_outage(server, client, scale_model, samples):
    """Unload then load, which drops requests, is seen: failures are counted with their status."""
    traffic = Traffic.of("dropped", samples)
    config = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
    with deploy(server, scale_model("dropped")) as deployment:
        deployment.serve(config)
        with BackgroundLoad(server.grpc, traffic, rate_per_s=100) as load:
            client.unload("dropped")
            client.load("dropped", deployment.model.config(config))
            time.sleep(0.2)
        report = load.report()

    assert report.failed
    assert sum(report.errors.values()) == report.failed
