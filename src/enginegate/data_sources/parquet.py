"""The one door to Parquet and Arrow. A tensor column is a list whose field says its shape.

docs/data.md says which columns can be read; docs/shadow.md how those of recorded requests are
called.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.candidate import Sha256
from enginegate.data import Array
from enginegate.data_sources.reader import BLOCK_BYTES, BLOCK_ROWS, Block, Column, files_digest
from enginegate.errors import DataError
from enginegate.messages import counted
from enginegate.policy.data import Padding

RowShapes = Mapping[str, tuple[int, ...]]

_SHAPE = b"shape"
_PRIVATE = 0o600
# A column of a row group is read through a buffer of this size; else a file is read whole at once.
_BUFFER_BYTES = 1 << 20
_ROWS_WITH_A_LIST = 256
# What encoders of data sets call the two halves of an image.
_ENCODED = "bytes"


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


class ParquetReader:
    """One Parquet file, or several whose rows follow one another."""

    form = "Parquet"

    def __init__(
        self, files: Sequence[Path], origin: str, padded: Mapping[str, Padding] | None = None
    ) -> None:
        """Read the schema and the first rows.

        Args:
            padded: how columns of lists of several lengths are filled up.

        Raises:
            DataError: there is no Parquet file, or the files differ in their columns.
        """
        self.origin, self._files, self._padded = origin, tuple(files), padded or {}
        count, described = 0, None
        for path in self._files:
            with _opened(path) as file:
                count += file.metadata.num_rows
                described = described or _described(path, file, self._padded)
                self._check_alike(path, file.schema_arrow.names, described)
        self.samples: int | None = count
        self.columns: Mapping[str, Column] = described or {}

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """See `DataReader.blocks`."""
        for path in self._files:
            with _opened(path) as file:
                for batch in _batches(path, file, list(names)):
                    yield from table_blocks(path, batch, names, self._padded)

    def content_digest(self) -> Sha256:
        """Of the files."""
        return files_digest(self._files)

    def _check_alike(self, path: Path, names: list[str], described: Mapping[str, Column]) -> None:
        if set(names) != set(described):
            other = sorted(set(names) ^ set(described))
            raise DataError(
                f"{path} and {self._files[0]} differ in their columns: only one of them has "
                f"{', '.join(other)}. Put files of one table into one folder."
            )


def table_blocks(
    path: Path, table: Any, names: Sequence[str], padded: Mapping[str, Padding]
) -> Iterator[Block]:
    """`table_block` of some rows at a time: as many as take little memory once they are filled up.

    A short list of a column that is filled up to millions of values takes none in the table.
    """
    row_bytes = 0.0
    shapes: dict[str, tuple[int, ...]] = {}
    for name in padded.keys() & set(names):
        found = _one_value(path, table.schema.field(name), _whole(table.column(name)))
        if found is not None:
            row_bytes += padded[name].length * found.nbytes
            shapes[name] = found.shape[1:]
    step = max(1, min(table.num_rows, int(BLOCK_BYTES / max(1.0, row_bytes))))
    for start in range(0, table.num_rows, step):
        yield table_block(path, table.slice(start, step), names, padded, shapes)


def table_block(
    path: Path,
    table: Any,
    names: Sequence[str],
    padded: Mapping[str, Padding],
    shapes: RowShapes | None = None,
) -> Block:
    """Columns of an Arrow table or batch: arrays, and images as bytes; lists filled up as said.

    Args:
        path: what messages name.
        table: the rows.
        names: of the columns.
        padded: how columns of lists of several lengths are filled up.
        shapes: of one value of such a list, for rows that have none.

    Raises:
        DataError: a value is missing, rows differ in length, or a column is of no kind that can be
            read.
    """
    block: dict[str, Array | list[bytes]] = {}
    for name in names:
        field, column = table.schema.field(name), _whole(table.column(name))
        encoded = _is_encoded(field.type)
        if encoded:
            block[name] = _cells(path, field, column)
        elif name in padded:
            block[name] = _filled(path, field, column, padded[name], (shapes or {}).get(name))
        else:
            block[name] = _array(path, field, column, None)
    return block


def table_columns(path: Path, first: Any, padded: Mapping[str, Padding]) -> dict[str, Column]:
    """What the columns of an Arrow table are, by its schema and its first rows (`rows_to_see`)."""
    return {field.name: _column(path, field, first, padded) for field in first.schema}


def rows_to_see(padded: Mapping[str, Padding]) -> int:
    """So many first rows that show each column's shape: a list to fill up may be empty."""
    return _ROWS_WITH_A_LIST if padded else 1


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
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except FileNotFoundError as error:
        raise DataError(f"There is no data at {path}.") from error
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path) from error


