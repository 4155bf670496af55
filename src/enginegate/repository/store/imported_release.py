"""A release that exists elsewhere: which files it is, and bringing the very same ones in here."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import sync_tree
from enginegate.candidate import TensorSpec
from enginegate.decision import Release
from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository.history.journal import Journal
from enginegate.repository.store.layout import JOURNAL, Layout

_COPIED = "copied_from"


@dataclass(frozen=True, slots=True)
class ImportedRelease:
    """A release of another repository, number and digest included.

    Attributes:
        root: where its files are, laid out as in a live repository.
    """

    release: Release
    root: Path

    @property
    def model(self) -> str:
        """The model's name."""
        return self.release.model

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the release takes."""
        return self.release.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the release gives."""
        return self.release.outputs


def release_files(layout: Layout, release: Release) -> tuple[str, ...]:
    """Every file of a release and its parts, relative to the repository; its manifest last."""
    manifest = layout.release_file(release.version)
    folders = [layout.version_folder(release.version)]
    folders += [layout.part(part.name).version_folder(part.version) for part in release.parts]
    served = [path for folder in folders for path in folder.rglob("*")]
    beside = set(manifest.parent.glob(f"{release.version}.*")) - {manifest}
    found = sorted(path for path in (*served, *beside) if path.is_file())
    return tuple(str(path.relative_to(layout.root)) for path in (*found, manifest))


def stage_copy(copy: ImportedRelease, staging: Path) -> Release:
    """Copy a release's files, each with the digest that its manifest states.

    Raises:
        TamperedError: a file is missing, differs or was added, or is not this release's.
    """
    source, release = Layout(copy.root, copy.model), copy.release
    version = release.version
    if source.release(version).digest != release.digest:
        raise TamperedError(f"{source.release_file(version)} is not the manifest that was asked.")
    source.check_files(release)
    shutil.copytree(source.version_folder(version), staging / "bytes")
    shutil.copyfile(source.golden_file(version), staging / "golden.npz")
    shutil.copyfile(source.release_file(version), staging / "release.json")
    if source.signature_file(version).is_file():
        shutil.copyfile(source.signature_file(version), staging / "signature.json")
    for part in release.parts:
        folder = staging / "parts" / part.name
        served = source.part(part.name).version_folder(part.version)
        shutil.copytree(served, folder / "bytes")
        config = source.part_file(version, part.name, "pbtxt")
        shutil.copyfile(config, folder / "config.pbtxt")
        if part.golden is not None:
            golden = source.part_file(version, part.name, "golden.npz")
            shutil.copyfile(golden, folder / "golden.npz")
    sync_tree(staging)
    return release


def issued_number(layout: Layout, package: object, asked: int | None, *, last: int) -> int:
    """The number a release goes by: a copy's own, the one asked for, or the one after ``last``.

    Raises:
        RepositoryError: the number was issued before.
        TamperedError: a copy's number stands for another release here.
    """
    if isinstance(package, ImportedRelease):
        _check_new(layout, package.release)
        return package.release.version
    if asked is not None and asked <= last:
        raise RepositoryError(
            f"Number {asked} cannot be issued for {layout.model}: {layout.root} has known {last}. "
            "A number is never used twice."
        )
    return last + 1 if asked is None else asked


def part_names(package: object) -> tuple[str, ...]:
    """The models beside its own that a package or a copy brings in."""
    release = package.release if isinstance(package, ImportedRelease) else package
    return tuple(part.name for part in getattr(release, "parts", ()))


def origin_of(package: object) -> dict[str, str]:
    """What the journal says of a copy: its manifest tells of another repository's audit log."""
    return {_COPIED: str(package.root)} if isinstance(package, ImportedRelease) else {}


def copied_versions(layout: Layout) -> frozenset[int]:
    """Numbers of the releases that came here as copies."""
    entries = Journal(layout.root / JOURNAL).read()
    return frozenset(e.version for e in entries if e.model == layout.model and _COPIED in e.detail)


def _check_new(layout: Layout, release: Release) -> None:
    """A manifest whose bytes retention removed may get them back; nothing else is written over."""
    path = layout.release_file(release.version)
    if path.is_file() and layout.release(release.version).digest != release.digest:
        raise TamperedError(f"{path} is another release than the one to copy.")
    if layout.version_folder(release.version).exists():
        raise RepositoryError(
            f"{layout.version_folder(release.version)} is here already; roll back to it instead."
        )


def check_same(where: object, release: Release, digest: str) -> None:
    """Refuse a manifest that is not the one that was made live.

    Raises:
        TamperedError: it is not.
    """
    if release.digest != digest:
        raise TamperedError(
            f"The manifest of release {release.version} of {release.model} in {where} is not the "
            f"one that was made live: its digest is {release.digest[:12]}, not {digest[:12]}."
        )
