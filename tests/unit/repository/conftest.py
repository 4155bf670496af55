"""Live repositories whose servers are in memory."""

from functools import partial

import pytest

from enginegate.repository import LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in


@pytest.fixture
def server(tmp_path):
    """A server that nothing was loaded on yet."""
    root = tmp_path / "host" / "live"
    root.mkdir(parents=True)
    return FakeTriton(root)


@pytest.fixture
def repository(server):
    return LiveRepository(server.root, server, load_timeout_s=1.0)


@pytest.fixture
def package(tmp_path):
    """Make what a release is made of; the model adds ``offset``."""
    return partial(package_in, tmp_path)