def _described(path: Path, file: Any, padded: Mapping[str, Padding]) -> dict[str, Column]:
    names = list(file.schema_arrow.names)
    first = next(_batches(path, file, names, rows=rows_to_see(padded)), None)
    if first is None:
        raise DataError(f"{path} holds no rows.")
    return table_columns(path, first, padded)


def _column(path: Path, field: Any, first: Any, padded: Mapping[str, Padding]) -> Column:
    if _is_encoded(field.type):
        return Column("image")
    try:
        seen = _first_with_a_value(_whole(first.column(field.name))) if field.name in padded else 0
        rows = first.slice(seen, 1)
        (values,) = table_block(path, rows, [field.name], padded).values()
        array = np.asarray(values)
    except DataError as error:
        return Column("other", str(field.type), why=str(error))
    if array.dtype.kind == "U":
        return Column("text", "", array.shape[1:])
    if array.dtype.kind not in "biuf":
        return Column("other", str(field.type))
    return Column("number", array.dtype.name, array.shape[1:])


def _first_with_a_value(column: Any) -> int:
    """The first row whose list is not empty, else the first."""
    pa, _ = _vendor()
    lists = column.storage if isinstance(column, pa.ExtensionArray) else column
    if not _is_list(pa, lists.type):
        return 0
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    return int(np.argmax(np.nan_to_num(lengths) > 0))


def _one_value(path: Path, field: Any, column: Any) -> Array | None:
    """The first value of a column's lists, shape ``(1, ...)``; None: there is none."""
    pa, _ = _vendor()
    lists = column.storage if isinstance(column, pa.ExtensionArray) else column
    if not _is_list(pa, lists.type):
        return None
    inner = lists.slice(_first_with_a_value(column), 1).flatten()
    return _array(path, field, inner.slice(0, 1), None) if len(inner) else None


def _is_encoded(kind: Any) -> bool:
    """Whether its values are files' bytes: of images, as far as data sets go."""
    pa, _ = _vendor()
    if pa.types.is_struct(kind):
        return bool(kind.get_field_index(_ENCODED) >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _cells(path: Path, field: Any, column: Any) -> list[bytes]:
    """The bytes of each row; a path beside them is not followed."""
    pa, _ = _vendor()
    values = column.field(_ENCODED) if pa.types.is_struct(column.type) else column
    if values.null_count:
        raise DataError(
            f"{path}: column {field.name} has {counted(values.null_count, 'image')} without its "
            "bytes. Files beside the data are not followed: write the images into it."
        )
    return [bytes(value) for value in values.to_pylist()]


def _whole(column: Any) -> Any:
    """A column's rows in one piece."""
    pa, _ = _vendor()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _batches(path: Path, file: Any, names: list[str], *, rows: int = BLOCK_ROWS) -> Iterator[Any]:
    """Some rows at a time: ``rows`` at most, and no more than take little memory."""
    first = next(_of_size(path, file, names, 1), None)
    if first is not None:
        yield from _of_size(path, file, names, min(rows, _rows_at_a_time(file, names, first)))


def _of_size(path: Path, file: Any, names: list[str], rows: int) -> Iterator[Any]:
    pa, _ = _vendor()
    batches = file.iter_batches(batch_size=rows, columns=names)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(path) from error
        if batch is None:
            return
        yield batch


def _rows_at_a_time(file: Any, names: list[str], first: Any) -> int:
    """So many that they take little memory decoded.

    Compressed or repeated values make a file far smaller than its rows, so its size is one measure
    of four: a row group's count of values, sizes that the schema fixes, and the first row's bytes
    are the others; the largest counts.
    """
    fields = [field for field in file.schema_arrow if field.name in names]
    row_bytes = max(float(first.nbytes), sum(_fixed_bytes(field.type)[0] for field in fields))
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        chunks = [group.column(place) for place in range(group.num_columns)]
        chosen = [
            (chunk, _fixed_bytes(field.type)[1])
            for field in fields
            for chunk in chunks
            if f"{chunk.path_in_schema}.".startswith(f"{field.name}.")
        ]
        stored = sum(chunk.total_uncompressed_size for chunk, _ in chosen)
        values = sum(chunk.num_values * item for chunk, item in chosen)
        row_bytes = max(row_bytes, max(stored, values) / max(1, group.num_rows))
    return max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / max(1.0, row_bytes))))


