"""Private keys for public keys of age and OpenSSH; messages hold nothing of a key."""

import pyrage
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from enginegate.backup import OpeningKey, SealingKey
from enginegate.errors import InputError, TamperedError

MANIFEST = "ab" * 32


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "release.pem"
    path.write_bytes(b"-----BEGIN PRIVATE KEY-----")
    path.chmod(0o600)
    return path


def ssh_pair(folder):
    """A private key's file, and the public key's line."""
    private = Ed25519PrivateKey.generate()
    path = folder / "id_ed25519"
    path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return path, f"{public.decode()} ada@host"


def test_any_recipient_opens_it(key, opening, sealing, tmp_path):
    """A backup is for several people, each with a key of their own."""
    path, line = ssh_pair(tmp_path)
    both = SealingKey(recipients=(*sealing.recipients, line))

    sealed = both.seal(MANIFEST, [("workspace/keys/release.pem", key)])

    for opens in (opening, OpeningKey(str, (path,))):
        (found,) = opens.open(sealed, MANIFEST, tmp_path)
        assert (found.content, found.mode) == (key.read_bytes(), 0o600)


def test_stranger_opens_nothing(key, sealing, tmp_path):
    stranger = pyrage.x25519.Identity.generate()
    path = tmp_path / "stranger.txt"
    path.write_text(f"{stranger}\n")
    sealed = sealing.seal(MANIFEST, [("workspace/keys/release.pem", key)])

    with pytest.raises(InputError, match="do not open with the identities") as raised:
        OpeningKey(str, (path,)).open(sealed, MANIFEST, tmp_path)
    assert str(stranger) not in str(raised.value)


def test_keys_of_another_backup_do_not_fit(key, sealing, opening, tmp_path):
    sealed = sealing.seal(MANIFEST, [("workspace/keys/release.pem", key)])

    with pytest.raises(TamperedError, match="belongs to the manifest abababababab"):
        opening.open(sealed, "cd" * 32, tmp_path)


@pytest.mark.parametrize("content", ["AGE-SECRET-KEY-1NONSENSE", "-----BEGIN NOTHING", "\x00"])
def test_file_that_is_no_identity_is_named_and_not_shown(sealing, tmp_path, content):
    path = tmp_path / "identity.txt"
    path.write_text(content)

    with pytest.raises(InputError, match="holds no private key") as raised:
        OpeningKey(str, (path,)).open(sealing.seal(MANIFEST, []), MANIFEST, tmp_path)
    assert "NONSENSE" not in str(raised.value)


@pytest.mark.parametrize("recipient", ["age1nonsense", "ssh-ed25519 AAAA", "me@example.org"])
def test_recipient_that_is_no_public_key_is_refused(recipient):
    with pytest.raises(InputError, match="is no public key"):
        SealingKey(recipients=(recipient,)).check()


def test_large_file_among_the_keys_is_no_key(sealing, tmp_path):
    """It would be held in memory."""
    path = tmp_path / "keys.tar"
    path.write_bytes(bytes((1 << 20) + 1))

    with pytest.raises(InputError, match="that is no key"):
        sealing.seal(MANIFEST, [("workspace/keys/keys.tar", path)])


def test_passphrase_is_in_no_representation():
    """A traceback or a log may show the key's record."""
    assert "correct horse" not in repr(SealingKey("correct horse battery"))
