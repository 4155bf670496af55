"""A part of a qualification in one file, to carry it to a machine that no network reaches.

The file is a ZIP archive of the part's record, ``part.json``, and of every file that it names, at
its place in the workspace that made it. Nothing is taken out of it by the archive's own names: the
record says which files there are, and their digests, sizes and places.
"""

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from enginegate.candidate import Engine, FileDigest
from enginegate.content_store import make_once
from enginegate.devices.part import (
    MANIFEST,
    DeviceQualification,
    PartIdentity,
    PartStore,
    StoredEngine,
)
from enginegate.engines.build import read_engine
from enginegate.errors import InputError, TamperedError
from enginegate.object_storage import ObjectStore
from enginegate.workspace import Workspace

_PART = "part.json"
# Records hold measurements of every candidate: megabytes at most.
_LARGEST_PART = 1 << 28
_WAIT_S = 60.0


def write_bundle(part: DeviceQualification, workspace: Workspace, target: Path) -> FileDigest:
    """Write a part and its files as one archive, whole or not at all.

    Args:
        part: of this workspace.
        workspace: has its files.
        target: the archive; one that is there is replaced.

    Returns:
        The archive's digest, by which whoever imports it knows it.

    Raises:
        TamperedError: a file is missing or changed.
        InputError: the archive cannot be written.
    """
    store = PartStore(workspace)
    store.check(part)
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".bundle-") as folder:
            made = Path(folder) / "bundle"
            with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(zipfile.ZipInfo(_PART), part.pretty_json())
                for name, path in sorted(_places(part, workspace).items()):
                    _add(archive, path, name)
            digest = FileDigest.of(made)
            made.replace(target)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from error
    return digest


def _places(part: DeviceQualification, workspace: Workspace) -> Mapping[str, Path]:
    """Every file of a part by its name in an archive, which does not tell who imported it."""
    store = PartStore(workspace)
    plans = {store.engine_folder(each): _place(each, workspace) for each in part.engines.values()}
    found = {}
    for path in store.files(part):
        folder = next((each for each in plans if path.is_relative_to(each)), None)
        if folder is None:
            found[path.relative_to(workspace.root).as_posix()] = path
        else:
            found[f"{plans[folder]}/{path.relative_to(folder).as_posix()}"] = path
    return found


