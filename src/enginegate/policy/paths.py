"""Paths in a policy: where relative ones start from, and how records hold them.

A policy belongs to a project: the nearest folder from the policy file's own up that holds
``.enginegate/`` or ``pyproject.toml``, else the folder above ``policies/``, else the policy file's
folder. Its relative paths start there, whatever the current folder is. Records and digests hold a
path as it was written, so the same policy has the same digest on every machine.
"""

from pathlib import Path, PosixPath, PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, ValidationInfo

WORKSPACE = ".enginegate"
POLICIES = "policies"
ROOT = "root"  # key of the validation context: the folder that relative paths start from


class PlacedPath(PosixPath):
    """A relative path of a policy, made absolute; records and digests hold it as it was written."""

    written: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _placed_as, (str(self), self.written)


def _placed_as(path: str, written: str) -> PlacedPath:
    placed = PlacedPath(path)
    placed.written = written
    return placed


def _stays_below(path: Path, info: ValidationInfo) -> Path:
    if ".." in PurePath(path).parts:
        message = "a path in a policy may not contain '..'; use an absolute path, or move the file"
        raise ValueError(message)
    root: Path | None = (info.context or {}).get(ROOT)
    if root is None or path.is_absolute():
        return path
    return _placed_as(str(root / path), str(path))


def as_written(path: Path) -> Path:
    """A path of a policy as its file says it."""
    return Path(getattr(path, "written", "") or path)


SafePath = Annotated[
    Path,
    AfterValidator(_stays_below),
    PlainSerializer(as_written, return_type=Path),
]


def project_of(folder: Path) -> Path:
    """The nearest folder from this one up that holds a workspace or a project file; else this.

    A folder named ``policies`` is never a project by itself: commands look for it in one.
    """
    for each in (folder, *folder.parents):
        if (each / WORKSPACE).is_dir() or (each / "pyproject.toml").is_file():
            return each
    return folder.parent if folder.name == POLICIES else folder
