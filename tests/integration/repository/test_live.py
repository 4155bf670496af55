"""Publishing, rolling back and recovering on a real Triton."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate.candidate import FileDigest
from enginegate.durable import file_lock
from enginegate.errors import (
    PublishError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository import Golden, Layout, LiveRepository, verify
from enginegate.repository.journal import Journal
from enginegate.triton.server import start
from tests.fakes.evidence import SERVING

pytestmark = pytest.mark.triton


def processes(server, version):
    """What the server runs for one version: each instance of a Python model is a process."""
    tasks = Path("/proc", str(server.pid), "task").iterdir()
    children = {pid for task in tasks for pid in (task / "children").read_text().split()}
    ours = f"{server.repository}/digits/{version}/".encode()
    return {pid for pid in children if ours in Path("/proc", pid, "cmdline").read_bytes()}


def problems(repository):
    return [check.problem for check in verify(repository) if check.problem]


def test_a_release_goes_live_and_comes_back(repository, package, ask):
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


def test_a_number_is_never_issued_twice(repository, package, ask):
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
def test_a_release_that_is_not_right_changes_nothing(
    repository, package, ask, tmp_path, break_it, message
):
    """Whatever is wrong with it, the old release answers, verifies, and nothing is left behind."""
    repository.publish(package(1.0), expected=None)
    before = sorted(p.name for p in (repository.root / "digits").iterdir())

    with pytest.raises(PublishError, match=f"(?s){message}.*Release 1 is live, as before"):
        repository.publish(break_it(package(2.0), tmp_path / "built" / "2.0"), expected=1)

    assert ask() == (1, 1.0)
    assert sorted(p.name for p in (repository.root / "digits").iterdir()) == before
    assert problems(repository) == []


def test_a_first_release_that_is_not_right_leaves_no_model(repository, package):
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


def test_a_rollback_has_limits(repository, package):
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


def test_one_changed_byte_is_reported(repository, package):
    """Verification names the file; so it does for an added file and an edited configuration."""
    repository.publish(package(1.0), expected=None)
    folder = repository.root / "digits"
    (folder / "1" / "engine.bin").chmod(0o644)
    (folder / "1" / "engine.bin").write_text("1.1")
    assert "1/engine.bin is not the file that was recorded" in "".join(problems(repository))
    (folder / "1" / "engine.bin").write_text("1.0")
    assert problems(repository) == []

    (folder / "1" / "extra.py").write_text("")
    assert "files that were not published: extra.py" in "".join(problems(repository))
    (folder / "1" / "extra.py").unlink()

    (folder / "config.pbtxt").write_text("")
    assert "config.pbtxt is not what release 1" in "".join(problems(repository))
    assert "was put back" in "".join(repository.repair())
    assert problems(repository) == []


def test_a_server_that_serves_something_else_is_reported(repository, package):
    """The folder is right, but somebody unloaded the model."""
    repository.publish(package(1.0), expected=None)
    repository.client.unload("digits")

    (problem,) = problems(repository)

    assert "versions [1] should be ready" in problem
    repository.bring_up("digits")
    assert problems(repository) == []


def test_two_promoters_do_not_interleave(root, package, repository, monkeypatch):
    """The second is refused with the holder named."""
    monkeypatch.setattr("enginegate.repository.live._LOCK_TIMEOUT_S", 0.1)
    holder = f"pid {os.getpid()}"
    with file_lock(root / ".enginegate.lock"), pytest.raises(RepositoryBusyError, match=holder):
        repository.publish(package(1.0), expected=None)


def test_without_a_server_nothing_is_published(root, package):
    """Nothing can be proved, so nothing is written."""
    with pytest.raises(RepositoryError, match="enginegate serve"):
        LiveRepository(root, None).publish(package(1.0), expected=None)

    assert not (root / "digits").exists()


def test_a_dead_server_leaves_the_folder_right(install, package, tmp_path):
    """Killed under the promoter, it would find the old release on disk; the rest is done later."""
    root = tmp_path / "repository"
    root.mkdir()
    with start(install, root, folder=tmp_path / "server") as server, server.client() as client:
        repository = LiveRepository(root, client, load_timeout_s=30.0)
        repository.publish(package(1.0), expected=None)
        os.kill(server.pid, signal.SIGKILL)

        with pytest.raises(PublishError, match="Release 1 is live on disk"):
            repository.publish(package(2.0), expected=1)

    offline = LiveRepository(root, None)
    (said,) = offline.recover()
    assert "Release 1 is live on disk; what a server serves is not known" in said
    (open_still,) = problems(offline)
    assert "was cut short after its step 'configured'" in open_still
    assert Layout(root, "digits").current().version == 1


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


def test_a_withdrawn_first_release_leaves_nothing(repository, package):
    """Its promotion failed after it was published, and there is nothing to go back to."""
    repository.publish(package(1.0), expected=None)

    assert repository.withdraw("digits", 1) == "Nothing is live, as before."

    assert not (repository.root / "digits").exists()
    assert not repository.client.model_ready("digits")


def test_an_old_withdrawal_cannot_take_a_newer_release(repository, package, ask):
    """A withdrawal that was cut short is void once another release is live."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    journal = Journal(repository.root / ".enginegate-journal.jsonl")
    journal.open("withdraw", "digits", 1)

    repository.recover()

    assert ask() == (2, 2.0)
    assert problems(repository) == []


