"""Folders made once: by whoever comes first, and again if one was damaged since."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from enginegate.atomic_io import NotRegularFileError, file_lock, new_folder
from enginegate.errors import EnginegateError, InputError, TamperedError

T = TypeVar("T")


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
    with ExitStack() as held:
        try:
            lock = folder.parent / f".{folder.name}.lock"
            held.enter_context(file_lock(lock, timeout_s=wait_s))
        except TimeoutError as error:
            raise EnginegateError(
                f"Another process ({error}) has been making {folder} for more than {wait_s:g} s. "
                "Wait for it, or end it, and run again."
            ) from error
        except NotRegularFileError as error:
            raise EnginegateError(f"{error.strerror}.") from error
        note = ""
        if folder.is_dir():
            try:
                return ContentFolder(read(folder), folder, reused=True)
            except (InputError, TamperedError) as error:
                note = f"{folder} was damaged, so it was made again. {error}"
                shutil.rmtree(folder)
        return ContentFolder(_made(folder, make), folder, reused=False, note=note)


def _made(folder: Path, make: Callable[[Path], T]) -> T:
    try:
        with new_folder(folder) as staging:
            return make(staging)
    except OSError as error:
        raise EnginegateError(
            f"{folder} could not be made: {error}. Nothing of it is left. Free space or fix "
            "permissions, and run again."
        ) from error
