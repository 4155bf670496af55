"""Whose turn it is in object storage, on a real S3 API server; needs no Triton."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from enginegate.atomic_io import file_lock
from enginegate.errors import PublishError, RepositoryBusyError, RepositoryError, TamperedError
from enginegate.policy import parse_policy
from enginegate.repository import Fleet, Layout, LiveRepository, open_storage
from enginegate.repository.rollout import rollout_state
from enginegate.repository.store import object_journal
from enginegate.repository.store.object_journal import Lease, ObjectJournal, highest, is_abandoned
from enginegate.repository.store.object_release import ObjectReleases
from tests.fakes.hosts import answer, live, problems
from tests.fakes.lab import POLICY


class TestTurns:
    """Whose turn it is. Needs no Triton."""

    def test_one_at_a_time(self, store):
        """The second is refused with the holder named, until the first has finished."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.acquire("publish", 3)
        with pytest.raises(RepositoryBusyError, match=rf"pid {os.getpid()} began it"):
            journal.acquire("rollback", 1)

        turn.add("placed")
        turn.add("undone")

        assert highest(journal.acquire("rollback", 1).entry) == 3
        assert [entry.step for entry in journal.read()] == ["intent", "placed", "undone", "intent"]

    def test_whoever_was_overtaken_notices(self, store):
        """Its time was up and another host closed its operation: it cannot take another step."""
        journal = ObjectJournal(store, "digits", -1.0)
        turn = journal.acquire("publish", 3)
        assert is_abandoned(turn.entry)

        Lease(journal, journal.last()).add("undone")

        with pytest.raises(RepositoryBusyError, match="took longer than its lease"):
            turn.add("loaded")

    def test_it_outlasts_the_watching_of_a_canary(self, tmp_path):
        """Else another host would take a promoter for dead that only waits."""
        target = {"objects": "s3://bucket/live", "canary_s": 7200.0}
        rules = parse_policy({**POLICY, "target": {**target, "repository": str(tmp_path)}}, "test")

        stored = open_storage(rules.live_tables, LiveRepository(tmp_path, None))

        assert stored.journal.lease_s > 7200.0

    def test_a_changed_entry_breaks_the_chain(self, store):
        """As in the journal of a folder."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.acquire("publish", 3)
        turn.add("done")
        store.write("digits/journal/00000000.json", turn.entry.canonical_json())

        with pytest.raises(TamperedError, match="the chain is broken"):
            journal.read()


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
        replace(one, lease_s=-1.0).journal.acquire("publish", 1)

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
            one.roll_back_promotion("digits", 1)

        assert one.journal.last() == told
        assert one.rollback("digits", expected=2).version == 1

    def test_what_is_to_be_left_is_not_fetched_first(self, hosts, package):
        """By a host that has not pulled; what it goes back to is, and no canary is watched."""
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

    def test_a_window_that_a_pull_opened_is_ended_too(self, hosts, package, monkeypatch):
        """From its own host, at once; everywhere else goes back with it."""
        one, two = hosts
        monkeypatch.setattr(rollout_state, "_LOCK_TIMEOUT_S", 10.0)
        one.publish(package(1.0), expected=None)
        two.pull()
        one.publish(package(2.0), expected=1)

        def watch(_seconds, check):
            for _ in range(500):
                check()
                time.sleep(0.02)

        watching = replace(two, local=Fleet(two.local, (), 10.0, watch))
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

        assert not is_abandoned(ObjectJournal(store, "digits", 60.0).acquire("publish", 1).entry)
        assert is_abandoned(ObjectJournal(store, "faces", -1.0).acquire("publish", 1).entry)

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
