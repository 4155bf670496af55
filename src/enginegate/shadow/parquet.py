"""The one door to Parquet. A tensor column is a list of fixed size whose field says its shape.

docs/shadow.md has the grammar of the columns' names.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.data import Array
from enginegate.errors import DataError
from enginegate.messages import counted

RowShapes = Mapping[str, tuple[int, ...]]

_SHAPE = b"shape"
_READ_BYTES = 4 << 20
_READ_ROWS = 4096
_PRIVATE = 0o600


class PartWriter:
    """One new Parquet file, readable by its owner only; all its rows have the same columns."""

    def __init__(self, path: Path, first: Mapping[str, Array]) -> None:
        """Create the file for rows that look like ``first``."""
        pa, pq = _vendor()
        fields = [_field(pa, name, array) for name, array in first.items()]
        self.path, self.rows = path, 0
        self._schema = pa.schema(fields)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE)
        self._file = os.fdopen(handle, "wb")
        self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")

    def write(self, columns: Mapping[str, Array]) -> None:
        """Append rows as one row group."""
        pa, _ = _vendor()
        arrays = [_arrow(pa, self._schema.field(name), array) for name, array in columns.items()]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self.rows += len(next(iter(columns.values())))

    def close(self) -> None:
        """Finish the file; without this it is no Parquet."""
        self._writer.close()
        self._file.close()


def read_columns(
    path: Path, shapes: RowShapes | None = None, *, only: Sequence[str] | None = None
) -> Iterator[dict[str, Array]]:
    """Some rows of every column at a time.

    Args:
        path: a Parquet file, ours or another system's.
        shapes: of a row, by column name, where the file does not say it.
        only: the columns to read; None reads all.

    Raises:
        DataError: it is no Parquet file, or a column is not of a kind that can be read.
    """
    with _opened(path) as file:
        fields = {field.name: field for field in file.schema_arrow}
        names = list(fields) if only is None else list(only)
        for batch in _batches(path, file, names):
            yield {
                name: _array(path, fields[name], batch.column(name), (shapes or {}).get(name))
                for name in names
            }


def column_names(path: Path) -> tuple[str, ...]:
    """The columns of a Parquet file.

    Raises:
        DataError: it is none.
    """
    with _opened(path) as file:
        return tuple(file.schema_arrow.names)


def _vendor() -> tuple[Any, Any]:
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415

    return pa, pq


def _opened(path: Path) -> Any:
    pa, pq = _vendor()
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise DataError(f"There is no data at {path}.") from error
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path) from error


def _batches(path: Path, file: Any, names: list[str]) -> Iterator[Any]:
    pa, _ = _vendor()
    batches = file.iter_batches(batch_size=_rows_at_a_time(file), columns=names)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(path) from error
        if batch is None:
            return
        yield batch


def _rows_at_a_time(file: Any) -> int:
    """So many that they take little memory: by the schema's size of a row, or the file's size.

    Compressed or repeated values make a file smaller than its rows; fixed sizes cannot.
    """
    sizes = [getattr(field.type, "list_size", 1) for field in file.schema_arrow]
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    stored = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
    row_bytes = max(8.0 * sum(sizes), stored)
    return max(1, min(_READ_ROWS, int(_READ_BYTES / row_bytes)))


def _not_parquet(path: Path) -> DataError:
    return DataError(
        f"{path} cannot be read as Parquet: it is damaged, cut short, or something else.\n"
        "Write or record it again."
    )


def _field(pa: Any, name: str, array: Array) -> Any:
    if array.dtype.kind == "U":
        return pa.field(name, pa.string())
    kind = pa.from_numpy_dtype(array.dtype)
    if array.ndim == 1:
        return pa.field(name, kind)
    shape = array.shape[1:]
    return pa.field(
        name, pa.list_(kind, math.prod(shape)), metadata={_SHAPE: ",".join(map(str, shape))}
    )


def _arrow(pa: Any, field: Any, array: Array) -> Any:
    if array.dtype.kind == "U":
        return pa.array(array.tolist(), pa.string())
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, type=field.type)


def _array(path: Path, field: Any, column: Any, shape: tuple[int, ...] | None) -> Array:
    """One column's rows, shape ``(N, ...)``: as declared, else as the lists in it are nested."""
    pa, _ = _vendor()
    declared = shape or _declared_shape(pa, field)
    rows = len(column)
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    nested: tuple[int, ...] = ()
    _check_whole(path, field, values)
    while _is_list(pa, values.type):
        nested += (_length(path, field, values),)
        values = values.flatten()
        _check_whole(path, field, values)
    array = _values(path, field, values)
    shape = nested if declared is None else declared
    if rows * math.prod(shape) != len(array):
        raise DataError(
            f"{path}: a row of column {field.name} has {math.prod(nested)} values, shape "
            f"{shape} needs {math.prod(shape)}."
        )
    return array.reshape(rows, *shape)


def _values(path: Path, field: Any, values: Any) -> Array:
    pa, _ = _vendor()
    kinds, kind = pa.types, values.type
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_dictionary(kind):
        return np.array([str(value) for value in values.to_pylist()], np.str_)
    if kinds.is_primitive(kind):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    raise DataError(
        f"{path}: column {field.name} is of type {kind}; columns hold numbers, text, or lists of "
        "numbers. docs/shadow.md has the grammar."
    )


def _check_whole(path: Path, field: Any, values: Any) -> None:
    if values.null_count:
        raise DataError(
            f"{path}: column {field.name} has {counted(values.null_count, 'empty value')}; "
            "each row needs its own."
        )


def _length(path: Path, field: Any, lists: Any) -> int:
    lengths = np.diff(lists.offsets) if hasattr(lists, "offsets") else [lists.type.list_size]
    if len(set(np.asarray(lengths).tolist())) > 1:
        raise DataError(
            f"{path}: rows of column {field.name} differ in length. Write one file for each length."
        )
    return int(lengths[0]) if len(lengths) else 0


def _is_list(pa: Any, kind: Any) -> bool:
    kinds = pa.types
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _declared_shape(pa: Any, field: Any) -> tuple[int, ...] | None:
    if isinstance(field.type, pa.FixedShapeTensorType):
        return tuple(field.type.shape)
    text = (field.metadata or {}).get(_SHAPE)
    return tuple(int(axis) for axis in text.decode().split(",")) if text else None
