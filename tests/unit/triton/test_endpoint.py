"""What a server that was started here leaves for the commands that run beside it."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from enginegate.errors import ServerError
from enginegate.policy.operating import PromotionTarget
from enginegate.triton.endpoint import live_addresses, live_server

# `serve`, with a server that is this very process.
_SERVING = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from enginegate.triton import endpoint as live

@contextmanager
def start(*_, **__):
    yield SimpleNamespace(grpc="127.0.0.1:7", http=None, pid=int(sys.argv[2]), metrics=None)

live.find_triton, live.start = lambda _: None, start
root = Path(sys.argv[1])
with live.live_server(root, SimpleNamespace(root=root, logs=root)):
    print("serving", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A place where servers can be started that are none; each has a port of its own."""
    ports = iter(range(1, 9))

    @contextmanager
    def start(*_, **__):
        grpc = f"127.0.0.1:{next(ports)}"
        yield SimpleNamespace(grpc=grpc, http=None, pid=os.getpid(), metrics=None)

    monkeypatch.setattr("enginegate.triton.endpoint.find_triton", lambda _: None)
    monkeypatch.setattr("enginegate.triton.endpoint.start", start)
    return SimpleNamespace(root=tmp_path, logs=tmp_path)


@pytest.fixture
def repository(tmp_path):
    return tmp_path / "repository"


def test_second_server_is_refused_and_the_first_one_stays_known(repository, workspace):
    """The refusal names the one that serves; when that ends, the next may start."""
    target = PromotionTarget(repository=repository)
    with live_server(repository, workspace) as first:
        with (
            pytest.raises(ServerError, match=f"served already at gRPC {first.grpc}.*pid"),
            live_server(repository, workspace),
        ):
            pytest.fail("a second server was started")

        assert live_addresses(target).grpc == first.grpc
    assert live_addresses(target) is None

    with live_server(repository, workspace) as next_one:
        assert live_addresses(target).grpc == next_one.grpc


def test_fleet_server_starts_and_stops_beside_the_first_server(repository, workspace):
    """The policy says where it is, so that it neither takes nor removes the first one's place."""
    target = PromotionTarget(repository=repository)
    with live_server(repository, workspace) as first:
        with live_server(repository, workspace, server_name="b"):
            assert live_addresses(target).grpc == first.grpc

        assert live_addresses(target).grpc == first.grpc


def test_address_file_of_a_killed_server_is_ignored(repository, workspace):
    """Also when another process has its number by now; the next server starts at once."""
    repository.mkdir()
    command = [sys.executable, "-c", _SERVING, str(repository), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "serving\n"
        served = live_addresses(PromotionTarget(repository=repository))
        process.send_signal(signal.SIGKILL)

    assert served.grpc == "127.0.0.1:7"
    assert live_addresses(PromotionTarget(repository=repository)) is None
    with live_server(repository, workspace) as server:
        assert live_addresses(PromotionTarget(repository=repository)).grpc == server.grpc
