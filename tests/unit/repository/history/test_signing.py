"""Signatures on releases: what they cover, which key is trusted, and what happens without them."""

import base64
import importlib.util
import json
import logging
import shutil
import subprocess
from dataclasses import replace

import pytest

from enginegate.candidate import FileDigest
from enginegate.errors import EnginegateError, InputError, RepositoryError, TamperedError
from enginegate.policy.operating import Signing
from enginegate.repository import Layout, ReleaseSigning
from enginegate.repository.store.package import ImportedRelease
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.removal import remove
from enginegate.repository.store.staging import place
from enginegate.workspace import Workspace
from tests.fakes.evidence import release

REQUIRED = Signing(required=True)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def signing(workspace):
    return ReleaseSigning.of(REQUIRED, workspace)


@pytest.fixture
def placed(tmp_path):
    """Put a release of a few bytes where a live repository would have it."""

    def place(version=1):
        layout = Layout(tmp_path / "live", "digits")
        folder = layout.version_folder(version)
        folder.mkdir(parents=True)
        (folder / "engine.bin").write_text(f"engine {version}")
        (folder / "model.py").write_text("# what Triton's Python backend opens\n")
        layout.golden_file(version).parent.mkdir(parents=True, exist_ok=True)
        layout.golden_file(version).write_text("samples")
        made = release(
            version=version,
            golden=FileDigest.of(layout.golden_file(version)),
            files={n: FileDigest.of(folder / n) for n in ("engine.bin", "model.py")},
            previous_version=None,
        )
        layout.release_file(version).write_bytes(made.pretty_json())
        return layout, made

    return place


def test_signed_release_verifies_until_a_byte_changes(signing, placed):
    """Engine, golden samples and manifest are all covered; the message names the file."""
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    assert signing.check(ReleaseFiles(layout, release).signed()) == ""

    engine = layout.version_folder(1) / "engine.bin"
    for path in (engine, layout.golden_file(1), layout.release_file(1)):
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        with pytest.raises(TamperedError, match=f"digits/.*{path.name}"):
            signing.check(ReleaseFiles(layout, release).signed())
        path.write_bytes(before)
    assert signing.check(ReleaseFiles(layout, release).signed()) == ""


def test_the_signature_of_one_release_does_not_do_for_another(signing, placed):
    """Which files count is decided by the release that is asked about."""
    layout, first = placed(1)
    _, second = placed(2)
    signing.sign(ReleaseFiles(layout, first).signed())
    shutil.copy(layout.signature_file(1), layout.signature_file(2))

    with pytest.raises(TamperedError, match=r"2\.json"):
        signing.check(ReleaseFiles(layout, second).signed())


