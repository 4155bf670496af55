"""Pruning a workspace and a live repository: what stays, what goes, and what a kill leaves."""

import shutil

import pytest

from enginegate.atomic_io import file_lock
from enginegate.content_store import make_once
from enginegate.decision import Decision
from enginegate.errors import EnginegateError, RepositoryBusyError, RepositoryError, TamperedError
from enginegate.repository import Layout, LiveRepository
from enginegate.retention import plan_scope, prune_scope
from enginegate.retention.plan import Reason
from enginegate.workspace import now
from tests.fakes.evidence import decision
from tests.fakes.kept import UNUSED, age
from tests.fakes.live_triton import FakeTriton, package_in


def places(plan):
    return [entry.place for entry in plan.delete]


def pruned(scope):
    return prune_scope(scope, plan_scope(scope))


def stored(project):
    """Digests of the engines that the store has."""
    found = project.workspace.engines.glob("[!.]*/model.onnx")
    return {path.read_bytes() for path in found}


def test_showing_changes_nothing(project):
    """A plan is a plan."""
    project.publish(1.0)
    project.engine(b"nobody's")
    project.cached()
    before = {path: path.lstat().st_mtime for path in project.root.rglob("*") if path.is_file()}

    plan = plan_scope(project.scope(unused_for=UNUSED))

    assert len(plan.delete) == 2
    after = {path: path.lstat().st_mtime for path in project.root.rglob("*") if path.is_file()}
    assert after.items() - before.items() == {
        (path, after[path]) for path in after if path.name == "retention.json"
    }


def test_what_nothing_refers_to_goes_and_the_rest_stays(project):
    """Live, waiting and recorded evidence stays; engines of what was rejected go, with caches."""
    project.publish(1.0, 2.0)
    project.scorecard(project.engine(b"waiting"), replaces=2)
    rejected = project.scorecard(project.engine(b"rejected"), replaces=2, reason="another")
    project.workspace.save_decision(decision(rejected, answer="reject"))
    project.note(rejected, "rejected")
    project.engine(b"nobody's")
    cache = project.cached()

    outcome = pruned(project.scope(unused_for=UNUSED))

    assert stored(project) == {b"1.0", b"2.0", b"waiting"}
    assert not cache.exists()
    assert project.workspace.scorecard_file(rejected).exists()
    assert len(outcome.deleted) == 3
    assert outcome.freed_bytes == sum(entry.size_bytes for entry in outcome.deleted) > 0
    assert (outcome.failed, outcome.left) == ({}, [])


def test_scorecard_that_nobody_can_publish_goes_with_its_signature(project):
    project.publish(1.0, 2.0)
    card = project.scorecard(project.engine(b"outdated"), replaces=1, reason="unpublished")
    path = project.workspace.scorecard_file(card)
    signature = path.with_suffix(".sig")
    signature.write_bytes(b"signature")
    age(signature)

    pruned(project.scope(unused_for=UNUSED))

    assert not path.exists()
    assert not signature.exists()
    assert stored(project) == {b"1.0", b"2.0"}


def test_folder_that_is_used_after_the_plan_stays(project):
    """A qualification that begins meanwhile finds its engine, and keeps it."""
    project.engine(b"engine", key="a" * 64)
    scope = project.scope(unused_for=UNUSED)
    plan = plan_scope(scope)

    def read(folder):
        return (folder / "model.onnx").read_bytes()

    folder = project.workspace.engines / ("a" * 64)
    made = make_once(folder, read=read, make=read, wait_s=1)
    outcome = prune_scope(scope, plan)

    assert made.reused
    assert stored(project) == {b"engine"}
    assert [entry.place for entry in outcome.left] == places(plan)