def _fixed_bytes(kind: Any) -> tuple[float, float]:
    """The bytes of one row as far as its type fixes them, and of one of its values."""
    pa, _ = _vendor()
    values = 1
    while _is_list(pa, kind) or isinstance(kind, pa.BaseExtensionType):
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            values *= getattr(kind, "list_size", 1)
            kind = kind.value_type
    item = max(1.0, kind.bit_width / 8) if pa.types.is_primitive(kind) else 1.0
    return values * item, item


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


def _filled(
    path: Path,
    field: Any,
    column: Any,
    padding: Padding,
    each: tuple[int, ...] | None,
) -> Array:
    """Rows of lists of several lengths, shape ``(N, length, ...)``; ``each`` value's, if known."""
    pa, _ = _vendor()
    lists = column.storage if isinstance(column, pa.ExtensionArray) else column
    _check_whole(path, field, lists)
    if not _is_list(pa, lists.type):
        raise DataError(f"{path}: column {field.name} is to be filled up, and holds no lists.")
    sizes = getattr(lists, "offsets", None)
    even = np.full(len(lists), getattr(lists.type, "list_size", 0))
    lengths = even if sizes is None else np.diff(np.asarray(sizes))
    if lengths.max(initial=0) > padding.length:
        raise DataError(
            f"{path}: a list of column {field.name} has {lengths.max()} values, and [data.columns] "
            f"padded says {padding.length}. Raise it, or cut the lists when writing the data."
        )
    inner = lists.flatten()
    if _is_list(pa, inner.type) and not len(inner) and each is None:
        raise DataError(
            f"{path}: {counted(len(lists), 'row')} of column {field.name} have no value, so its "
            "shape does not show. Put samples that have some between them."
        )
    values = _array(path, field, inner, None if len(inner) else each)
    try:
        filled = np.full(
            (len(lists), padding.length, *values.shape[1:]), padding.fill, values.dtype
        )
    except OverflowError as error:
        raise DataError(
            f"{path}: column {field.name} holds {values.dtype}, which {padding.fill:g} is not."
        ) from error
    filled[np.arange(padding.length) < lengths[:, None]] = values
    return filled


def _values(path: Path, field: Any, values: Any) -> Array:
    pa, _ = _vendor()
    kinds, kind = pa.types, values.type
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_dictionary(kind):
        return np.array([str(value) for value in values.to_pylist()], np.str_)
    if kinds.is_primitive(kind):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    raise DataError(
        f"{path}: column {field.name} is of type {kind}; columns hold numbers, text, or lists of "
        "numbers. docs/data.md and docs/shadow.md say which."
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
            f"{path}: rows of column {field.name} differ in length. Write one file for each "
            "length, or say what they are filled up to: padded, under [data.columns]."
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
