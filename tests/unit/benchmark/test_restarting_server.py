"""A server that dies under a measurement is started again, and the measurement repeated."""

from contextlib import contextmanager

import pytest

from enginegate.benchmark.restarting_server import RestartingServer, RunningServer
from enginegate.errors import ServerError
from enginegate.measurement import Load
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
LOAD = Load(rate_per_s=200.0, duration_s=1.0, seed=1)


class Mortal:
    """Servers of which each answers so many measurements, then dies; counts starts and ends."""

    def __init__(self, *lives, refuses=False):
        self.lives, self.refuses = list(lives), refuses
        self.started = self.ended = 0

    @contextmanager
    def up(self):
        self.started += 1
        left = [self.lives.pop(0)]

        def measure(config, load, *, ends=None):
            del config, load, ends
            if self.refuses:
                raise ServerError("the model does not load")
            if left[0] == 0:
                left[0] = -1
                raise ServerError("connection lost")
            left[0] -= 1
            return self.started

        def check_alive():
            if left[0] < 0:
                raise ServerError("it does not answer. The end of its log: out of memory")

        try:
            yield RunningServer({"a": measure, "b": measure}, check_alive)
        finally:
            self.ended += 1


def test_server_starts_only_when_needed():
    """What was measured before needs no server."""
    servers = Mortal(1)

    with RestartingServer(servers.up) as server:
        server.measure("a")

    assert servers.started == 0


def test_single_server_serves_all_models():
    """Candidate and champion are measured side by side, and all is taken down at the end."""
    servers = Mortal(4)

    with RestartingServer(servers.up) as server:
        seen = [server.measure(name)(CONFIG, LOAD) for name in ("a", "b", "a")]

    assert seen == [1, 1, 1]
    assert (servers.started, servers.ended, server.restarted) == (1, 1, 0)


def test_dead_server_is_replaced_and_the_measurement_repeated():
    """The caller sees nothing of it; people are told."""
    servers, said = Mortal(1, 0, 9), []

    with RestartingServer(servers.up, warn=said.append) as server:
        seen = [server.measure("a")(CONFIG, LOAD) for _ in range(3)]

    assert seen == [1, 3, 3]
    assert (servers.started, servers.ended, server.restarted) == (3, 3, 2)
    assert "restart 2 of 3" in said[1]


def test_servers_are_not_started_without_end():
    """After the allowed number the error says how often, under what, and the log's end."""
    servers = Mortal(0, 0, 0, 0, 0)

    with (
        RestartingServer(servers.up, restarts=2) as server,
        pytest.raises(ServerError, match=r"3 servers died.*batch <= 8.*\n.*out of memory"),
    ):
        server.measure("a")(CONFIG, LOAD)

    assert (servers.started, servers.ended) == (3, 3)


def test_error_of_a_living_server_is_passed_on():
    """A model that does not load is no reason to start another server."""
    servers = Mortal(9, refuses=True)

    with (
        RestartingServer(servers.up) as server,
        pytest.raises(ServerError, match="does not load"),
    ):
        server.measure("a")(CONFIG, LOAD)

    assert (servers.started, servers.ended) == (1, 1)
