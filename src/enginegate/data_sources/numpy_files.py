"""NumPy's own files, where their arrays are not called as a data set's: columns like any other."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from enginegate.candidate import Sha256
from enginegate.data import Array, array_types, load_arrays
from enginegate.data_sources.reader import BLOCK_BYTES, BLOCK_ROWS, Block, Column, files_digest
from enginegate.errors import DataError


class NumpyReader:
    """An ``.npz`` file, a folder of ``.npy`` files, or one ``.npy`` file (a column of its name)."""

    form = "NumPy"

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            DataError: it is missing, damaged or pickled, or its arrays differ in length.
        """
        self.origin, self._path = str(path), path
        self._single = path.suffix == ".npy"
        if self._single:
            array = _single_array(path)
            types = {path.stem: (array.dtype, array.shape)}
        else:
            types = array_types(path)
        lengths = {name: shape[0] if shape else 0 for name, (_, shape) in types.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"{path}: arrays differ in length: {lengths}. Each needs one row a sample."
            )
        self.samples = next(iter(lengths.values()), 0)
        self.columns: Mapping[str, Column] = {
            name: _column_of(dtype, shape) for name, (dtype, shape) in types.items()
        }

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """See `DataReader.blocks`."""
        arrays = (
            {self._path.stem: _single_array(self._path)}
            if self._single
            else load_arrays(self._path)
        )
        yield from rows_of({name: arrays[name] for name in names})

    def content_digest(self) -> Sha256:
        """Of the files."""
        folder = self._path.is_dir()
        return files_digest(sorted(self._path.glob("*.npy")) if folder else [self._path])


def rows_of(arrays: Mapping[str, Array]) -> Iterator[Block]:
    """Some rows of arrays of one length at a time."""
    count = len(next(iter(arrays.values())))
    row_bytes = sum(array.nbytes for array in arrays.values()) / max(1, count)
    step = max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / max(1.0, row_bytes))))
    for start in range(0, count, step):
        yield {name: array[start : start + step] for name, array in arrays.items()}


def _column_of(dtype: "np.dtype[np.generic]", shape: tuple[int, ...]) -> Column:
    if dtype.kind in "US":
        return Column("text", "", shape[1:])
    if dtype.kind not in "biuf":
        return Column("other", dtype.name)
    return Column("number", dtype.name, shape[1:])


def _single_array(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"There is no data at {path}. The policy's [data] names it.") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as .npy: {error}. Write it with numpy.save; pickled arrays "
            "are refused."
        ) from error
    return array
