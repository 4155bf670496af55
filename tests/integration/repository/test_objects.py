"""Releases in object storage: a real S3 API server, and real Tritons that follow it."""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from enginegate.candidate import FileDigest
from enginegate.cli.app import app
from enginegate.durable import file_lock
from enginegate.errors import (
    ExitCode,
    PolicyError,
    PublishError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository import Layout, LiveRepository, ReleaseSigning, object_journal
from enginegate.repository.object_journal import ObjectJournal, Turn, highest, is_abandoned
from enginegate.repository.object_release import ObjectReleases
from enginegate.repository.objects import ObjectRepository
from enginegate.repository.staging import place
from enginegate.repository.storage import ObjectStore
from enginegate.repository.verify_target import verify
from tests.fakes.live_triton import FakeTriton

ROOT = Path(__file__).parents[3]
SECRET = "not-to-be-seen"  # noqa: S105


@pytest.fixture(scope="session")
def endpoint():
    """The address of an S3 API server."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def environment(endpoint, monkeypatch):
    """What a user sets to reach it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return monkeypatch


@pytest.fixture
def store(environment, request):  # noqa: ARG001
    """An empty prefix of a bucket."""
    made = ObjectStore(f"s3://releases/{request.node.name.partition('[')[0].replace('_', '-')}")
    made._files().makedirs("releases", exist_ok=True)
    for key in made.keys(""):
        made.delete(key)
    return made


@pytest.fixture
def here(store, repository):
    """This host: it publishes."""
    return ObjectRepository(store, "digits", repository)


@pytest.fixture
def there(store, second):
    """Another host: it follows."""
    return ObjectRepository(store, "digits", second)


@pytest.fixture
def placed(package, ensemble, tmp_path):
    """A release's files, as a host has them before it uploads them; nothing serves."""

    def make(version: int = 1, *, parts: bool = False):
        root = tmp_path / "placed"
        root.mkdir()
        made = ensemble(1.0) if parts else package(1.0)
        return root, place(Layout(root, "digits"), made, version, None)

    return make


def answer(host):
    reply = host.local.client.infer("digits", {"x": np.zeros((1, 2), np.float32)})
    return int(reply.model_version), float(reply.outputs["y"][0, 0])


def problems(host):
    return [check.problem for check in verify(host) if check.problem]


class TestStorage:
    """What S3 promises, and how its failures read. Needs no Triton."""

    def test_an_object_is_written_read_and_digested(self, store, tmp_path):
        """The same bytes come back by every way, and a key below is listed."""
        (tmp_path / "file").write_bytes(b"engine" * 1000)
        store.upload(tmp_path / "file", "digits/1/engine.bin")

        store.download("digits/1/engine.bin", tmp_path / "back")

        assert (tmp_path / "back").read_bytes() == b"engine" * 1000
        assert store.digest("digits/1/engine.bin").size_bytes == 6000
        assert store.keys("digits/1") == ("digits/1/engine.bin",)
        assert store.keys("digits/1/engine.bin.") == store.keys("nothing/") == ()
        assert store.read("digits/2") is None

    def test_conditions_keep_writers_apart(self, store):
        """Only one creates, and a replacement needs the tag of what is there."""
        store.check_conditions()
        assert store.create("key", b"1")
        assert not store.create("key", b"2")
        old = store.read("key").tag
        assert store.replace("key", b"3", old)
        assert not store.replace("key", b"4", old)
        assert not store.replace("key", b"5", None)
        assert not store.replace("none", b"6", old)

        assert store.read("key").content == b"3"

    def test_a_write_whose_answer_was_lost_counts(self, store):
        """The repeated request is refused because the first one was carried out."""
        store.create("key", b"mine")

        assert store.create("key", b"mine")

    @pytest.mark.parametrize(
        ("change", "url", "message"),
        [
            ({"AWS_ACCESS_KEY_ID": None}, "s3://releases/x", "Set AWS_ACCESS_KEY_ID"),
            ({}, "s3://nobody-made-this/x", "Make the bucket"),
            (
                {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
                "s3://releases/x",
                "names a server that runs",
            ),
        ],
        ids=["no-credentials", "no-bucket", "connection-refused"],
    )
    def test_what_is_wrong_is_said(self, environment, change, url, message):
        """With the remedy, and never with a secret."""
        for name, value in change.items():
            if value is None:
                environment.delenv(name)
            else:
                environment.setenv(name, value)

        with pytest.raises(RepositoryError, match=message) as caught:
            ObjectStore(url).read("a")

        assert SECRET not in str(caught.value)


class TestReleases:
    """Releases as objects. Needs no Triton."""

    @pytest.mark.parametrize("parts", [False, True], ids=["one-model", "ensemble"])
    def test_a_release_comes_back_as_it_was(self, store, placed, tmp_path, parts):
        """Every file with its digest, the manifest among them; and it can be forgotten."""
        root, release = placed(parts=parts)
        releases = ObjectReleases(store, "digits")
        releases.upload(root, release)
        releases.check(1)

        copy = releases.fetch(1, tmp_path / "fetched")

        assert copy.release == release
        (tmp_path / "host").mkdir()
        assert place(Layout(tmp_path / "host", "digits"), copy, 1, None) == release
        Layout(tmp_path / "host", "digits").check_files(release)
        releases.forget(1)
        assert (releases.versions(), releases.has_bytes(1)) == ((1,), False)
        assert [key for key in store.keys("digits.") if "/1/" in key] == []
        releases.remove(1)
        assert store.keys("") == ()

    @pytest.mark.parametrize(
        ("key", "content", "message"),
        [
            ("digits/1/engine.bin", b"9.0", r"digits/1/engine\.bin is not the object that was"),
            ("digits/releases/1.golden.npz", b"", r"1\.golden\.npz is not the object that was"),
            ("digits/releases/1.json", b"{}", r"releases/1\.json is not a"),
            ("digits/releases/1.files.json", b"{", r"1\.files\.json is missing or damaged"),
            (
                "digits/releases/1.files.json",
                b'{"files": {"digits/../../etc/x": {"sha256": "%s", "size_bytes": 1}}}'
                % (b"a" * 64),
                "not its own",
            ),
        ],
        ids=["engine", "golden", "manifest", "contents", "path-outside"],
    )
    def test_what_was_altered_after_the_upload_is_named(
        self, store, placed, tmp_path, key, content, message
    ):
        """When it is checked, and when another host fetches it."""
        root, release = placed()
        releases = ObjectReleases(store, "digits")
        releases.upload(root, release)

        store.write(key, content)

        with pytest.raises(TamperedError, match=message):
            releases.check(1)
        if not key.endswith("1.json"):
            with pytest.raises(TamperedError, match=message):
                releases.fetch(1, tmp_path / "fetched")
        assert not (tmp_path / "etc").exists()

    def test_a_signature_travels_with_its_release(self, store, placed, tmp_path):
        """A host that only has the public key can check it."""
        root, release = placed()
        keys = tmp_path / "keys"
        ReleaseSigning(True, None, None, keys).sign(Layout(root, "digits"), release)  # noqa: FBT003
        ObjectReleases(store, "digits").upload(root, release)

        copy = ObjectReleases(store, "digits").fetch(1, tmp_path / "fetched")
        (tmp_path / "host").mkdir()
        host = Layout(tmp_path / "host", "digits")
        place(host, copy, 1, None)

        elsewhere = ReleaseSigning(
            required=True,
            private_key=None,
            public_key=keys / "release.pub",
            keys=tmp_path / "none",
        )
        assert elsewhere.check(host, release) == ""
        engine = host.version_folder(1) / "engine.bin"
        engine.chmod(0o644)
        engine.write_text("9.0")
        with pytest.raises(TamperedError, match="does not hold"):
            elsewhere.check(host, release)

    def test_bytes_that_come_back_changed_end_the_upload(self, store, placed, monkeypatch):
        """Without a manifest it is no release; what is left of it can be found and removed."""
        root, release = placed(2)
        releases = ObjectReleases(store, "digits")
        upload = ObjectStore.upload

        def upload_damaged(self, path, key):
            upload(self, path, key)
            if key.endswith("engine.bin"):
                self.write(key, b"damaged")

        monkeypatch.setattr(ObjectStore, "upload", upload_damaged)
        with pytest.raises(TamperedError, match=r"2/engine\.bin"):
            releases.upload(root, release)

        assert (releases.versions(), releases.stray()) == ((), (2,))
        releases.remove(2)
        assert store.keys("digits/") == ()


class TestTurns:
    """Whose turn it is. Needs no Triton."""

    def test_one_at_a_time(self, store):
        """The second is refused with the holder named, until the first has finished."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.take("publish", 3)
        with pytest.raises(RepositoryBusyError, match=rf"pid {os.getpid()} began it"):
            journal.take("rollback", 1)

        turn.add("placed")
        turn.add("undone")

        assert highest(journal.take("rollback", 1).entry) == 3
        assert [entry.step for entry in journal.read()] == ["intent", "placed", "undone", "intent"]

    def test_whoever_was_overtaken_notices(self, store):
        """Its time was up and another host closed its operation: it cannot take another step."""
        journal = ObjectJournal(store, "digits", -1.0)
        turn = journal.take("publish", 3)
        assert is_abandoned(turn.entry)

        Turn(journal, journal.last()).add("undone")

        with pytest.raises(RepositoryBusyError, match="took longer than its turn"):
            turn.add("loaded")

    def test_a_changed_entry_breaks_the_chain(self, store):
        """As in the journal of a folder."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.take("publish", 3)
        turn.add("done")
        store.write("digits/journal/00000000.json", turn.entry.canonical_json())

        with pytest.raises(TamperedError, match="the chain is broken"):
            journal.read()


class TestRaces:
    """Two hosts and their timing. Needs no Triton."""

    @pytest.fixture
    def hosts(self, store, tmp_path):
        """Two that publish to the same prefix, each with a server in memory."""

        def host(name):
            root = tmp_path / name / "live"
            root.mkdir(parents=True)
            local = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
            return ObjectRepository(store, "digits", local)

        return host("one"), host("two")

    def test_of_two_that_begin_together_one_wins(self, hosts, package, monkeypatch):
        """The second had looked before the first began; it takes nothing of the first's away."""
        one, two = hosts
        take = ObjectJournal.take

        def take_late(self, kind, version):
            monkeypatch.setattr(ObjectJournal, "take", take)
            one.publish(package(1.0), expected=None)
            return take(self, kind, version)

        monkeypatch.setattr(ObjectJournal, "take", take_late)
        with pytest.raises(PublishError, match=r"Release 1 of digits is live .* while none was"):
            two.publish(package(2.0), expected=None)

        assert (one.current().version, one.releases.versions()) == (1, (1,))
        assert answer(one) == answer(two) == (1, 1.0)
        assert problems(one) + problems(two) == []
        assert two.publish(package(3.0), expected=1).version == 3

    @pytest.mark.parametrize("before", [None, 1], ids=["first-release", "second-release"])
    def test_whoever_was_overtaken_cannot_commit(self, hosts, package, monkeypatch, before):
        """Closed by another host after its last look at the journal: its bytes are gone."""
        one, two = hosts
        if before:
            one.publish(package(1.0), expected=None)
        slow, commit = replace(one, lease_s=-1.0), ObjectReleases.commit

        def commit_late(self, release, tag):
            monkeypatch.setattr(ObjectReleases, "commit", commit)
            assert "was cut short after its step 'loaded'" in two.recover()[0]
            commit(self, release, tag)

        monkeypatch.setattr(ObjectReleases, "commit", commit_late)
        with pytest.raises(PublishError, match="was changed by somebody else"):
            slow.publish(package(2.0), expected=before)
        one.recover()

        current = one.current()
        assert (current.version if current else None) == before
        assert one.releases.versions() == ((1,) if before else ())
        assert one.local.client.model_ready("digits") is bool(before)
        assert problems(one) == []
        assert one.publish(package(3.0), expected=before).version == 2 + bool(before)

    def test_objects_of_another_operation_stay(self, hosts, placed):
        """A publication that came to no upload is closed; its number holds somebody else's."""
        one, _ = hosts
        root, release = placed()
        one.releases.upload(root, release, "another")
        replace(one, lease_s=-1.0).journal.take("publish", 1)

        one.recover()

        one.releases.check(1)
        with pytest.raises(RepositoryError, match="somebody else's"):
            one.releases.upload(root, release, "a third")

    def test_another_release_than_the_one_judged_is_not_left(self, hosts, package):
        """Neither rolled back from nor withdrawn, and nothing is noted."""
        one, two = hosts
        one.publish(package(1.0), expected=None)
        two.recover()
        two.publish(package(2.0), expected=1)
        told = one.journal.last()

        with pytest.raises(RepositoryError, match="Release 2 of digits is live"):
            one.rollback("digits", expected=1)
        with pytest.raises(RepositoryError, match="Release 2 of digits is live"):
            one.withdraw("digits", 1)

        assert one.journal.last() == told
        assert one.rollback("digits", expected=2).version == 1

    @pytest.mark.parametrize(
        ("pinned", "left"),
        [(frozenset(), [3, 4]), (frozenset({1}), [1, 3, 4]), (None, [1, 2, 3, 4])],
    )
    def test_retention_leaves_what_is_pinned(self, hosts, package, pinned, left):
        """As in a folder; where that is not known, nothing goes."""
        one, _ = hosts
        host = replace(one, keep=1, local=replace(one.local, pinned=pinned))

        for number in range(1, 5):
            host.publish(package(float(number)), expected=number - 1 or None)

        assert [v for v in host.releases.versions() if host.releases.has_bytes(v)] == left

    def test_a_number_of_a_process_that_came_again_holds_no_turn(self, store, monkeypatch):
        """After a reboot: process 1 runs, but it is not the one that began."""
        monkeypatch.setattr(object_journal, "_me", lambda: f"{socket.gethostname()} pid 1")

        assert not is_abandoned(ObjectJournal(store, "digits", 60.0).take("publish", 1).entry)
        assert is_abandoned(ObjectJournal(store, "faces", -1.0).take("publish", 1).entry)

    def test_what_a_killed_pull_left_is_removed(self, hosts):
        """Not while one is under way."""
        one, _ = hosts
        left = one.root.parent / ".digits-pull.abc"
        (left / "digits").mkdir(parents=True)

        with file_lock(one.root / ".enginegate-pull.lock"):
            one.recover()
            assert left.exists()
        one.recover()

        assert not left.exists()


@pytest.mark.triton
class TestHosts:
    def test_a_release_reaches_every_host_and_comes_back(self, here, there, package):
        """Same number and digest everywhere; a rollback moves one object, and hosts follow it."""
        assert there.pull() is None
        here.publish(package(1.0), expected=None)
        there.pull()
        with pytest.raises(RepositoryError, match="prepared while none was"):
            there.publish(package(2.0), expected=None)
        second = here.publish(package(2.0), expected=1)
        engine = here.store.read("digits/2/engine.bin").content
        here.store.write("digits/2/engine.bin", b"9.0")
        with pytest.raises(TamperedError, match=r"2/engine\.bin is not the object that was"):
            there.pull()
        assert (answer(here), answer(there)) == ((2, 2.0), (1, 1.0))

        here.store.write("digits/2/engine.bin", engine)
        assert there.pull() == second
        assert (answer(there), there.serves("digits")) == ((2, 2.0), True)

        back = here.rollback("digits")
        assert (back.version, answer(here), there.serves("digits")) == (1, (1, 1.0), False)
        assert there.pull() == back
        assert answer(there) == (1, 1.0)
        assert problems(here) + problems(there) == []

    def test_what_a_host_serves_already_moves_in(self, here, package):
        """Its live release becomes the first one in storage, under its number."""
        here.local.publish(package(1.0), expected=None)

        here.recover()

        assert here.current().version == 1
        assert problems(here) == []

    def test_an_upload_that_fails_changes_nothing(self, here, package, monkeypatch):
        """Nothing was loaded, nothing is left, and the number is not issued again."""
        monkeypatch.setattr(
            ObjectStore, "digest", lambda *_: FileDigest(sha256="0" * 64, size_bytes=1)
        )

        with pytest.raises(PublishError, match=r"(?s)is not the object.*Nothing is live in s3://"):
            here.publish(package(1.0), expected=None)

        assert not here.local.client.model_ready("digits")
        assert here.releases.versions() == here.releases.stray() == ()
        assert highest(here.journal.last()) == 1


_KILLED = """
import os, pickle, signal, sys
from enginegate.repository.live import LiveRepository
from enginegate.repository.object_release import ObjectReleases
from enginegate.repository.objects import ObjectRepository
from enginegate.repository.storage import ObjectStore
from enginegate.triton.client import TritonClient

with open(sys.argv[1], "rb") as file:
    root, address, url, package = pickle.load(file)
kind, name = {
    "uploading": (ObjectStore, "create"),
    "published": (LiveRepository, "publish"),
    "committed": (ObjectReleases, "commit"),
}[sys.argv[2]]
real = getattr(kind, name)

def then_die(*given, **more):
    answer = real(*given, **more)
    if name != "create" or "files.json" in given[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

setattr(kind, name, then_die)
local = LiveRepository(root, TritonClient(address))
ObjectRepository(ObjectStore(url), "digits", local).publish(package, expected=None)
"""


@pytest.mark.triton
@pytest.mark.parametrize("moment", ["uploading", "published", "committed"])
def test_a_kill_leaves_one_state_everywhere(here, package, server, tmp_path, moment):
    """Killed before the commit point moved, nothing is live; after it, the release is."""
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((here.root, server.grpc, here.store.url, package(2.0))))
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(job), moment], check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    said = here.repair()

    committed = moment == "committed"
    assert any("was cut short" in sentence for sentence in said)
    assert here.local.client.model_ready("digits") is committed
    assert (here.releases.versions(), here.releases.stray()) == ((1,) if committed else (), ())
    assert problems(here) == []
    if committed:
        assert here.withdraw("digits", 1) == "Nothing is live, as before."
        assert not here.local.client.model_ready("digits")
    elif moment == "published":
        assert here.publish(package(3.0), expected=None).version == 2


