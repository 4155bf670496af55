"""Releases in object storage: a real S3 API server, and real Tritons that replicate it."""

import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.atomic_io import file_lock
from enginegate.candidate import FileDigest
from enginegate.cli.app import app
from enginegate.decision import RenewedPromise
from enginegate.errors import ExitCode, PolicyError, PublishError, RepositoryError, TamperedError
from enginegate.object_storage import ObjectStore
from enginegate.repository import AuditLog, Fleet, Layout
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout import rollout_state
from enginegate.repository.store import object_journal
from enginegate.repository.store.object_journal import ObjectJournal, highest, is_abandoned
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.workspace import now
from tests.fakes.hosts import answer, live, problems

ADA = Withdrawal("ada", "it answers nonsense")
ROOT = Path(__file__).parents[4]


@pytest.mark.triton
class TestHosts:
    def test_release_reaches_every_host_and_comes_back(self, here, there, package):
        """Same number and digest everywhere; a rollback moves one object, hosts replicate it."""
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

    def test_first_release_is_withdrawn_on_every_host(self, here, there, package):
        """By the next pull, also where another release is live; each log says by whom and why."""
        here.publish(package(1.0), expected=None)
        there.pull()
        here.publish(package(2.0), expected=1)
        there.pull()
        with pytest.raises(RepositoryError, match="not the first one"):
            here.withdraw("digits", ADA)
        here.rollback("digits")
        with pytest.raises(RepositoryError, match="enginegate withdraw POLICY"):
            here.rollback("digits")

        assert here.withdraw("digits", ADA).version == 1
        assert not here.client.model_ready("digits")
        assert there.client.model_ready("digits")
        assert there.pull() is None

        for host in (here, there):
            assert not host.client.model_ready("digits")
            event = AuditLog(host.root).read()[-1]
            assert (event.event, event.who, event.why) == ("withdrawn", ADA.who, ADA.why)
        assert problems(here) + problems(there) == []
        assert here.publish(package(3.0), expected=None).version == 3
        assert there.pull().version == 3

    def test_new_promise_reaches_every_host(self, here, there, package):
        """Without a reload, and a host that comes later has it too; a rollback keeps it."""
        first = here.publish(package(1.0), expected=None)
        there.pull()
        given = RenewedPromise(
            model="digits",
            version=1,
            release_sha256=first.digest,
            scorecard_sha256="d" * 64,
            promise=first.promise.model_copy(update={"slo_p99_ms": 7.0}),
            decision=first.decision,
            renewed_at=now(),
        )

        assert here.renew(given) == given
        assert any("is held to the promise" in said for said in problems(there))
        there.pull()

        for host in (here, there):
            assert Layout(host.root, "digits").renewed(1) == given
            assert AuditLog(host.root).read()[-1].event == "promised"
        assert problems(here) + problems(there) == []
        here.publish(package(2.0), expected=1)
        here.rollback("digits")
        there.pull()
        assert Layout(there.root, "digits").renewed(1) == given
        assert problems(here) + problems(there) == []

    def test_promise_that_is_not_in_storage_is_not_replicated(self, here, there, package):
        """Somebody removed or changed the object: what the host has stays, and it is said."""
        first = here.publish(package(1.0), expected=None)
        there.pull()
        given = RenewedPromise(
            model="digits",
            version=1,
            release_sha256=first.digest,
            scorecard_sha256="d" * 64,
            promise=first.promise,
            decision=first.decision,
            renewed_at=now(),
        )
        here.renew(given)
        key = f"digits/releases/1.promise-{given.digest[:16]}.json"
        here.store.write(key, given.pretty_json().replace(b"dddd", b"eeee"))

        with pytest.raises(TamperedError, match="lacks the promise"):
            there.pull()

        assert Layout(there.root, "digits").renewed(1) is None

    def test_release_that_a_host_serves_already_moves_in(self, here, package):
        """Its live release becomes the first one in storage, under its number."""
        here.local.publish(package(1.0), expected=None)

        here.recover()

        assert here.current().version == 1
        assert problems(here) == []

    def test_folder_named_like_our_records_is_a_releases_own(self, here, package, tmp_path):
        """It is stored under the release's number, and goes when the release is forgotten."""
        words = tmp_path / "words.txt"
        words.write_text("one")
        made = package(1.0)
        here.publish(replace(made, files={**made.files, "00/words.txt": words}), expected=None)

        assert here.store.read("digits/1/00/words.txt").content == b"one"
        here.releases.forget(1)
        assert list(here.store.keys("digits/1/")) == []

    def test_failed_upload_changes_nothing(self, here, package, monkeypatch):
        """Nothing was loaded, nothing is left, and the number is not issued again."""
        monkeypatch.setattr(
            ObjectStore, "digest", lambda *_: FileDigest(sha256="0" * 64, size_bytes=1)
        )

        with pytest.raises(PublishError, match=r"(?s)is not the object.*Nothing is live in s3://"):
            here.publish(package(1.0), expected=None)

        assert not here.local.client.model_ready("digits")
        assert here.releases.versions() == here.releases.stray() == ()
        assert highest(here.journal.last()) == 1