def test_damaged_bytes_do_not_block_the_way_back(repository, package, ask):
    """The live release is damaged and an operation is unfinished: an older one can still serve."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    golden = Layout(repository.root, "digits").golden_file(2)
    golden.write_bytes(b"not an archive")
    journal = Journal(repository.root / ".enginegate-journal.jsonl")
    journal.open("publish", "digits", 3)

    assert "cannot be read" in "".join(problems(repository))
    assert repository.rollback("digits", to=1).version == 1
    assert ask() == (1, 1.0)


def _swap_for_link(folder):
    engine = folder / "1" / "engine.bin"
    copy = folder.parent / "elsewhere.bin"
    copy.write_bytes(engine.read_bytes())
    engine.unlink()
    engine.symlink_to(copy)


def _edit_manifest(folder):
    path = folder / "00" / "releases" / "1.json"
    path.write_bytes(path.read_bytes().replace(b"models:/digits/1", b"models:/digits/7"))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (
            lambda folder: (folder.parent / ".enginegate-current.digits.json").unlink(),
            "the journal's last change made it 1",
        ),
        (lambda folder: shutil.rmtree(folder / "00"), "has no release 1"),
        (_swap_for_link, "is a link"),
        (_edit_manifest, "is not the manifest that was published"),
        (
            lambda f: (f / "00" / "releases" / "1.json").write_text("{"),
            "not a valid Release",
        ),
    ],
    ids=["state-deleted", "manifests-deleted", "link", "manifest-edited", "manifest-cut"],
)
def test_whatever_is_changed_is_reported(repository, package, tamper, message):
    """And one problem never hides that the journal is fine."""
    repository.publish(package(1.0), expected=None)

    tamper(repository.root / "digits")

    checks = verify(repository)
    assert message in "".join(check.problem for check in checks)
    assert [check.problem for check in checks if check.subject == "journal"] == [""]


def test_a_repository_that_is_a_file_is_named(tmp_path, package):
    """Not a traceback."""
    (tmp_path / "file").write_text("")

    with pytest.raises(RepositoryError, match="file cannot be changed"):
        LiveRepository(tmp_path / "file", None).publish(package(1.0), expected=None)


_KILLED = """
import os, pickle, signal, sys
from enginegate.repository import live
from enginegate.repository.journal import Journal

with open(sys.argv[1], "rb") as file:
    root, address, package, expected = pickle.load(file)
step = sys.argv[2]
add = Journal.add

def add_then_die(self, entry, now, **detail):
    made = add(self, entry, now, **detail)
    if now == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

Journal.add = add_then_die
if step == "committed":
    write = live.write_file
    def write_then_die(path, *rest, **more):
        write(path, *rest, **more)
        if path.name == ".enginegate-current.digits.json":
            os.kill(os.getpid(), signal.SIGKILL)
    live.write_file = write_then_die
repository = live.LiveRepository(root, live.TritonClient(address))
repository.publish(package, expected=expected)
"""


@pytest.mark.parametrize("first", [True, False], ids=["first-release", "second-release"])
@pytest.mark.parametrize("step", ["placed", "configured", "loaded", "committed", "done"])
def test_a_kill_at_any_step_leaves_one_release(  # noqa: PLR0913
    repository, package, ask, tmp_path, step, first, server
):
    """Killed before the commit the old release is live, after it the new one; never a mixture."""
    if not first:
        repository.publish(package(1.0), expected=None)
    job = tmp_path / "job"
    job.write_bytes(
        pickle.dumps((repository.root, server.grpc, package(2.0), None if first else 1))
    )
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(job), step], check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    said = repository.recover()

    assert len(said) == (0 if step == "done" else 1)
    committed = step in {"committed", "done"}
    if committed:
        assert ask() == ((1, 2.0) if first else (2, 2.0))
    elif first:
        assert not (repository.root / "digits").exists()
        assert not repository.client.model_ready("digits")
    else:
        assert ask() == (1, 1.0)
    assert problems(repository) == []
    around = repository.root.parent
    left = [*around.rglob(".digits-*"), *around.rglob(".*.tmp")]
    assert left == []


def test_a_full_disk_changes_nothing(package, install, tmp_path):
    """The bytes do not fit: the message says so, the old release serves, no half copy is left."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        root = small / "repository"
        root.mkdir()
        with start(install, root, folder=tmp_path / "server") as server, server.client() as client:
            repository = LiveRepository(root, client, load_timeout_s=30.0)
            repository.publish(package(1.0), expected=None)
            large = package(2.0)
            (tmp_path / "built" / "2.0" / "extra").write_bytes(os.urandom(500_000))
            large = replace(
                large, files={**large.files, "extra": tmp_path / "built" / "2.0" / "extra"}
            )
            with pytest.raises(PublishError, match="No space left"):
                repository.publish(large, expected=1)
            assert problems(repository) == []
            x = np.zeros((1, 2), np.float32)
            assert client.infer("digits", {"x": x}).model_version == "1"
    finally:
        subprocess.run(["umount", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)
