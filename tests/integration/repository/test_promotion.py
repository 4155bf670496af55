"""Publishing, rolling back and withdrawing on a real Triton."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.atomic_io import file_lock
from enginegate.candidate import FileDigest
from enginegate.errors import (
    PublishError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository import Golden, Layout, LiveRepository
from enginegate.repository.history.journal import Journal
from enginegate.serving import BackendSettings
from tests.fakes.evidence import SERVING
from tests.fakes.hosts import problems

pytestmark = pytest.mark.triton


def processes(server, version):
    """What the server runs for one version: each instance of a Python model is a process."""
    ours, found = f"{server.repository}/digits/{version}/", set()
    for task in Path("/proc", str(server.pid), "task").iterdir():
        for pid in text_of(task / "children").split():
            if ours in text_of(Path("/proc", pid, "cmdline")):
                found.add(pid)
    return found


def versions_ready(server):
    """Versions of the model that answer."""
    with server.client() as client:
        return {row.version for row in client.index() if row.name == "digits" and row.ready}


def text_of(path):
    """Empty where a thread or process ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def test_release_goes_live_and_rolls_back(repository, package, ask):
    """Each time the right version answers, and in the end everything verifies."""
    first = repository.publish(package(1.0), expected=None)
    assert (first.version, ask()) == (1, (1, 1.0))

    second = repository.publish(package(2.0), expected=1)
    assert (second.version, second.previous_version, ask()) == (2, 1, (2, 2.0))

    back = repository.rollback("digits")
    assert (back.version, ask()) == (1, (1, 1.0))
    assert problems(repository) == []

    forward = repository.rollback("digits", to=2)
    assert (forward.version, ask()) == (2, (2, 2.0))


def test_publishing_leaves_what_serves_in_place(server, repository, package, ask):
    """The version that stands by is not loaded again, whatever was published or gone back to."""
    while processes(server, 1):  # Of an earlier test, on their way out.
        time.sleep(0.05)
    repository.publish(package(1.0), expected=None)
    began = processes(server, 1)

    repository.publish(package(2.0), expected=1)
    beside = processes(server, 1)
    repository.rollback("digits")
    repository.publish(package(3.0), expected=1)

    assert len(began) == SERVING.instances
    assert began == beside == processes(server, 1)
    assert ask() == (3, 3.0)


def test_releases_that_no_configuration_can_load_together_take_turns(
    server, repository, package, ask
):
    """The live one leaves while the new one comes, and comes back the same way."""
    told = BackendSettings(parameters={"mode": "another"})
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0, settings=told), expected=1)
    assert (ask(), versions_ready(server)) == ((2, 2.0), {2})
    assert repository.client.parameters("digits")["mode"] == "another"

    repository.rollback("digits")

    assert (ask(), versions_ready(server)) == ((1, 1.0), {1})
    assert "mode" not in repository.client.parameters("digits")
    assert problems(repository) == []


def test_version_without_model_file_is_never_loaded(server, repository, package, ask):
    """This Triton would never end that load, nor any other of the model."""
    repository.publish(package(1.0), expected=None)
    lacking = package(2.0)
    lacking = replace(lacking, files={"engine.bin": lacking.files["engine.bin"]})

    with pytest.raises(PublishError, match=r"digits/2/model\.py is not there"):
        repository.publish(lacking, expected=1)
    repository.publish(package(3.0), expected=1)

    assert (ask(), versions_ready(server)) == ((3, 3.0), {1, 3})


def test_release_number_is_never_reused(repository, package, ask):
    """After a failed publish the next release skips its number."""
    repository.publish(package(1.0), expected=None)
    wrong = package(2.0, golden=package(3.0).golden)
    with pytest.raises(PublishError):
        repository.publish(wrong, expected=1)

    third = repository.publish(package(2.0), expected=1)

    assert (third.version, ask()) == (3, (3, 2.0))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        pytest.param(
            lambda made, _: replace(
                made, golden=Golden(made.golden.inputs, {"y": made.golden.outputs["y"] + 1})
            ),
            "differs from the validated answer by 1;",
            id="answers-differently",
        ),
        pytest.param(
            lambda made, folder: (
                (folder / "model.py").write_text("import nothing_like_it") and made
            ),
            "nothing_like_it",
            id="does-not-load",
        ),
        pytest.param(
            lambda made, _: replace(
                made, approved={"engine.bin": FileDigest(sha256="f" * 64, size_bytes=3)}
            ),
            "is not the file that was recorded",
            id="other-bytes-than-approved",
        ),
        pytest.param(
            lambda made, _: replace(
                made, inputs=(made.inputs[0].model_copy(update={"shape": (-1, 3)}),)
            ),
            "Clients would fail",
            id="other-inputs",
        ),
        pytest.param(
            lambda made, folder: replace(made, files={**made.files, "data": folder / "nothing"}),
            "is not a regular file",
            id="a-file-is-missing",
        ),
    ],
)
def test_invalid_release_changes_nothing(repository, package, ask, tmp_path, break_it, message):
    """Whatever is wrong with it, the old release answers, verifies, and nothing is left behind."""
    repository.publish(package(1.0), expected=None)
    before = sorted(p.name for p in (repository.root / "digits").iterdir())

    with pytest.raises(PublishError, match=f"(?s){message}.*Release 1 is live, as before"):
        repository.publish(break_it(package(2.0), tmp_path / "built" / "2.0"), expected=1)

    assert ask() == (1, 1.0)
    assert sorted(p.name for p in (repository.root / "digits").iterdir()) == before
    assert problems(repository) == []


