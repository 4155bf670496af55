"""What was changed behind the back of a live repository is reported, on a real Triton."""

import shutil
from dataclasses import replace

import pytest

from enginegate.errors import ServerError
from enginegate.repository import Layout, LiveRepository, verify
from enginegate.repository.history.journal import Journal
from enginegate.triton.server import ServerOptions, start
from tests.fakes.hosts import problems

pytestmark = pytest.mark.triton


def test_changed_byte_is_reported(repository, package):
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


def test_server_serving_something_else_is_reported(repository, package):
    """The folder is right, but somebody unloaded the model."""
    repository.publish(package(1.0), expected=None)
    repository.client.unload("digits")

    (problem,) = problems(repository)

    assert "versions [1] should be ready" in problem
    repository.bring_up("digits")
    assert problems(repository) == []


def test_endless_load_is_reported(install, tmp_path, package):
    """What serves is right, and yet nothing can be promoted until the server is started again."""
    root = tmp_path / "repository"
    root.mkdir()
    ends_soon = ServerOptions(exit_timeout_s=0)
    with (
        start(install, root, folder=tmp_path / "server", options=ends_soon) as server,
        server.client() as client,
    ):
        repository = LiveRepository(root, client, load_timeout_s=30.0)
        repository.publish(package(1.0), expected=None)
        both = model_config_of(client, (1, 2))
        (root / "digits" / "2").mkdir()
        with pytest.raises(ServerError, match="could not load digits"):
            client.load("digits", config=both, timeout_s=0.5)
        (root / "digits" / "2").rmdir()

        (problem,) = problems(replace(repository, load_timeout_s=0.5))

    assert "Version 2 of digits is LOADING" in problem
    assert "was for the 0.5 s" in problem


def model_config_of(client, versions):
    """The model's configuration in force, for other versions."""
    config = client.config("digits")
    config.message.version_policy.specific.versions[:] = versions
    return config


def test_damaged_bytes_do_not_block_the_way_back(repository, package, ask):
    """The live release is damaged and an operation is unfinished: an older one can still serve."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    golden = Layout(repository.root, "digits").golden_file(2)
    golden.write_bytes(b"not an archive")
    journal = Journal(repository.root)
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
def test_every_change_is_reported(repository, package, tamper, message):
    """And one problem never hides that the journal is fine."""
    repository.publish(package(1.0), expected=None)

    tamper(repository.root / "digits")

    checks = verify(repository)
    assert message in "".join(check.problem for check in checks)
    assert [check.problem for check in checks if check.subject == "journal"] == [""]
