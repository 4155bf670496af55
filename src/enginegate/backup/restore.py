"""Restoring a backup: checked whole, staged beside its places, and moved in only then.

Nothing is replaced: each place must be absent or empty. A restore that fails leaves no more than
it found.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import IO

from enginegate.atomic_io import maker_is_gone, sync_folder, write_file
from enginegate.backup.archive import (
    ArchiveMember,
    BackupHeader,
    CheckedArchive,
    Progress,
    archive_members,
    check_archive,
)
from enginegate.backup.places import OF_THE_DISK, why_left_out
from enginegate.backup.sealing import OpeningKey, SealedFile
from enginegate.candidate import FileDigest
from enginegate.errors import EnginegateError, InputError, TamperedError
from enginegate.repository.lock import LOCK
from enginegate.workspace import Workspace

_CHUNK_BYTES = 1 << 20
_STAGING = ".enginegate-restore-"
_MOST_NAMED = 3
_MODES = 0o777
_PROJECT = "project/"
_PROJECT_END = "project0"  # the first name that comes after every one below the project


@dataclass(frozen=True, slots=True)
class RestorePlaces:
    """Where a restore goes.

    Attributes:
        project: the project's folder; made if it is not there.
        workspace: of that project.
        repositories: folders that the backup names by an absolute path -> where each goes.
    """

    project: Path
    workspace: Workspace
    repositories: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """What was restored, or only checked.

    Attributes:
        header: what the backup says of itself.
        file: digest and size of the backup.
        files: how many files were in it, without keys.
        keys: how many private keys were restored.
        places: every folder and file that is there now; none: it was only checked.
    """

    header: BackupHeader
    file: FileDigest
    files: int
    keys: int
    places: tuple[Path, ...] = ()


def restore_backup(
    path: Path,
    to: RestorePlaces | None,
    key: OpeningKey | None,
    *,
    sha256: str = "",
    progress: Progress | None = None,
) -> RestoredBackup:
    """Check a whole backup, then bring all of it to its places, or none.

    Args:
        path: the file.
        to: where it goes; None: it is only checked, and nothing is written.
        key: what opens its private keys; None: they are left out.
        sha256: what the file's digest, or its beginning, must be; empty: any.
        progress: called with how many bytes were read, and how many there are.

    Raises:
        InputError: it is no whole backup, its keys do not open, or a place is not empty.
        TamperedError: it is not what it was when it was written.
        EnginegateError: a place cannot be written to; nothing of the backup is left there.
    """
    with check_archive(path, sha256=sha256, progress=progress) as checked:
        keys: tuple[SealedFile, ...] = ()
        if key is not None and checked.keys is not None:
            keys = key.open(checked.keys, checked.manifest_sha256, path)
        found = RestoredBackup(checked.header, checked.file, checked.files, len(keys))
        if to is None:
            return found
        places = _places(checked.header, to)
        for place in places:
            place.check_free()
        files = _project_files(checked, keys, to.project)
        _check_space(checked, places)
        with _staged(places) as staged, ExitStack() as made:
            _write_keys(keys, staged)
            _extract(checked, staged)
            os.sync()  # one call for what may be a million files
            for place in places:
                place.move_in(made)
            _write_project_files(files, checked, keys, made)
            made.pop_all()
    moved = tuple(place.target for place in places)
    return replace(found, places=(*moved, *files))


@dataclass(slots=True)
class _Place:
    """One folder of a restore.

    Attributes:
        name: of its members in the backup.
        target: where they go.
        is_workspace: what may be there already differs.
        within: another place that this one lies in, and is staged with.
        staging: where its members are until they are moved in.
        handle: of that folder, which is locked for as long as this process may fill it.
        made: folders above the target that this restore made, the innermost first.
    """

    name: str
    target: Path
    is_workspace: bool = False
    within: "_Place | None" = None
    staging: Path | None = None
    handle: int | None = None
    made: list[Path] = field(default_factory=list)

    def check_free(self) -> None:
        """Refuse a place that holds anything of its own.

        Raises:
            InputError: it does; names it.
        """
        try:
            there = _names(self.target) if os.path.lexists(self.target) else []
        except OSError as error:
            raise InputError(f"{self.target} cannot be restored to: {error.strerror}.") from error
        if taken := [name for name in there if not self._may_be_there(name)]:
            left = any(name.startswith(_STAGING) for name in there)
            cut = " A restore was killed there; what it moved in can be removed." if left else ""
            shown = ", ".join(map(repr, taken[:_MOST_NAMED]))
            more = " and more" if len(taken) > _MOST_NAMED else ""
            raise InputError(
                f"{self.target} is not empty: it holds {shown}{more}. A restore replaces "
                f"nothing, and nothing was written. Move that away, or restore elsewhere.{cut}"
            )

    def _may_be_there(self, name: str) -> bool:
        if name.startswith(_STAGING):  # of a restore that was killed, or is under way
            return True
        if self.is_workspace:
            others = why_left_out(PurePosixPath(name), shadow=True)
            return others is not None
        return name in OF_THE_DISK or name == LOCK

    def stage(self) -> None:
        """Make the folder that its members are written to, on the target's own file system."""
        if self.within is not None and self.within.staging is not None:
            self.staging = self.within.staging / self.target.relative_to(self.within.target)
            return
        if not self.target.is_dir():
            above = self.target.parent
            while not above.exists():
                self.made.append(above)
                above = above.parent
            self.target.parent.mkdir(parents=True, exist_ok=True)
        beside = self.target if self.target.is_dir() else self.target.parent
        for folder in {beside, self.target.parent}:
            for left in folder.glob(f"{_STAGING}*"):
                if maker_is_gone(left):
                    _remove(left)
        self.staging = Path(tempfile.mkdtemp(dir=beside, prefix=_STAGING))
        self.handle = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def move_in(self, made: ExitStack) -> None:
        """Give members their places; ``made`` undoes it."""
        if self.within is not None or self.staging is None:
            return
        if not self.target.is_dir():
            self.staging.rename(self.target)
            made.callback(_remove, self.target)
            sync_folder(self.target.parent)
            return
        self.check_free_but_for(self.staging.name)
        # A mount point, or a folder that its platform made: it stays, with its owner and mode.
        for name in _names(self.staging):
            (self.staging / name).rename(self.target / name)
            made.callback(_remove, self.target / name)
        self.staging.rmdir()
        sync_folder(self.target)

    def check_free_but_for(self, staging: str) -> None:
        """Refuse to move in where somebody wrote meanwhile."""
        own = set() if self.staging is None else set(_names(self.staging))
        others = [name for name in _names(self.target) if name != staging]
        there = [name for name in others if name in own or not self._may_be_there(name)]
        if there:
            raise InputError(
                f"{self.target} holds {there[0]!r}, which the backup would replace, or which was "
                "written meanwhile. Nothing of the backup is left. Find out who wrote it, and "
                "restore again."
            )


