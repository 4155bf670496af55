"""The journal and the lease in object storage, on a real S3 API server; needs no Triton."""

import os
from datetime import timedelta

import pytest

from enginegate.errors import RepositoryBusyError, TamperedError
from enginegate.policy import parse_policy
from enginegate.repository import LiveRepository, open_storage
from enginegate.repository.store.object_journal import Lease, ObjectJournal, highest, is_abandoned
from enginegate.repository.store.object_release import Pointer
from tests.fakes.hosts import answer, problems
from tests.fakes.lab import POLICY


class TestLease:
    """Whose lease it is. Needs no Triton."""

    def test_lease_has_one_holder(self, store):
        """The second is refused with the holder named, until the first has finished."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.acquire("publish", 3)
        with pytest.raises(RepositoryBusyError, match=rf"pid {os.getpid()} began it"):
            journal.acquire("rollback", 1)

        turn.add("placed")
        turn.add("undone")

        assert highest(journal.acquire("rollback", 1).entry) == 3
        assert [entry.step for entry in journal.read()] == ["intent", "placed", "undone", "intent"]

    def test_preempted_holder_notices(self, store):
        """Its time was up and another host closed its operation: it cannot take another step."""
        journal = ObjectJournal(store, "digits", -1.0)
        turn = journal.acquire("publish", 3)
        assert is_abandoned(turn.entry)

        Lease(journal, journal.last()).add("undone")

        with pytest.raises(RepositoryBusyError, match="took longer than its lease"):
            turn.add("loaded")

    def test_lease_outlasts_the_canary_analysis(self, tmp_path):
        """Else another host would take a promoter for dead that only waits."""
        target = {"objects": "s3://bucket/live", "canary_s": 7200.0}
        rules = parse_policy({**POLICY, "target": {**target, "repository": str(tmp_path)}}, "test")

        stored = open_storage(rules.live_tables, LiveRepository(tmp_path, None))

        assert stored.journal.lease_s > 7200.0

    def test_changed_entry_breaks_the_chain(self, store):
        """As in the journal of a folder."""
        journal = ObjectJournal(store, "digits", 3600.0)
        turn = journal.acquire("publish", 3)
        turn.add("done")
        store.write("digits/journal/00000000.json", turn.entry.canonical_json())

        with pytest.raises(TamperedError, match="the chain is broken"):
            journal.read()


@pytest.fixture
def two(host, package):
    """Two hosts with servers in memory; release 2 is live on both."""
    one, other = host("one"), host("two")
    one.publish(package(1.0), expected=None)
    other.pull()
    one.publish(package(2.0), expected=1)
    other.pull()
    assert problems(one) + problems(other) == []
    return one, other


def point_at(host, version):
    """Edit the commit point by hand."""
    pointer, tag = host.releases.pointer()
    edited = Pointer(
        version=version,
        release=host.releases.release(version).digest,
        changed_at=pointer.changed_at + timedelta(seconds=1),
    )
    assert host.store.replace("digits/current.json", edited.pretty_json(), tag)


def test_edited_live_pointer_is_replicated_by_no_host(two):
    """Every host says so, and what serves still serves."""
    one, other = two
    point_at(one, 1)

    for host in (one, other):
        with pytest.raises(TamperedError, match="release 1 is live; the journal's last change"):
            host.pull()
        with pytest.raises(TamperedError, match="so nothing is replicated"):
            host.repair()
        assert answer(host) == (2, 2.0)


@pytest.mark.parametrize("keep", [0, 4], ids=["deleted", "cut"])
def test_journal_that_was_cut_to_fit_is_noticed(two, keep):
    """By the releases in storage; and by what a host followed, where those were deleted too."""
    one, other = two
    for key in one.store.keys("digits/journal/")[keep:]:
        one.store.delete(key)
    point_at(one, 1)

    with pytest.raises(TamperedError, match="ends before release 2, which was published"):
        one.pull()
    assert "ends before release 2" in "".join(problems(other))
    one.releases.remove(2)
    with pytest.raises(TamperedError, match="ends before release 2, which was published"):
        other.pull()

    assert answer(one) == answer(other) == (2, 2.0)
