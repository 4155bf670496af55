"""Writing that is all or nothing, and on disk when it returns.

Every function stages beside its target (so that the rename stays on one file system), flushes the
content and then the folder: a rename is atomic without the last step, but not durable.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


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


@contextmanager
def file_lock(path: Path, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel releases it if the process dies.

    Raises:
        TimeoutError: somebody else held it for all of ``timeout_s``; the message is what the holder
            wrote into the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise TimeoutError(file.read().strip()) from None
                time.sleep(_POLL_S)
        file.truncate(0)
        file.write(
            f"pid {os.getpid()} since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        )
        file.flush()
        yield
