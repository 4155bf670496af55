"""What a live repository does when the world around it fails; the rest is beside its own tests.

Broken engines and wrong answers: tests/integration/repository/test_live.py. There too: tampering in
test_verify.py and test_trust.py, a full disk and kills in test_recovery.py and test_kill.py.
"""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from enginegate.errors import EnginegateError, PublishError, RepositoryError, ServerError
from enginegate.repository import Layout, LiveRepository, verify
from enginegate.repository.history.journal import Journal
from enginegate.repository.lock import hold_lock
from enginegate.triton.client import TritonClient
from enginegate.triton.server import ServerOptions, start
from tests.kills.tagged import ENGINE, QUICK, Order, made, samples, tag_in

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("repository-faults")]


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    from enginegate.triton.install import find_triton

    return find_triton(tmp_path_factory.mktemp("triton"))


@contextmanager
def serving(install, root, folder):
    root.mkdir(parents=True, exist_ok=True)
    options = ServerOptions(flags=QUICK, exit_timeout_s=1)
    with start(install, root, folder=folder, options=options) as server, server.client() as client:
        yield server, LiveRepository(root, client, load_timeout_s=20.0)


@pytest.fixture(scope="module")
def shared(install, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with serving(install, folder / "repository", folder) as running:
        yield running


@pytest.fixture
def repository(shared, package):
    """One release is live; everything is gone afterwards."""
    server, made_here = shared
    made_here.publish(package(1), expected=None)
    yield made_here
    made_here.client.unload(ENGINE)
    while made_here.client.model_ready(ENGINE):
        time.sleep(0.02)
    for left in server.repository.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.fixture
def package(tmp_path):
    return lambda tag, **more: made(Order(tmp_path / f"built-{tag}", ENGINE, tag, **more))


def answering(repository):
    """Which version answers, and the tag that its answer carries."""
    reply = repository.client.infer(ENGINE, samples(ENGINE)[3])
    return int(reply.model_version), tag_in(ENGINE, 3, reply)


def problems(repository):
    return [check.problem for check in verify(repository) if check.problem]


def test_read_only_repository_is_refused_first(repository, package):
    """The release that serves goes on serving; the message names the folder and the reason."""
    root = str(repository.root)
    bound = subprocess.run(["mount", "--bind", root, root], check=False, capture_output=True)
    if bound.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
        # What was opened through the folder before the mount is not under it.
        blind = replace(repository, root=repository.root.resolve())
        with pytest.raises(RepositoryError, match="cannot be changed: Read-only file system"):
            blind.publish(package(2), expected=1)
        with pytest.raises(RepositoryError, match="cannot be changed: Read-only file system"):
            blind.recover()
    finally:
        subprocess.run(["umount", root], check=True)
    assert answering(repository) == (1, 1.0)
    assert problems(repository) == []


def _dies_at(moment, monkeypatch, server):
    """Let the server be killed by hand at a moment of a promotion."""

    once = threading.Lock()

    def kill():
        if once.acquire(blocking=False):
            os.kill(server.pid, signal.SIGKILL)

    load, infer = TritonClient.load, TritonClient.infer

    def load_and_die(self, *given, **more):
        if moment == "before-the-load":
            kill()
        if moment == "during-the-load":
            threading.Timer(0.05, kill).start()
        load(self, *given, **more)

    def die_and_infer(self, *given, **more):
        if moment == "at-the-golden-samples":
            kill()
        return infer(self, *given, **more)

    monkeypatch.setattr(TritonClient, "load", load_and_die)
    monkeypatch.setattr(TritonClient, "infer", die_and_infer)


@pytest.mark.parametrize("moment", ["before-the-load", "during-the-load", "at-the-golden-samples"])
def test_server_death_leaves_the_folder_intact(install, package, tmp_path, monkeypatch, moment):
    """The folder says release 1 whatever the moment; a new server is brought up to it."""
    root = tmp_path / "repository"
    with serving(install, root, tmp_path / "first") as (server, repository):
        repository.publish(package(1), expected=None)
        with monkeypatch.context() as patched:
            _dies_at(moment, patched, server)
            with pytest.raises(PublishError, match="Release 1 is live on disk"):
                repository.publish(package(2), expected=1)

    with serving(install, root, tmp_path / "second") as (_, repository):
        said = repository.repair()

        assert any("was cut short" in sentence for sentence in said)
        assert answering(repository) == (1, 1.0)
        assert problems(repository) == []
        assert repository.publish(package(3), expected=1).version == 3
        assert answering(repository) == (3, 3.0)


def test_dead_server_is_found_before_publishing(install, package, tmp_path):
    """Dead from the start: nothing is published, and the message says what answers not."""
    root = tmp_path / "repository"
    with serving(install, root, tmp_path / "server") as (server, repository):
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EnginegateError, match=server.grpc):
            repository.publish(package(1), expected=None)

    offline = LiveRepository(root, None)
    offline.recover()
    assert Layout(root, ENGINE).current() is None


