"""Writing that is all or nothing, and on disk when it returns; opening only what is a regular file.

Every function that writes stages beside its target (so that the rename stays on one file system),
flushes the content and then the folder: a rename is atomic without the last step, but not durable.

Whoever may write into a folder could leave a symbolic link there, to make this program read or
change a file elsewhere, or a FIFO, on which a plain ``open`` waits for ever. `open_regular` refuses
both without following or waiting.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.1
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# What every content of a lock file begins with; anything else is somebody's file.
_HOLDER = "pid "
_LONGEST_HOLDER = 200
_DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class NotRegularFileError(OSError):
    """Where a file of this program should be is a link, a FIFO or something else."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            errno.EINVAL,
            f"{path} is {what}, where only a regular file may be, so it was neither followed nor "
            "changed. Find out who put it there, and remove it",
            str(path),
        )


def open_regular(
    path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o644, follow_links: bool = False
) -> int:
    """Open a regular file, and nothing else; the caller closes the descriptor that is returned.

    Never waits, never follows a link at the end of the path (links before it are followed), and
    changes nothing before it is known to be a regular file.

    Args:
        path: what to open.
        flags: as for ``os.open``, without ``O_TRUNC``.
        mode: permissions of a file that this creates.
        follow_links: only for a path that a person named, such as a key that a platform mounts.

    Raises:
        NotRegularFileError: it is a symbolic link, a FIFO, a socket, a device or a folder.
        OSError: it cannot be opened.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    flags |= 0 if follow_links else os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, mode)
    except OSError as error:
        what = _irregular(path, follow_links=follow_links)
        if what:
            raise NotRegularFileError(path, what) from error
        raise
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise NotRegularFileError(path, _KINDS.get(kind, "no regular file"))
    return handle


def read_file(path: Path, *, follow_links: bool = False) -> bytes:
    """The content of a regular file.

    Raises:
        NotRegularFileError: it is a symbolic link, a FIFO, a socket, a device or a folder.
        OSError: it is missing or cannot be read.
    """
    with os.fdopen(open_regular(path, follow_links=follow_links), "rb") as file:
        return file.read()


def _irregular(path: Path, *, follow_links: bool) -> str:
    """What is at a path that could not be opened; empty where it is a regular file, or nothing."""
    try:
        kind = stat.S_IFMT(path.stat(follow_symlinks=follow_links).st_mode)
    except OSError:
        return ""
    return "" if kind == stat.S_IFREG else _KINDS.get(kind, "no regular file")


def write_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content``: after a crash it holds the old bytes or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename inside it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder``, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            handle = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(root))


@contextmanager
def new_folder(target: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """Fill a staging folder that becomes ``target`` in one rename when the block ends well.

    If ``target`` exists by then (somebody else finished the same work first), theirs is kept. If
    the block raises, nothing is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))
    try:
        yield staging
        sync_tree(staging)
        staging.chmod(mode)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        sync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def lock_holder(path: Path) -> str | None:
    """What the holder of a `file_lock` wrote into it; None: nobody holds it. Nothing is written.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    return None


def maker_is_gone(path: Path) -> bool:
    """Whether nobody holds a ``flock`` on a file or folder that is made under one.

    Its maker was killed then: the kernel let go of the lock, and nobody will finish it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def file_lock(path: Path, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel releases it if the process dies.

    Raises:
        TimeoutError: somebody else held it for all of ``timeout_s``; the message is what the holder
            wrote into the file.
        NotRegularFileError: it is a link, a FIFO or the like, or another file than a lock (it may
            be a second name of somebody's file); nothing was changed.
        OSError: it cannot be opened for writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while True:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _take_lock(handle, deadline)
            # Whoever had it may have deleted the file with what it guarded: then it locks nothing.
            if _is_still(path, handle):
                _name_holder(path, handle)
                yield
                return
        finally:
            os.close(handle)


def _take_lock(handle: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(handle, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
                raise TimeoutError(holder) from None
            time.sleep(_POLL_S)
        else:
            return


def _is_still(path: Path, handle: int) -> bool:
    """Whether an open file is the one that its path names."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))


def _name_holder(path: Path, handle: int) -> None:
    """Write into a lock who holds it. On a full disk it is held all the same, without a name."""
    written = os.pread(handle, len(_HOLDER), 0)
    if written and written != _HOLDER.encode():
        raise NotRegularFileError(path, "no lock but a file with another content")
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{_HOLDER}{os.getpid()} since {since}\n".encode(), 0)
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise


def mark_used(path: Path) -> None:
    """Give a file or folder the present as its time, which says when it was used last.

    Retention deletes what was not used for long. Where it may not be written to, it is left alone.
    """
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)
