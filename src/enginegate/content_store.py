"""Folders made once: by whoever comes first, and again if one was damaged since.

A folder's time says when it was used last. Whoever uses one and whoever deletes one hold its lock
while they look at that time, so that nothing is deleted that somebody has just begun to use.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

from enginegate.atomic_io import (
    NotRegularFileError,
    file_lock,
    mark_used,
    new_folder,
    sync_folder,
)
from enginegate.errors import EnginegateError, InputError, TamperedError

T = TypeVar("T")
# What was renamed to be deleted ends so; nothing reads it, and a killed deletion is finished later.
DELETING = ".deleting"
# A folder's lock is held this long only by who makes it, and then it is in use.
_USE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ContentFolder(Generic[T]):
    """What a folder of the store holds.

    Attributes:
        value: its manifest.
        folder: where it is.
        reused: whether it was there already.
        note: why it was made again, when the folder that was there had been damaged.
    """

    value: T
    folder: Path
    reused: bool
    note: str = ""


def make_once(
    folder: Path, *, read: Callable[[Path], T], make: Callable[[Path], T], wait_s: float
) -> ContentFolder[T]:
    """The folder's value, made now unless it is there and ``read`` accepts it.

    Two processes that want the same folder make it once: the second waits, then reads.

    Args:
        folder: the final place; its name is a digest of everything that decides its content.
        read: checks and returns what a folder holds; InputError or TamperedError refuse it.
        make: fills an empty folder, which takes its final name only if this returns.
        wait_s: how long another process that is making it may take.

    Raises:
        EnginegateError: another process held the lock for all of ``wait_s``, or the store cannot be
            written.
    """
    with _holding(folder, wait_s):
        note = ""
        if folder.is_dir():
            try:
                found = read(folder)
            except (InputError, TamperedError) as error:
                note = f"{folder} was damaged, so it was made again. {error}"
                shutil.rmtree(folder)
            else:
                mark_used(folder)
                return ContentFolder(found, folder, reused=True)
        return ContentFolder(_made(folder, make), folder, reused=False, note=note)


def use_folder(folder: Path) -> Path:
    """Begin to use a folder whose files are made one at a time; it is there, and stays.

    Raises:
        EnginegateError: another process has held its lock for a minute, or it cannot be made.
    """
    with _holding(folder, _USE_WAIT_S):
        folder.mkdir(parents=True, exist_ok=True)
        mark_used(folder)
    return folder


def delete_unused(path: Path, unused_since: datetime) -> bool:
    """Delete a file, or a folder of the store, unless it was used since; whether it is gone.

    A folder is renamed first: killed in between, it is whole, or nothing reads what is left of it.

    Raises:
        OSError: it may not be deleted.
    """
    if not path.is_dir() or path.is_symlink():
        return _delete_file(path, unused_since)
    return delete_folder(path, unless=lambda: _used_since(path, unused_since))


def delete_folder(folder: Path, *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Delete a folder of the store with its lock; whether it is gone.

    Args:
        folder: which.
        unless: asked once nobody else can begin to use it; True leaves it.

    Raises:
        OSError: it may not be deleted.
    """
    lock = _lock_of(folder)
    with suppress(TimeoutError), file_lock(lock):
        if not folder.is_dir():
            lock.unlink(missing_ok=True)
            return True
        if unless():
            return False
        # No folder is made for it: the disk may be full.
        hidden = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}{DELETING}")
        folder.rename(hidden)
        sync_folder(folder.parent)
        lock.unlink(missing_ok=True)
        shutil.rmtree(hidden)
        return True
    return False


def delete_left(path: Path, unused_since: datetime) -> bool:
    """Delete what a killed process left: staging, half of a deletion, or the lock of no folder."""
    if path.name.endswith(".lock"):
        folder = path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
        with suppress(TimeoutError), file_lock(path):
            if folder.exists():
                return False
            path.unlink(missing_ok=True)
            return True
        return False
    if not path.name.endswith(DELETING) and _used_since(path, unused_since):
        return False
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return True


def _delete_file(path: Path, unused_since: datetime) -> bool:
    try:
        if _used_since(path, unused_since):
            return False
    except FileNotFoundError:
        return True
    path.unlink(missing_ok=True)
    return True


def _used_since(path: Path, when: datetime) -> bool:
    return datetime.fromtimestamp(path.lstat().st_mtime, UTC) >= when


def _lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@contextmanager
def _holding(folder: Path, wait_s: float) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(_lock_of(folder), timeout_s=wait_s))
        except TimeoutError as error:
            raise EnginegateError(
                f"Another process ({error}) has been making {folder} for more than {wait_s:g} s. "
                "Wait for it, or end it, and run again."
            ) from error
        except NotRegularFileError as error:
            raise EnginegateError(f"{error.strerror}.") from error
        yield


def _made(folder: Path, make: Callable[[Path], T]) -> T:
    try:
        with new_folder(folder) as staging:
            return make(staging)
    except OSError as error:
        raise EnginegateError(
            f"{folder} could not be made: {error}. Nothing of it is left. Free space or fix "
            "permissions, and run again."
        ) from error
