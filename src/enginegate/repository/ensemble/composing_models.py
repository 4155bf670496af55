"""The Triton models that an ensemble's release is made of, on disk.

Each part is a model folder beside the ensemble's, with the release's own number::

    ROOT/
    ├── MODEL/           the ensemble: 1/ 2/ …, each holding ensemble.pbtxt
    ├── MODEL.engine/    config.pbtxt, 1/ 2/ …, 00/part-of
    └── MODEL.STEP/      likewise

A part has no commit point of its own: the ensemble's speaks for all of them.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.atomic_io import read_file, sync_folder, write_file
from enginegate.candidate import FileDigest
from enginegate.decision import ComposingModel, Release
from enginegate.errors import RepositoryError
from enginegate.repository.deploy.golden import Golden
from enginegate.repository.store.layout import PART_OF, Current, Layout
from enginegate.triton.config import Config, config_text, read_config
from enginegate.triton.ensemble_config import config_for_versions
from enginegate.triton.version_sharing import sharing_obstacle

Fill = Callable[[Mapping[str, Path], Path], dict[str, FileDigest]]


@dataclass(frozen=True, slots=True)
class PartPackage:
    """One part before it is published.

    Attributes:
        name: as Triton knows it, e.g. ``digits.preprocess``.
        config: under that name, without versions.
        files: path in the version folder -> file to copy.
        approved: digests that some of them must have.
        golden: samples with validated answers of this part alone.
    """

    name: str
    config: Config
    files: Mapping[str, Path]
    approved: Mapping[str, FileDigest] = field(default_factory=dict)
    golden: Golden | None = None
    golden_max_abs_error: float = 0.0


def part_config(layout: Layout, version: int, part: ComposingModel) -> Config:
    """A part's configuration as published, without versions.

    Raises:
        TamperedError: it is not the one that was published.
    """
    path = layout.part_file(version, part.name, "pbtxt")
    part.config.check(path)
    return read_config(path.read_text(), str(path))


def owned_parts(layout: Layout) -> tuple[Layout, ...]:
    """Every part of a model that is here, also of releases that are no longer served."""
    found = layout.root.glob(f"{layout.model}.*/{PART_OF}")
    mine = [path for path in found if read_file(path) == layout.model.encode()]
    return tuple(sorted((layout.part(p.parents[1].name) for p in mine), key=lambda p: p.model))


def stage_parts(
    parts: tuple[PartPackage, ...], version: int, staging: Path, *, fill: Fill
) -> tuple[ComposingModel, ...]:
    """Copy every part below ``staging``; ``fill`` copies files into a new folder."""
    staged = []
    for part in parts:
        folder = staging / "parts" / part.name
        folder.mkdir(parents=True)
        files = fill(part.files, folder / "bytes")
        for name, approved in part.approved.items():
            approved.check(folder / "bytes" / name)
        write_file(folder / "config.pbtxt", config_text(part.config).encode())
        if part.golden is not None:
            part.golden.write(folder / "golden.npz")
        staged.append(
            ComposingModel(
                name=part.name,
                version=version,
                files=files,
                config=FileDigest.of(folder / "config.pbtxt"),
                golden=FileDigest.of(folder / "golden.npz") if part.golden else None,
                golden_max_abs_error=part.golden_max_abs_error,
            )
        )
    return tuple(staged)


def move_parts_in(layout: Layout, release: Release, staging: Path, *, records: Layout) -> None:
    """Move staged parts to where Triton finds them; nothing serves them yet.

    Args:
        layout: of the ensemble.
        release: its parts are moved.
        staging: on the same file system.
        records: where configurations and golden samples go: the ensemble, or its staged folder.
    """
    version = release.version
    for part in release.parts:
        source, place = staging / "parts" / part.name, layout.part(part.name)
        (source / "config.pbtxt").rename(records.part_file(version, part.name, "pbtxt"))
        if part.golden is not None:
            (source / "golden.npz").rename(records.part_file(version, part.name, "golden.npz"))
        if place.folder.is_dir():
            (source / "bytes").rename(place.version_folder(version))
            sync_folder(place.folder)
            continue
        # A model folder without a version stops a polling Triton: a new part comes in whole.
        first = Layout(source, "model")
        write_file(first.folder / PART_OF, layout.model.encode())
        (source / "bytes").rename(first.version_folder(version))
        config = config_for_versions(
            part_config(records, version, part), (version,), {version: release.digest}
        )
        write_file(first.config, config_text(config).encode())
        first.folder.rename(place.folder)
        sync_folder(layout.root)


def remove_part_bytes(layout: Layout, version: int) -> None:
    """Delete one version of every part, and parts that have no version left."""
    for part in owned_parts(layout):
        shutil.rmtree(part.version_folder(version), ignore_errors=True)
        if not part.stored_versions():
            shutil.rmtree(part.folder, ignore_errors=True)


def check_room(layout: Layout, parts: Iterable[str], version: int) -> None:
    """Refuse to publish over anything that this program did not put there.

    Whatever a failed publication undoes is then its own.

    Raises:
        RepositoryError: a folder is somebody else's, or already holds this version.
    """
    mine = {part.model for part in owned_parts(layout)}
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


def check_parts_fit(layout: Layout, parts: tuple[PartPackage, ...], before: Current | None) -> None:
    """Both versions of a part share one configuration while the ensemble goes over.

    Raises:
        RepositoryError: the live release's part cannot be loaded with the new configuration.
    """
    live = layout.release(before.version) if before else None
    old = {part.name: part for part in live.parts} if live else {}
    for part in parts:
        if live is None or part.name not in old:
            continue
        why_not = sharing_obstacle(part_config(layout, live.version, old[part.name]), part.config)
        if why_not:
            raise RepositoryError(
                f"Part {part.name} of the live release {live.version} cannot be loaded beside the "
                f"new one, because one configuration cannot load both: {why_not}. Both must serve "
                "while traffic goes over: give the changed step another name, or publish under "
                "another model name."
            )
