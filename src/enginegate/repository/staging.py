"""Bringing bytes into a repository: staged on its file system, flushed, moved in by rename."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.candidate import Candidate, FileDigest, Sha256, TensorSpec
from enginegate.decision import Decision, Promise, Release
from enginegate.durable import sync_folder, sync_tree, write_file
from enginegate.errors import RepositoryError
from enginegate.evidence import ServingConfig
from enginegate.repository.golden import Golden
from enginegate.repository.layout import Current, Layout
from enginegate.repository.serving import served_config
from enginegate.repository.transitions import after_publish
from enginegate.triton.config import config_text
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


def place(layout: Layout, package: Package, version: int, before: Current | None) -> Release:
    """Copy a package in as a version that nothing serves yet.

    Raises:
        RepositoryError: it does not fit what is live, cannot be written, or holds something that is
            not a regular file.
        TamperedError: the engine's bytes are not the approved ones.
    """
    _check_same_interface(layout, package, before)
    try:
        with _staging(layout, version) as staging:
            release = _stage(package, version, staging, before)
            _move_in(layout, release, staging)
    except OSError as error:
        raise RepositoryError(
            f"Cannot write release {version} of {layout.model} below {layout.root}: "
            f"{error.strerror}. Free space or fix permissions, then promote again."
        ) from error
    layout.check_files(release)
    return release


def remove(layout: Layout, version: int) -> None:
    """Take a release that never went live out again, with whatever staging was left of it."""
    for parent in (layout.folder, layout.root.absolute().parent):
        for left in parent.glob(f".{layout.model}-{version}.*"):
            shutil.rmtree(left, ignore_errors=True)
    if layout.folder.is_dir():
        shutil.rmtree(layout.version_folder(version), ignore_errors=True)
        layout.release_file(version).unlink(missing_ok=True)
        layout.golden_file(version).unlink(missing_ok=True)


def forget_old(layout: Layout, keep: int) -> None:
    """Delete the bytes of releases beyond the newest ``keep``; manifests stay as history."""
    current = layout.current()
    kept = {*current.known, current.version} if current else set()
    stored = [r.version for r in layout.releases() if layout.version_folder(r.version).is_dir()]
    for version in stored[:-keep]:
        if version not in kept:
            shutil.rmtree(layout.version_folder(version))


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


def _stage(package: Package, version: int, staging: Path, before: Current | None) -> Release:
    """Write bytes, golden samples and the manifest; the engine must be the one approved."""
    folder = staging / "bytes"
    folder.mkdir()
    for name, source in package.files.items():
        _copy(source, folder / name)
    write_file(folder / "__pycache__", _NO_BYTECODE, mode=0o444)
    golden = staging / "golden.npz"
    package.golden.write(golden)
    files = {path.name: FileDigest.of(path) for path in sorted(folder.iterdir())}
    for name, approved in package.approved.items():
        approved.check(folder / name)
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
    )
    write_file(staging / "release.json", release.pretty_json())
    sync_tree(staging)
    return release


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_file():
        raise RepositoryError(f"{source} is not a regular file; a release holds only those.")
    shutil.copyfile(source, target)
    target.chmod(0o444)


def _move_in(layout: Layout, release: Release, staging: Path) -> None:
    if layout.folder.is_dir():
        _move_files(layout, release.version, staging)
        return
    # A model folder without a version stops a polling Triton: the first release comes in whole.
    first = Layout(staging, "model")
    first.release_file(release.version).parent.mkdir(parents=True)
    _move_files(first, release.version, staging)
    config = served_config(after_publish(None, release.version), {release.version: release})
    write_file(first.config, config_text(config).encode())
    sync_tree(first.folder)
    first.folder.rename(layout.folder)
    sync_folder(layout.root)


def _move_files(layout: Layout, version: int, staging: Path) -> None:
    (staging / "golden.npz").rename(layout.golden_file(version))
    (staging / "release.json").rename(layout.release_file(version))
    (staging / "bytes").rename(layout.version_folder(version))
    sync_folder(layout.release_file(version).parent)
    sync_folder(layout.folder)


def _check_same_interface(layout: Layout, package: Package, before: Current | None) -> None:
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
