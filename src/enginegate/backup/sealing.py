"""Private keys in a backup: encrypted as age files are, for a passphrase or for public keys.

Whoever has the `age` program can open the member without this one. What is encrypted also says
which manifest it belongs to, so nobody who does not know the passphrase can change any other
member unnoticed. (Public keys are public: for them this shows damage only.)
"""

import base64
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Base64Bytes, ValidationError

from enginegate.atomic_io import read_file
from enginegate.candidate import Sha256
from enginegate.errors import InputError, TamperedError
from enginegate.records import Record

_INSTALL = "pip install 'enginegate[backup]'"
# A backup is carried away, and then tried against guesses as fast as scrypt allows.
SHORTEST_PASSPHRASE = 12
_LARGEST_KEY = 1 << 20


class SealedFile(Record):
    """One private key."""

    name: str
    mode: int
    content: Base64Bytes
    """In base 64."""


class SealedPart(Record):
    """What is encrypted."""

    schema_version: Literal[1] = 1
    manifest_sha256: Sha256
    files: tuple[SealedFile, ...]


@dataclass(frozen=True, slots=True)
class SealingKey:
    """For whom private keys are encrypted: one passphrase, or several public keys.

    Attributes:
        passphrase: at least twelve characters; empty: for the recipients.
        recipients: public keys as age and OpenSSH write them.
    """

    passphrase: str = field(default="", repr=False)
    recipients: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["passphrase", "recipients"]:
        """Which of the two."""
        return "recipients" if self.recipients else "passphrase"

    def check(self) -> None:
        """Refuse what nothing could be encrypted for, before anything is read or written.

        Raises:
            InputError: pyrage is missing, the passphrase is short, or a recipient is no public key.
        """
        _library()
        if not self.recipients and len(self.passphrase) < SHORTEST_PASSPHRASE:
            raise InputError(
                f"The passphrase of a backup has at least {SHORTEST_PASSPHRASE} characters: who "
                "gets hold of the file may guess as long as they like. A few random words do."
            )
        for recipient in self.recipients:
            _recipient(recipient)

    def seal(self, manifest_sha256: Sha256, files: Iterable[tuple[str, Path]]) -> bytes:
        """Encrypt files, by their names in a backup.

        Raises:
            InputError: one cannot be read, or is too large for a key.
        """
        pyrage = _library()
        sealed = tuple(_sealed_file(name, path) for name, path in files)
        part = SealedPart(manifest_sha256=manifest_sha256, files=sealed).canonical_json()
        if not self.recipients:
            return bytes(pyrage.passphrase.encrypt(part, self.passphrase))
        return bytes(pyrage.encrypt(part, [_recipient(each) for each in self.recipients]))


@dataclass(frozen=True, slots=True)
class OpeningKey:
    """What opens private keys.

    Attributes:
        ask: gives the passphrase; asked only where one is needed.
        identities: files of private keys, as age and OpenSSH write them.
    """

    ask: Callable[[], str] = field(repr=False)
    identities: tuple[Path, ...] = ()

    def open(self, sealed: bytes, manifest_sha256: Sha256, origin: Path) -> tuple[SealedFile, ...]:
        """Decrypt the member of a backup.

        Raises:
            InputError: it does not open with what was given.
            TamperedError: it belongs to another manifest than the file has.
        """
        pyrage = _library()
        try:
            if self.identities:
                opened = pyrage.decrypt(
                    sealed, [i for p in self.identities for i in _identities(p)]
                )
            else:
                opened = pyrage.passphrase.decrypt(sealed, self.ask())
        except pyrage.DecryptError as error:
            given = "identities that were given" if self.identities else "passphrase"
            raise InputError(
                f"The private keys in {origin} do not open with the {given} ({error}). Nothing was "
                "written. --without-keys restores all but them."
            ) from error
        try:
            part = SealedPart.model_validate_json(opened)
        except ValidationError:
            # Its text would hold what was decrypted.
            raise InputError(f"The private keys in {origin} are of another version.") from None
        if part.manifest_sha256 != manifest_sha256:
            raise TamperedError(
                f"{origin} was changed after it was written: its encrypted part belongs to the "
                f"manifest {part.manifest_sha256[:12]}, the file has {manifest_sha256[:12]}. "
                "Nothing was written. Restore another backup."
            )
        return part.files


def _sealed_file(name: str, path: Path) -> SealedFile:
    try:
        content = read_file(path, follow_links=True)
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise InputError(f"The key {path} cannot be read: {error.strerror or error}.") from error
    if len(content) > _LARGEST_KEY:
        raise InputError(f"{path} is among the keys and has {len(content)} bytes: that is no key.")
    return SealedFile(name=name, mode=mode, content=base64.b64encode(content))


def _library() -> Any:
    if importlib.util.find_spec("pyrage") is None:
        raise InputError(
            f"Private keys are in a backup only encrypted, which needs pyrage: {_INSTALL}. "
            "--without-keys leaves them out."
        )
    import pyrage  # noqa: PLC0415

    return pyrage


def _recipient(text: str) -> Any:
    pyrage = _library()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text.strip())
    except pyrage.RecipientError as error:
        raise InputError(
            f"{text!r} is no public key that keys can be encrypted for ({error}). Name one that "
            "begins with age1, ssh-ed25519 or ssh-rsa."
        ) from error


def _identities(path: Path) -> list[Any]:
    """The private keys of one file: lines of age, or one of OpenSSH. Messages hold none of it."""
    pyrage = _library()
    try:
        content = read_file(path, follow_links=True)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        if content.lstrip().startswith(b"-----BEGIN"):
            return [pyrage.ssh.Identity.from_buffer(content)]
        lines = [line.strip() for line in content.decode().splitlines()]
        return [pyrage.x25519.Identity.from_str(x) for x in lines if x and not x.startswith("#")]
    except (pyrage.IdentityError, UnicodeDecodeError):
        raise InputError(
            f"{path} holds no private key that opens a backup: a file of `age-keygen`, or an "
            "OpenSSH key of ed25519 or RSA without a passphrase."
        ) from None