@pytest.fixture
def command(store, tmp_path, monkeypatch):
    """Run a verb with a policy whose releases go to storage and to one more server."""
    given = (ROOT / "policies" / "digits.toml").read_text()
    further = f'objects = "{store.url}"\nfleet = [{{ name = "b", endpoint = "127.0.0.1:9" }}]\n'
    with_both = re.sub(r'repository = ".*"\n', f'repository = "live"\n{further}', given)
    (tmp_path / "both.toml").write_text(with_both)
    (tmp_path / "plain.toml").write_text(given)
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    monkeypatch.chdir(tmp_path)
    return partial(CliRunner().invoke, app)


def test_the_command_shows_and_follows_storage(command, store, placed):
    """Before the first release, and when what is live cannot be served here."""
    assert "Nothing of digits is live in s3://" in command(["pull", "both.toml"]).output
    assert isinstance(command(["pull", "plain.toml"]).exception, PolicyError)
    root, release = placed()
    releases = ObjectReleases(store, "digits")
    turn = ObjectJournal(store, "digits", 60.0).take("publish", 1)
    releases.upload(root, release)
    releases.commit(release, None)
    turn.add("done")

    shown = command(["status", "both.toml"]).output
    checked = command(["verify", "both.toml"])
    followed = command(["pull", "both.toml"])

    assert f"object storage {store.url}: release 1, since" in shown
    assert "server b: does not answer" in shown
    assert "Release 1 is live;" in checked.output
    assert "Follow it with `enginegate pull`" in " ".join(checked.output.split())
    assert checked.exit_code == ExitCode.GATES_FAILED
    assert "does not answer, so nothing was begun" in str(followed.exception)
