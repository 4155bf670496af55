"""Signatures on releases, by OpenSSF model-signing with a key: the only door of that library.

Scorecards and decisions, which are one small file each, are signed with the same keys: ECDSA over
their canonical JSON, in a file beside each.

One signature covers a release's manifest, its golden samples and every file it serves, so an edited
manifest shows as surely as an edited engine. What is trusted is a public key that lies outside the
repository: the policy's, else this workspace's. A key beside a release would prove nothing, because
whoever can change the release can change the key.
"""

import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginegate.atomic_io import file_lock, read_file, write_file
from enginegate.errors import InputError, RepositoryError, TamperedError
from enginegate.policy.operating import Signing
from enginegate.records import Record, sha256_bytes
from enginegate.workspace import Workspace

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_LOCK_TIMEOUT_S = 30.0
_ANY_OTHER = stat.S_IRWXG | stat.S_IRWXO
_INSTALL = "pip install 'enginegate[signing]'"


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The files that one signature covers.

    Attributes:
        root: which the signature's names are relative to.
        files: exactly these.
        signature: where it is.
        subject: what is signed, for messages.
    """

    root: Path
    files: tuple[Path, ...]
    signature: Path
    subject: str


@dataclass(frozen=True, slots=True)
class ReleaseSigning:
    """How releases of one model family are signed and checked.

    Attributes:
        required: refuse a release without a signature that verifies.
        private_key: PEM to sign with; None: the workspace's own, made on first use.
        public_key: PEM that is trusted; None: the one that belongs to the private key.
        keys: the workspace's folder of keys.
    """

    required: bool
    private_key: Path | None
    public_key: Path | None
    keys: Path

    @classmethod
    def of(cls, rules: Signing, workspace: Workspace) -> "ReleaseSigning":
        """As a policy says, with the keys of a workspace."""
        return cls(rules.required, rules.private_key, rules.public_key, workspace.keys)

    def sign(self, signed: SignedFiles) -> None:
        """Sign files that were just written, and check the signature with the trusted key.

        Nothing is done where model-signing is missing and no signature is required.

        Raises:
            RepositoryError: a signature is required and cannot be made.
            InputError: a key cannot be read.
            TamperedError: the private key is not the one whose public half is trusted.
        """
        if not self._usable():
            return
        from model_signing import signing  # noqa: PLC0415

        key = self._signing_key()
        config = signing.Config()  # type: ignore[no-untyped-call]
        with _key_errors(key):
            config.use_elliptic_key_signer(private_key=key)
        config.set_hashing_config(_listed(signed.files))
        with tempfile.TemporaryDirectory(prefix="enginegate-signing-") as folder:
            written = Path(folder, "signature.json")
            config.sign(signed.root, written)
            write_file(signed.signature, written.read_bytes())
        self.check(signed)

    def check(self, signed: SignedFiles) -> str:
        """Check a signature, offline.

        Returns:
            What could not be checked, where no signature is required; empty when it verifies.

        Raises:
            RepositoryError: a signature is required, and there is none or it cannot be checked.
            TamperedError: a file is not what was signed, or another key than the trusted one
                signed it.
        """
        if not signed.signature.is_file():
            return self._lenient(f"{signed.subject} is not signed")
        if not self._usable():
            return f"its signature was not checked: {_INSTALL}"
        with self._trusted() as public_key:
            if public_key is None:
                return self._lenient(
                    "its signature cannot be checked here: this workspace has no key, and the "
                    "policy names none ([signing] public_key)"
                )
            return self._verified(signed, public_key)

    def sign_record(self, record: Record, path: Path) -> str:
        """Sign a scorecard or a decision that is kept at ``path``, beside it.

        Returns:
            Why it is not signed; empty when it is.
        """
        if not importlib.util.find_spec("cryptography"):
            return f"records are signed only with {_INSTALL}"
        if self.private_key is None and self.public_key is not None:
            return "the policy trusts a public key, and no private key is named here"
        try:
            signature = _signature(_read_private(self._signing_key()), record)
            with self._trusted() as public_key:
                if public_key is None or not _holds(public_key, record, signature):
                    return f"the private key is not the one of {self.public_key or public_key}"
            write_file(signature_beside(path), signature)
        except (InputError, OSError) as error:
            return str(error)
        return ""

    def check_record(self, record: Record, path: Path) -> str:
        """Check the signature on a scorecard or a decision, offline.

        Returns:
            Why no signature shows that it is as it was written; empty when one does.

        Raises:
            TamperedError: there is a signature by the trusted key's owner or a stranger, and it is
                not on this content.
        """
        beside = signature_beside(path)
        try:
            signature = read_file(beside)
        except FileNotFoundError:
            return f"it is not signed ({beside} is not there)"
        except OSError as error:
            raise TamperedError(f"The signature {beside} cannot be read: {error}.") from error
        if not importlib.util.find_spec("cryptography"):
            return f"its signature cannot be checked: {_INSTALL}"
        shown = self.public_key or self.private_key or self.keys / "release.pub"
        try:
            with self._trusted() as public_key:
                if public_key is None:
                    return (
                        "its signature cannot be checked: this workspace has no key, and the "
                        "policy names none ([signing] public_key)"
                    )
                if _holds(public_key, record, signature):
                    return ""
        except InputError as error:
            return f"its signature cannot be checked: {error}"
        if self.public_key is None and not self.required:
            return f"its signature is not by the key {shown}, or not on this content"
        raise TamperedError(
            f"The signature {beside} is not valid: it is not by the key {shown}, or not on what "
            f"{path} says. Find out who changed it, then make it again."
        )

    def trusted_state(self) -> str:
        """What decides whether a signature verifies here: where it changes, so may every check."""
        parts = [str(self.required), str(bool(importlib.util.find_spec("model_signing")))]
        for key in (self.public_key, self.private_key, self.keys / "release.pub"):
            with suppress(OSError):
                parts.append(sha256_bytes(read_file(key, follow_links=True)) if key else "")
        return " ".join(parts)

    def _verified(self, signed: SignedFiles, public_key: Path) -> str:
        from model_signing import verifying  # noqa: PLC0415

        config = verifying.Config()  # type: ignore[no-untyped-call]
        with _key_errors(self.public_key or public_key):
            config.use_elliptic_key_verifier(public_key=public_key)
        config.set_hashing_config(_listed(signed.files))
        # Damage shows as whatever its parser, its verifier or the file system raises.
        try:
            config.verify(signed.root, signed.signature)
        except Exception as error:
            if "Key mismatch" in str(error) and not self.required and self.public_key is None:
                return "it was signed with another key than this workspace's"
            raise TamperedError(_mismatch(signed.signature, str(error), public_key)) from error
        return ""

    def _lenient(self, note: str) -> str:
        if self.required:
            raise RepositoryError(
                f"The policy requires signatures, but {note}. Promote its scorecard again to "
                "publish and sign it, or go to a release that is signed."
            )
        return note

    def _usable(self) -> bool:
        """Whether model-signing is here.

        Raises:
            RepositoryError: it is not, and signatures are required.
        """
        if all(importlib.util.find_spec(name) for name in ("model_signing", "OpenSSL")):
            return True
        if self.required:
            raise RepositoryError(
                "The policy requires signatures ([signing] required), and model-signing is not "
                f"installed here. Install it: {_INSTALL}"
            )
        return False

    @contextmanager
    def _trusted(self) -> Iterator[Path | None]:
        """The public key to verify with; derived where only the private one is named."""
        if self.public_key is not None:
            with _key_errors(self.public_key):
                read_file(self.public_key, follow_links=True)
            yield self.public_key
            return
        if self.private_key is None:
            own = self.keys / "release.pub"
            there = os.path.lexists(own)
            if there:
                with _key_errors(own):
                    read_file(own)
            yield own if there else None
            return
        with tempfile.TemporaryDirectory(prefix="enginegate-signing-") as folder:
            derived = Path(folder, "release.pub")
            derived.write_bytes(_public_pem(_read_private(self.private_key)))
            yield derived

    def _signing_key(self) -> Path:
        """The policy's private key, else the workspace's own.

        A key that the policy names may be a link, as platforms mount secrets; never the own one.
        """
        if self.private_key is None:
            return self._own_key()
        with _key_errors(self.private_key):
            read_file(self.private_key, follow_links=True)
        return self.private_key

    def _own_key(self) -> Path:
        """The workspace's key; made on first use, readable by its owner only."""
        private, public = self.keys / "release.pem", self.keys / "release.pub"
        for key in (private, public):
            with _key_errors(key), suppress(FileNotFoundError):
                read_file(key)
        if private.is_file() and public.is_file():
            if private.stat().st_mode & _ANY_OTHER:
                raise InputError(
                    f"Others may read the private key {private}. Make it yours alone: chmod 600 "
                    f"{private}"
                )
            return private
        self.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = self.keys / ".lock"
        with _key_errors(lock), file_lock(lock, timeout_s=_LOCK_TIMEOUT_S):
            if not private.is_file():
                write_file(private, _new_private_pem(), mode=0o600)
            write_file(public, _public_pem(_read_private(private)))
        return private


