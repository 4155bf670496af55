"""From a policy's [data] to a data set: which form it is, and who reads it."""

import glob
import threading
from pathlib import Path

from enginegate.data import DataHeader, DataSet, data_header, read_data, read_header
from enginegate.data_sources.conversion import converted_data, first_rows
from enginegate.data_sources.function import FunctionReader
from enginegate.data_sources.hf_dataset import HfDatasetReader, is_hf_dataset
from enginegate.data_sources.image_folder import ImageFolderReader, holds_images
from enginegate.data_sources.mlflow_dataset import fetched_dataset
from enginegate.data_sources.numpy_files import NumpyReader
from enginegate.data_sources.parquet import ParquetReader
from enginegate.data_sources.reader import DataReader
from enginegate.errors import DataError
from enginegate.policy.data import DataSource, data_source
from enginegate.workspace import Workspace

_PARQUET = (".parquet", ".pq")
# What functions gave this process, by their names and how they were read: each is called once.
_returned: dict[tuple[str, ...], DataSet] = {}
_returning = threading.Lock()


def load_data(source: DataSource | Path) -> DataSet:
    """The samples of a set of any form; memory-mapped where they may be larger than memory.

    Data that is no NumPy file is converted once into the workspace of the policy's project.

    Raises:
        DataError: it is missing or damaged, a column is missing, or it is no data of a known form.
        PolicyError: it is a function, and the policy does not allow code.
        TrackingError: it is a dataset of MLflow, which cannot be reached.
    """
    source = _source(source)
    if source.scheme == "python":
        return _returned_data(source)
    path = _path(source)
    if _is_plain(path, source):
        return read_data(path)
    return converted_data(_open_path(path, source), source, _store(source))


def read_source_header(source: DataSource | Path) -> DataHeader | None:
    """What a set of any form holds, by its headers and its first rows.

    None for a function, which only its call would tell.

    Raises:
        DataError: as `load_data`.
        TrackingError: as `load_data`.
    """
    source = _source(source)
    if source.scheme == "python":
        return None
    path = _path(source)
    if _is_plain(path, source):
        return read_header(path)
    reader = _open_path(path, source)
    count = reader.samples or 0
    found = first_rows(reader, source).arrays()
    types = {name: (array.dtype, (count, *array.shape[1:])) for name, array in found.items()}
    return data_header(types, reader.origin)


def open_reader(source: DataSource | Path) -> DataReader:
    """The reader of a set's form, NumPy's own files included.

    Raises:
        DataError: as `load_data`.
        PolicyError: as `load_data`.
        TrackingError: as `load_data`.
    """
    source = _source(source)
    if source.scheme == "python":
        return FunctionReader(source)
    return _open_path(_path(source), source)


def _returned_data(source: DataSource) -> DataSet:
    rules = (source.columns.digest, source.images.digest)
    key = (source.written, str(source.root), str(source.allow_code), *rules)
    with _returning:
        if key not in _returned:
            reader = FunctionReader(source)
            _returned[key] = converted_data(reader, source, _store(source))
        return _returned[key]


def _source(source: DataSource | Path) -> DataSource:
    return source if isinstance(source, DataSource) else data_source(source)


def _workspace(source: DataSource) -> Workspace:
    return Workspace.of_project(source.root)


def _store(source: DataSource) -> Path:
    """The folder of converted data, which only its owner may open."""
    folder = _workspace(source).data
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _path(source: DataSource) -> Path:
    """Where the data lies on this machine; a dataset of MLflow is looked up, or copied here."""
    path = source.path
    if path is None:
        uri = _workspace(source).tracking_uri
        path = fetched_dataset(source, _store(source), tracking_uri=uri)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(
            f"{path} is neither a file nor a folder: reading a pipe or a device may never end."
        )
    return path


def _is_plain(path: Path, source: DataSource) -> bool:
    """Whether it is NumPy's own form, with arrays called as a data set's."""
    return not source.mapped and _is_numpy(path) and path.suffix != ".npy"


def _is_numpy(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("*.npy"))
    return not (path.suffix in _PARQUET or is_hf_dataset(path) or _matches(path))


def _open_path(path: Path, source: DataSource) -> DataReader:
    """The reader of a file, a folder, or a pattern of Parquet files."""
    padded = source.columns.padded
    if not path.is_dir() and (files := _matches(path)):
        return ParquetReader(files, str(path), padded)
    if path.suffix in _PARQUET and not path.is_dir():
        return ParquetReader([path], str(path), padded)
    if is_hf_dataset(path):
        return HfDatasetReader(path, padded)
    if not path.is_dir() or any(path.glob("*.npy")):
        return NumpyReader(path)
    parquet = sorted(
        each for ending in _PARQUET for each in path.glob(f"*{ending}") if each.is_file()
    )
    if parquet:
        return ParquetReader(parquet, str(path), padded)
    if holds_images(path):
        return ImageFolderReader(path, source.columns.classes)
    raise DataError(
        f"{path} holds no data of a form that is known: .npy or Parquet files, a Hugging Face "
        "dataset (save_to_disk), or images in folders of their classes. docs/data.md has the forms."
    )


def _matches(path: Path) -> list[Path]:
    """The Parquet files of a pattern such as ``data/test-*.parquet``; none of a plain path."""
    if path.suffix not in _PARQUET or path.exists() or not glob.has_magic(path.name):
        return []
    return sorted(each for each in path.parent.glob(path.name) if each.is_file())