def test_folder_that_somebody_is_making_stays(project):
    """Its lock is held; nobody waits for it."""
    project.engine(b"engine", key="a" * 64)
    scope = project.scope(unused_for=UNUSED)
    plan = plan_scope(scope)

    with file_lock(project.workspace.engines / f".{'a' * 64}.lock"):
        outcome = prune_scope(scope, plan)

    assert stored(project) == {b"engine"}
    assert len(outcome.left) == 1


def test_answer_after_the_plan_keeps_what_it_approves(project):
    """A person who approves while somebody looks at the list finds the engine there."""
    project.publish(1.0)
    card = project.scorecard(project.engine(b"reconsidered"), replaces=1, reason="second thoughts")
    no = decision(card, answer="reject", decided_at=now())
    project.workspace.save_decision(no)
    scope = project.scope(unused_for=UNUSED)
    plan = plan_scope(scope)
    assert len(plan.delete) == 1

    project.workspace.save_decision(decision(card, decided_at=now()))
    prune_scope(scope, plan)

    assert b"reconsidered" in stored(project)


def test_nothing_is_deleted_that_was_not_shown(project):
    scope = project.scope(unused_for=UNUSED)
    project.cached("verdicts/shown.json")
    plan = plan_scope(scope)
    later = project.cached("verdicts/later.json")

    prune_scope(scope, plan)

    assert later.exists()
    assert not (project.workspace.results / "verdicts" / "shown.json").exists()


def test_killed_deletion_leaves_a_folder_whole_or_unread(project, monkeypatch):
    """The next pruning takes the rest, however young it is."""
    project.engine(b"engine", key="a" * 64)
    scope = project.scope(unused_for=UNUSED)

    def kill(_folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            pruned(scope)
    assert not (project.workspace.engines / ("a" * 64)).exists()
    assert stored(project) == set()

    (left,) = plan_scope(scope).delete
    assert left.kind == "leftover"
    pruned(scope)

    assert list(project.workspace.engines.iterdir()) == []


def test_staging_of_a_run_that_goes_on_stays(project):
    """Only what is old was left by somebody who died."""
    folder = project.workspace.engines
    old, young = folder / f".{'a' * 64}.1.tmp", folder / f".{'b' * 64}.2.tmp"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "model.onnx").write_bytes(b"half")
    age(old)

    pruned(project.scope(unused_for=UNUSED))

    assert list(folder.iterdir()) == [young]


class TestReleases:
    """Bytes of releases go by their number."""

    def test_only_the_newest_keep_their_bytes(self, project):
        project.publish(1.0, 2.0, 3.0)

        outcome = pruned(project.scope(unused_for=UNUSED, keep=1))

        layout = Layout(project.live, "digits")
        assert {entry.kind for entry in outcome.deleted} == {"release", "engine"}
        # The one before the live one is what a rollback without a number goes to.
        assert layout.stored_versions() == (2, 3)
        assert [release.version for release in layout.releases()] == [1, 2, 3]
        assert stored(project) == {b"2.0", b"3.0"}

    def test_release_that_an_open_operation_is_about_stays(self, project):
        """A rollback was killed: recovery may finish it."""
        from enginegate.repository.history.journal import Journal

        project.publish(1.0, 2.0, 3.0)
        Journal(project.live).open("rollback", "digits", 1)

        pruned(project.scope(unused_for=UNUSED, keep=1))

        assert Layout(project.live, "digits").stored_versions() == (1, 2, 3)

    def test_release_that_was_not_shown_stays(self, project):
        """A promotion after the list makes another one too many: the next list shows it."""
        project.publish(1.0, 2.0, 3.0)
        scope = project.scope(unused_for=UNUSED, keep=1)
        plan = plan_scope(scope)
        live = LiveRepository(project.live, FakeTriton(project.live), load_timeout_s=1.0, keep=99)
        package = package_in(project.root, 4.0, model_uri="file:digits.onnx")
        live.publish(package, expected=3)

        prune_scope(scope, plan)

        assert Layout(project.live, "digits").stored_versions() == (2, 3, 4)

    def test_repository_that_is_being_changed_is_left_alone(self, project, monkeypatch):
        from enginegate.repository import lock

        monkeypatch.setattr(lock, "LOCK_TIMEOUT_S", 0.0)
        project.publish(1.0, 2.0, 3.0)
        scope = project.scope(unused_for=UNUSED, keep=1)

        with file_lock(project.live / lock.LOCK):
            outcome = pruned(scope)

        assert Layout(project.live, "digits").stored_versions() == (1, 2, 3)
        assert "being changed" in "".join(outcome.failed.values())


