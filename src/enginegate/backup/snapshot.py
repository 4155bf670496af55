"""What a backup will hold, listed at one moment: repositories under their locks, then the rest.

A repository's lock is held only while its files are listed and its small records are read. The
bytes of releases are written once and never changed, so they are copied afterwards, while others
promote or roll back. A copied file that is not the listed one any more makes the backup start anew.

Repositories come before the workspace: whatever their audit logs refer to is there by then.
"""

import base64
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, cast

from enginegate.atomic_io import NotRegularFileError, open_regular, read_file
from enginegate.backup.archive import LeftOut
from enginegate.backup.places import (
    RECORD_FILES,
    BackupPlaces,
    RepositoryPlace,
    is_of_the_moment,
    why_left_out,
)
from enginegate.errors import InputError, RepositoryError
from enginegate.repository.history.audit import AUDIT
from enginegate.repository.history.journal import JOURNAL
from enginegate.repository.lock import hold_lock
from enginegate.triton.release_labels import RECORDS

# Longer than a promotion holds it for one load of a large model; a backup has the time.
_LOCK_TIMEOUT_S = 600.0
_GROWING = frozenset({AUDIT, JOURNAL})
_MODES = 0o777


class ChangedMeanwhileError(RepositoryError):
    """A file of a live repository is not the one any more that was listed under its lock."""


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One file or folder.

    Attributes:
        name: its place in the backup.
        path: where it is; of a folder and of what was read already this is for messages only.
        mode: permissions.
        mtime_s: when it was changed last, in seconds since 1970.
        size_bytes: of a file, when it was listed.
        inode: what the file's inode must be when it is copied; 0: another file may have replaced
            it, or none.
        mtime_ns: when it was changed last, of a file that must not have been; 0: it grows at its
            end, and only its first ``size_bytes`` bytes belong to the snapshot.
        content: of a file that was read when it was listed.
    """

    name: str
    path: Path
    mode: int
    mtime_s: int
    is_folder: bool = False
    size_bytes: int = 0
    inode: int = 0
    mtime_ns: int = 0
    content: bytes | None = None

    def as_json(self) -> bytes:
        """One line."""
        content = None if self.content is None else base64.b64encode(self.content).decode()
        values = [self.name, os.fspath(self.path), self.mode, self.mtime_s, self.is_folder]
        return json.dumps([*values, self.size_bytes, self.inode, self.mtime_ns, content]).encode()

    @classmethod
    def from_json(cls, line: bytes) -> "SnapshotEntry":
        """What `as_json` wrote."""
        name, path, mode, at, is_folder, size, inode, mtime_ns, read = json.loads(line)
        content = None if read is None else base64.b64decode(read)
        return cls(name, Path(path), mode, at, is_folder, size, inode, mtime_ns, content)

    @contextmanager
    def opened(self) -> Iterator[tuple[IO[bytes], int] | None]:
        """The file, and how many bytes of it are meant; None: it is gone, and that is no fault.

        Raises:
            ChangedMeanwhileError: it is not the file that was listed.
            InputError: it cannot be read.
        """
        if self.content is not None:
            yield io.BytesIO(self.content), self.size_bytes
            return
        try:
            handle = open_regular(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if self.inode:
                raise self.changed() from error
            yield None
            return
        except OSError as error:
            raise _unreadable(error, self.path) from error
        with os.fdopen(handle, "rb") as file:
            now = os.fstat(handle)
            if self.inode and now.st_ino != self.inode:
                raise self.changed()
            if self.mtime_ns and (now.st_mtime_ns, now.st_size) != (
                self.mtime_ns,
                self.size_bytes,
            ):
                raise self.changed()
            grows = self.inode and not self.mtime_ns
            source = cast("IO[bytes]", _Source(file, self.path))
            yield source, self.size_bytes if grows else now.st_size

    def changed(self) -> ChangedMeanwhileError:
        """What is raised where it is not the file that was listed."""
        return ChangedMeanwhileError(
            f"{self.path} was changed or removed while the backup was written, as a promotion's "
            "retention does. Nothing was kept. Run it again when nothing is being promoted."
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that is copied: what goes wrong here is told apart from a full disk there."""

    file: IO[bytes]
    path: Path

    def read(self, size: int = -1) -> bytes:
        try:
            return self.file.read(size)
        except OSError as error:
            raise _unreadable(error, self.path) from error