def _places(header: BackupHeader, to: RestorePlaces) -> list[_Place]:
    """Every folder of a backup with its target, outer ones first.

    Raises:
        InputError: a repository was not below the project, and nobody said where it goes.
    """
    places = [_Place("workspace", to.workspace.root, is_workspace=True)]
    open_ = []
    for number, repository in enumerate(header.repositories):
        written = PurePosixPath(repository.written)
        if written.is_absolute() and repository.written not in to.repositories:
            open_.append(repository.written)
        elif ".." in written.parts:
            raise InputError(f"The backup names a repository {repository.written!r}: no folder.")
        target = to.repositories.get(repository.written, to.project / written)
        places.append(_Place(f"repositories/{number:04d}", target))
    if open_:
        options = " ".join(f"--repository {shlex.quote(each)}" for each in open_)
        raise InputError(
            f"The backup holds {', '.join(open_)}, outside of the project's folder. To restore "
            f"there add: {options}. To restore elsewhere, --repository OLD=NEW; policies name the "
            "old folder then, so change target.repository. Nothing was written."
        )
    places.sort(key=lambda place: len(place.target.absolute().parts))
    for index, place in enumerate(places):
        around = [p for p in places[:index] if place.target.is_relative_to(p.target)]
        if around and around[-1].target == place.target:
            raise InputError(f"{place.target} would be restored to twice. Nothing was written.")
        place.within = around[-1] if around else None
    return places


