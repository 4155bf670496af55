"""What a server that was started here leaves for the commands that run beside it."""

import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from enginegate.operating import Target
from enginegate.triton.live import live_addresses, live_server


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A place where servers can be started that are none; each has a port of its own."""
    ports = iter(range(1, 9))

    @contextmanager
    def start(*_, **__):
        grpc = f"127.0.0.1:{next(ports)}"
        yield SimpleNamespace(grpc=grpc, http=None, pid=os.getpid(), metrics=None)

    monkeypatch.setattr("enginegate.triton.live.find_triton", lambda _: None)
    monkeypatch.setattr("enginegate.triton.live.start", start)
    return SimpleNamespace(root=tmp_path, logs=tmp_path)


def test_a_server_that_ends_takes_its_own_address_with_it_only(tmp_path, workspace):
    """Of two on one repository the later one is found, until it ends itself."""
    repository = tmp_path / "repository"
    target = Target(repository=repository)
    first = ExitStack()
    first.enter_context(live_server(repository, workspace))

    with live_server(repository, workspace) as second:
        first.close()
        found = live_addresses(target)

    assert found.grpc == second.grpc
    assert live_addresses(target) is None
    assert list(repository.iterdir()) == []
