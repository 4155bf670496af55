"""A benchmark's model folder in an embedded server's repository: checked, written, removed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from enginegate.atomic_io import new_folder
from enginegate.errors import ModelError, ServerError
from enginegate.triton.config import opened_file

# Names a folder that a benchmark wrote and may remove.
_SCRATCH = ".scratch"


def check_model_files(name: str, backend: str, files: Mapping[str, Path]) -> None:
    """Refuse files that Triton would not load: a Python model without model.py hangs the server.

    Raises:
        ModelError: a file is missing, or all are.
    """
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing or not files:
        raise ModelError(
            f"{name} cannot be served: "
            + (f"missing {', '.join(missing)}." if missing else "it has no files.")
            + "\nBuild the engine again."
        )
    opened = opened_file(backend)
    if opened and opened not in files:
        raise ModelError(f"{name} is for Triton's {backend} backend, but has no {opened}.")


def clear_model_folder(folder: Path) -> None:
    """Remove a killed benchmark's model folder.

    Raises:
        ServerError: the folder was not written by a benchmark.
    """
    if folder.is_dir() and not (folder / _SCRATCH).is_file():
        raise ServerError(
            f"{folder} holds a model that was not put there for a benchmark.\n"
            "Give the embedded server a repository of its own."
        )
    shutil.rmtree(folder, ignore_errors=True)


def write_model_folder(files: Mapping[str, Path], folder: Path, *, version: int) -> None:
    """Write a model's folder with one version, at once or not at all."""
    with new_folder(folder) as staging:
        for name, source in files.items():
            target = staging / str(version) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Engines are large and never written to, so a second name for the bytes will do.
            try:
                os.link(source.resolve(), target)
            except OSError:
                shutil.copyfile(source, target)
        (staging / _SCRATCH).touch()
