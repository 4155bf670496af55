"""A server that polls its repository takes no load calls: what it may see is only ever whole."""

import threading

import numpy as np
import pytest

from enginegate.repository import LiveRepository, verify
from enginegate.triton.server import ServerOptions, start

pytestmark = pytest.mark.triton
_POLLING = ServerOptions(flags=("--model-control-mode=poll", "--repository-poll-secs=1"))


def _watch(server, stop, wrong):
    """Ask without end: each answer must be its version's."""
    with server.client() as client:
        while not stop.is_set():
            reply = client.infer("digits", {"x": np.zeros((1, 2), np.float32)})
            if float(reply.outputs["y"][0, 0]) != float(reply.model_version):
                wrong.append(reply)


def test_publishing_under_polling_shows_no_wrong_state(install, package, tmp_path):
    """There and back, every request is answered by the version that it says answered."""
    root, wrong, stop = tmp_path / "repository", [], threading.Event()
    root.mkdir()
    with (
        start(install, root, folder=tmp_path / "server", options=_POLLING) as server,
        server.client() as client,
    ):
        repository = LiveRepository(root, client, load_timeout_s=30.0)
        repository.publish(package(1.0), expected=None)
        asking = threading.Thread(target=_watch, args=(server, stop, wrong))
        asking.start()
        try:
            repository.publish(package(2.0), expected=1)
            repository.rollback("digits", to=1)
        finally:
            alive = asking.is_alive()
            stop.set()
            asking.join()

        assert (alive, wrong) == (True, [])
        assert [check.problem for check in verify(repository) if check.problem] == []
