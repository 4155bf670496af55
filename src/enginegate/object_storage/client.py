"""The one door to object storage: one prefix of a bucket or container, through obstore.

S3 and whatever speaks its API (``s3://BUCKET/PREFIX``), Google Cloud Storage (``gs://``) and Azure
Blob Storage (``az://CONTAINER/PREFIX``). Endpoint and credentials come from where each provider's
own libraries look (``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``,
``AZURE_STORAGE_ACCOUNT_NAME``, an instance's role, …); nothing of them is kept, logged or put into
a message.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from enginegate.candidate import FileDigest
from enginegate.errors import InputError, RepositoryError
from enginegate.object_storage.providers import OBJECT_URL, PROVIDERS
from enginegate.redact import masked

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ObjectStore as Backend

T = TypeVar("T")

_BLOCK_BYTES = 1 << 24
# Storage that answers that it is overloaded gets so many seconds more: AWS and Azure ask for one to
# five. A rollback waits for these too.
_WAITS_S = (1.0, 2.0, 4.0)
_OVERLOADED = re.compile("status code: (429|503)|SlowDown|ServerBusy")
# An environment variable with one of these in its name is never quoted.
_SECRET_NAMES = re.compile(r"^(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|SERVICE_ACCOUNT)")

_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|specified bucket does not exist")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object's content, and the tag that a conditional replacement needs."""

    content: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object of a listing.

    Attributes:
        modified_at: when it was written last, by the storage's clock.
    """

    key: str
    size_bytes: int
    modified_at: datetime


class ObjectStore:
    """Objects below one prefix. Keys are relative to it."""

    def __init__(self, url: str) -> None:
        """Connect lazily to ``s3://BUCKET/PREFIX``, ``gs://…`` or ``az://CONTAINER/PREFIX``.

        Raises:
            InputError: it is no such address.
        """
        if not re.match(OBJECT_URL, url.rstrip("/")):
            raise InputError(
                f"{masked(url)!r} is no address of object storage. Write s3://BUCKET/PREFIX, "
                "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."
            )
        self.url = url.rstrip("/")
        self.provider = PROVIDERS[self.url.partition(":")[0]]

    def read(self, key: str) -> Stored | None:
        """An object whole; None when there is none.

        Raises:
            RepositoryError: storage cannot be reached or refuses (so do all other methods).
        """
        return self._ask("read", key, partial(self._read, key))

    def create(self, key: str, content: bytes) -> bool:
        """Write an object only if there is none; whether that is so now by our doing."""
        return self.replace(key, content, None)

    def replace(self, key: str, content: bytes, tag: str | None) -> bool:
        """Write over the object with this tag (None: where there is none), and no other."""
        return self._ask("write", key, partial(self._put, key, content, tag))

    def upload(self, path: Path, key: str) -> None:
        """Write a file, in parts if it is large; it appears whole or not at all."""
        self._ask("write", key, partial(self._upload, path, key))

    def write(self, key: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        self._ask("write", key, lambda: self._backend.put(key, content))

    def download(self, key: str, path: Path) -> None:
        """Read an object into a file.

        Raises:
            RepositoryError: there is no such object.
        """

        def fetch() -> None:
            with path.open("wb") as file:
                for block in self._backend.get(key).stream(min_chunk_size=_BLOCK_BYTES):
                    file.write(block)

        path.parent.mkdir(parents=True, exist_ok=True)
        self._ask("read", key, fetch)

    def digest(self, key: str) -> FileDigest:
        """Digest and size of an object's content, read back whole.

        Raises:
            RepositoryError: there is no such object.
        """

        return self._ask("read", key, partial(self._digest, key))

    def keys(self, below: str) -> tuple[str, ...]:
        """Keys that begin with ``below``, sorted."""
        return tuple(entry.key for entry in self.entries(below))

    def entries(self, below: str) -> tuple[ObjectEntry, ...]:
        """Objects whose keys begin with ``below``, sorted by key."""
        folder, _, _ = below.rpartition("/")

        def listed() -> list[ObjectEntry]:
            return [
                ObjectEntry(meta["path"], meta["size"], meta["last_modified"])
                for page in self._backend.list(folder)
                for meta in page
                if meta["path"].startswith(below)
            ]

        return tuple(sorted(self._ask("list", below, listed), key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        self._ask("delete", key, partial(self._delete, key))

    def check_conditions(self) -> None:
        """Make sure that two writers can be kept apart.

        Raises:
            RepositoryError: the server overwrites an object although it was asked not to.
        """
        key, ignored = ".enginegate-probe", ""
        self.create(key, b"first")
        if self.create(key, uuid4().bytes):
            ignored = "a write where there is no object yet"
        elif (before := self.read(key)) is not None:
            self.write(key, uuid4().bytes)
            if self.replace(key, uuid4().bytes, before.tag):
                ignored = "a write over one version of an object"
        if ignored:
            raise RepositoryError(
                f"The server of {self.url} ignores the condition of {ignored}, so two promotions "
                "could not be kept apart. Use storage with conditional writes (AWS S3, Google "
                "Cloud Storage, Azure, MinIO, Ceph, R2 have them), or a target without `objects`."
            )

    def _read(self, key: str) -> Stored | None:
        try:
            answer = self._backend.get(key)
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise
            return None
        return Stored(bytes(answer.bytes()), answer.meta[self.provider.tag] or "")

    def _digest(self, key: str) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        for block in self._backend.get(key).stream(min_chunk_size=_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
        return FileDigest(sha256=digest.hexdigest(), size_bytes=size)

    def _upload(self, path: Path, key: str) -> None:
        try:
            self._backend.put(key, path)
        except Exception as error:
            if not _is_storage(error) or _OVERLOADED.search(str(error)):
                raise
            # Azure refuses to make one object of a file's parts twice, so the library's repeated
            # request fails where only the answer to the first one was lost.
            with _raising_first(error):
                found = self._digest(key)
            if found != FileDigest.of(path):
                raise

    def _put(self, key: str, content: bytes, tag: str | None) -> bool:
        from obstore.exceptions import (  # noqa: PLC0415
            AlreadyExistsError,
            PreconditionError,
        )

        mode: PutMode = "create"
        if tag is not None:
            mode = {"version": tag} if self.provider.tag == "version" else {"e_tag": tag}
        for attempt in (1, 2):
            try:
                self._backend.put(key, content, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                # An earlier attempt may have been carried out and only its answer lost.
                there = self._read(key)
                return there is not None and there.content == content
            except Exception as error:
                # The library does not repeat a write on a condition whose answer was lost.
                if not _is_storage(error) or _OVERLOADED.search(str(error)):
                    raise
                with _raising_first(error):
                    there = self._read(key)
                if there is not None and there.content == content:
                    return True
                if (None if there is None else there.tag) != tag:
                    return False
                if attempt == 2:  # noqa: PLR2004
                    raise
            else:
                return True
        raise AssertionError  # not reached

    def _delete(self, key: str) -> None:
        for attempt in (1, 2):
            try:
                self._backend.delete(key)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
            except Exception as error:
                # Nor a deletion that it sends as a POST.
                if attempt == 2 or not _is_storage(error):  # noqa: PLR2004
                    raise
                continue
            return

    @cached_property
    def _backend(self) -> "Backend":
        bucket, _, prefix = self.url.partition("://")[2].partition("/")
        try:
            return self.provider.connect(bucket, prefix)
        except ImportError as error:
            raise RepositoryError(
                f"{self.provider.name} needs libraries which cannot be imported: {error}.\n"
                f"Install them: python -m pip install 'enginegate[{self.provider.extra}]'"
            ) from error

    def _ask(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Call, and again after a while where storage says that it is overloaded.

        The library repeats such requests within half a second, whatever `Retry-After` says.
        """
        for wait_s in (*_WAITS_S, None):
            try:
                return call()
            except RepositoryError:
                raise
            except Exception as error:
                if not _is_storage(error):
                    raise
                if wait_s is None or not _OVERLOADED.search(str(error)):
                    raise self._explained(verb, key, error) from None
                time.sleep(wait_s)
        raise AssertionError  # not reached

    def _explained(self, verb: str, key: str, error: Exception) -> RepositoryError:
        text, _, _ = str(error).partition("\n\nDebug source")
        remedies = (remedy for sign, remedy in self.provider.remedies.items() if sign in text)
        return RepositoryError(
            f"Cannot {verb} {self.url}/{key}: {_without_secrets(text.strip())}\n"
            f"{next(remedies, 'See what the storage says about it, then try again.')}"
        )


@contextmanager
def _raising_first(error: Exception) -> Iterator[None]:
    """Raise what was raised before, where looking at what is there raises too."""
    try:
        yield
    except Exception:  # noqa: BLE001
        raise error from None


def _is_storage(error: Exception) -> bool:
    """Whether an exception came from the storage libraries, not from a mistake of ours."""
    module = type(error).__module__.partition(".")[0]
    no_credentials = isinstance(error, ValueError) and "get_credentials" in str(error)
    return isinstance(error, OSError) or module in {"obstore", "botocore"} or no_credentials


def _without_secrets(text: str) -> str:
    """An endpoint's address may hold a password or a token, and an answer may quote a key."""
    text = masked(text)
    for name, value in os.environ.items():
        if len(value) > 3 and _SECRET_NAMES.match(name):  # noqa: PLR2004
            text = text.replace(value, "***")
    return text
