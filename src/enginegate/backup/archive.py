"""The file: a plain tar archive whose last members say what every other one must be.

::

    backup.json        when, where and of what it was made; what was left out
    project/…          policies and public keys
    repositories/NNNN/…
    workspace/…
    manifest.jsonl     name, permissions, size and sha256 of every member above, in their order
    keys.age           private keys and the manifest's digest, encrypted; only where there are keys

Names only ever increase, each below a folder that came before, so none is there twice and none
leaves its folder. Reading needs no more memory for a terabyte than for a kilobyte: the manifest is
made again from what is read, and must come out the same, byte for byte.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

from pydantic import Field, ValidationError

from enginegate import __version__
from enginegate.atomic_io import open_regular
from enginegate.candidate import FileDigest, Sha256
from enginegate.errors import InputError, TamperedError
from enginegate.records import Record

HEADER = "backup.json"
MANIFEST = "manifest.jsonl"
KEYS = "keys.age"
ROOTS = ("project", "repositories", "workspace")
_CHUNK_BYTES = 1 << 20
# A policy holds kilobytes and a key less; what is larger was not written by a backup.
_LARGEST_RECORD = 1 << 26
_MODES = 0o777
# In the year 2242: any time that a file system holds is before it, and a forged one fails no call.
_LATEST_S = 1 << 33

# Called with how many bytes are done, and of about how many.
Progress = Callable[[int, int], None]
_Told = Callable[[int], None]


class LeftOut(Record):
    """Something that a backup does not hold."""

    what: str
    why: str


class BackedUpRepository(Record):
    """One live repository in a backup."""

    written: str = Field(description="its folder as the policies say it")
    models: tuple[str, ...] = ()


class BackupHeader(Record):
    """What a backup is of; the first member of the file."""

    schema_version: Literal[1] = 1
    made_at: datetime
    made_by: str = Field(description="user and host")
    version: str = Field(default=__version__, description="of enginegate")
    project: str = Field(description="folder there, for people")
    repositories: tuple[BackedUpRepository, ...]
    policies: tuple[str, ...] = Field(description="below the project's folder")
    keys: int = Field(default=0, ge=0, description="private keys, all encrypted")
    sealed_for: Literal["passphrase", "recipients"] | None = None
    content_bytes: int = Field(ge=0, description="of all files, when they were listed")
    left_out: tuple[LeftOut, ...] = ()


class ManifestLine(Record):
    """What one member must be."""

    name: str
    mode: int
    size_bytes: int = 0
    sha256: Sha256 | None = None
    """None: it is a folder."""


@dataclass(slots=True)
class _Hashing:
    """A file that is read or written from its beginning to its end, and its digest."""

    file: IO[bytes]
    progress: _Told | None = None
    digest: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    is_abandoned: bool = False

    def write(self, content: bytes) -> int:
        if self.is_abandoned:
            return len(content)
        self.file.write(content)
        self._take(content)
        return len(content)

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        self._take(content)
        return content

    def _take(self, content: bytes) -> None:
        self.digest.update(content)
        self.size += len(content)
        if self.progress is not None:
            self.progress(self.size)

    def found(self) -> FileDigest:
        """Of everything so far."""
        return FileDigest(sha256=self.digest.hexdigest(), size_bytes=self.size)


@dataclass(slots=True)
class ArchiveWriter:
    """Members are added in the order of the file; `close` ends it."""

    file: IO[bytes]
    progress: _Told | None = None
    _target: _Hashing = field(init=False, repr=False)
    _tar: tarfile.TarFile = field(init=False, repr=False)
    _manifest: IO[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._target = _Hashing(self.file, self.progress)
        self._tar = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115 - `close` ends it
            fileobj=self._target,
            mode="w|",
            format=tarfile.PAX_FORMAT,
            bufsize=_CHUNK_BYTES,
            copybufsize=_CHUNK_BYTES,
        )
        self._manifest = TemporaryFile()  # noqa: SIM115

    def add_folder(self, name: str, *, mode: int, mtime_s: int) -> None:
        """Add a folder; what is in it comes later."""
        self._tar.addfile(_member(name, mode, mtime_s, is_folder=True))
        self._note(ManifestLine(name=name, mode=mode))

    def add_file(
        self, name: str, source: IO[bytes], size_bytes: int, *, mode: int, mtime_s: int
    ) -> bool:
        """Add a file of exactly so many bytes.

        Returns:
            Whether the source had so many; if not, the archive is of no use any more.
        """
        content = _Hashing(source)
        try:
            info = _member(name, mode, mtime_s, size=size_bytes)
            self._tar.addfile(info, content)
        except OSError:
            if content.size < size_bytes and not source.read(1):
                return False
            raise
        digest = content.found()
        line = ManifestLine(name=name, mode=mode, size_bytes=size_bytes, sha256=digest.sha256)
        self._note(line)
        return True

    def add_record(self, name: str, content: bytes) -> None:
        """Add a small file of this program's own."""
        self.add_file(name, io.BytesIO(content), len(content), mode=0o600, mtime_s=0)

    def close(self, seal: Callable[[Sha256], bytes] | None) -> FileDigest:
        """End the archive.

        Args:
            seal: makes the encrypted member from the manifest's digest; None: there is none.

        Returns:
            Digest and size of the whole file.
        """
        size = self._manifest.tell()
        self._manifest.seek(0)
        content = _Hashing(self._manifest)
        self._tar.addfile(_member(MANIFEST, 0o600, 0, size=size), content)
        if seal is not None:
            sealed = seal(content.found().sha256)
            info = _member(KEYS, 0o600, 0, size=len(sealed))
            self._tar.addfile(info, io.BytesIO(sealed))
        self._tar.close()
        self._manifest.close()
        return self._target.found()

    def abandon(self) -> None:
        """Let go of what is open; of an archive that was not closed nothing more is written."""
        self._target.is_abandoned = True  # tarfile writes what it holds when Python collects it
        self._manifest.close()

    def _note(self, line: ManifestLine) -> None:
        self._tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every member in memory
        self._manifest.write(line.canonical_json() + b"\n")