@dataclass(slots=True)
class Snapshot:
    """The list, in a file of its own: a million names take no memory.

    Attributes:
        repositories: those that are there, in the order of their numbers.
        left_out: what is not in it, with why.
        size_bytes: of all files together.
        files: how many.
    """

    _lines: IO[bytes] = field(repr=False)
    repositories: list[RepositoryPlace] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    size_bytes: int = 0
    files: int = 0

    def add(self, entry: SnapshotEntry) -> None:
        """Put one in the list."""
        self._lines.write(entry.as_json() + b"\n")
        self.size_bytes += entry.size_bytes
        self.files += not entry.is_folder

    def entries(self) -> Iterator[SnapshotEntry]:
        """Everything, in the order it was listed; may be asked for again."""
        self._lines.seek(0)
        for line in self._lines:
            yield SnapshotEntry.from_json(line)


@contextmanager
def snapshot_of(places: BackupPlaces, *, shadow: bool = False) -> Iterator[Snapshot]:
    """List everything that a backup of these places holds, private keys left out.

    Args:
        places: what is backed up.
        shadow: take recorded requests in as well.

    Raises:
        RepositoryBusyError: somebody changed a repository for ten minutes on end.
        RepositoryError: a repository may not be written to, so that its lock cannot be held.
        InputError: something cannot be read, or is a link.
    """
    with TemporaryFile() as lines:
        snapshot = Snapshot(lines)
        for entry in _project_entries(places):
            snapshot.add(entry)
        for place in places.repositories:
            if place.root.is_dir():
                snapshot.repositories.append(place)
            else:
                snapshot.left_out.append(LeftOut(what=place.written, why="nothing is there yet"))
        if snapshot.repositories:
            above = SnapshotEntry("repositories", places.project, 0o755, 0, is_folder=True)
            snapshot.add(above)
        for number, place in enumerate(snapshot.repositories):
            with hold_lock(place.root, timeout_s=_LOCK_TIMEOUT_S):
                for entry in _repository_entries(places, place.root, f"repositories/{number:04d}"):
                    snapshot.add(entry)
        if places.workspace.root.is_dir():
            for entry in _workspace_entries(places, snapshot.left_out, shadow=shadow):
                snapshot.add(entry)
        yield snapshot


def _project_entries(places: BackupPlaces) -> Iterator[SnapshotEntry]:
    """Policies and public keys as they are now, with the folders above them."""
    found: dict[tuple[str, ...], SnapshotEntry] = {}
    for name, path in places.files.items():
        parts = ("project", *PurePosixPath(name).parts)
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            found[parts[:depth]] = SnapshotEntry(above, path.parent, 0o755, 0, is_folder=True)
        found[parts] = _read_now("/".join(parts), path, follow_links=True)
    for parts in sorted(found):
        yield found[parts]


def _repository_entries(places: BackupPlaces, root: Path, name: str) -> Iterator[SnapshotEntry]:
    """Whatever is in one repository, whose lock is held."""

    def wanted(place: PurePosixPath) -> bool:
        return not is_of_the_moment(place) and not _is_another(places, root / place)

    for entry in _walk(root, name, wanted):
        place = PurePosixPath(entry.name).relative_to(name)
        if entry.is_folder:
            yield entry
        elif place.as_posix() in _GROWING:
            yield _with_stamp(entry, grows=True)
        elif _is_rewritten(place):
            yield _read_now(entry.name, entry.path)
        else:
            yield _with_stamp(entry, grows=False)


