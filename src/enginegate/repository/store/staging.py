"""Bringing bytes into a repository: staged on its file system, flushed, moved in by rename."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.atomic_io import sync_folder, sync_tree, write_file
from enginegate.candidate import Candidate, FileDigest, Sha256, TensorSpec
from enginegate.decision import Decision, Head, Promise, Release
from enginegate.errors import RepositoryError
from enginegate.repository.deploy.desired_config import ENSEMBLE_FILE, served_config
from enginegate.repository.deploy.golden import Golden
from enginegate.repository.ensemble.composing_models import (
    PartPackage,
    check_parts_fit,
    move_parts_in,
    stage_parts,
)
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.store.imported_release import ImportedRelease, stage_copy
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.transitions import after_publish
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.config import Config, config_text
from enginegate.workspace import now

# Triton's Python backend would write bytecode beside the model it loads, and read it back later:
# bytes that nobody approved. A file where the folder would be keeps it from doing either.
_NO_BYTECODE = b"Keeps Python from writing bytecode beside a release.\n"


@dataclass(frozen=True, slots=True)
class Package:
    """Everything a release is made of; the engine's digest is the one that was approved.

    Attributes:
        files: name in the version folder -> file to copy.
        approved: digests that the engine's own files must have, by name in the version folder.
        golden: samples with the validated engine's answers.
        golden_max_abs_error: how far a live answer may be from them.
        options: what Triton is told besides batching and instances.
        settings: what the backend is told so that it runs the engine as it was validated.
        ensemble: the model's configuration when it is made of several: then the engine is one of
            the ``parts``, ``files`` is empty, and inputs and outputs are the ensemble's.
    """

    model: str
    model_uri: str
    candidate: Candidate
    engine_sha256: Sha256
    approved: dict[str, FileDigest]
    files: dict[str, Path]
    backend: str
    gpu: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    serving: ServingConfig
    golden: Golden
    golden_max_abs_error: float
    scorecard_sha256: Sha256
    decision: Decision
    promise: Promise
    further_decisions: tuple[Decision, ...] = ()
    options: ServingOptions = field(default_factory=ServingOptions)
    settings: BackendSettings = field(default_factory=BackendSettings)
    ensemble: Config | None = None
    parts: tuple[PartPackage, ...] = ()


def place(
    layout: Layout, package: Package | ImportedRelease, version: int, before: Current | None
) -> Release:
    """Copy a package, or another repository's release, in as a version that nothing serves yet.

    Raises:
        RepositoryError: it does not fit what is live, cannot be written, or holds something that is
            not a regular file.
        TamperedError: the engine's bytes are not the approved ones.
    """
    _check_same_interface(layout, package, before)
    parts = package.parts if isinstance(package, Package) else ()
    check_parts_fit(layout, parts, before)
    try:
        with _staging(layout, version) as staging:
            if isinstance(package, ImportedRelease):
                release = stage_copy(package, staging)
            else:
                head = AuditLog(layout.root).head()
                release = _stage(package, version, staging, before, audit=head)
            _move_in(layout, release, staging)
    except OSError as error:
        raise RepositoryError(
            f"Cannot write release {version} of {layout.model} below {layout.root}: "
            f"{error.strerror}. Free space or fix permissions, then promote again."
        ) from error
    layout.check_files(release)
    return release


@contextmanager
def _staging(layout: Layout, version: int) -> Iterator[Path]:
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
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage(
    package: Package, version: int, staging: Path, before: Current | None, *, audit: Head | None
) -> Release:
    """Write bytes, golden samples and the manifest; the engine must be the one approved."""
    folder = staging / "bytes"
    if package.ensemble is None:
        files = _fill(package.files, folder)
    else:
        write_file(folder / ENSEMBLE_FILE, config_text(package.ensemble).encode(), mode=0o444)
        files = {ENSEMBLE_FILE: FileDigest.of(folder / ENSEMBLE_FILE)}
    for name, approved in package.approved.items():
        approved.check(folder / name)
    golden = staging / "golden.npz"
    package.golden.write(golden)
    release = Release(
        model=package.model,
        version=version,
        model_uri=package.model_uri,
        candidate=package.candidate,
        engine_sha256=package.engine_sha256,
        serving=package.serving,
        backend=package.backend,
        gpu=package.gpu,
        inputs=package.inputs,
        outputs=package.outputs,
        golden=FileDigest.of(golden),
        golden_max_abs_error=package.golden_max_abs_error,
        files=files,
        scorecard_sha256=package.scorecard_sha256,
        decision=package.decision,
        previous_version=before.version if before else None,
        promise=package.promise,
        published_at=now(),
        further_decisions=package.further_decisions,
        audit=audit,
        options=package.options,
        settings=package.settings,
        parts=stage_parts(package.parts, version, staging, fill=_fill),
    )
    write_file(staging / "release.json", release.pretty_json())
    sync_tree(staging)
    return release


def _fill(files: Mapping[str, Path], folder: Path) -> dict[str, FileDigest]:
    """Copy files into a new folder and take their digests."""
    folder.mkdir()
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(source, folder / name)
    for code in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        write_file(code / "__pycache__", _NO_BYTECODE, mode=0o444)
    there = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileDigest.of(path) for path in there}


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_file():
        raise RepositoryError(f"{source} is not a regular file; a release holds only those.")
    shutil.copyfile(source, target)
    target.chmod(0o444)


def _move_in(layout: Layout, release: Release, staging: Path) -> None:
    if layout.folder.is_dir():
        move_parts_in(layout, release, staging, records=layout)
        _move_files(layout, release.version, staging)
        return
    # A model folder without a version stops a polling Triton: the first release comes in whole.
    first = Layout(staging, "model")
    first.release_file(release.version).parent.mkdir(parents=True)
    move_parts_in(layout, release, staging, records=first)
    _move_files(first, release.version, staging)
    config = served_config(first, after_publish(None, release.version))
    write_file(first.config, config_text(config).encode())
    sync_tree(first.folder)
    first.folder.rename(layout.folder)
    sync_folder(layout.root)


def _move_files(layout: Layout, version: int, staging: Path) -> None:
    (staging / "golden.npz").rename(layout.golden_file(version))
    (staging / "release.json").rename(layout.release_file(version))
    if (staging / "signature.json").is_file():
        (staging / "signature.json").rename(layout.signature_file(version))
    (staging / "bytes").rename(layout.version_folder(version))
    sync_folder(layout.release_file(version).parent)
    sync_folder(layout.folder)


def _check_same_interface(
    layout: Layout, package: Package | ImportedRelease, before: Current | None
) -> None:
    """Triton loads a version with other inputs without complaint, and then every caller fails."""
    if before is None:
        return
    live = layout.release(before.version)
    if (live.inputs, live.outputs) != (package.inputs, package.outputs):
        raise RepositoryError(
            f"The new release of {layout.model} takes {', '.join(map(str, package.inputs))} and "
            "gives "
            f"{', '.join(map(str, package.outputs))}; the live one takes "
            f"{', '.join(map(str, live.inputs))} and gives {', '.join(map(str, live.outputs))}. "
            "Clients would fail: publish it under another model name."
        )
