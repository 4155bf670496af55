"""Promotions through object storage that loses answers; servers in memory, real S3 and Azure."""

import pytest

from enginegate.errors import PublishError
from enginegate.object_storage import ObjectStore
from enginegate.repository import LiveRepository, ObjectRepository
from enginegate.repository.store.object_journal import ObjectJournal
from enginegate.repository.store.object_release import ObjectReleases
from tests.fakes.fault_proxy import Fault
from tests.fakes.live_triton import FakeTriton


@pytest.fixture
def promoter(faulty, tmp_path):
    """A host whose requests go through the proxy, and the proxy."""
    store, proxy = faulty
    root = tmp_path / "promoter" / "live"
    root.mkdir(parents=True)
    local = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    return ObjectRepository(store, "digits", local), proxy


def sequence(store: ObjectStore) -> list[tuple[str, str, int]]:
    """Each step that the journal tells of, in order; every entry follows from the one before."""
    journal = ObjectJournal(store, "digits", 60.0)
    last = journal.last()
    entries = [journal.entry(number) for number in range(last.sequence + 1)]
    assert [e.previous for e in entries[1:]] == [e.digest for e in entries[:-1]]
    return [(e.kind, e.step, e.version) for e in entries]


STEPS = ["intent", "placed", "loaded", "done"]


def test_promotion_whose_every_conditional_write_lost_its_answer_is_done_once(
    promoter, any_store, package
):
    """The lease, each step and the live pointer: found there, and written no second time."""
    host, proxy = promoter
    for key in ("journal/", "current.json", "releases/1.files.json"):
        proxy.add(Fault("lost", path=f"digits/{key}", times=99))

    host.publish(package(1.0), expected=None)

    assert sum(fault == "lost" for _, _, fault in proxy.seen) >= 6
    assert sequence(any_store) == [("publish", step, 1) for step in STEPS]
    assert ObjectReleases(any_store, "digits").live_version() == 1
    host.releases.check(1)


def test_commit_that_arrives_after_its_promotion_was_undone_changes_nothing(
    promoter, any_store, package
):
    """Its connection was reset before storage had it: the pointer was fenced before undoing."""
    host, proxy = promoter
    host.publish(package(1.0), expected=None)
    proxy.add(Fault("late", path="current.json", times=2, seconds=1.0))

    with pytest.raises(PublishError, match=r"failed after its step 'loaded'"):
        host.publish(package(2.0), expected=1)

    assert proxy.done.wait(10)
    assert ObjectReleases(any_store, "digits").live_version() == 1
    assert sequence(any_store)[-1] == ("publish", "undone", 2)
    assert host.publish(package(3.0), expected=1).version == 3
