"""Taking bytes out of a repository: what never went live, what is too old, what a kill left behind.

Nothing here touches what is live or standing by.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from enginegate.atomic_io import sync_folder
from enginegate.repository.history.audit import AUDIT_HEAD
from enginegate.repository.store.layout import CURRENT, Layout, parts_by_owner
from enginegate.repository.store.release_files import record_files, spare_folders
from enginegate.triton.release_labels import RECORDS

_FORGOTTEN = ".forgotten"
_log = logging.getLogger("enginegate.repository")


def remove(layout: Layout, version: int, *, known: bool = False) -> None:
    """Take a release that never went live out again, with whatever staging was left of it.

    Args:
        layout: of its model.
        version: which.
        known: it was a release before, and a copy was to bring its bytes back: its history stays.
    """
    for parent in (layout.folder, layout.root.absolute().parent):
        for left in parent.glob(f".{layout.model}-{version}.*"):
            shutil.rmtree(left, ignore_errors=True)
    if layout.is_ours:
        shutil.rmtree(layout.version_folder(version), ignore_errors=True)
        if not known:
            for path in record_files(layout, version):
                path.unlink()
    _remove_part_bytes(layout, version)


def sweep(root: Path, known: Iterable[str]) -> None:
    """Remove what a killed process was writing or deleting; whoever calls holds the lock.

    Args:
        root: the repository.
        known: models to look at.
    """
    for left in root.glob(".*.tmp"):
        if left.name.startswith((f".{CURRENT}.", f".{AUDIT_HEAD}.")):
            left.unlink(missing_ok=True)
    parts = parts_by_owner(root)
    for name in known:
        _sweep_model(Layout(root, name), parts.get(name, ()))


def _sweep_model(layout: Layout, parts: Sequence[Layout]) -> None:
    own = (layout.folder,) if layout.is_ours else ()
    for folder in (*own, *(part.folder for part in parts)):
        for place in (folder, folder / RECORDS, folder / RECORDS / "releases"):
            for left in place.glob(".*.tmp"):
                left.unlink(missing_ok=True)
    for left in layout.folder.glob(f"*{_FORGOTTEN}") if own else ():
        version = left.name.removesuffix(_FORGOTTEN).rpartition("-")[2]
        _remove_part_bytes(layout, int(version))
        shutil.rmtree(left, ignore_errors=True)


def remove_all(layout: Layout, version: int, *, history: bool = False) -> None:
    """Take a model out whose only release this was, with its composing models; else keep it.

    Args:
        layout: of the model.
        version: which release this was.
        history: take its other releases out too, none of which can go live again without a
            promotion: a server that loads whatever it finds must not find them.
    """
    others = {r.version for r in layout.releases()} - {version} if not history else set()
    if layout.is_ours and not others:
        _take_out(layout, layout, version)
    if not others:
        for part in layout.owned_parts():
            _take_out(part, layout, version)


def _take_out(model: Layout, layout: Layout, version: int) -> None:
    """Killed in between, the folder is whole or gone; `remove` finds what was left of it."""
    try:
        place = layout.root.absolute().parent
        gone = Path(tempfile.mkdtemp(dir=place, prefix=f".{layout.model}-{version}."))
        model.folder.rename(gone / "model")
        sync_folder(layout.root)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:  # a mount point, or a folder above it that is somebody else's
        shutil.rmtree(model.folder, ignore_errors=True)


def _remove_part_bytes(layout: Layout, version: int) -> None:
    """Delete one version for other kinds of device, and of every composing model.

    A composing model that has no version left goes.
    """
    for folder in spare_folders(layout, version):
        shutil.rmtree(folder, ignore_errors=True)
    for part in layout.owned_parts():
        shutil.rmtree(part.version_folder(version), ignore_errors=True)
        if not part.stored_versions():
            shutil.rmtree(part.folder, ignore_errors=True)


def forget_old(layout: Layout, keep: int, pinned: frozenset[int] = frozenset()) -> None:
    """Delete the bytes of releases beyond the newest ``keep``; manifests stay as history.

    What is live, standing by, known to the running configuration or ``pinned`` stays.
    """
    current = layout.current()
    kept = pinned | ({*current.known, current.version} if current else set())
    stored = [r.version for r in layout.releases() if layout.version_folder(r.version).is_dir()]
    for version in stored[:-keep]:
        if version not in kept:
            _forget(layout, version)


def _forget(layout: Layout, version: int) -> None:
    """Killed in between, a release has all of its bytes, or none that anybody would look for."""
    hidden = layout.folder / f".{layout.model}-{version}{_FORGOTTEN}"
    layout.version_folder(version).rename(hidden)
    sync_folder(layout.folder)
    _remove_part_bytes(layout, version)
    shutil.rmtree(hidden)


def forget_quietly(layout: Layout, keep: int, pinned: frozenset[int] | None) -> None:
    """The same after a promotion that is done, which retention must not fail.

    Nothing is deleted where it is not known what is pinned (None).
    """
    try:
        if pinned is not None:
            forget_old(layout, keep, pinned)
    except OSError as error:
        _log.warning("old releases below %s could not be removed: %s", layout.folder, error)