def signature_beside(path: Path) -> Path:
    """Where the signature on a scorecard or a decision is, by where that is."""
    return path.with_suffix(".sig")


def _listed(files: tuple[Path, ...]) -> Any:
    """model-signing's hashing, of exactly the files that belong to a release, or to a promise.

    The set is ours, never the signature's: else the signature of one release would do for another.
    """
    from model_signing import hashing  # noqa: PLC0415

    class Listed(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            del files_to_hash
            return super().hash(model_path, files_to_hash=list(files))

    listed = Listed()  # type: ignore[no-untyped-call]
    return listed.set_ignored_paths(paths=[], ignore_git_paths=False)


def _mismatch(signature: Path, reason: str, public_key: Path) -> str:
    if "Key mismatch" in reason:
        said = f"it was made with another key than {public_key}"
    else:
        said = reason or "it is not a signature by the trusted key"
    return (
        f"The signature {signature} is not valid: {said}. Find out who changed the release; until "
        "then go to one that verifies."
    )


@contextmanager
def _key_errors(key: Path) -> Iterator[None]:
    """A message about a key names its file and never what is in it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"The key {key} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{key} is not an unencrypted PEM key on the curve P-256, P-384 or P-521. Make one:\n"
            "  openssl ecparam -name prime256v1 -genkey -noout -out release.pem"
        ) from error


def _read_private(path: Path) -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    with _key_errors(path):
        key = load_pem_private_key(read_file(path, follow_links=True), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError
        return key


def _signature(key: "EllipticCurvePrivateKey", record: Record) -> bytes:
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    return key.sign(_signed_content(record), ec.ECDSA(hashes.SHA256()))


def _holds(public_key: Path, record: Record, signature: bytes) -> bool:
    """Whether a signature is by that key, and on this record."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    with _key_errors(public_key):
        key = load_pem_public_key(read_file(public_key, follow_links=True))
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise TypeError
    try:
        key.verify(signature, _signed_content(record), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _signed_content(record: Record) -> bytes:
    """Its kind belongs to it, so that the signature on one record is never one on another."""
    return f"enginegate {type(record).__name__}\n".encode() + record.canonical_json()


def _new_private_pem() -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
