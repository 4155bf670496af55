"""The one door to object storage: one prefix of one bucket behind the S3 API, through obstore.

Endpoint and credentials come from where the AWS libraries look (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``, an instance's role, …); nothing of them is kept, logged or
put into a message.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from enginegate.candidate import FileDigest
from enginegate.errors import RepositoryError

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ClientConfig, S3Config, S3Store

_BLOCK_BYTES = 1 << 24
_CONNECT_S, _SILENT_S = 5, 60
# A request is retried this often: more would keep a rollback waiting for storage that is away.
_RETRIES = 1
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Part of an error's text -> what to do.
_REMEDIES = {
    "get_credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE).",
    "artial credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, both of them.",
    "NoSuchBucket": "Make the bucket, or name another one as target.objects in the policy.",
    "error sending request": "Check that AWS_ENDPOINT_URL names a server that runs.",
    "AccessDenied": "Allow these credentials to list, read, write and delete below this prefix.",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY.",
    "redirect": "Set AWS_DEFAULT_REGION to the bucket's region.",
    "AuthorizationHeaderMalformed": "Set AWS_DEFAULT_REGION to the bucket's region.",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """An object's content, and the tag that a conditional replacement needs."""

    content: bytes
    tag: str


class ObjectStore:
    """Objects below one prefix. Keys are relative to it."""

    def __init__(self, url: str) -> None:
        """Connect lazily to ``s3://BUCKET/PREFIX``."""
        self.url = url.rstrip("/")

    def read(self, key: str) -> Stored | None:
        """An object whole; None when there is none.

        Raises:
            RepositoryError: storage cannot be reached or refuses (so do all other methods).
        """
        with self._explained("read", key):
            try:
                answer = self._backend.get(key)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            return Stored(bytes(answer.bytes()), answer.meta["e_tag"] or "")

    def create(self, key: str, content: bytes) -> bool:
        """Write an object only if there is none; whether that is so now by our doing."""
        return self._put(key, content, "create")

    def replace(self, key: str, content: bytes, tag: str | None) -> bool:
        """Write over the object with this tag (None: where there is none), and no other."""
        return self._put(key, content, {"e_tag": tag} if tag else "create")

    def upload(self, path: Path, key: str) -> None:
        """Write a file, in parts if it is large; it appears whole or not at all."""
        with self._explained("write", key):
            self._backend.put(key, path)

    def write(self, key: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        with self._explained("write", key):
            self._backend.put(key, content)

    def download(self, key: str, path: Path) -> None:
        """Read an object into a file.

        Raises:
            RepositoryError: there is no such object.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("read", key), path.open("wb") as file:
            for block in self._backend.get(key).stream(min_chunk_size=_BLOCK_BYTES):
                file.write(block)

    def digest(self, key: str) -> FileDigest:
        """Digest and size of an object's content, read back whole.

        Raises:
            RepositoryError: there is no such object.
        """
        digest, size = hashlib.sha256(), 0
        with self._explained("read", key):
            for block in self._backend.get(key).stream(min_chunk_size=_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        return FileDigest(sha256=digest.hexdigest(), size_bytes=size)

    def keys(self, below: str) -> tuple[str, ...]:
        """Keys that begin with ``below``, sorted."""
        folder, _, _ = below.rpartition("/")
        with self._explained("list", below):
            found = [meta["path"] for page in self._backend.list(folder) for meta in page]
        return tuple(sorted(key for key in found if key.startswith(below)))

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        with self._explained("delete", key):
            self._backend.delete(key)

    def check_conditions(self) -> None:
        """Make sure that two writers can be kept apart.

        Raises:
            RepositoryError: the server overwrites an object although it was asked not to.
        """
        key = ".enginegate-probe"
        self.create(key, b"first")
        if self.create(key, uuid4().bytes):
            raise RepositoryError(
                f"The server of {self.url} ignores If-None-Match, so two promotions could not be "
                "kept apart. Use storage with conditional writes (AWS S3, MinIO, Ceph, R2 have "
                "them), or a target without `objects`."
            )

    def _put(self, key: str, content: bytes, mode: "PutMode") -> bool:
        from obstore.exceptions import (  # noqa: PLC0415
            AlreadyExistsError,
            PreconditionError,
        )

        with self._explained("write", key):
            try:
                self._backend.put(key, content, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                # The first attempt may have been carried out and only its answer lost.
                there = self.read(key)
                return there is not None and there.content == content
        return True

    @cached_property
    def _backend(self) -> "S3Store":
        return _connect(self.url)

    @contextmanager
    def _explained(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except RepositoryError:
            raise
        except Exception as error:
            if not _is_storage(error):
                raise
            text, _, _ = str(error).partition("\n\nDebug source")
            remedies = (remedy for sign, remedy in _REMEDIES.items() if sign in text)
            raise RepositoryError(
                f"Cannot {verb} {self.url}/{key}: {_without_secrets(text.strip())}\n"
                f"{next(remedies, 'See what the storage says about it, then try again.')}"
            ) from None


def _connect(url: str) -> "S3Store":
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
        from obstore.store import S3Store  # noqa: PLC0415
    except ImportError as error:
        raise RepositoryError(
            f"Object storage needs obstore and boto3, which cannot be imported: {error}.\n"
            "Install them: python -m pip install 'enginegate[s3]'"
        ) from error
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: ClientConfig = {
        "allow_http": (endpoint or "").startswith("http://"),
        "connect_timeout": f"{_CONNECT_S}s",
        "read_timeout": f"{_SILENT_S}s",
        "timeout": "1day",  # of a whole transfer, however large; silence ends it much earlier
    }
    if authority := os.environ.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(authority).read_bytes()
    config: S3Config = {"endpoint": endpoint} if endpoint else {}
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,
        credential_provider=Boto3CredentialProvider(),
        client_options=options,
        retry_config={"max_retries": _RETRIES},
    )


def _is_storage(error: Exception) -> bool:
    """Whether an exception came from the storage libraries, not from a mistake of ours."""
    module = type(error).__module__.partition(".")[0]
    no_credentials = isinstance(error, ValueError) and "get_credentials" in str(error)
    return isinstance(error, OSError) or module in {"obstore", "botocore"} or no_credentials


def _without_secrets(text: str) -> str:
    """An endpoint's address may hold a password, and an answer may quote a key."""
    text = re.sub(r"//[^/@\s]*@", "//", text)
    for name in _SECRETS:
        value = os.environ.get(name, "")
        text = text.replace(value, "***") if len(value) > 3 else text  # noqa: PLR2004
    return text
