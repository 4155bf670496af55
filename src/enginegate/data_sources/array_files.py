"""Arrays written to ``.npy`` files some rows at a time, so that none is ever whole in memory."""

from collections.abc import Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from enginegate.data import Array
from enginegate.errors import DataError

_PRIVATE = 0o600


class ArrayFiles:
    """New arrays in a folder, one file each, called by number: names may hold any sign."""

    def __init__(self, folder: Path, origin: str) -> None:
        self._folder, self._origin = folder, origin
        self._files: dict[str, _NumberFile | _TextFile] = {}
        self.samples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    def append(self, rows: Mapping[str, Array]) -> None:
        """Some rows of every array.

        Raises:
            DataError: a value has another type or shape than those before it, or the arrays
                differ in length.
        """
        lengths = {name: len(array) for name, array in rows.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self._origin}: arrays differ in length: {lengths}.")
        for name, array in rows.items():
            if name not in self._files:
                path = self._folder / f"{len(self._files)}.npy"
                new = _TextFile if array.dtype.kind in "US" else _NumberFile
                self._files[name] = new(path, array)
            self._files[name].append(array, f"{self._origin}: {name}")
        self.samples += next(iter(lengths.values()), 0)

    def finish(self) -> dict[str, str]:
        """Complete the files; the arrays' names by file."""
        for file in self._files.values():
            file.finish()
        return {file.path.name: name for name, file in self._files.items()}


def map_arrays(folder: Path, names: Mapping[str, str]) -> dict[str, Array]:
    """Arrays by name, memory-mapped.

    Raises:
        OSError, ValueError: a file is missing or damaged.
    """
    return {
        name: np.load(folder / file, mmap_mode="r", allow_pickle=False)
        for file, name in names.items()
    }


class _NumberFile:
    """Rows of one type and shape. NumPy leaves room in a header for a longer first axis."""

    def __init__(self, path: Path, like: Array) -> None:
        self.path, self._dtype, self._shape, self._rows = path, like.dtype, like.shape[1:], 0
        self._file = _created(path)
        self._header_bytes = self._write_header()

    def append(self, array: Array, name: str) -> None:
        if array.dtype != self._dtype or array.shape[1:] != self._shape:
            raise DataError(
                f"{name} has rows of {array.dtype} {array.shape[1:]} after rows of {self._dtype} "
                f"{self._shape}. Every row needs the same type and shape."
            )
        self._file.write(np.ascontiguousarray(array).data)
        self._rows += len(array)

    def finish(self) -> None:
        self._file.seek(0)
        if self._write_header() != self._header_bytes:
            raise RuntimeError(f"{self.path}: NumPy's header of {self._rows} rows has no room")

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> int:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


class _TextFile:
    """Texts of any length: kept in pieces until the longest is known."""

    def __init__(self, path: Path, like: Array) -> None:
        self.path, self._shape, self._width, self._rows = path, like.shape[1:], 1, 0
        self._pieces = _created(path.with_suffix(".pieces"))

    def append(self, array: Array, name: str) -> None:
        if array.shape[1:] != self._shape or array.dtype.kind not in "US":
            raise DataError(
                f"{name} has rows of {array.dtype} {array.shape[1:]} after texts of shape "
                f"{self._shape}. Every row needs the same type and shape."
            )
        texts = array.astype(np.str_)
        self._width = max(self._width, int(np.char.str_len(texts).max(initial=1)))
        self._rows += len(texts)
        np.save(self._pieces, texts, allow_pickle=False)

    def finish(self) -> None:
        whole = _NumberFile(self.path, np.empty((0, *self._shape), f"<U{self._width}"))
        try:
            for piece in self._read_pieces():
                whole.append(piece.astype(f"<U{self._width}"), self.path.name)
            whole.finish()
        finally:
            whole.close()
        self.close()
        self.path.with_suffix(".pieces").unlink()

    def close(self) -> None:
        self._pieces.close()

    def _read_pieces(self) -> Iterator[Array]:
        self._pieces.seek(0)
        read = 0
        while read < self._rows:
            piece: Any = np.load(self._pieces, allow_pickle=False)
            read += len(piece)
            yield piece


def _created(path: Path) -> BufferedRandom:
    path.touch(_PRIVATE, exist_ok=False)
    return path.open("r+b")
