"""Pruning object storage: what hosts share, and releases that no host goes back to."""

from datetime import timedelta

import pytest

from enginegate.content_store import make_once
from enginegate.errors import RepositoryBusyError
from enginegate.object_storage import SharedFolders, fetch_or_make
from enginegate.policy.operating import PromotionTarget
from enginegate.repository import LiveRepository, ObjectRepository
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.retention import plan_scope, prune, prune_scope
from enginegate.workspace import now
from tests.fakes.kept import UNUSED, KeptProject
from tests.fakes.live_triton import FakeTriton, package_in

NAME = "d" * 64


@pytest.fixture
def project(tmp_path):
    return KeptProject(tmp_path)


@pytest.fixture
def months_later(monkeypatch):
    """Storage's clock cannot be set back, so this program's is set forward."""
    monkeypatch.setattr(prune, "now", lambda: now() + timedelta(days=90))


def pruned(scope):
    return prune_scope(scope, plan_scope(scope))


def read(folder):
    return (folder / "engine").read_bytes()


def make(folder):
    (folder / "engine").write_bytes(b"engine")
    return b"engine"


class TestSharedFolders:
    """A cache of all hosts, which costs a build to lose."""

    @pytest.fixture
    def shared(self, any_store, monkeypatch):
        monkeypatch.setenv("ENGINEGATE_STORE", any_store.url)
        return SharedFolders(any_store, "engines")

    def made_on(self, folder):
        fetched = fetch_or_make(NAME, "engines", read=read, make=make)
        return make_once(folder / NAME, read=read, make=fetched, wait_s=5)

    def test_folder_that_nobody_used_goes_whole(self, shared, project, months_later, tmp_path):
        del months_later  # it only has to be
        self.made_on(tmp_path / "one")

        outcome = pruned(project.scope(unused_for=UNUSED))

        assert [entry.kind for entry in outcome.deleted] == ["shared engine"]
        assert shared.store.keys("") == ()

    def test_folder_that_a_host_stored_or_fetched_lately_stays(self, shared, project, tmp_path):
        self.made_on(tmp_path / "one")
        (before,) = shared.folders()
        self.made_on(tmp_path / "two")
        (after,) = shared.folders()

        assert after.used_at >= before.used_at
        assert pruned(project.scope(unused_for=UNUSED)).deleted == []
        assert shared.delete_unused(NAME, now() - timedelta(hours=1)) is False
        assert (tmp_path / "two" / NAME / "engine").read_bytes() == b"engine"

    def test_folder_whose_object_is_gone_is_stored_again(self, shared, tmp_path):
        """Another host stored it while it was deleted: the list is there, an object is not."""
        self.made_on(tmp_path / "one")
        (lost,) = shared.store.keys(f"engines/{NAME}/")
        shared.store.delete(lost)

        self.made_on(tmp_path / "two")

        assert shared.store.keys(f"engines/{NAME}/") == (lost,)
        folder = tmp_path / "three"
        folder.mkdir()
        assert shared.fetch(NAME, folder)

    def test_killed_deletion_leaves_objects_without_a_list_for_the_next(
        self, shared, project, months_later, tmp_path
    ):
        del months_later
        self.made_on(tmp_path / "one")
        shared.store.delete(f"engines/{NAME}.files.json")
        empty = tmp_path / "two"
        empty.mkdir()
        assert shared.fetch(NAME, empty) is False

        pruned(project.scope(unused_for=UNUSED))

        assert shared.store.keys("") == ()


def test_part_that_workers_left_goes_when_it_is_old(project, store, months_later):
    del months_later
    store.write(f"parts/{NAME}.evidence", b"an archive")

    outcome = pruned(project.scope(unused_for=UNUSED, part_stores=(store.url,)))

    assert [entry.kind for entry in outcome.deleted] == ["shared part"]
    assert store.keys("") == ()


class TestReleases:
    """Releases in storage, which other hosts replicate."""

    @pytest.fixture
    def here(self, project, store):
        project.live.mkdir()
        local = LiveRepository(project.live, FakeTriton(project.live), load_timeout_s=1.0, keep=99)
        repository = ObjectRepository(store, "digits", local, keep=99)
        for before, offset in ((None, 1.0), (1, 2.0), (2, 3.0)):
            package = package_in(project.root, offset, model_uri="file:digits.onnx")
            repository.publish(package, expected=before)
        return repository

    def scope(self, project, store):
        target = PromotionTarget(repository=project.live, objects=store.url)
        tables = project.tables
        tables = type(tables)(
            tables.model,
            target,
            tables.signing,
            tables.retention,
            tables.watch,
            tables.approval,
        )
        return project.scope(unused_for=UNUSED, tables=(tables,), keep=1)

    def test_bytes_that_no_host_goes_back_to_go_and_a_new_host_still_comes(
        self, project, store, here, tmp_path
    ):
        """Live, and the one before it, stay in storage and on this host; manifests all do."""
        outcome = pruned(self.scope(project, store))

        releases = ObjectReleases(store, "digits")
        assert sorted(entry.kind for entry in outcome.deleted) == ["release", "release in storage"]
        assert [releases.has_bytes(version) for version in (1, 2, 3)] == [False, True, True]
        assert releases.versions() == (1, 2, 3)
        assert here.journal.under_way() is None
        root = tmp_path / "there"
        root.mkdir()
        there = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
        assert ObjectRepository(store, "digits", there).pull().version == 3
        assert here.rollback("digits").version == 2

    def test_change_that_is_under_way_is_waited_for(self, project, store, here):
        """Its lease is held, and it may be about the very release."""
        lease = here.journal.acquire("rollback", 2)

        outcome = pruned(self.scope(project, store))

        assert ObjectReleases(store, "digits").has_bytes(1)
        assert any("under way" in why for why in outcome.failed.values())
        with pytest.raises(RepositoryBusyError):
            here.journal.acquire("rollback", 1)
        lease.add("undone")