def _is_rewritten(place: PurePosixPath) -> bool:
    """Whether a promotion or a rollback replaces it: the pointers, and each model's own files."""
    if len(place.parts) == 1:
        return place.name.startswith(RECORD_FILES)
    return place.parts[1:] in {("config.pbtxt",), (RECORDS, "device"), (RECORDS, "part-of")}


def _workspace_entries(
    places: BackupPlaces, left_out: list[LeftOut], *, shadow: bool
) -> Iterator[SnapshotEntry]:
    """The workspace without repositories, private keys, and what is made again."""
    root, secret = places.workspace.root, set(places.secrets().values())

    def wanted(place: PurePosixPath) -> bool:
        path = root / place
        why = why_left_out(place, shadow=shadow)
        if why:
            left_out.append(LeftOut(what=f"{root.name}/{place}", why=why))
        return why is None and path not in secret and not _is_another(places, path)

    yield from _walk(root, "workspace", wanted)


def _is_another(places: BackupPlaces, path: Path) -> bool:
    """Whether a path is a repository, or the workspace: each is listed on its own."""
    roots = (places.workspace.root, *(place.root for place in places.repositories))
    return any(path == root for root in roots)


def _walk(
    root: Path, name: str, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[SnapshotEntry]:
    """A folder and all below it, each folder before what is in it, names in order.

    Raises:
        InputError: something is a link or no file, has no name in UTF-8, or cannot be read.
    """
    info = root.stat()
    yield SnapshotEntry(name, root, info.st_mode & _MODES, int(info.st_mtime), is_folder=True)
    folders = [_listed(root, PurePosixPath(), wanted)]
    while folders:
        found = next(folders[-1], None)
        if found is None:
            folders.pop()
            continue
        place, info = found
        path, mode = root / place, info.st_mode
        whole, at = f"{name}/{place}", int(info.st_mtime)
        if stat.S_ISDIR(mode):
            yield SnapshotEntry(whole, path, mode & _MODES, at, is_folder=True)
            folders.append(_listed(root, place, wanted))
        elif stat.S_ISREG(mode):
            size = info.st_size
            yield SnapshotEntry(whole, path, mode & _MODES, at, size_bytes=size)
        else:
            what = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
            raise InputError(
                f"{path} is {what}, which a backup does not follow: what it leads to would be "
                "missing after a restore. Put the file or the folder itself there."
            )


def _listed(
    root: Path, place: PurePosixPath, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, os.stat_result]]:
    try:
        names = sorted(path.name for path in (root / place).iterdir())
    except FileNotFoundError:  # removed since its parent was listed, as retention does
        return
    except OSError as error:
        raise _unreadable(error, root / place) from error
    for name in names:
        below = place / name
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The name of {str(root / below)!r} is no UTF-8, so no other machine would know it "
                "again. Rename it."
            ) from error
        if not wanted(below):
            continue
        try:
            yield below, (root / below).lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(error, root / below) from error


def _read_now(name: str, path: Path, *, follow_links: bool = False) -> SnapshotEntry:
    try:
        content, info = read_file(path, follow_links=follow_links), path.stat()
    except OSError as error:
        raise _unreadable(error, path) from error
    mode, at = info.st_mode & _MODES, int(info.st_mtime)
    return SnapshotEntry(name, path, mode, at, size_bytes=len(content), content=content)


def _with_stamp(entry: SnapshotEntry, *, grows: bool) -> SnapshotEntry:
    info = entry.path.lstat()
    return SnapshotEntry(
        entry.name,
        entry.path,
        entry.mode,
        entry.mtime_s,
        size_bytes=info.st_size,
        inode=info.st_ino,
        mtime_ns=0 if grows else info.st_mtime_ns,
    )


def _unreadable(error: OSError, path: Path) -> InputError:
    if isinstance(error, NotRegularFileError):
        return InputError(f"{error.strerror}.")
    return InputError(
        f"{path} cannot be read: {error.strerror or error}. A backup needs a user who may read all "
        "of the workspace and its repositories; nothing was written."
    )
