"""What is in data that nobody has described yet: for a person, and for a first policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from enginegate.candidate import TensorSpec
from enginegate.data import DataSet
from enginegate.data_sources.conversion import first_rows
from enginegate.data_sources.dispatch import open_reader
from enginegate.data_sources.reader import Column, DataReader
from enginegate.errors import InputError
from enginegate.policy.data import DataColumns, DataSource, InputColumns, data_source

_LABELS = ("label", "labels", "target", "y", "class", "targets")
_IDS = ("id", "ids")
# A column of more values than this in its first rows is no slice: each needs samples of its own.
_MOST_SLICES = 12


@dataclass(frozen=True, slots=True)
class DataDescription:
    """Data of any form, by its headers and its first rows.

    Attributes:
        form: what people call it, e.g. ``Parquet``.
        samples: how many it holds; None: a function, which only its end would tell.
        columns: what it has, by name, before any is an input or a label.
        values: how many different values each column of text or whole numbers has in the first
            rows.
        inputs: as the data set will have them, by name, the first axis -1; empty with a problem.
        labels: arrays of labels, e.g. ``label`` or ``label.price``.
        slices: names of its slice columns.
        classes: names of the label's classes in their order; empty where not known.
        problem: why it is no data set yet: mostly that no column is called as an input.
    """

    origin: str
    form: str
    samples: int | None
    columns: Mapping[str, Column]
    values: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    problem: str = ""


def describe_data(source: DataSource | Path | str) -> DataDescription:
    """Look at data of any form; nothing is converted, and only the first rows are read.

    Raises:
        DataError: it is missing, damaged, or of no form that is known.
        PolicyError: it is a function, and the source does not allow code.
        TrackingError: it is a dataset of MLflow, which cannot be reached.
    """
    source = data_source(source) if isinstance(source, str | Path) else source
    reader = open_reader(source)
    values = _values(reader)
    try:
        rows = first_rows(open_reader(source), source)
    except InputError as error:
        return DataDescription(
            reader.origin, reader.form, reader.samples, reader.columns, values, problem=str(error)
        )
    label = source.columns.label or "label"
    known = reader.columns[label].classes if label in reader.columns else ()
    return DataDescription(
        reader.origin,
        reader.form,
        reader.samples,
        reader.columns,
        values,
        inputs=_inputs(rows),
        labels=tuple(name for name in rows.arrays() if name.split(".")[0] == "label"),
        slices=tuple(rows.slices),
        classes=source.columns.classes or known,
    )


def suggest_columns(found: DataDescription, inputs: tuple[TensorSpec, ...]) -> DataColumns:
    """Which columns probably are what, for a person to correct.

    An input is the column of its name, else of a like name, else the only column that fits it; an
    input of vectors may be all columns of numbers that are left, when they are as many. A label and
    an id go by their usual names, or a label is the one column of whole numbers beside them; slices
    are columns of few values.

    Args:
        found: the data.
        inputs: of the model.
    """
    if found.inputs and set(found.inputs) == {spec.name for spec in inputs}:
        return DataColumns()
    free = {name: c for name, c in found.columns.items() if c.kind != "other"}
    label = next((name for name in _LABELS if name in free and not free[name].shape), None)
    label = label or _one_too_many(inputs, free)
    sample_id = next((name for name in _IDS if name in free), None)
    for taken in {label, sample_id} - {None}:
        free.pop(str(taken))
    chosen: dict[str, InputColumns] = {}
    for spec in inputs:
        columns = _columns_for(spec, free, only=len(inputs) == 1)
        if not columns:
            continue
        dtypes = {free[name].dtype for name in columns}
        differs = dtypes != {spec.dtype} and free[columns[0]].kind == "number"
        chosen[spec.name] = InputColumns.model_validate(
            {"columns": columns, "dtype": spec.dtype if differs else None}
        )
        free = {name: column for name, column in free.items() if name not in columns}
    slices = tuple(
        name
        for name, column in free.items()
        if name not in _LABELS
        and not column.shape
        and 1 < found.values.get(name, 0) <= _MOST_SLICES
    )
    return DataColumns(inputs=chosen, label=label, slices=slices, id=sample_id)


def _one_too_many(inputs: tuple[TensorSpec, ...], free: Mapping[str, Column]) -> str | None:
    """The only whole numbers among one column more than the model's vector takes: its classes."""
    numbers = [n for n, column in free.items() if column.kind == "number" and not column.shape]
    whole = [name for name in numbers if free[name].dtype.startswith(("int", "uint", "bool"))]
    if len(inputs) != 1 or inputs[0].shape[1:] != (len(numbers) - 1,) or len(whole) != 1:
        return None
    return whole[0]


def _columns_for(spec: TensorSpec, free: Mapping[str, Column], *, only: bool) -> tuple[str, ...]:
    """The columns of one input; none where nothing fits."""
    row = spec.shape[1:]

    def fits(column: Column) -> bool:
        if column.kind == "image":
            return len(row) == 3  # noqa: PLR2004 - channels, height, width
        same_rank = len(column.shape) == len(row)
        return (
            column.kind == "number"
            and same_rank
            and all(axis in {-1, size} for axis, size in zip(row, column.shape, strict=True))
        )

    fitting = [name for name, column in free.items() if fits(column)]
    named = [name for name in (spec.name, f"input.{spec.name}") if name in fitting]
    named = named or get_close_matches(spec.name, fitting, n=1)
    if named or (only and len(fitting) == 1):
        return ((named or fitting)[0],)
    numbers = tuple(n for n, c in free.items() if c.kind == "number" and not c.shape)
    vector = len(row) == 1 and only
    return numbers if vector and numbers and row[0] in {-1, len(numbers)} else ()


def _inputs(rows: DataSet) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name=name, dtype=array.dtype.name, shape=(-1, *array.shape[1:]))
        for name, array in rows.inputs.items()
    }


def _values(reader: DataReader) -> dict[str, int]:
    names = [
        name
        for name, column in reader.columns.items()
        if not column.shape and (column.kind == "text" or column.dtype[:3] in {"int", "uin", "boo"})
    ]
    block = next(iter(reader.blocks(names)), {}) if names else {}
    return {name: len(np.unique(np.asarray(values))) for name, values in block.items()}