def _place(stored: StoredEngine, workspace: Workspace) -> str:
    """An engine's folder in an archive."""
    return (workspace.engines / stored.folder).relative_to(workspace.root).as_posix()


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    """With a fixed time, so that the same part is the same archive."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
        shutil.copyfileobj(source, target)


def read_bundle(path: Path, workspace: Workspace, *, sha256: str = "") -> DeviceQualification:
    """Bring a part and its files into a workspace; every digest is checked.

    Args:
        path: an archive that `write_bundle` wrote.
        workspace: where they go.
        sha256: what the archive's digest, or its beginning, must be; empty: any.

    Raises:
        InputError: it is no such archive.
        TamperedError: the archive is another one, a file of it is missing, or is not what the
            record says; nothing counts as evidence then.
    """
    with _opened(path, sha256) as archive:
        part = _record(archive, path)
        for stored in part.engines.values():
            _bring_engine(archive, stored, workspace)
        store = PartStore(workspace)
        for verdict in part.evidence.verdicts:
            digest = part.evidence.golden.get(verdict.candidate.name)
            if digest is None or verdict.engine_sha256 is None:
                continue
            golden = store.golden_file(digest)
            name = golden.relative_to(workspace.root).as_posix()
            golden.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=golden.parent, prefix=".golden-") as folder:
                _take(archive, name, digest, Path(folder) / "golden")
                (Path(folder) / "golden").replace(golden)
    store.check(part)
    store.save(part)
    return part


def push_part(part: DeviceQualification, workspace: Workspace, store: ObjectStore) -> None:
    """Leave a part and its files in object storage, under the key of everything that decides it.

    Raises:
        RepositoryError: storage cannot be reached or refuses.
        TamperedError: a file is missing or changed.
    """
    with tempfile.TemporaryDirectory(prefix="enginegate-part-") as folder:
        path = Path(folder) / "bundle"
        write_bundle(part, workspace, path)
        store.upload(path, _key(part.identity))


def fetch_part(
    identity: PartIdentity, workspace: Workspace, store: ObjectStore
) -> DeviceQualification | None:
    """Bring a part of that identity from object storage into a workspace; None: there is none.

    Raises:
        RepositoryError: storage cannot be reached or refuses.
        TamperedError: what is there is about something else, or is not what its record says.
    """
    key = _key(identity)
    if key not in store.keys(key):
        return None
    with tempfile.TemporaryDirectory(prefix="enginegate-part-") as folder:
        path = Path(folder) / "bundle"
        store.download(key, path)
        part = read_bundle(path, workspace)
    if part.identity != identity:
        raise TamperedError(
            f"{store.url}/{key} is about something else than its name says: "
            f"{', '.join(part.identity.differences(identity))}. Delete it, and qualify again."
        )
    return part


def known_part(
    identity: PartIdentity, workspace: Workspace, store: ObjectStore | None
) -> DeviceQualification | None:
    """The part of that identity if somebody made it, and nothing of it broke.

    Args:
        identity: of the part.
        workspace: looked in first.
        store: where workers leave it; None: they share the workspace.

    Raises:
        RepositoryError: storage cannot be reached or refuses.
        TamperedError: what is in storage is not what its record says.
    """
    part = PartStore(workspace).find(identity)
    if store is not None and (part is None or part.errored):
        part = fetch_part(identity, workspace, store) or part
    return None if part is None or part.errored else part


def _key(identity: PartIdentity) -> str:
    return f"parts/{identity.digest}.evidence"


@contextmanager
def _opened(path: Path, sha256: str) -> Iterator[zipfile.ZipFile]:
    try:
        found = FileDigest.of(path).sha256
        if not found.startswith(sha256.lower()):
            raise TamperedError(
                f"{path} is not the archive that was exported: its sha256 is {found}, not "
                f"{sha256}. Bring it again."
            )
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise InputError(
            f"{path} is not evidence that `enginegate evidence export` wrote: {error}."
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _record(archive: zipfile.ZipFile, path: Path) -> DeviceQualification:
    if archive.getinfo(_PART).file_size > _LARGEST_PART:
        raise InputError(f"{path} holds a record larger than any part is.")
    try:
        return DeviceQualification.model_validate_json(archive.read(_PART))
    except ValueError as error:
        raise InputError(
            f"The record in {path} is not one that this version reads. Export it again with the "
            f"version that is here."
        ) from error


def _bring_engine(archive: zipfile.ZipFile, stored: StoredEngine, workspace: Workspace) -> None:
    place = _place(stored, workspace)

    def make(staging: Path) -> Engine:
        _take(archive, f"{place}/{MANIFEST}", stored.manifest, staging / MANIFEST)
        engine = Engine.read(staging / MANIFEST)
        for name, digest in _named(engine).items():
            _take(archive, f"{place}/{name}", digest, staging / name)
        return read_engine(staging)

    def read(there: Path) -> Engine:
        stored.manifest.check(there / MANIFEST)
        engine = read_engine(there)
        for name, digest in _named(engine).items():
            digest.check(there / name)
        return engine

    folder = PartStore(workspace).imported_folder(stored)
    if not folder.is_dir():
        # The workspace that built it has it already. Another build of that plan stays as it is.
        with suppress(InputError, TamperedError):
            read(workspace.engines / stored.folder)
            return
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_once(folder, read=read, make=make, wait_s=_WAIT_S)


def _named(engine: Engine) -> Mapping[str, FileDigest]:
    """The files of an engine's folder besides its manifest; a name may not leave the folder.

    Raises:
        TamperedError: one would.
    """
    found = {engine.filename: engine.file, **engine.external, **engine.beside}
    for name in found:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or name == MANIFEST or "\\" in name:
            raise TamperedError(f"The manifest of {engine.candidate} names {name!r}: not its own.")
    return found


def _take(archive: zipfile.ZipFile, name: str, digest: FileDigest, target: Path) -> None:
    """Copy one file out of the archive: so many bytes as were recorded, no more."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise TamperedError(f"{archive.filename} lacks {name}. Export it again.") from None
    if info.file_size != digest.size_bytes:
        raise TamperedError(
            f"{name} in {archive.filename} has {info.file_size} bytes; {digest.size_bytes} were "
            "recorded. Export it again."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, target.open("wb") as written:
        shutil.copyfileobj(source, written)
    digest.check(target)
