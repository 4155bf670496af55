"""The data of a first policy: what its columns are, and which samples int8 scales are found on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from enginegate.candidate import TensorSpec
from enginegate.cli.policy.first_policy import samples_to_set_aside
from enginegate.data import DataSet, write_data
from enginegate.data_sources import (
    DataDescription,
    describe_data,
    load_data,
    open_reader,
    suggest_columns,
)
from enginegate.errors import DataError, InputError
from enginegate.messages import counted
from enginegate.policy.data import DataColumns, DataSource, ImageRules, InputColumns, data_source
from enginegate.report.tables import print_hanging

# Two copies of more than this are no favour to anybody's disk.
_MOST_COPIED = 1 << 30
_CLASSES_READ = 200_000
_IMAGE_AXES = 4
_LABELS = ("label", "labels", "target", "targets", "y")
# Rows of any numbers: what a classical model takes, under any name.
_TABLE = (TensorSpec(name="features", dtype="float32", shape=(-1, -1)),)


@dataclass(frozen=True, slots=True)
class ColumnFlags:
    """What a person said about the data's columns.

    Attributes:
        inputs: ``NAME=COLUMN`` or ``NAME=COLUMN,COLUMN``.
    """

    inputs: Sequence[str] = ()
    label: str | None = None
    slices: Sequence[str] = ()

    def over(
        self, suggested: DataColumns, found: DataDescription, specs: Sequence[TensorSpec]
    ) -> DataColumns:
        """A suggestion with what was said in its place.

        Args:
            found: the data.
            specs: inputs of the model, as far as they are known.

        Raises:
            InputError: an input is not said as NAME=COLUMN.
        """
        inputs = dict(suggested.inputs)
        for text in self.inputs:
            name, _, listed = text.partition("=")
            columns = tuple(listed.split(","))
            if not name or not all(columns):
                raise InputError(f"--input {text}: must be NAME=COLUMN, or NAME=COLUMN,COLUMN.")
            inputs = {n: each for n, each in inputs.items() if not {*each.columns} & {*columns}}
            wanted = next((spec.dtype for spec in specs if spec.name == name), "float32")
            given = {found.columns[each].dtype for each in columns if each in found.columns}
            numbers = given and "" not in given and given != {wanted}
            inputs[name] = InputColumns.model_validate(
                {"columns": columns, "dtype": wanted if numbers else None}
            )
        changes: dict[str, object] = {"inputs": inputs}
        if self.label is not None:
            changes["label"] = self.label
        if self.slices:
            changes["slices"] = tuple(self.slices)
        return suggested.model_copy(update=changes)


class DescribedData(NamedTuple):
    """A set of data with what its columns probably are.

    Attributes:
        numbers: a column of labels that are numbers, of an output whose name is not known yet.
        unread: a sentence for each column that is called as labels are, and holds none.
    """

    source: DataSource
    numbers: str | None = None
    unread: tuple[str, ...] = ()

    def labelling(self, output: str) -> DataSource:
        """The set with its numbers as labels of an output."""
        if self.numbers is None:
            return self.source
        columns = self.source.columns.model_copy(update={"labels": {output: self.numbers}})
        return replace(self.source, columns=columns)


def described_source(
    written: str, root: Path, flags: ColumnFlags, inputs: tuple[TensorSpec, ...]
) -> DescribedData:
    """A set of data with what its columns probably are.

    Args:
        written: as a person named it: a path below the current folder, or an address.
        root: the policy's project.
        flags: what the person said about columns; it goes before what is guessed.
        inputs: of the model, as far as they are known.

    Raises:
        DataError: it is missing, or of no form that is known; or no column could be an input.
    """
    source = _source(written, root)
    if source.scheme == "python":
        return DescribedData(replace(source, allow_code=True))
    found = describe_data(source)
    unread = tuple(_unread_labels(found))
    has_images = any(column.kind == "image" for column in found.columns.values())
    if found.inputs and flags == ColumnFlags() and not has_images:
        return DescribedData(source, unread=unread)
    columns = flags.over(suggest_columns(found, inputs or _TABLE), found, inputs)
    if not columns.inputs and not found.inputs:
        wanted = f"The model takes {', '.join(map(str, inputs))}. " if inputs else ""
        raise DataError(
            f"{found.origin} ({found.form}) has the columns {_listed(found)}. {wanted}None is "
            "called input.NAME, and which of them are the model's inputs does not show. Say it: "
            "--input NAME=COLUMN (or NAME=COLUMN,COLUMN for numbers side by side)."
        )
    label, numbers = columns.label or _shaped_label(found, columns), None
    if label is not None and label in found.columns:
        if found.columns[label].kind == "text":
            columns = columns.model_copy(update={"classes": _classes(source, label)})
        elif found.columns[label].shape or found.columns[label].dtype.startswith("float"):
            numbers, columns = label, columns.model_copy(update={"label": None})
    source = replace(source, columns=columns, images=_images(found, columns, inputs))
    return DescribedData(source, numbers, unread)


def set_aside_samples(
    source: DataSource,
    data: DataSet,
    folder: Path,
    *,
    wanted: int | None,
    out: Console,
) -> tuple[DataSource, DataSource | None]:
    """Split data where int8 needs samples and none were named.

    Args:
        folder: where the copies go.
        wanted: how many; None: as many as the data can spare; 0: none.

    Returns:
        The samples that judge, and those that scales are found on; both copies.
    """
    count = samples_to_set_aside(len(data)) if wanted is None else wanted
    if not 0 <= count < len(data):
        raise InputError(f"--set-aside {count}: the data holds {len(data)} samples.")
    size = sum(array.nbytes for array in data.arrays().values())
    why = "the data are too few to spare any" if not count else ""
    if count and (size > _MOST_COPIED or source.images != ImageRules()):
        why = "these data are not copied to spare any"
    if why:
        print_hanging(
            out,
            f"int8 is left out: it needs samples for its scales, and {why}. Name others with "
            "--calibration FILE.",
            "note    ",
        )
        return source, None
    # Evenly spaced, so that data that is sorted by class gives some of each.
    chosen = np.zeros(len(data), bool)
    chosen[np.linspace(0, len(data) - 1, count).round().astype(int)] = True
    paths = folder / "evaluation.npz", folder / "calibration.npz"
    for path, rows in zip(paths, (~chosen, chosen), strict=True):
        write_data(data.only(rows), path)
    print_hanging(
        out,
        f"{counted(int(chosen.sum()), 'sample')}, evenly spaced, are set aside for int8 scales; "
        f"the other {int((~chosen).sum()):,} judge candidates. Both are copies in {folder}. "
        "Name samples of your own with --calibration FILE.",
        "note    ",
    )
    evaluation, calibration = (
        data_source(path_below(path, source.root), source.root) for path in paths
    )
    return evaluation, calibration


def loaded(source: DataSource) -> DataSet:
    """The samples, with the flags that would mend what is wrong with them.

    Raises:
        DataError: as `data_sources.load_data`.
    """
    try:
        return load_data(source)
    except DataError as error:
        raise DataError(
            f"{error}\nColumns are named with --input NAME=COLUMN, --label COLUMN and --slice "
            "COLUMN; docs/data.md has the forms."
        ) from error


def data_tables(evaluation: DataSource, calibration: DataSource | None) -> Mapping[str, object]:
    """The policy's [data], as TOML would be read."""
    table: dict[str, object] = {"evaluation": evaluation.written}
    if calibration is not None:
        table["calibration"] = calibration.written
    for key in ("columns", "images"):
        rules = getattr(evaluation, key)
        stated = rules.model_dump(mode="json", exclude_defaults=True)
        if stated:
            table[key] = stated
    if evaluation.scheme == "python":
        table["allow_code"] = True
    return table


