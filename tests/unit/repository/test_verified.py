"""Verifying again: what has not changed is not read, and what has is."""

import os
from datetime import timedelta

import pytest

from enginegate.repository import verified as module
from enginegate.repository import verify
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.verified import VerifiedRecords
from enginegate.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    root = tmp_path / "workspace"
    root.mkdir()
    return Workspace(root)


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Files of this instant count as settled."""
    monkeypatch.setattr(module, "_SETTLED_NS", -(10**12))


@pytest.fixture
def two(repository, package):
    """Two releases, of which nothing was verified yet."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    return repository


@pytest.fixture
def read(monkeypatch):
    """Which releases' bytes were read, one list for each time that it is asked."""
    found, check = [], ReleaseFiles.check

    def noted(self):
        found.append(self.release.version)
        check(self)

    monkeypatch.setattr(ReleaseFiles, "check", noted)

    def since():
        seen = tuple(found)
        found.clear()
        return seen

    return since


def problems(repository, workspace, *, whole=False):
    checks = verify(repository, records=VerifiedRecords(workspace, whole))
    return [check.problem for check in checks if check.problem]


def test_unchanged_bytes_are_read_once(two, workspace, read):
    """The second time nothing is read, and the check says since when; `--all` reads all."""
    read()
    assert problems(two, workspace) == []
    assert read() == (1, 2)

    checks = verify(two, records=VerifiedRecords(workspace))

    assert read() == ()
    (said,) = [check for check in checks if check.since]
    assert said.subject.startswith("digits: 2 releases unchanged since")
    assert any(check.subject == "digits on the live server" for check in checks)
    assert problems(two, workspace, whole=True) == []
    assert read() == (1, 2)


def test_only_a_new_release_is_read(two, workspace, read, package):
    """The others' bytes are as they were; all that ties them to the records is checked."""
    problems(two, workspace)
    two.publish(package(3.0), expected=2)
    read()

    assert problems(two, workspace) == []
    assert read() == (3,)


@pytest.mark.parametrize("restored", [False, True])
def test_changed_byte_is_found(two, workspace, restored):
    """Of the same size, with the old time of modification, also after the old bytes were back."""
    problems(two, workspace)
    engine = two.root / "digits" / "1" / "engine.bin"
    before, content = engine.stat(), engine.read_bytes()
    engine.write_bytes(b"x" * len(content))
    os.utime(engine, ns=(before.st_atime_ns, before.st_mtime_ns))

    (problem,) = problems(two, workspace)
    assert "engine.bin" in problem
    assert problems(two, workspace) == [problem]  # a problem is never remembered as fine
    if restored:
        engine.write_bytes(content)
        assert problems(two, workspace) == []


@pytest.mark.parametrize("added", ["digits/1/extra", "digits/9/engine.bin", "digits/00/releases/9"])
def test_added_file_is_looked_at(two, workspace, read, added):
    """Whatever its name, the model is checked again."""
    problems(two, workspace)
    read()
    path = two.root / added
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")

    checks = verify(two, records=VerifiedRecords(workspace))

    assert not any(check.since for check in checks)


@pytest.mark.parametrize("name", [".enginegate-current.digits.json", "digits/config.pbtxt"])
def test_pointer_and_configuration_are_looked_at(two, workspace, name):
    """Neither is a release's own file."""
    problems(two, workspace)
    path = two.root / name
    path.write_bytes(path.read_bytes().replace(b"2", b"1"))

    assert problems(two, workspace)


def test_lost_head_shows_although_no_model_changed(two, workspace):
    """The log's head belongs to no model."""
    problems(two, workspace)
    (two.root / ".enginegate-audit-head.json").unlink()

    assert "is gone" in "".join(problems(two, workspace))


@pytest.mark.parametrize("forged", ["edited", "other key", "older format"])
def test_record_that_is_not_ours_counts_for_nothing(two, workspace, read, forged, monkeypatch):
    """Everything is read again."""
    problems(two, workspace)
    read()
    (record,) = (workspace.root / "verified").glob("*.json")
    if forged == "edited":
        record.write_bytes(record.read_bytes().replace(b'"digits"', b'"digitz"'))
    elif forged == "other key":
        (workspace.keys / "verified.key").write_bytes(b"k" * 32)
    else:
        monkeypatch.setattr(module, "_FORMAT", 2)

    assert problems(two, workspace) == []
    assert read() == (1, 2)


def test_bytes_are_read_again_after_a_week(two, workspace, read, monkeypatch):
    """Rot changes no time."""
    problems(two, workspace)
    read()
    now = module.now()
    monkeypatch.setattr(module, "now", lambda: now + timedelta(days=6))
    assert (problems(two, workspace), read()) == ([], ())
    monkeypatch.setattr(module, "now", lambda: now + timedelta(days=8))
    assert (problems(two, workspace), read()) == ([], (1, 2))


def test_bytes_read_in_the_future_are_read_again(two, workspace, read, monkeypatch):
    """A clock that was a year ahead, and was set right, puts off no reading for a year."""
    now = module.now()
    monkeypatch.setattr(module, "now", lambda: now + timedelta(days=365))
    problems(two, workspace)
    monkeypatch.setattr(module, "now", lambda: now)
    read()
    assert (problems(two, workspace), read()) == ([], (1, 2))


def test_file_of_this_instant_is_read_again(two, workspace, read, monkeypatch):
    """Within one tick of the clock a second change would not show."""
    monkeypatch.setattr(module, "_SETTLED_NS", 10**12)
    problems(two, workspace)
    read()

    assert problems(two, workspace) == []
    assert read() == (1, 2)


def test_workspace_that_cannot_be_written_keeps_nothing(two, tmp_path, read):
    """Whoever only looks reads everything, and leaves no file."""
    read()
    nowhere = Workspace(tmp_path / "nowhere")

    assert problems(two, nowhere) == []
    assert read() == (1, 2)
    assert not nowhere.root.exists()