def _member(
    name: str, mode: int, mtime_s: int, *, size: int = 0, is_folder: bool = False
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime, info.size = mode, mtime_s, size
    info.type = tarfile.DIRTYPE if is_folder else tarfile.REGTYPE
    return info


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One member while the file is read; ``content`` can be read until the next is asked for."""

    name: str
    mode: int
    mtime_s: int
    size_bytes: int
    content: IO[bytes] | None
    """None: it is a folder."""


@dataclass(slots=True)
class CheckedArchive:
    """A file that is what its manifest says.

    Attributes:
        path: the file.
        header: its first member.
        file: its digest and size.
        keys: its encrypted member; None: it has none.
        manifest_sha256: what the encrypted member must say.
        manifest: the manifest, to read again.
        files: how many the backup holds, without its own records.
    """

    path: Path
    header: BackupHeader
    file: FileDigest
    keys: bytes | None
    manifest_sha256: Sha256
    manifest: IO[bytes] = field(repr=False)
    files: int = 0

    def lines(self) -> Iterator[ManifestLine]:
        """What each member must be, in the order of the file."""
        self.manifest.seek(0)
        for line in self.manifest:
            yield ManifestLine.model_validate_json(line)


def backup_header(path: Path) -> BackupHeader:
    """What a file says it is a backup of; nothing is checked yet.

    Raises:
        InputError: it is no backup, of another version, or cannot be read.
    """
    with _opened_archive(path, None) as (tar, _):
        first = next(_members(tar, path), None)
        return _header(first, path)


@contextmanager
def check_archive(
    path: Path, *, sha256: str = "", progress: Progress | None = None
) -> Iterator[CheckedArchive]:
    """Read a whole backup and compare every byte with its manifest; nothing is written.

    Args:
        path: the file.
        sha256: what its digest, or the beginning of that, must be; empty: any.
        progress: called with how many bytes were read, and how many there are.

    Raises:
        InputError: it is no backup, was cut short, or cannot be read.
        TamperedError: it is another file than ``sha256`` says, or a member is not what its
            manifest says.
    """
    with TemporaryFile() as made, TemporaryFile() as stored:
        with _opened_archive(path, progress) as (tar, source):
            header, keys, files = _read_all(tar, path, made, stored)
            while source.read(_CHUNK_BYTES):  # what follows the archive's end, for the digest
                pass
        found = source.found()
        if not found.sha256.startswith(sha256.lower()):
            raise TamperedError(
                f"{path} is not the backup that was meant: its sha256 is {found.sha256}, not "
                f"{sha256}. Nothing was written."
            )
        digest = _compare(made, stored, path)
        yield CheckedArchive(path, header, found, keys, digest, made, files)


def _read_all(
    tar: tarfile.TarFile, path: Path, made: IO[bytes], stored: IO[bytes]
) -> tuple[BackupHeader, bytes | None, int]:
    """Read every member once.

    Args:
        tar: the archive.
        path: its file, for messages.
        made: where a manifest is made of what is read.
        stored: where the archive's own manifest goes.

    Returns:
        The header, the encrypted member, and how many files there are.
    """
    header: BackupHeader | None = None
    keys, files, ended = None, 0, False
    for member in _members(tar, path):
        if member.name == MANIFEST and not ended:
            ended = True
            _copy(member, stored)
        elif ended and member.name == KEYS and keys is None:
            keys = _read_small(member, path)
        elif ended:
            raise InputError(f"{path} goes on after its end, with {member.name!r}.")
        elif header is None:
            header = _header(member, path, made)
        else:
            files += member.content is not None
            made.write(_line_of(member).canonical_json() + b"\n")
    if header is None or not ended or (header.sealed_for is not None and keys is None):
        raise InputError(_cut_short(path))
    return header, keys, files


def archive_members(path: Path) -> Iterator[ArchiveMember]:
    """The members of a file that was checked, without its own records.

    Raises:
        InputError: it cannot be read any more.
    """
    with _opened_archive(path, None) as (tar, _):
        for member in _members(tar, path):
            if member.name not in {HEADER, MANIFEST, KEYS}:
                yield member


@contextmanager
def _opened_archive(
    path: Path, progress: Progress | None
) -> Iterator[tuple[tarfile.TarFile, _Hashing]]:
    try:
        with open(open_regular(path, follow_links=True), "rb") as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            told = None if progress is None else lambda done: progress(done, size)
            source = _Hashing(file, told)
            tar = tarfile.open(fileobj=source, mode="r|", bufsize=_CHUNK_BYTES)  # type: ignore[call-overload]  # noqa: SIM115
            with tar:
                yield tar, source
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, tarfile.ReadError) and "unexpected end" in str(error):
            raise InputError(_cut_short(path)) from error
        raise InputError(
            f"{path} is no backup that `enginegate backup` wrote: {error}. Nothing was written."
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[ArchiveMember]:
    """Every member; its kind and its place are checked before anybody sees it."""
    before: tuple[str, ...] = ()
    folders: list[str] = []
    while (info := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]
        if info.type not in {tarfile.REGTYPE, tarfile.DIRTYPE} or info.sparse is not None:
            raise InputError(f"{path} holds {info.name!r}, which is neither a file nor a folder.")
        parts = tuple(info.name.split("/"))
        if len(parts) > 1 or info.name in ROOTS:
            _check_place(info.name, parts, before, folders, path)
            before = parts
            del folders[len(parts) - 1 :]
            if info.isdir():
                folders.append(parts[-1])
        elif info.name not in {HEADER, MANIFEST, KEYS} or info.isdir():
            raise InputError(f"{path} holds {info.name!r}, which no backup has.")
        content = tar.extractfile(info) if info.isreg() else None
        mode, mtime = info.mode & _MODES, min(max(int(info.mtime), 0), _LATEST_S)
        yield ArchiveMember(info.name, mode, mtime, info.size, content)


def _check_place(
    name: str, parts: tuple[str, ...], before: tuple[str, ...], folders: list[str], path: Path
) -> None:
    """Refuse a name that leaves its folder, comes twice, or lies below something else.

    Raises:
        InputError: it does.
    """
    wrong = any(part in {"", ".", ".."} or "\\" in part or "\0" in part for part in parts)
    above = list(parts[:-1])
    if wrong or parts[0] not in ROOTS or parts <= before or above != folders[: len(above)]:
        raise InputError(
            f"{path} holds {name!r} where no backup would have it: a restore could write "
            "elsewhere than it should. Nothing was written. Find out who made this file."
        )


def _header(
    member: ArchiveMember | None, path: Path, made: IO[bytes] | None = None
) -> BackupHeader:
    if member is None or member.name != HEADER or member.content is None:
        raise InputError(f"{path} is no backup that `enginegate backup` wrote.")
    content = _read_small(member, path)
    if made is not None:
        digest = hashlib.sha256(content).hexdigest()
        line = ManifestLine(
            name=HEADER, mode=member.mode, size_bytes=member.size_bytes, sha256=digest
        )
        made.write(line.canonical_json() + b"\n")
    try:
        return BackupHeader.model_validate_json(content)
    except ValidationError as error:
        raise InputError(
            f"{path} was written by another version of enginegate, which this one "
            f"({__version__}) does not read. Restore it with that version."
        ) from error


def _read_small(member: ArchiveMember, path: Path) -> bytes:
    if member.content is None or member.size_bytes > _LARGEST_RECORD:
        raise InputError(f"{path} holds {member.name!r} of {member.size_bytes} bytes: no backup.")
    return member.content.read()


def _copy(member: ArchiveMember, target: IO[bytes]) -> None:
    while member.content is not None and (chunk := member.content.read(_CHUNK_BYTES)):
        target.write(chunk)


def _line_of(member: ArchiveMember) -> ManifestLine:
    """What a member is, by reading it."""
    if member.content is None:
        return ManifestLine(name=member.name, mode=member.mode)
    digest = hashlib.sha256()
    while chunk := member.content.read(_CHUNK_BYTES):
        digest.update(chunk)
    return ManifestLine(
        name=member.name,
        mode=member.mode,
        size_bytes=member.size_bytes,
        sha256=digest.hexdigest(),
    )


def _compare(made: IO[bytes], stored: IO[bytes], path: Path) -> Sha256:
    """The digest of the manifest, which must be the one that was made from the members.

    Raises:
        TamperedError: a member is not what the manifest says.
    """
    made.seek(0)
    stored.seek(0)
    digest = hashlib.sha256()
    for line, said in zip_longest(made, stored, fillvalue=b""):
        if line != said:
            which = ManifestLine.model_validate_json(line).name if line else "what follows"
            raise TamperedError(
                f"{path} was damaged or changed after it was written: {which!r} is not what its "
                "manifest says. Nothing was written. Restore another backup."
            )
        digest.update(said)
    return digest.hexdigest()


def _cut_short(path: Path) -> str:
    return (
        f"{path} was cut short: its end is missing, as after a full disk or a broken transfer. "
        "Nothing was written. Bring it again, or restore another backup."
    )
