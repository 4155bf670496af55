"""Imports samples that other systems recorded, as Parquet or NPZ. docs/shadow.md: the columns.

Only columns of the grammar are imported; other columns of a file are left out and named.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from enginegate.data import Array, read_data
from enginegate.data_sources.parquet import RowShapes, column_names, read_columns
from enginegate.errors import DataError
from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import NO_ARRIVAL, NO_LABEL, NO_VERSION, STAGES, RecordBatch
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import SampleInfo, SampleOrigin
from enginegate.shadow.store import new_sample, new_sample_path, sample_info

_ROWS = 1024
_GRAMMAR = re.compile(
    r"(input|output|slice|parameter)\..+|request_id|arrival|arrival_ns|model_version|label"
    rf"|stage\.({'|'.join(STAGES)})_us"
)
_NPZ = frozenset({".npz", ".npy", ""})


def import_sample(
    source: Path, model: str, wanted: Shadow, *, home: Path, shapes: RowShapes | None = None
) -> tuple[Path, SampleInfo]:
    """Import a sample, redacted and sliced as the policy says.

    Args:
        source: a ``.parquet`` file, an ``.npz`` file, or a folder of ``.npy`` (docs/data.md).
        model: whose requests they are.
        wanted: redaction and slices; its limits do not apply.
        home: where samples are kept.
        shapes: of one row, by column name, where a Parquet file does not say it.

    Returns:
        The new sample's folder and description.

    Raises:
        DataError: the file cannot be read, or a column is missing or of the wrong kind.
    """
    now = datetime.now(tz=UTC)
    target = new_sample_path(home, model, now)
    imported, left_out = _columns_of(source)
    origin = SampleOrigin(f"import of {source.name}", model, now)
    with new_sample(target, origin, Preparation.of(wanted)) as writer:
        writer.left_out = left_out
        for columns in _read(source, imported, shapes):
            writer.add(_batch(source, columns))
    return target, sample_info(target)


def _columns_of(source: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns to import, and those to leave out."""
    if source.suffix in _NPZ:
        return (), ()
    names = column_names(source)
    imported = tuple(name for name in names if _GRAMMAR.fullmatch(name))
    if not any(name.startswith(("input.", "output.")) for name in imported):
        raise DataError(
            f"{source} holds columns {', '.join(names) or '(none)'}; none is called input.NAME or "
            "output.NAME.\nRename them after the model's tensors. docs/shadow.md has the grammar."
        )
    return imported, tuple(name for name in names if name not in imported)


def _read(
    source: Path, imported: tuple[str, ...], shapes: RowShapes | None
) -> Iterator[Mapping[str, Array]]:
    if source.suffix not in _NPZ:
        yield from read_columns(source, shapes, only=imported)
        return
    data = read_data(source)
    columns = data.arrays()
    columns["request_id"] = columns.pop("id")
    for start in range(0, len(data), _ROWS):
        yield {name: column[start : start + _ROWS] for name, column in columns.items()}


def _batch(source: Path, columns: Mapping[str, Array]) -> RecordBatch:
    rows = len(next(iter(columns.values())))
    return RecordBatch(
        inputs=_named(columns, "input."),
        outputs=_named(columns, "output."),
        requests=np.arange(rows),
        request_ids=columns.get("request_id", np.full(rows, "")).astype(np.str_),
        arrival_ns=_arrivals(source, columns, rows),
        model_versions=_whole(source, columns, "model_version", rows, NO_VERSION),
        stages_us={
            stage: columns.get(f"stage.{stage}_us", np.full(rows, np.nan)).astype(np.float64)
            for stage in STAGES
        },
        labels=_whole(source, columns, "label", rows, NO_LABEL),
        parameters={name: c.astype(np.str_) for name, c in _named(columns, "parameter.").items()},
        slices={name: c.astype(np.str_) for name, c in _named(columns, "slice.").items()},
    )


def _arrivals(source: Path, columns: Mapping[str, Array], rows: int) -> Array:
    times = columns.get("arrival")
    if times is None:
        return _whole(source, columns, "arrival_ns", rows, NO_ARRIVAL)
    if times.dtype.kind != "M":
        raise DataError(
            f"{source}: column arrival is {times.dtype}, it must hold timestamps. Whole "
            "nanoseconds go into arrival_ns."
        )
    return times.astype("datetime64[ns]").astype(np.int64)


def _whole(source: Path, columns: Mapping[str, Array], name: str, rows: int, missing: int) -> Array:
    column = columns.get(name)
    if column is None:
        return np.full(rows, missing, np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise DataError(f"{source}: column {name} is {column.dtype}, it must hold whole numbers.")
    return column.astype(np.int64)


def _named(columns: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): np.asarray(column)
        for name, column in columns.items()
        if name.startswith(prefix)
    }
