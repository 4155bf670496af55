"""One published project, a backup of it, and age keys that need no second to be stretched."""

import shutil

import pyrage
import pytest

from enginegate.backup import OpeningKey, SealingKey, write_backup
from tests.fakes.projects import Project, published_project


def no_passphrase():
    raise AssertionError("a passphrase was asked for")


@pytest.fixture(scope="session")
def age_key():
    return pyrage.x25519.Identity.generate()


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Made once; each test that changes something has a copy."""
    return published_project(tmp_path_factory.mktemp("published") / "old")


@pytest.fixture(scope="session")
def written(published, age_key, tmp_path_factory):
    """The bytes of a backup of it."""
    path = tmp_path_factory.mktemp("written") / "project.backup"
    key = SealingKey(recipients=(str(age_key.to_public()),))
    write_backup(path, published.places, key)
    return path.read_bytes()


@pytest.fixture
def project(published, tmp_path):
    shutil.copytree(published.root, tmp_path / "old")
    return Project.at(tmp_path / "old")


@pytest.fixture
def sealing(age_key):
    return SealingKey(recipients=(str(age_key.to_public()),))


@pytest.fixture
def opening(age_key, tmp_path):
    """With the file of a private key, as age-keygen writes it."""
    path = tmp_path / "identity.txt"
    path.write_text(f"# created: today\n# public key: {age_key.to_public()}\n{age_key}\n")
    return OpeningKey(no_passphrase, (path,))


@pytest.fixture
def backup(written, tmp_path):
    """A backup of the project, on another disk as it were."""
    path = tmp_path / "project.backup"
    path.write_bytes(written)
    return path
