"""Links, FIFOs and folders where a repository's own files should be: named, and never followed."""

import os
from dataclasses import replace

import pytest

from enginegate.errors import InputError, RepositoryError
from enginegate.repository import Layout, ReleaseSigning, verify
from enginegate.repository.history.audit import AUDIT, AUDIT_HEAD
from enginegate.repository.history.journal import JOURNAL
from enginegate.repository.lock import LOCK

CURRENT = ".enginegate-current.digits.json"


def problems(repository):
    return "".join(check.problem for check in verify(repository))


@pytest.fixture
def put(tmp_path):
    """Replace a file by something that leads to a copy of it elsewhere, or to nothing."""

    def replace_by(path, kind):
        theirs = tmp_path / f"theirs-{path.name}"
        theirs.write_bytes(path.read_bytes())
        path.unlink()
        if kind == "link":
            path.symlink_to(theirs)
        elif kind == "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        else:
            os.mkfifo(path)
        return theirs

    return replace_by


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO"])
@pytest.mark.parametrize("name", [JOURNAL, AUDIT, CURRENT])
def test_irregular_record_is_reported_and_nothing_changes(repository, package, put, name, kind):
    """`verify` ends and names it; a promotion is refused, and what a link leads to stays."""
    repository.publish(package(1.0), expected=None)
    theirs = put(repository.root / name, kind)
    before = theirs.read_bytes()

    assert f"{name} is a " in problems(repository)
    with pytest.raises((RepositoryError, InputError), match=rf"{name} is a (symbolic link|FIFO)"):
        repository.publish(package(2.0), expected=1)

    assert theirs.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_irregular_audit_head_is_refused(repository, package, put, kind):
    """It only shows that the log was cut, so nothing else is kept from going on."""
    repository.publish(package(1.0), expected=None)
    theirs = put(repository.root / AUDIT_HEAD, kind)
    before = theirs.read_bytes()

    assert repository.publish(package(2.0), expected=1).version == 2

    assert f"{AUDIT_HEAD} is a " in problems(repository)
    assert theirs.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_irregular_lock_is_refused(repository, package, put, kind):
    """Any file that the user may write could be behind it."""
    repository.publish(package(1.0), expected=None)
    theirs = put(repository.root / LOCK, kind)
    theirs.write_text("precious")

    for change in (repository.recover, lambda: repository.publish(package(2.0), expected=1)):
        with pytest.raises(RepositoryError, match=rf"{LOCK} is a .*remove it"):
            change()

    assert theirs.read_text() == "precious"


def test_symlinked_configuration_is_replaced(repository, package, put):
    """Today it holds what it should; tomorrow whoever owns its target decides."""
    repository.publish(package(1.0), expected=None)
    config = Layout(repository.root, "digits").config
    put(config, "link")

    assert "config.pbtxt is not what release 1" in problems(repository)
    repository.repair()

    assert not config.is_symlink()
    assert problems(repository) == ""


@pytest.mark.parametrize("name", ["release.pem", "release.pub", ".lock"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_the_own_key_is_a_file_and_no_link(repository, package, tmp_path, put, name, kind):
    """A key that the policy names may be one: platforms mount secrets so."""
    keys = tmp_path / "keys"
    own = ReleaseSigning(required=False, private_key=None, public_key=None, keys=keys)
    replace(repository, signing=own).publish(package(1.0), expected=None)
    if name == ".lock":
        (keys / "release.pem").unlink()
    theirs = put(keys / name, kind)

    with pytest.raises((InputError, RepositoryError), match=rf"{name} is a (symbolic link|FIFO)"):
        replace(repository, signing=own).publish(package(2.0), expected=1)

    if name == "release.pem" and kind == "link":
        theirs.chmod(0o600)
        named = replace(own, private_key=keys / name, public_key=keys / "release.pub")
        assert replace(repository, signing=named).publish(package(2.0), expected=1).version
