"""A promoter or its server is killed, or the disk is full; recovering on a real Triton."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from enginegate.errors import PublishError
from enginegate.repository import Layout, LiveRepository
from enginegate.triton.server import start
from tests.fakes.hosts import problems

pytestmark = pytest.mark.triton


def test_dead_server_leaves_the_folder_correct(install, package, tmp_path):
    """Killed under the promoter, it would find the old release on disk; the rest is done later."""
    root = tmp_path / "repository"
    root.mkdir()
    with start(install, root, folder=tmp_path / "server") as server, server.client() as client:
        repository = LiveRepository(root, client, load_timeout_s=30.0)
        repository.publish(package(1.0), expected=None)
        os.kill(server.pid, signal.SIGKILL)

        with pytest.raises(PublishError, match="Release 1 is live on disk"):
            repository.publish(package(2.0), expected=1)

    offline = LiveRepository(root, None)
    (said,) = offline.recover()
    assert "Release 1 is live on disk; what a server serves is not known" in said
    (open_still,) = problems(offline)
    assert "was cut short after its step 'configured'" in open_still
    assert Layout(root, "digits").current().version == 1


_KILLED = """
import os, pickle, signal, sys
from enginegate.repository import LiveRepository
from enginegate.repository.history.journal import Journal
from enginegate.repository.store import pointer
from enginegate.triton.client import TritonClient

with open(sys.argv[1], "rb") as file:
    root, address, package, expected = pickle.load(file)
step = sys.argv[2]
add = Journal.add

def add_then_die(self, entry, now, **detail):
    made = add(self, entry, now, **detail)
    if now == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

Journal.add = add_then_die
if step == "committed":
    write = pointer.write_file
    def write_then_die(path, *rest, **more):
        write(path, *rest, **more)
        if path.name == ".enginegate-current.digits.json":
            os.kill(os.getpid(), signal.SIGKILL)
    pointer.write_file = write_then_die
repository = LiveRepository(root, TritonClient(address))
repository.publish(package, expected=expected)
"""


@pytest.mark.parametrize("first", [True, False], ids=["first-release", "second-release"])
@pytest.mark.parametrize("step", ["placed", "configured", "loaded", "committed", "done"])
def test_kill_at_any_step_leaves_one_release(  # noqa: PLR0913
    repository, package, ask, tmp_path, step, first, server
):
    """Killed before the commit the old release is live, after it the new one; never a mixture."""
    if not first:
        repository.publish(package(1.0), expected=None)
    job = tmp_path / "job"
    job.write_bytes(
        pickle.dumps((repository.root, server.grpc, package(2.0), None if first else 1))
    )
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(job), step], check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    said = repository.recover()

    assert len(said) == (0 if step == "done" else 1)
    committed = step in {"committed", "done"}
    if committed:
        assert ask() == ((1, 2.0) if first else (2, 2.0))
    elif first:
        assert not (repository.root / "digits").exists()
        assert not repository.client.model_ready("digits")
    else:
        assert ask() == (1, 1.0)
    assert problems(repository) == []
    around = repository.root.parent
    left = [*around.rglob(".digits-*"), *around.rglob(".*.tmp")]
    assert left == []


def test_full_disk_changes_nothing(package, install, tmp_path):
    """The bytes do not fit: the message says so, the old release serves, no half copy is left."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        root = small / "repository"
        root.mkdir()
        with start(install, root, folder=tmp_path / "server") as server, server.client() as client:
            repository = LiveRepository(root, client, load_timeout_s=30.0)
            repository.publish(package(1.0), expected=None)
            large = package(2.0)
            (tmp_path / "built" / "2.0" / "extra").write_bytes(os.urandom(500_000))
            large = replace(
                large, files={**large.files, "extra": tmp_path / "built" / "2.0" / "extra"}
            )
            with pytest.raises(PublishError, match="No space left"):
                repository.publish(large, expected=1)
            assert problems(repository) == []
            x = np.zeros((1, 2), np.float32)
            assert client.infer("digits", {"x": x}).model_version == "1"
    finally:
        subprocess.run(["umount", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)
