"""Bringing bytes into a repository: staged on its file system, flushed, moved in by rename."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from enginegate.atomic_io import sync_folder, sync_tree, write_file
from enginegate.candidate import FileDigest
from enginegate.decision import ComposingModel, Head, Release, ReleasedEngine
from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository.store.layout import (
    DEVICE,
    ENSEMBLE_FILE,
    PART_OF,
    Current,
    Layout,
    check_loadable,
    part_config,
    published_config,
)
from enginegate.repository.store.package import ImportedRelease, Package, PartPackage
from enginegate.repository.store.release_files import ReleaseFiles, record_files, spare_folders
from enginegate.triton.config import Config, config_text
from enginegate.triton.ensemble_config import config_for_versions
from enginegate.triton.version_sharing import sharing_obstacle
from enginegate.workspace import now

# Triton's Python backend would write bytecode beside the model it loads, and read it back later:
# bytes that nobody approved. A file where the folder would be keeps it from doing either.
_NO_BYTECODE = b"Keeps Python from writing bytecode beside a release.\n"


def check_room(layout: Layout, parts: Iterable[str], version: int) -> None:
    """Refuse to publish over anything that this program did not put there.

    Whatever a failed publication undoes is then its own.

    Raises:
        RepositoryError: a folder is somebody else's, or already holds this version.
    """
    mine = {part.model for part in layout.owned_parts()}
    for name in (layout.model, *parts):
        there = layout.part(name)
        ours = there.is_ours if name == layout.model else name in mine
        if there.folder.exists() and not ours:
            raise RepositoryError(
                f"{there.folder} is another model's, not of this program's making. Rename the "
                "step, or the model, in the policy."
            )
        if there.version_folder(version).exists():
            raise RepositoryError(
                f"{there.version_folder(version)} is here already, and is no release. Find out who "
                "put it there, then remove it."
            )


def check_engine_for(where: object, device: str, package: Package | ImportedRelease) -> None:
    """Refuse what has no engine for the kind of device of a server; nothing is changed.

    Args:
        where: names the server.
        device: its kind; empty: the policy names none.
        package: what is to come.

    Raises:
        RepositoryError: it has none.
    """
    # A release of before the policy named kinds is what such a server serves already.
    unnamed = isinstance(package, ImportedRelease) and set(package.devices) <= {"cpu", "gpu"}
    if device and not unnamed and device not in package.devices:
        known = ", ".join(package.devices) or "none that is named"
        raise RepositoryError(
            f"{where} has devices of kind {device!r}, and there is no engine that was judged on "
            f"that kind: the release of {package.model} is for {known}. Nothing was changed. "
            f"Qualify on {device}, so that its scorecard has a winner there, or take the server "
            "out of the policy."
        )


def _check_same_device(layout: Layout, device: str) -> None:
    there = layout.device
    if device and there and there != device:
        raise RepositoryError(
            f"{layout.folder} holds engines for {there}, and its server has {device} by the "
            "policy. Give the server another repository folder; if only the name changed, keep "
            f"the name {there}."
        )


def place(
    layout: Layout,
    package: Package | ImportedRelease,
    version: int,
    before: Current | None,
    *,
    audit: Head | None = None,
) -> Release:
    """Copy a package, or another repository's release, in as a version that nothing serves yet.

    Args:
        layout: of its model.
        package: what comes in.
        version: its number.
        before: what is live.
        audit: how far the audit log has come, for the manifest of a package.

    Raises:
        RepositoryError: it does not fit what is live, cannot be written, or holds something that is
            not a regular file.
        TamperedError: the engine's bytes are not the approved ones.
    """
    _check_same_device(layout, package.device)
    live = layout.release(before.version) if before else None
    if live is not None:
        _check_same_interface(live, package)
        if isinstance(package, Package):
            _check_parts_fit(layout, live, package.parts)
    try:
        with _staging(layout, version) as staged:
            if isinstance(package, ImportedRelease):
                release = _stage_import(package, staged)
            else:
                previous = live.version if live else None
                release = _stage_package(package, version, staged, previous, audit)
            sync_tree(staged.root)
            _move_in(layout, release, staged)
    except OSError as error:
        raise RepositoryError(
            f"Cannot write release {version} of {layout.model} below {layout.root}: "
            f"{error.strerror}. Free space or fix permissions, then promote again."
        ) from error
    ReleaseFiles(layout, release).check()
    return release


@contextmanager
def _staging(layout: Layout, version: int) -> Iterator[Layout]:
    """A folder on the repository's file system that Triton never takes for a model or version."""
    parent = layout.folder if layout.folder.is_dir() else layout.root.absolute().parent
    if parent.stat().st_dev != layout.root.stat().st_dev:
        raise RepositoryError(
            f"{layout.root} is a mount point, so a first release cannot be moved in with one "
            "rename. "
            "Use a folder inside it as the repository."
        )
    staging = Path(tempfile.mkdtemp(dir=parent, prefix=f".{layout.model}-{version}."))
    try:
        yield Layout(staging, layout.model)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage_import(imported: ImportedRelease, staged: Layout) -> Release:
    """Copy a release's files, each with the digest that its manifest states.

    Raises:
        TamperedError: a file is missing, differs or was added, or is not this release's.
    """
    source, release = Layout(imported.root, imported.model), imported.release
    if source.release(release.version).digest != release.digest:
        raise TamperedError(
            f"{source.release_file(release.version)} is not the manifest that was asked."
        )
    files = ReleaseFiles(source, source.release(release.version))
    files.check()
    if imported.device and len(release.engines) > 1:
        if imported.device == release.devices[0]:
            files.copy_to(staged.root)
        else:
            files.copy_for(imported.device, staged)
        write_file(staged.folder / DEVICE, imported.device.encode())
        return staged.release(release.version)
    files.copy_to(staged.root)
    return release


