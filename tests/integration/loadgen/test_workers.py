"""Several sending processes: what becomes of them when something is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.loadgen.schedule import PATTERNS, due_times
from enginegate.loadgen.traffic import EarlyEnd, Transport, run_load
from enginegate.loadgen.workers import end_idle_workers
from enginegate.measurement import ArrivalPattern, Load
from tests.fakes.load_patterns import RAMP

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]

_SYSTEM = Path("/dev/shm")  # noqa: S108 - where the system keeps shared memory
LONG = """
import signal
import sys
import numpy as np
from enginegate.measurement import Load
from enginegate.loadgen.traffic import Traffic, Transport, run_load
# Where the tests run in a shell's background, Ctrl-C is ignored, by this process too.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_load(
    sys.argv[1],
    Traffic.of("scale", [{"x": np.zeros((1, 4), np.float32)}]),
    Load(rate_per_s=50, duration_s=600, seed=1),
    sending=Transport(processes=2, shared_memory="system"),
)
"""


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _has_ended(pid):
    """Whether its parent can know of it: a killed process loses its command a moment before."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _workers(pid):
    """Processes that send for another one; those that ended have no command any more."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end between being listed and being looked at.
        with contextlib.suppress(OSError):
            children += (task / "children").read_text().split()
    return {int(child) for child in children if "loadgen.workers" in _command(child)}


def _regions():
    return {path.name for path in _SYSTEM.glob("enginegate-load-*")}


def _wait(condition, limit_s=30.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.02)


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_workers_and_shared_memory_end_with_the_owner(server, client, traffic, by):
    """Sending processes and shared memory go when the one that started them goes.

    What the server still holds of a killed run's memory goes with the next run that shares some.
    """
    regions, sent = _regions(), client.statistics("scale").requests
    with subprocess.Popen(
        [sys.executable, "-c", LONG, server.grpc], stderr=subprocess.DEVNULL
    ) as load:
        _wait(lambda: client.statistics("scale").requests > sent + 5, 120.0)
        workers = _workers(load.pid)
        shared = _regions() - regions

        load.send_signal(by)
        load.wait(30.0)

    assert len(workers) == 2
    assert shared
    _wait(lambda: not any(_command(worker) for worker in workers))
    _wait(lambda: not shared & _regions())
    short = Load(rate_per_s=50, duration_s=0.05, seed=1)
    run_load(server.grpc, traffic, short, sending=Transport(shared_memory="system"))
    assert not shared & set(client.shared_memory())


@pytest.fixture(autouse=True)
def _no_idle_processes():
    """Each test starts its own, and leaves none."""
    end_idle_workers()
    yield
    end_idle_workers()


@pytest.mark.usefixtures("scale")
def test_sending_processes_are_used_again(server, traffic):
    """The next load starts none, an early end leaves none behind its time, and all can be ended."""
    short, two = Load(rate_per_s=100, duration_s=0.3, seed=1), Transport(processes=2)
    at_once = EarlyEnd(limit_s=0.01, skip_s=0.0, decided=lambda *_: True)
    first = run_load(server.grpc, traffic, short, sending=two)
    workers = _workers(os.getpid())
    ended = run_load(server.grpc, traffic, short, sending=two, ends=at_once)
    again = run_load(server.grpc, traffic, short, sending=two)

    assert _workers(os.getpid()) == workers
    assert len(workers) == 2
    assert np.array_equal(first.due_s, again.due_s)
    assert (first.failed, ended.failed, again.failed) == (0, 0, 0)
    end_idle_workers()
    _wait(lambda: not any(_command(worker) for worker in workers))


@pytest.mark.usefixtures("scale")
def test_idle_process_that_was_killed_is_not_used(server, traffic):
    """Another is started in its place."""
    short, two = Load(rate_per_s=100, duration_s=0.2, seed=1), Transport(processes=2)
    run_load(server.grpc, traffic, short, sending=two)
    killed = min(_workers(os.getpid()))
    os.kill(killed, signal.SIGKILL)
    _wait(lambda: _has_ended(killed))

    result = run_load(server.grpc, traffic, short, sending=two)

    assert result.failed == 0
    assert killed not in _workers(os.getpid())


@pytest.mark.usefixtures("scale")
def test_sending_process_that_dies_is_an_error(server, client, traffic):
    """A load that lost a part of itself is no measurement; the other processes end too."""
    sent, failure = client.statistics("scale").requests, []

    def load():
        try:
            many = Load(rate_per_s=50, duration_s=600, seed=1)
            run_load(server.grpc, traffic, many, sending=Transport(processes=2))
        except ServerError as error:
            failure.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    _wait(lambda: client.statistics("scale").requests > sent + 5, 120.0)
    workers = _workers(os.getpid())

    os.kill(min(workers), signal.SIGKILL)
    thread.join(30.0)

    assert len(workers) == 2
    assert "ended with status -9" in failure[0]
    _wait(lambda: not any(_command(worker) for worker in workers))


@pytest.mark.usefixtures("scale")
def test_processes_follow_a_pattern_that_another_package_adds(server, traffic, monkeypatch):
    """The schedule travels to the processes, which have never heard of the pattern's name."""
    monkeypatch.setitem(PATTERNS, "ramp", RAMP)
    ramp = ArrivalPattern(name="ramp", start_share=0.5)
    load = Load(rate_per_s=100, duration_s=0.5, seed=1, arrivals=ramp)

    result = run_load(server.grpc, traffic, load, sending=Transport(processes=2))

    assert result.failed == 0
    assert result.due_s.tolist() == list(due_times(load))


def test_processes_say_that_there_is_no_server(traffic, monkeypatch):
    """The error of a sending process comes out as if it had been raised here."""
    monkeypatch.setattr("enginegate.loadgen.workers._WORKER", _IMPATIENT)

    with pytest.raises(ServerError, match=r"No connection to Triton at 127\.0\.0\.1:1"):
        run_load(
            "127.0.0.1:1",
            traffic,
            Load(rate_per_s=10, duration_s=0.5, seed=1),
            sending=Transport(processes=2),
        )


_IMPATIENT = """
from enginegate.loadgen import worker_load, workers
worker_load._CONNECT_S = 0.2
workers.run_worker()
"""