def test_invalid_first_release_leaves_no_model(repository, package):
    """There is nothing to go back to, so the model is gone from folder and server."""
    wrong = package(1.0, golden=package(2.0).golden)

    with pytest.raises(PublishError, match="Nothing is live, as before"):
        repository.publish(wrong, expected=None)

    assert not (repository.root / "digits").exists()
    assert not repository.client.model_ready("digits")


def test_stale_evidence_is_refused(repository, package, ask):
    """If another release went live meanwhile, the promotion prepared before it does not apply."""
    repository.publish(package(1.0), expected=None)

    with pytest.raises(RepositoryError, match="prepared while none was"):
        repository.publish(package(2.0), expected=None)

    assert ask() == (1, 1.0)


def test_rollback_needs_an_intact_earlier_release(repository, package):
    """There must be something to go back to, with its bytes as published."""
    with pytest.raises(RepositoryError, match="no live release"):
        repository.rollback("digits")
    repository.publish(package(1.0), expected=None)
    with pytest.raises(RepositoryError, match="is the first one"):
        repository.rollback("digits")
    with pytest.raises(RepositoryError, match="no release 9"):
        repository.rollback("digits", to=9)
    repository.publish(package(2.0), expected=1)
    engine = repository.root / "digits" / "1" / "engine.bin"
    engine.chmod(0o644)
    engine.write_text("7.0")
    with pytest.raises(TamperedError, match=r"1/engine\.bin"):
        repository.rollback("digits")


def test_two_promoters_do_not_interleave(root, package, repository, monkeypatch):
    """The second is refused with the holder named."""
    monkeypatch.setattr("enginegate.repository.lock.LOCK_TIMEOUT_S", 0.1)
    holder = f"pid {os.getpid()}"
    with file_lock(root / ".enginegate.lock"), pytest.raises(RepositoryBusyError, match=holder):
        repository.publish(package(1.0), expected=None)


def test_without_a_server_nothing_is_published(root, package):
    """Nothing can be proved, so nothing is written."""
    with pytest.raises(RepositoryError, match="enginegate serve"):
        LiveRepository(root, None).publish(package(1.0), expected=None)

    assert not (root / "digits").exists()


def test_old_bytes_are_forgotten_but_not_their_history(repository, package):
    """Retention keeps the newest releases and whatever is live or standing by."""
    keeping_two = replace(repository, keep=2)
    for number in range(1, 5):
        keeping_two.publish(package(float(number)), expected=number - 1 or None)

    layout = Layout(repository.root, "digits")

    assert [r.version for r in layout.releases()] == [1, 2, 3, 4]
    assert [v for v in range(1, 5) if layout.version_folder(v).is_dir()] == [3, 4]
    with pytest.raises(RepositoryError, match="removed by retention"):
        repository.rollback("digits", to=1)


def test_withdrawn_first_release_leaves_nothing(repository, package):
    """Its promotion failed after it was published, and there is nothing to go back to."""
    repository.publish(package(1.0), expected=None)

    assert repository.roll_back_promotion("digits", 1) == "Nothing is live, as before."

    assert not (repository.root / "digits").exists()
    assert not repository.client.model_ready("digits")


def test_stale_withdrawal_cannot_remove_a_newer_release(repository, package, ask):
    """A withdrawal that was cut short is void once another release is live."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    journal = Journal(repository.root)
    journal.open("withdraw", "digits", 1)

    repository.recover()

    assert ask() == (2, 2.0)
    assert problems(repository) == []


def test_file_as_repository_is_named(tmp_path, package):
    """Not a traceback."""
    (tmp_path / "file").write_text("")

    with pytest.raises(RepositoryError, match="file cannot be changed"):
        LiveRepository(tmp_path / "file", None).publish(package(1.0), expected=None)