def test_clock_going_back_keeps_the_order(repository, package, monkeypatch):
    """What was written first stays first, and the newest release serves, from older times too."""
    for path in (repository.root / ENGINE).rglob("*"):
        ahead = time.time() + 3600
        os.utime(path, (ahead, ahead))

    class Earlier(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2001, 1, 1, tzinfo=tz or UTC)

    for module in ("repository.history.journal", "repository.history.audit"):
        monkeypatch.setattr(f"enginegate.{module}.datetime", Earlier)
    monkeypatch.setattr("enginegate.repository.store.pointer.now", Earlier.now)
    monkeypatch.setattr("enginegate.repository.store.staging.now", Earlier.now)

    repository.publish(package(2), expected=1)
    assert answering(repository) == (2, 2.0)
    repository.rollback(ENGINE)

    assert answering(repository) == (1, 1.0)
    entries = Journal(repository.root).read()
    assert [entry.sequence for entry in entries] == list(range(len(entries)))
    assert {entry.at.year for entry in entries} >= {2001}
    assert [(e.kind, e.version) for e in entries if e.step == "done"] == [
        ("publish", 1),
        ("publish", 2),
        ("rollback", 1),
    ]
    assert problems(repository) == []
    assert repository.publish(package(3), expected=1).version == 3


def test_of_two_promoters_one_wins(repository, package):
    """They begin together: the second waits for the first, and is then told who was there."""
    ended = []
    packages = [package(2), package(3)]

    def promote(which):
        try:
            ended.append(repository.publish(packages[which], expected=1).version)
        except RepositoryError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=promote, args=(which,)) for which in (0, 1)]
    with hold_lock(repository.root, timeout_s=1.0):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()

    (refused,) = [end for end in ended if isinstance(end, str)]
    assert 2 in ended
    assert "but this was prepared while 1 was" in refused
    assert answering(repository)[0] == 2
    assert problems(repository) == []


def test_folder_for_file_and_symlink_are_refused(repository, package, tmp_path):
    """A release holds plain files only: a link could point anywhere."""
    link = tmp_path / "link.bin"
    link.symlink_to("/etc/hostname")
    plain = package(2)
    for odd in (link, tmp_path):
        strange = replace(plain, files={**plain.files, "data.bin": odd})
        with pytest.raises(PublishError, match=r"(?s)not a regular file.*Release 1 is live"):
            repository.publish(strange, expected=1)

    assert answering(repository) == (1, 1.0)
    assert problems(repository) == []


def test_unsafe_model_name_is_refused(repository, package):
    """Quotes, newlines and paths: by the folder's layout too, should a policy ever let one by."""
    for name in ('dig"its', "dig\nits", "../digits", "digits'; drop", ".hidden", "a/b", ""):
        odd = replace(package(2), model=name)
        with pytest.raises(RepositoryError, match="cannot be a model's name"):
            repository.publish(odd, expected=None)

    assert [path.name for path in repository.root.iterdir() if path.is_dir()] == [ENGINE]


def test_unloaded_server_is_reported_and_repaired(repository):
    """Somebody unloaded the model by hand: verification says so, repair loads what is live."""
    repository.client.unload(ENGINE)
    while repository.client.model_ready(ENGINE):
        time.sleep(0.02)

    assert any("should be ready" in problem for problem in problems(repository))
    with pytest.raises(ServerError):
        repository.client.infer(ENGINE, {"x": np.zeros((1, 2), np.float32)})
    repository.repair()

    assert answering(repository) == (1, 1.0)