def path_below(path: Path, root: Path | None) -> str:
    """A path as the policy will have it: from its project, or absolute outside of it."""
    if root is not None and path.is_relative_to(root) and ".." not in path.parts:
        return path.relative_to(root).as_posix()
    return path.resolve().as_posix()


def _source(written: str, root: Path) -> DataSource:
    if written.startswith(("mlflow:", "python:")):
        return data_source(written, root)
    return data_source(path_below(Path.cwd() / written, root), root)


def _listed(found: DataDescription) -> str:
    shown = [
        f"{name} ({column.dtype or column.kind}{list(column.shape) if column.shape else ''})"
        for name, column in list(found.columns.items())[:30]
    ]
    return ", ".join(shown) or "(none)"


def _classes(source: DataSource, label: str) -> tuple[str, ...]:
    """The texts of a label in alphabetical order, as scikit-learn orders classes."""
    texts: set[str] = set()
    read = 0
    for block in open_reader(source).blocks([label]):
        texts |= {str(text) for text in block[label]}
        read += len(block[label])
        if read > _CLASSES_READ:
            break
    return tuple(sorted(texts))


def _unread_labels(found: DataDescription) -> Iterator[str]:
    """Columns that look like labels by their names, and cannot be; nobody should search for why."""
    for name, column in found.columns.items():
        is_called_so = name in {*_LABELS, "class"} or name.startswith("label.")
        if not is_called_so or column.kind != "other":
            continue
        empty = column.dtype == "null"
        holds = "is empty in every row" if empty else f"cannot be read as labels ({column.dtype})"
        yield (
            f"column {name!r} of {found.origin} {holds}, so it labels nothing. Fill it, or name "
            "another with --label COLUMN."
        )


def _shaped_label(found: DataDescription, columns: DataColumns) -> str | None:
    """A column that is called as labels are, and holds several numbers a sample."""
    used = {name for each in columns.inputs.values() for name in each.columns}
    return next((n for n in _LABELS if n in found.columns and n not in used), None)


def _images(
    found: DataDescription, columns: DataColumns, inputs: tuple[TensorSpec, ...]
) -> ImageRules:
    """Size and layout that an input's shape shows; how values are normalised nothing shows."""
    for spec in inputs:
        used = columns.inputs.get(spec.name)
        column = found.columns.get(used.columns[0] if used is not None else spec.name)
        if column is None or column.kind != "image" or len(spec.shape) != _IMAGE_AXES:
            continue
        last = spec.shape[3] in {1, 3} and spec.shape[1] not in {1, 3}
        height, width = spec.shape[1:3] if last else spec.shape[2:4]
        channels = spec.shape[3] if last else spec.shape[1]
        return ImageRules.model_validate(
            {
                "channels": 1 if channels == 1 else 3,
                "size": (height, width) if min(height, width) > 0 else None,
                "dtype": "uint8" if spec.dtype == "uint8" else "float32",
                "layout": "nhwc" if last else "nchw",
            }
        )
    return ImageRules()