class TestRefusals:
    """Without knowing all that could refer, nothing is decided."""

    def test_repository_that_is_not_mounted(self, project):
        """It had releases, and now there is an empty folder."""
        project.publish(1.0, 2.0)
        scope = project.scope(unused_for=UNUSED)
        plan_scope(scope)
        shutil.move(project.live, project.root / "elsewhere")
        project.live.mkdir()

        with pytest.raises(RepositoryError, match="not mounted"):
            plan_scope(scope)

    def test_repository_that_was_never_seen_and_should_have_releases(self, project):
        """A scorecard says that it would replace one."""
        project.scorecard(project.engine(b"engine"), replaces=3)

        with pytest.raises(RepositoryError, match="not mounted"):
            plan_scope(project.scope(unused_for=UNUSED))

    def test_live_pointer_that_is_damaged(self, project):
        project.publish(1.0)
        Layout(project.live, "digits").current_file.write_text("{")

        with pytest.raises(TamperedError):
            plan_scope(project.scope(unused_for=UNUSED))

    def test_answer_that_cannot_be_read(self, project):
        """It may be a yes."""
        card = project.scorecard(project.engine(b"engine"))
        path = project.workspace.save_decision(decision(card))
        path.write_text("{")

        with pytest.raises(EnginegateError, match=Decision.__name__):
            plan_scope(project.scope(unused_for=UNUSED))

    def test_runs_that_cannot_be_asked_for(self, project):
        def ask():
            raise EnginegateError("Prefect does not answer.")

        with pytest.raises(EnginegateError, match="does not answer"):
            plan_scope(project.scope(unused_for=UNUSED, elsewhere=ask))

    def test_registry_that_does_not_answer(self, project, monkeypatch):
        """Its aliases may name a version whose engines are here."""
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        project.scorecard(project.engine(b"engine"), model_uri="models:/digits/1", replaces=None)

        with pytest.raises(EnginegateError, match="MLflow"):
            plan_scope(project.scope(unused_for=UNUSED))

    def test_two_at_a_time(self, project):
        scope = project.scope(unused_for=UNUSED)
        project.cached()
        plan = plan_scope(scope)

        with (
            file_lock(project.workspace.root / ".prune.lock"),
            pytest.raises(RepositoryBusyError, match="is being pruned"),
        ):
            prune_scope(scope, plan)


def test_scorecard_of_another_version_keeps_what_it_names(project):
    """It cannot be read here, and its text still names an engine."""
    engine = project.engine(b"engine")
    path = project.workspace.root / "scorecards" / f"{'5' * 64}.json"
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"schema_version": 9, "engines": {{"{engine}": 1}}}}')
    age(path)

    plan = plan_scope(project.scope(unused_for=UNUSED))

    assert plan.delete == ()
    assert {total.reason for total in plan.kept} == {Reason.UNREADABLE}


def test_model_without_a_policy_keeps_its_evidence_until_somebody_retires_it(project):
    engine = project.engine(b"engine")
    project.scorecard(engine, model="retired", replaces=7)

    kept = plan_scope(project.scope(unused_for=UNUSED))
    gone = plan_scope(project.scope(unused_for=UNUSED, retired=frozenset({"retired"})))

    assert {total.reason for total in kept.kept} == {Reason.NO_POLICY}
    assert [entry.kind for entry in gone.delete] == ["scorecard", "engine"]
