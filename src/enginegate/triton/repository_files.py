"""Puts a model's files into an embedded server's repository, and recognises what it put there."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from enginegate.atomic_io import new_folder
from enginegate.errors import ModelError, ServerError
from enginegate.triton.config import OPENED_FILES

_MARK = ".scratch"


def check_files(name: str, backend: str, files: Mapping[str, Path]) -> None:
    """Refuse what would not load.

    Raises:
        ModelError: a file is missing, or all are. A Python model without its file makes the load
            hang for ever, and the server with it.
    """
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing or not files:
        raise ModelError(
            f"{name} cannot be served: "
            + (f"missing {', '.join(missing)}." if missing else "it has no files.")
            + "\nBuild the engine again."
        )
    opened = OPENED_FILES.get(backend)
    if opened is not None and opened not in files:
        raise ModelError(f"{name} is for Triton's {backend} backend, but has no {opened}.")


def clear(folder: Path) -> None:
    """Remove what a killed run left; never a model that somebody else put there.

    Raises:
        ServerError: somebody else did.
    """
    if folder.is_dir() and not (folder / _MARK).is_file():
        raise ServerError(
            f"{folder} holds a model that was not put there for a benchmark.\n"
            "Give the embedded server a repository of its own."
        )
    shutil.rmtree(folder, ignore_errors=True)


def place(files: Mapping[str, Path], folder: Path, *, version: int) -> None:
    """Put the files into a version of a model's folder, at once or not at all."""
    with new_folder(folder) as staging:
        for name, source in files.items():
            target = staging / str(version) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, target)
        (staging / _MARK).touch()


def _link_or_copy(source: Path, target: Path) -> None:
    """Engines are large and never written to, so a second name for the same bytes will do."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