def test_damaged_signature_is_invalid(signing, placed):
    """Whatever it is changed to."""
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    whole = layout.signature_file(1).read_text()

    forged = json.loads(whole)
    signatures = forged["dsseEnvelope"]["signatures"]
    signatures[0]["sig"] = base64.b64encode(b"0" * 70).decode()

    for damaged in ("", "{}", whole[: len(whole) // 2], json.dumps(forged)):
        layout.signature_file(1).write_text(damaged)
        with pytest.raises(TamperedError, match="is not valid"):
            signing.check(ReleaseFiles(layout, release).signed())


def test_the_key_is_made_once_and_is_the_owners_alone(signing, placed, workspace, caplog):
    """Readable by nobody else, never in a log, and a key that others may read is refused."""
    caplog.set_level(logging.DEBUG)
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    key = workspace.keys / "release.pem"
    made = key.read_bytes()
    signing.sign(ReleaseFiles(layout, release).signed())

    assert key.read_bytes() == made
    assert key.stat().st_mode & 0o777 == 0o600
    assert made.splitlines()[1].decode() not in caplog.text
    assert b"PRIVATE" not in layout.signature_file(1).read_bytes()
    key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        signing.sign(ReleaseFiles(layout, release).signed())


def other_key(workspace, placed):
    """The public key of another workspace."""
    elsewhere = Workspace(workspace.root.parent / "elsewhere")
    ReleaseSigning.of(REQUIRED, elsewhere).sign(ReleaseFiles(*placed(9)).signed())
    return elsewhere.keys / "release.pub"


def test_another_key_than_the_trusted_one_is_refused(signing, placed, workspace):
    """Also where no signature is required, if the policy names the key; else it is a note."""
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    named = replace(signing, public_key=other_key(workspace, placed), required=False)

    with pytest.raises(TamperedError, match="another key"):
        named.check(ReleaseFiles(layout, release).signed())
    elsewhere = ReleaseSigning.of(Signing(), Workspace(workspace.root.parent / "elsewhere"))
    assert "another key" in elsewhere.check(ReleaseFiles(layout, release).signed())
    with pytest.raises(TamperedError, match="another key"):
        replace(elsewhere, required=True).check(ReleaseFiles(layout, release).signed())


def test_signing_with_a_key_that_the_policy_does_not_trust_fails_at_once(
    signing, placed, workspace
):
    """Not at the first rollback."""
    mixed = replace(signing, public_key=other_key(workspace, placed))

    with pytest.raises(TamperedError, match="another key"):
        mixed.sign(ReleaseFiles(*placed()).signed())


def test_the_policys_own_key_pair(placed, tmp_path, workspace):
    """A key made with OpenSSL signs; its public half is derived where none is named."""
    pem = tmp_path / "team.pem"
    make = ("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(pem))
    subprocess.run(make, check=True, capture_output=True)
    layout, release = placed()
    team = ReleaseSigning(required=True, private_key=pem, public_key=None, keys=workspace.keys)
    team.sign(ReleaseFiles(layout, release).signed())

    assert team.check(ReleaseFiles(layout, release).signed()) == ""
    assert not workspace.keys.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("secret words", "is not an unencrypted PEM key")],
    ids=["missing", "no-key"],
)
def test_unusable_key_is_named(signing, placed, tmp_path, content, message):
    """By its path; what is in the file is not shown."""
    pem = tmp_path / "team.pem"
    if content is not None:
        pem.write_text(content)

    with pytest.raises(InputError, match=rf"team\.pem {message}") as caught:
        replace(signing, private_key=pem).sign(ReleaseFiles(*placed()).signed())
    assert "secret" not in str(caught.value)


def test_unsigned_release_is_noted_or_refused(signing, placed):
    """As the policy says."""
    layout, release = placed()

    assert "is not signed" in replace(signing, required=False).check(
        ReleaseFiles(layout, release).signed()
    )
    with pytest.raises(RepositoryError, match="requires signatures"):
        signing.check(ReleaseFiles(layout, release).signed())


def test_without_a_key_a_signature_cannot_be_checked(signing, placed, tmp_path):
    """On a machine that never signed, and whose policy names no public key."""
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    bare = ReleaseSigning.of(Signing(), Workspace(tmp_path / "bare"))

    assert "cannot be checked here" in bare.check(ReleaseFiles(layout, release).signed())
    with pytest.raises(RepositoryError, match="public_key"):
        replace(bare, required=True).check(ReleaseFiles(layout, release).signed())


def test_without_the_package_the_extra_is_named(signing, placed, monkeypatch):
    """Releases are then unsigned, unless the policy requires signatures."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "model_signing" else find(name)
    )
    layout, release = placed()

    replace(signing, required=False).sign(ReleaseFiles(layout, release).signed())
    assert not layout.signature_file(1).exists()
    with pytest.raises(EnginegateError, match=r"enginegate\[signing\]"):
        signing.sign(ReleaseFiles(layout, release).signed())


def test_imported_release_keeps_its_signature(signing, placed, tmp_path):
    """A fleet's other folders and hosts that follow storage hold what the first one signed."""
    layout, release = placed()
    signing.sign(ReleaseFiles(layout, release).signed())
    other = Layout(tmp_path / "other", "digits")
    other.root.mkdir()

    place(other, ImportedRelease(release, layout.root), 1, None)

    assert signing.check(ReleaseFiles(other, release).signed()) == ""
    remove(other, 1)
    assert not other.signature_file(1).exists()
