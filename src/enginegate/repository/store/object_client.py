"""The one door to object storage: one prefix of one bucket behind the S3 API, through fsspec.

Endpoint and credentials come from the environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, …)
or from wherever the AWS libraries look; nothing of them is kept, logged or put into a message.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from enginegate.candidate import FileDigest
from enginegate.errors import RepositoryError

_BLOCK_BYTES = 1 << 24
_CONNECT_S = 5.0
_ATTEMPTS = 2
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_REMEDIES = {
    "NoCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE).",
    "PartialCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, both of them.",
    "NoSuchBucket": "Make the bucket, or name another one as target.objects in the policy.",
    "EndpointConnectionError": "Check that AWS_ENDPOINT_URL names a server that runs.",
    "ConnectTimeoutError": "Check that AWS_ENDPOINT_URL names a server that runs.",
    "AccessDenied": "Allow these credentials to list, read, write and delete below this prefix.",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY.",
}
_MISSING = {"NoSuchKey", "404"}
# 409 is what AWS answers when two conditional writes of the same object cross.
_REFUSED = {"PreconditionFailed", "412", "ConditionalRequestConflict"}


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
        self._bucket, _, self._prefix = self.url.removeprefix("s3://").partition("/")
        self._system: Any = None

    def read(self, key: str) -> Stored | None:
        """An object whole; None when there is none.

        Raises:
            RepositoryError: storage cannot be reached or refuses (so do all other methods).
        """
        system = self._files()
        with self._explained("read", key):
            try:
                content, tag = _get(system, self._bucket, self._full(key))
            except FileNotFoundError as error:
                if _code(error) not in _MISSING:
                    raise
                return None
        return Stored(content, tag)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object only if there is none; whether that is so now by our doing."""
        return self._put(key, content, IfNoneMatch="*")

    def replace(self, key: str, content: bytes, tag: str | None) -> bool:
        """Write over the object with this tag (None: where there is none), and no other."""
        return self._put(key, content, **({"IfMatch": tag} if tag else {"IfNoneMatch": "*"}))

    def upload(self, path: Path, key: str) -> None:
        """Write a file, in parts if it is large; it appears whole or not at all."""
        with self._explained("write", key):
            self._files().put_file(str(path), f"{self._bucket}/{self._full(key)}")

    def write(self, key: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        with self._explained("write", key):
            self._files().call_s3(
                "put_object", Bucket=self._bucket, Key=self._full(key), Body=content
            )

    def download(self, key: str, path: Path) -> None:
        """Read an object into a file.

        Raises:
            RepositoryError: there is no such object.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("read", key):
            self._files().get_file(f"{self._bucket}/{self._full(key)}", str(path))

    def digest(self, key: str) -> FileDigest:
        """Digest and size of an object's content, read back whole.

        Raises:
            RepositoryError: there is no such object.
        """
        digest, size = hashlib.sha256(), 0
        name = f"{self._bucket}/{self._full(key)}"
        with (
            self._explained("read", key),
            self._files().open(name, "rb", block_size=_BLOCK_BYTES) as file,
        ):
            while chunk := file.read(_BLOCK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return FileDigest(sha256=digest.hexdigest(), size_bytes=size)

    def keys(self, below: str) -> tuple[str, ...]:
        """Keys that begin with ``below``, sorted."""
        start = self._full(below)
        folder, _, _ = start.rpartition("/")
        with self._explained("list", below):
            found = self._files().find(f"{self._bucket}/{folder}".rstrip("/"))
        cut = len(self._bucket) + 1
        names = (name[cut:] for name in found)
        return tuple(sorted(n[len(self._full("")) :] for n in names if n.startswith(start)))

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        with self._explained("delete", key):
            self._files().rm_file(f"{self._bucket}/{self._full(key)}")

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

    def _put(self, key: str, content: bytes, **condition: str) -> bool:
        try:
            with self._explained("write", key):
                self._files().call_s3(
                    "put_object",
                    Bucket=self._bucket,
                    Key=self._full(key),
                    Body=content,
                    **condition,
                )
        except _RefusedError:
            # The first attempt may have been carried out and only its answer lost.
            found = self.read(key)
            return found is not None and found.content == content
        return True

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _files(self) -> Any:
        if self._system is None:
            self._system = _connect()
        return self._system

    @contextmanager
    def _explained(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except RepositoryError:
            raise
        except Exception as error:
            code = _code(error)
            if code in _REFUSED or (what == "write" and code in _MISSING):
                raise _RefusedError(str(error)) from error
            if not _is_storage(error):
                raise
            raise RepositoryError(
                f"Cannot {what} {self.url}/{key}: {_without_secrets(str(error))} ({code}).\n"
                f"{_REMEDIES.get(code, 'See what the storage says about it, then try again.')}"
            ) from None


class _RefusedError(RepositoryError):
    """A condition of a write did not hold."""


def _connect() -> Any:
    try:
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415

        # Listings of a bucket that other hosts write to must not come from a memory of it.
        return fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "retries": {"max_attempts": _ATTEMPTS},
                "connect_timeout": _CONNECT_S,
            },
        )
    except ImportError as error:
        raise RepositoryError(
            f"Object storage needs s3fs, which cannot be imported: {error}.\n"
            "Install it: python -m pip install 'enginegate[s3]'"
        ) from error


def _get(system: Any, bucket: str, key: str) -> tuple[bytes, str]:
    """Content and tag of one and the same state of an object."""
    from fsspec.asyn import sync  # type: ignore[import-untyped]  # noqa: PLC0415

    async def get() -> tuple[bytes, str]:
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key)  # noqa: SLF001
        return await answer["Body"].read(), answer["ETag"]

    found: tuple[bytes, str] = sync(system.loop, get)
    return found


def _code(error: BaseException) -> str:
    """S3's own name of an error, else the library's."""
    for candidate in (error.__cause__, error):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def _is_storage(error: Exception) -> bool:
    """Whether an exception came from the storage libraries, not from a mistake of ours."""
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or module in {"botocore", "aiobotocore", "aiohttp", "s3fs"}


def _without_secrets(text: str) -> str:
    """An endpoint's address may hold a password, and an answer may quote a key."""
    text = re.sub(r"//[^/@\s]*@", "//", text)
    for name in _SECRETS:
        value = os.environ.get(name, "")
        text = text.replace(value, "***") if len(value) > 3 else text  # noqa: PLR2004
    return text