def _stage_package(
    package: Package, version: int, staged: Layout, previous: int | None, audit: Head | None
) -> Release:
    """Write bytes, golden samples and the manifest; the engine must be the one approved."""
    staged.golden_file(version).parent.mkdir(parents=True)
    places = [(staged.version_folder(version), staged.golden_file(version))]
    places += [
        (staged.spare_folder(version, each.device), staged.spare_golden(version, each.device))
        for each in package.further
    ]
    engines = tuple(
        _stage_engine(each, version, staged, folder, golden)
        for each, (folder, golden) in zip((package, *package.further), places, strict=True)
    )
    if package.device:
        write_file(staged.folder / DEVICE, package.device.encode())
    release = Release(
        model=package.model,
        version=version,
        model_uri=package.model_uri,
        engines=engines,
        inputs=package.inputs,
        outputs=package.outputs,
        scorecard_sha256=package.scorecard_sha256,
        decision=package.decision,
        previous_version=previous,
        published_at=now(),
        further_decisions=package.further_decisions,
        audit=audit,
    )
    write_file(staged.release_file(version), release.pretty_json())
    return release


def _stage_engine(
    package: Package, version: int, staged: Layout, folder: Path, golden: Path
) -> ReleasedEngine:
    """Write one kind of device's bytes and golden samples."""
    if package.ensemble is None:
        files = _fill(package.files, folder, package.approved)
    else:
        write_file(folder / ENSEMBLE_FILE, config_text(package.ensemble).encode(), mode=0o444)
        files = {ENSEMBLE_FILE: FileDigest.of(folder / ENSEMBLE_FILE)}
    package.golden.write(golden)
    return ReleasedEngine(
        device=package.device or ("gpu" if package.gpu else "cpu"),
        on_gpu=package.gpu if package.device else None,
        candidate=package.candidate,
        engine_sha256=package.engine_sha256,
        serving=package.serving,
        backend=package.backend,
        golden=FileDigest.of(golden),
        golden_max_abs_error=package.golden_max_abs_error,
        files=files,
        promise=package.promise,
        options=package.options,
        settings=package.settings,
        parts=tuple(_stage_part(part, version, staged) for part in package.parts),
        gpu_bytes=package.gpu_bytes,
        cold_start_s=package.cold_start_s,
        builder=package.builder,
        version_compatible=package.version_compatible,
    )