@contextmanager
def _staged(places: Sequence[_Place]) -> Iterator[Sequence[_Place]]:
    """Folders to write members to; nothing of them is left where the block raises.

    Raises:
        EnginegateError: a place cannot be written to.
    """
    try:
        for place in places:
            place.stage()
        yield places
    except OSError as error:
        where = error.filename or "A place of the restore"
        raise EnginegateError(
            f"{where} cannot be written: {error.strerror or error}. Nothing of the backup is left. "
            "Free space or fix permissions, and restore again."
        ) from error
    finally:
        for place in places:
            if place.staging is not None and place.within is None:
                _remove(place.staging)
            if place.handle is not None:
                os.close(place.handle)
                place.handle = None
            for folder in place.made:
                with suppress(OSError):  # it holds what was restored
                    folder.rmdir()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _remove(path: Path) -> None:
    """Whatever it is; also folders that may not be written to, as releases' are at times."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        with suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def _project_files(
    checked: CheckedArchive, keys: Sequence[SealedFile], project: Path
) -> dict[Path, str]:
    """Policies and keys below the project that are to be written, by their names in the backup.

    Raises:
        InputError: one is there with another content.
    """
    digests = {
        line.name: line.sha256
        for line in checked.lines()
        if line.sha256 is not None and line.name.startswith(_PROJECT)
    }
    for key in keys:
        if key.name.startswith(_PROJECT):
            digests[key.name] = hashlib.sha256(key.content).hexdigest()
    files = {}
    for name, sha256 in digests.items():
        target = project / name.removeprefix(_PROJECT)
        if not os.path.lexists(target):
            files[target] = name
        elif not target.is_file() or FileDigest.of(target).sha256 != sha256:
            raise InputError(
                f"{target} is there already and differs from the one in the backup. A restore "
                "replaces nothing, and nothing was written. Move it away, or restore elsewhere "
                "with --to."
            )
    return files


def _check_space(checked: CheckedArchive, places: Sequence[_Place]) -> None:
    """Refuse early what cannot fit.

    Raises:
        EnginegateError: a file system has less room than is needed.
    """
    needed = dict.fromkeys((place.name for place in places), 0)
    for line in checked.lines():
        place = _place_of(line.name, places)
        if place is not None:
            needed[place.name] += line.size_bytes
    disks: dict[int, tuple[Path, int]] = {}
    for place in places:
        above = next(p for p in (place.target, *place.target.absolute().parents) if p.exists())
        disk = above.stat().st_dev
        disks[disk] = (above, disks.get(disk, (above, 0))[1] + needed[place.name])
    for folder, size in disks.values():
        free = shutil.disk_usage(folder).free
        if size > free:
            raise EnginegateError(
                f"The backup takes {size / 2**20:,.0f} MiB below {folder}, which has "
                f"{free / 2**20:,.0f} MiB free. Nothing was written."
            )


def _place_of(name: str, places: Sequence[_Place]) -> _Place | None:
    return next((p for p in places if name == p.name or name.startswith(f"{p.name}/")), None)


def _path_of(name: str, places: Sequence[_Place]) -> Path | None:
    """Where a member is staged; None: it belongs to the project, or only says where others are."""
    place = _place_of(name, places)
    if place is None or place.staging is None:
        return None
    return place.staging / name.removeprefix(place.name).lstrip("/")


def _write_keys(keys: Sequence[SealedFile], places: Sequence[_Place]) -> None:
    """Private keys of the workspace, before anything else is there."""
    for key in keys:
        parts = key.name.split("/")
        if {"", ".", ".."} & set(parts) or parts[0] not in {"project", "workspace"}:
            raise TamperedError(f"The backup holds a key {key.name!r}, which is no place for one.")
        path = _path_of(key.name, places)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, key.content, mode=key.mode & _MODES)


def _extract(checked: CheckedArchive, places: Sequence[_Place]) -> None:
    """Write every member to its staging folder, and check its bytes once more while they pass.

    Raises:
        TamperedError: the file was changed since it was checked.
    """
    lines = checked.lines()
    next(lines, None)  # the header
    opened: list[tuple[str, Path, ArchiveMember]] = []
    for member, line in zip_longest(archive_members(checked.path), lines):
        if member is None or line is None or member.name != line.name:
            raise _changed_since(checked.path)
        while opened and not member.name.startswith(f"{opened[-1][0]}/"):
            _close_folder(*opened.pop()[1:])
        path = _path_of(member.name, places)
        if path is None:
            continue
        if member.content is None:
            path.mkdir(parents=True, exist_ok=True)
            opened.append((member.name, path, member))
        elif _written(member, member.content, path) != (line.sha256, line.size_bytes):
            raise _changed_since(checked.path)
    while opened:
        _close_folder(*opened.pop()[1:])


def _close_folder(path: Path, member: ArchiveMember) -> None:
    """A folder gets its mode when it is full: it may be one that nobody may write to."""
    os.utime(path, (member.mtime_s, member.mtime_s))
    path.chmod(member.mode)


def _written(member: ArchiveMember, content: IO[bytes], path: Path) -> tuple[str, int]:
    """Digest and size of what was written to a file that is not there yet."""
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        os.fchmod(file.fileno(), member.mode)
    os.utime(path, (member.mtime_s, member.mtime_s))
    return digest.hexdigest(), size


def _write_project_files(
    files: Mapping[Path, str],
    checked: CheckedArchive,
    keys: Sequence[SealedFile],
    made: ExitStack,
) -> None:
    """Policies and keys of the project, each in one rename; ``made`` undoes it."""
    contents = {key.name: (key.content, key.mode & _MODES) for key in keys}
    wanted = set(files.values()) - set(contents)
    for member in archive_members(checked.path) if wanted else ():
        if member.name in wanted and member.content is not None:
            # Policies and public keys are no programs, whatever a file that was sent says.
            contents[member.name] = (member.content.read(), member.mode & ~0o111)
        elif member.name > _PROJECT_END:
            break
    for target, name in files.items():
        content, mode = contents[name]
        if os.path.lexists(target):
            raise InputError(
                f"{target} was written by somebody else meanwhile; it stays. Nothing of the backup "
                "is left. Restore again."
            )
        write_file(target, content, mode=mode)
        made.callback(_remove, target)


def _changed_since(path: Path) -> TamperedError:
    return TamperedError(
        f"{path} was changed while it was restored. Nothing of it is left; restore another backup."
    )
