"""Writing a backup: one new file, whole and on disk, or none."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from enginegate.atomic_io import maker_is_gone, sync_folder
from enginegate.backup.archive import (
    HEADER,
    ArchiveWriter,
    BackedUpRepository,
    BackupHeader,
    LeftOut,
    Progress,
)
from enginegate.backup.places import BackupPlaces
from enginegate.backup.sealing import SealingKey
from enginegate.backup.snapshot import (
    ChangedMeanwhileError,
    Snapshot,
    SnapshotEntry,
    snapshot_of,
)
from enginegate.candidate import FileDigest, Sha256
from enginegate.errors import EnginegateError, InputError
from enginegate.machine import user_at_host
from enginegate.repository.store.layout import models
from enginegate.workspace import now

# Promotions are rare beside the time that a backup takes; who promotes all the time is told.
_ATTEMPTS = 3
# Of each member's header and padding; with a long name it needs two more blocks.
_TAR_BYTES = 2048
_PART = ".enginegate-backup-"


@dataclass(frozen=True, slots=True)
class WrittenBackup:
    """A backup that is on disk.

    Attributes:
        path: the file.
        file: its digest and size.
        header: what it is of.
        files: how many it holds, without keys.
    """

    path: Path
    file: FileDigest
    header: BackupHeader
    files: int


def write_backup(
    target: Path,
    places: BackupPlaces,
    key: SealingKey | None,
    *,
    shadow: bool = False,
    progress: Progress | None = None,
) -> WrittenBackup:
    """Write everything that these places hold into one new file, readable by its owner only.

    Repositories are locked only while they are listed, so promotions and rollbacks go on.

    Args:
        target: the file; there must be none.
        places: what is backed up.
        key: for whom private keys are encrypted; None: they are left out.
        shadow: take recorded requests in as well.
        progress: called with how many bytes were written, and how many there will be about.

    Raises:
        InputError: ``target`` is there already or lies in what is backed up, or something cannot
            be read.
        RepositoryBusyError: a repository was being changed for ten minutes.
        RepositoryError: a repository changed under each of three attempts.
        EnginegateError: the file cannot be written; nothing of it is left.
    """
    _check_target(target, places)
    if key is not None:
        key.check()
    for _ in range(_ATTEMPTS - 1):
        with suppress(ChangedMeanwhileError):
            return _attempt(target, places, key, shadow=shadow, progress=progress)
    return _attempt(target, places, key, shadow=shadow, progress=progress)


def _attempt(
    target: Path,
    places: BackupPlaces,
    key: SealingKey | None,
    *,
    shadow: bool,
    progress: Progress | None,
) -> WrittenBackup:
    with snapshot_of(places, shadow=shadow) as snapshot:
        secrets = places.secrets()
        if key is None:
            without = "a private key, and --without-keys was given"
            snapshot.left_out += [LeftOut(what=name, why=without) for name in secrets]
        snapshot.left_out += [LeftOut(what=w, why=why) for w, why in places.elsewhere.items()]
        header = BackupHeader(
            made_at=now(),
            made_by=user_at_host(),
            project=str(places.project),
            repositories=tuple(
                BackedUpRepository(written=place.written, models=models(place.root))
                for place in snapshot.repositories
            ),
            policies=tuple(sorted(name for name in places.files if name.endswith(".toml"))),
            keys=len(secrets) if key is not None else 0,
            sealed_for=key.kind if key is not None else None,
            content_bytes=snapshot.size_bytes,
            left_out=tuple(snapshot.left_out),
        )
        _check_space(target, snapshot)
        with _new_file(target) as made:
            return _filled(made, target, header, snapshot, _Sealing(key, secrets), progress)


@dataclass(frozen=True, slots=True)
class _Sealing:
    key: SealingKey | None
    secrets: Mapping[str, Path]

    def seal(self) -> Callable[[Sha256], bytes] | None:
        """What makes the encrypted member; None: there is none."""
        key = self.key
        return None if key is None else lambda manifest: key.seal(manifest, self.secrets.items())


def _filled(
    made: IO[bytes],
    target: Path,
    header: BackupHeader,
    snapshot: Snapshot,
    sealing: _Sealing,
    progress: Progress | None,
) -> WrittenBackup:
    total = snapshot.size_bytes
    writer = ArchiveWriter(made, partial(_tell, progress, total) if progress else None)
    files = 0
    try:
        writer.add_record(HEADER, header.canonical_json())
        for entry in snapshot.entries():
            files += _add(writer, entry)
        return WrittenBackup(target, writer.close(sealing.seal()), header, files)
    finally:
        writer.abandon()


def _tell(progress: Progress, total: int, done: int) -> None:
    progress(min(done, total), total)


def _add(writer: ArchiveWriter, entry: SnapshotEntry) -> bool:
    """Copy one; whether it is a file that is there."""
    mode, mtime_s = entry.mode, entry.mtime_s
    if entry.is_folder:
        writer.add_folder(entry.name, mode=mode, mtime_s=mtime_s)
        return False
    with entry.opened() as found:
        if found is None:
            return False
        file, size = found
        if not writer.add_file(entry.name, file, size, mode=mode, mtime_s=mtime_s):
            raise entry.changed()
    return True


def _check_target(target: Path, places: BackupPlaces) -> None:
    folder = target.absolute().parent
    if os.path.lexists(target):
        raise InputError(
            f"{target} is there already, and a backup replaces no other. Name a new file, for "
            "example with the date."
        )
    if not folder.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {folder}. Make it.")
    for root in (places.workspace.root, *(place.root for place in places.repositories)):
        if folder.resolve().is_relative_to(root.resolve()):
            raise InputError(
                f"{target} lies in {root}, which is what is backed up: it would be lost with it. "
                "Name a file elsewhere, best on another disk."
            )


def _check_space(target: Path, snapshot: Snapshot) -> None:
    """Refuse early what cannot fit; what fills the disk meanwhile is refused when it does."""
    folder = target.absolute().parent
    needed = snapshot.size_bytes + snapshot.files * _TAR_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise EnginegateError(
            f"The backup takes about {needed / 2**20:,.0f} MiB, and {folder} has "
            f"{free / 2**20:,.0f} MiB free. Nothing was written. Free space, or name another disk."
        )


@contextmanager
def _new_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name only when it is whole and on disk.

    Raises:
        EnginegateError: it cannot be written; nothing of it is left.
        InputError: somebody else wrote a file of that name meanwhile.
    """
    folder = target.absolute().parent
    part: Path | None = None
    try:
        for left in folder.glob(f"{_PART}*"):
            if maker_is_gone(left):  # by a backup that was killed; it may be gigabytes
                left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=_PART)
        part = Path(name)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _take_name(part, target)
        sync_folder(folder)
    except FileExistsError as error:
        raise InputError(f"{target} was written by somebody else meanwhile; it stays.") from error
    except OSError as error:
        raise EnginegateError(
            f"{target} cannot be written: {error.strerror or error}. Nothing of it is left. Free "
            "space or fix permissions, and run again."
        ) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _take_name(part: Path, target: Path) -> None:
    """Unlike a rename a link replaces nothing; not every file system has links."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise
        part.rename(target)