def _stage_part(part: PartPackage, version: int, staged: Layout) -> ComposingModel:
    files = _fill(part.files, staged.part(part.name).version_folder(version), part.approved)
    config = staged.part_file(version, part.name, "pbtxt")
    write_file(config, config_text(part.config).encode())
    golden = staged.part_file(version, part.name, "golden.npz")
    if part.golden is not None:
        part.golden.write(golden)
    return ComposingModel(
        name=part.name,
        version=version,
        files=files,
        config=FileDigest.of(config),
        golden=FileDigest.of(golden) if part.golden else None,
        golden_max_abs_error=part.golden_max_abs_error,
    )


def _fill(
    files: Mapping[str, Path], folder: Path, approved: Mapping[str, FileDigest]
) -> dict[str, FileDigest]:
    """Copy files into a new folder and take their digests, some of which were approved."""
    folder.mkdir(parents=True)
    for name, source in files.items():
        if source.is_symlink() or not source.is_file():
            raise RepositoryError(f"{source} is not a regular file; a release holds only those.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
        (folder / name).chmod(0o444)
    for code in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        write_file(code / "__pycache__", _NO_BYTECODE, mode=0o444)
    for name, digest in approved.items():
        digest.check(folder / name)
    there = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileDigest.of(path) for path in there}


def _move_in(layout: Layout, release: Release, staged: Layout) -> None:
    """Move a staged release to where Triton finds it; nothing serves it yet.

    Its records are first, so that recovery knows its models, and its own bytes are last.
    """
    own = published_config(staged, release)
    parts = {part.name: part_config(staged, release.version, part) for part in release.engine.parts}
    if layout.folder.is_dir():
        records = layout.release_file(release.version).parent
        if staged.device:
            write_file(layout.folder / DEVICE, staged.device.encode())
        beside = record_files(staged, release.version)
        for path in (*spare_folders(staged, release.version), *beside):
            path.rename(records / path.name)
        sync_folder(records)
    owner = layout.model.encode()
    for name, config in parts.items():
        _move_model(layout.part(name), staged.part(name), release, config, owner=owner)
    _move_model(layout, staged, release, own)


def _move_model(
    model: Layout, staged: Layout, release: Release, config: Config, *, owner: bytes = b""
) -> None:
    """A model folder without a version stops a polling Triton: a new one comes in whole.

    Such a server begins to load it at once, so it must be loadable.
    """
    version = release.version
    if model.folder.is_dir():
        staged.version_folder(version).rename(model.version_folder(version))
        sync_folder(model.folder)
        return
    if owner:
        write_file(staged.folder / PART_OF, owner)
    served = config_for_versions(config, (version,), {version: release.digest})
    check_loadable(staged, served)
    write_file(staged.config, config_text(served).encode())
    staged.folder.rename(model.folder)
    sync_folder(model.root)


def _check_same_interface(live: Release, package: Package | ImportedRelease) -> None:
    """Triton loads a version with other inputs without complaint, and then every caller fails."""
    if (live.inputs, live.outputs) != (package.inputs, package.outputs):
        raise RepositoryError(
            f"The new release of {live.model} takes {', '.join(map(str, package.inputs))} and "
            "gives "
            f"{', '.join(map(str, package.outputs))}; the live one takes "
            f"{', '.join(map(str, live.inputs))} and gives {', '.join(map(str, live.outputs))}. "
            "Clients would fail: publish it under another model name."
        )


def _check_parts_fit(layout: Layout, live: Release, parts: tuple[PartPackage, ...]) -> None:
    """Both versions of a composing model share one configuration while the ensemble goes over.

    Raises:
        RepositoryError: the live release's model cannot be loaded with the new configuration.
    """
    old = {part.name: part for part in live.engine.parts}
    for part in parts:
        if part.name not in old:
            continue
        why_not = sharing_obstacle(part_config(layout, live.version, old[part.name]), part.config)
        if why_not:
            raise RepositoryError(
                f"Composing model {part.name} of the live release {live.version} cannot be loaded "
                f"beside the new one, because one configuration cannot load both: {why_not}. Both "
                "must serve while traffic goes over: give the changed step another name, or "
                "publish under another model name."
            )
