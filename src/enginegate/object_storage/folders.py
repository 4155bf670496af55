"""Folders of the content store in object storage: what one host has made, no other makes again.

``ENGINEGATE_STORE`` names the prefix. A folder is named after everything that decides its content.
Its list of files is written last, and only where none is, so a folder is there whole or not at all,
and of two hosts that made it the first one counts: objects are named after their content, so that
the other one cannot write over files of that list. Digests are compared when it is fetched, and
whoever fetches reads the folder like one that was made here. Storage that is away costs a build
here, and no failure.
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pydantic import ValidationError

from enginegate.candidate import FileDigest
from enginegate.errors import InputError, RepositoryError, TamperedError
from enginegate.object_storage.client import ObjectEntry, ObjectStore
from enginegate.records import Record

T = TypeVar("T")

_log = logging.getLogger("enginegate.store")
_VARIABLE = "ENGINEGATE_STORE"
_LIST = ".files.json"


class FolderFiles(Record):
    """The files of one folder, by their path in it.

    Attributes:
        by_digest: objects are named after their content; in older lists, after the path.
    """

    files: dict[str, FileDigest]
    by_digest: bool = False


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """One folder in object storage.

    Attributes:
        name: digest of everything that decides its content.
        size_bytes: of all its objects.
        used_at: when it was stored or fetched last.
        objects: last parts of their keys: digests of its files, and the list's.
    """

    name: str
    size_bytes: int
    used_at: datetime
    objects: frozenset[str]


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """One kind of folder below a prefix.

    Attributes:
        kind: engines or onnx.
    """

    store: ObjectStore
    kind: str

    @classmethod
    def of_environment(cls, kind: str) -> "SharedFolders | None":
        """Those that ``ENGINEGATE_STORE`` names; None where it is not set.

        Raises:
            InputError: it is no address of object storage.
        """
        address = os.environ.get(_VARIABLE)
        return cls(ObjectStore(address), kind) if address else None

    def fetch(self, name: str, folder: Path) -> bool:
        """Fill an empty folder; False, and it is empty again, where storage has not all of it.

        Raises:
            TamperedError: an object is not what its list says, or the list names another's files.
            RepositoryError: storage cannot be reached or refuses.
        """
        stored = self.store.read(self._list(name))
        if stored is None:
            return False
        try:
            listed = FolderFiles.model_validate_json(stored.content)
        except ValidationError as error:
            raise TamperedError(f"{self.store.url}/{self._list(name)} is damaged.") from error
        for path, digest in listed.files.items():
            parts = PurePosixPath(path)
            if parts.is_absolute() or ".." in parts.parts:
                raise TamperedError(f"{self.store.url}/{self._list(name)} names {path!r}.")
            key = f"{self.kind}/{name}/{digest.sha256 if listed.by_digest else path}"
            self.store.download(key, folder / path)
            if FileDigest.of(folder / path) != digest:
                raise TamperedError(f"{self.store.url}/{key} is not what was stored: {path}.")
        with suppress(RepositoryError):
            # Written again, its list has the time of its last use, by which retention goes.
            self.store.replace(self._list(name), stored.content, stored.tag)
        return True

    def offer(self, name: str, folder: Path) -> None:
        """Store a folder, unless another host has and all of it is there.

        Raises:
            RepositoryError: storage cannot be reached or refuses.
        """
        stored = self.store.read(self._list(name))
        if stored is not None and self._is_whole(name, stored.content):
            return
        files = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest = FileDigest.of(path)
            self.store.upload(path, f"{self.kind}/{name}/{digest.sha256}")
            files[path.relative_to(folder).as_posix()] = digest
        listed = FolderFiles(files=files, by_digest=True)
        tag = stored.tag if stored is not None else None
        self.store.replace(self._list(name), listed.pretty_json(), tag)

    def folders(self) -> tuple[SharedFolder, ...]:
        """Every folder that is there, and what a killed host left of one.

        Raises:
            RepositoryError: storage cannot be reached or refuses.
        """
        found: dict[str, list[ObjectEntry]] = {}
        for entry in self.store.entries(f"{self.kind}/"):
            rest = entry.key.removeprefix(f"{self.kind}/")
            found.setdefault(rest.partition("/")[0].removesuffix(_LIST), []).append(entry)
        return tuple(
            SharedFolder(
                name=name,
                size_bytes=sum(each.size_bytes for each in objects),
                used_at=max(each.modified_at for each in objects),
                objects=frozenset(PurePosixPath(each.key).name for each in objects),
            )
            for name, objects in found.items()
        )

    def delete_unused(self, name: str, unused_since: datetime) -> bool:
        """Delete a folder unless it was used since; whether it is gone.

        Its list goes first: killed in between, there is no folder, and what is left of it is
        deleted later. A host that stores it again meanwhile writes its objects anew: those stay.

        Raises:
            RepositoryError: storage cannot be reached or refuses.
        """
        below = f"{self.kind}/{name}"
        objects = [
            e for e in self.store.entries(below) if e.key.startswith((f"{below}/", f"{below}."))
        ]
        if any(each.modified_at >= unused_since for each in objects):
            return False
        self.store.delete(self._list(name))
        for each in self.store.entries(f"{below}/"):
            if each.modified_at < unused_since:
                self.store.delete(each.key)
        return True

    def _is_whole(self, name: str, content: bytes) -> bool:
        """Whether every object of a list is there; one may have been deleted while it was made."""
        try:
            listed = FolderFiles.model_validate_json(content)
        except ValidationError:
            return False
        there = set(self.store.keys(f"{self.kind}/{name}/"))
        named = listed.files.items()
        wanted = {digest.sha256 if listed.by_digest else path for path, digest in named}
        return {f"{self.kind}/{name}/{each}" for each in wanted} <= there

    def _list(self, name: str) -> str:
        return f"{self.kind}/{name}{_LIST}"


def fetch_or_make(
    name: str, kind: str, *, read: Callable[[Path], T], make: Callable[[Path], T]
) -> Callable[[Path], T]:
    """``make`` for `content_store.make_once`: fetched if another host made it, else shared.

    Args:
        name: of the folder, which is a digest of everything that decides its content.
        kind: engines or onnx.
        read: checks and returns what a folder holds.
        make: fills an empty folder.
    """
    shared = SharedFolders.of_environment(kind)
    if shared is None:
        return make

    def fetch_first(folder: Path) -> T:
        try:
            if shared.fetch(name, folder):
                return read(folder)
        except (InputError, RepositoryError) as error:
            _log.warning("%s %s is made here: %s", kind, name[:12], error)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        made = make(folder)
        try:
            shared.offer(name, folder)
        except RepositoryError as error:
            _log.warning("%s %s is not shared: %s", kind, name[:12], error)
        return made

    return fetch_first
