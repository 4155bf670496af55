"""A folder of images with one folder for each class: ``CLASS/NAME.png``."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from enginegate.candidate import Sha256
from enginegate.data_sources.images import ENDINGS
from enginegate.data_sources.reader import Block, Column, files_digest
from enginegate.errors import DataError
from enginegate.records import canonical_json, sha256_bytes

# Decoded photographs of a block are held together.
_FILES_AT_A_TIME = 32


def holds_images(folder: Path) -> bool:
    """Whether a folder is one of images: in it, or in the folders of its classes."""
    return any(_is_image(path) for path in folder.iterdir()) or any(
        _is_image(path) for inner in folder.iterdir() if inner.is_dir() for path in inner.iterdir()
    )


class ImageFolderReader:
    """Columns ``image``, ``label`` (the class), ``class`` (its name) and ``id`` (CLASS/NAME).

    Images that are in no folder of a class have no label: their folder has the columns ``image``
    and ``id``. Links that lead out of the folder are refused.
    """

    form = "image folder"

    def __init__(self, folder: Path, classes: tuple[str, ...] = ()) -> None:
        """List the files.

        Args:
            folder: of the classes' folders.
            classes: their order; empty: the folders in alphabetical order.

        Raises:
            DataError: a folder is no class or holds no image, an image lies beside them, or a link
                leads elsewhere.
        """
        self.origin, self._folder = str(folder), folder
        files = sorted(path for path in folder.rglob("*") if _is_image(path))
        names = {path.relative_to(folder).parts[0] for path in files if path.parent != folder}
        loose = [path for path in files if path.parent == folder]
        if loose and names:
            raise DataError(
                f"{folder} holds images beside folders of classes, e.g. {loose[0].name!r}. Move "
                "each into the folder of its class."
            )
        root = folder.resolve()
        outside = next((p for p in files if not p.resolve().is_relative_to(root)), None)
        if outside is not None:
            raise DataError(
                f"{outside} is a link that leads out of {folder}. Copy the image there."
            )
        unknown = sorted(names - set(classes)) if classes else []
        if unknown:
            raise DataError(
                f"{folder} has the folder {unknown[0]!r}, which is none of [data.columns] classes "
                f"{list(classes)}."
            )
        if names and not classes:
            _check_filled(folder, names)
        self._files = files
        self.samples: int | None = len(files)
        self._classes = classes or tuple(sorted(names))
        self.columns: Mapping[str, Column] = {"image": Column("image"), "id": Column("text")}
        if names:
            self.columns |= {
                "label": Column("number", "int64", classes=self._classes),
                "class": Column("text"),
            }

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """See `DataReader.blocks`."""
        places = {name: place for place, name in enumerate(self._classes)}
        for start in range(0, len(self._files), _FILES_AT_A_TIME):
            files = self._files[start : start + _FILES_AT_A_TIME]
            ids = [path.relative_to(self._folder).as_posix() for path in files]
            found: dict[str, object] = {"id": np.array(ids, np.str_)}
            if "image" in names:
                found["image"] = [path.read_bytes() for path in files]
            if "label" in self.columns:
                owners = [text.partition("/")[0] for text in ids]
                found["class"] = np.array(owners, np.str_)
                found["label"] = np.array([places[name] for name in owners], np.int64)
            yield {name: found[name] for name in names}  # type: ignore[misc]

    def content_digest(self) -> Sha256:
        """Of the images, their names and their classes."""
        names = [path.relative_to(self._folder).as_posix() for path in self._files]
        return sha256_bytes(canonical_json([files_digest(self._files), names, self._classes]))


def _check_filled(folder: Path, filled: set[str]) -> None:
    """Refuse the folder of a class without images: labels after it would be one too small.

    Hidden folders are those of tools, not of classes.
    """
    inner = {path.name for path in folder.iterdir() if path.is_dir()}
    empty = sorted(name for name in inner - filled if not name.startswith("."))
    if empty:
        raise DataError(
            f"{folder} has the folder {empty[0]!r} without an image that can be read, and labels "
            "are numbered by the folders. Put the images of this class there, remove the folder if "
            "it is no class, or state all classes in the order of the model's outputs: classes, "
            "under [data.columns]."
        )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and path.is_file()