class TestRaces:
    """Two hosts and their timing. Needs no Triton."""

    @pytest.fixture
    def hosts(self, host):
        """Two that publish to the same prefix, each with a server in memory."""
        return host("one"), host("two")

    def test_of_two_that_begin_together_one_wins(self, hosts, package, monkeypatch):
        """The second had looked before the first began; it takes nothing of the first's away."""
        one, two = hosts
        take = ObjectJournal.acquire

        def take_late(self, kind, version):
            monkeypatch.setattr(ObjectJournal, "acquire", take)
            one.publish(package(1.0), expected=None)
            return take(self, kind, version)

        monkeypatch.setattr(ObjectJournal, "acquire", take_late)
        with pytest.raises(PublishError, match=r"Release 1 of digits is live .* while none was"):
            two.publish(package(2.0), expected=None)

        assert (one.current().version, one.releases.versions()) == (1, (1,))
        assert answer(one) == answer(two) == (1, 1.0)
        assert problems(one) + problems(two) == []
        assert two.publish(package(3.0), expected=1).version == 3

    @pytest.mark.parametrize("before", [None, 1], ids=["first-release", "second-release"])
    def test_preempted_holder_cannot_commit(self, hosts, package, monkeypatch, before):
        """Closed by another host after its last check of the journal: its bytes are gone."""
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
        replace(one, lease_s=-1.0).journal.acquire("publish", 1)

        one.recover()

        one.releases.check(1)
        with pytest.raises(RepositoryError, match="somebody else's"):
            one.releases.upload(root, release, "a third")

    def test_another_release_than_the_judged_one_is_not_left(self, hosts, package):
        """Neither rolled back from nor withdrawn, and nothing is noted."""
        one, two = hosts
        one.publish(package(1.0), expected=None)
        two.recover()
        two.publish(package(2.0), expected=1)
        told = one.journal.last()

        with pytest.raises(RepositoryError, match="Release 2 of digits is live"):
            one.rollback("digits", expected=1)
        with pytest.raises(RepositoryError, match="Release 2 of digits is live"):
            one.roll_back_promotion("digits", 1)

        assert one.journal.last() == told
        assert one.rollback("digits", expected=2).version == 1

    def test_release_to_be_left_is_not_fetched_first(self, hosts, package):
        """By a host that has not pulled; what it rolls back to is, and no canary is watched."""
        one, two = hosts
        one.publish(package(1.0), expected=None)
        two.pull()
        for number in (2, 3):
            one.publish(package(float(number)), expected=number - 1)
        two.local.client.refuses.add(3)

        def fail(_seconds, _check):
            raise AssertionError

        watching = replace(two, local=Fleet(two.local, (), 60.0, fail))
        assert watching.rollback("digits").version == 2

        assert (two.current().version, answer(two)) == (2, (2, 2.0))
        assert not Layout(two.root, "digits").version_folder(3).exists()
        assert one.pull().version == 2
        assert problems(one) + problems(two) == []

    def test_analysis_that_a_pull_began_is_cancelled_too(self, hosts, package, monkeypatch):
        """From its own host, at once; everywhere else is rolled back with it."""
        one, two = hosts
        monkeypatch.setattr(rollout_state, "_LOCK_TIMEOUT_S", 60.0)
        one.publish(package(1.0), expected=None)
        two.pull()
        one.publish(package(2.0), expected=1)

        def watch(_seconds, check):
            for _ in range(3000):
                check()
                time.sleep(0.02)

        watching = replace(two, local=Fleet(two.local, (), 60.0, watch))
        with ThreadPoolExecutor(1) as puller:
            pull = puller.submit(watching.pull)
            while live(two) != 2:
                assert not pull.done(), pull.result()
                time.sleep(0.02)
            assert watching.rollback("digits", expected=2).version == 1
            with pytest.raises(
                PublishError, match="asked for a rollback during the canary analysis"
            ):
                pull.result()

        assert (live(two), two.current().version) == (1, 1)
        assert one.pull().version == live(one) == 1

    @pytest.mark.parametrize(
        ("pinned", "left"),
        [(frozenset(), [3, 4]), (frozenset({1}), [1, 3, 4]), (None, [1, 2, 3, 4])],
    )
    def test_retention_leaves_pinned_releases(self, hosts, package, pinned, left):
        """As in a folder; where that is not known, nothing goes."""
        one, _ = hosts
        host = replace(one, keep=1, local=replace(one.local, pinned=pinned))

        for number in range(1, 5):
            host.publish(package(float(number)), expected=number - 1 or None)

        assert [v for v in host.releases.versions() if host.releases.has_bytes(v)] == left

    def test_reused_process_number_holds_no_lease(self, store, monkeypatch):
        """After a reboot: process 1 runs, but it is not the one that began."""
        monkeypatch.setattr(object_journal, "_me", lambda: f"{socket.gethostname()} pid 1")

        assert not is_abandoned(ObjectJournal(store, "digits", 60.0).acquire("publish", 1).entry)
        assert is_abandoned(ObjectJournal(store, "faces", -1.0).acquire("publish", 1).entry)

    def test_leftovers_of_a_killed_pull_are_removed(self, hosts):
        """Not while one is under way."""
        one, _ = hosts
        left = one.root.parent / ".digits-pull.abc"
        (left / "digits").mkdir(parents=True)

        with file_lock(one.root / ".enginegate-pull.lock"):
            one.recover()
            assert left.exists()
        one.recover()

        assert not left.exists()


_KILLED = """
import os, pickle, signal, sys
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.repository.rollout.object_repository import ObjectRepository
from enginegate.object_storage import ObjectStore
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
def test_kill_leaves_one_state_everywhere(here, package, server, tmp_path, moment):
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
        assert here.roll_back_promotion("digits", 1) == "Nothing is live, as before."
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


def test_commands_show_and_replicate_storage(command, store, placed):
    """Before the first release, and when what is live cannot be served here."""
    assert "Nothing of digits is live in s3://" in command(["pull", "both.toml"]).output
    assert isinstance(command(["pull", "plain.toml"]).exception, PolicyError)
    root, release = placed()
    releases = ObjectReleases(store, "digits")
    turn = ObjectJournal(store, "digits", 60.0).acquire("publish", 1)
    releases.upload(root, release)
    releases.commit(release, None)
    turn.add("done")

    shown = command(["status", "both.toml"]).output
    checked = command(["verify", "both.toml"])
    followed = command(["pull", "both.toml"])

    assert f"{store.url} release 1, since" in " ".join(shown.split())
    assert "server b does not answer" in " ".join(shown.split())
    assert "Release 1 is live;" in checked.output
    assert "Replicate it with `enginegate pull`" in " ".join(checked.output.split())
    assert checked.exit_code == ExitCode.GATES_FAILED
    assert "does not answer, so nothing was begun" in str(followed.exception)
