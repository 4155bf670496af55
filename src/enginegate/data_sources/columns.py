"""From the columns of any form to the arrays of a data set: which column is what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from enginegate.data import Array
from enginegate.data_sources.reader import Block, Column
from enginegate.errors import DataError
from enginegate.policy.data import DataColumns

_ARRAYS = ("input.", "label.", "slice.")
_MOST_LISTED = 30

DecodeImages = Callable[[list[bytes]], Array]


@dataclass(frozen=True, slots=True)
class ArrayRule:
    """How one array of a data set is made.

    Attributes:
        name: of the array, e.g. ``input.image``.
        columns: where its values come from; several are put side by side.
        dtype: what they are converted to; None: as they are.
        classes: what the values are called, in the order of their numbers; empty: as they are.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str | None = None
    classes: tuple[str, ...] = ()


def array_rules(
    columns: Mapping[str, Column], wanted: DataColumns, origin: str, *, labelled: bool = True
) -> tuple[ArrayRule, ...]:
    """Which arrays are made of which columns, sorted by the arrays' names.

    What the policy says comes first, where its columns are there; a column that is called like an
    array is that array; images that nobody has named are an input of their column's name.

    Args:
        labelled: whether label, slice and id columns that the policy names must be there.

    Raises:
        DataError: a column is not there, cannot become an array, or none is an input.
    """
    found = {
        name: ArrayRule(name, (name,))
        for name, column in columns.items()
        if (name.startswith(_ARRAYS) or name in {"label", "id"}) and column.kind != "other"
    }
    named = {
        name: rule
        for name, rule in _named(wanted).items()
        if columns.keys() >= set(rule.columns)
        or not (name in found or (not labelled and not name.startswith("input.")))
    }
    for rule in named.values():
        for column in rule.columns:
            _check_readable(column, columns, origin)
    used = {column for rule in named.values() for column in rule.columns}
    found = {name: rule for name, rule in found.items() if name not in used} | named
    images = [name for name, column in columns.items() if column.kind == "image"]
    if not any(name.startswith("input.") for name in found) and len(images) == 1:
        found[f"input.{images[0]}"] = ArrayRule(f"input.{images[0]}", (images[0],))
    if not any(name.startswith("input.") for name in found):
        raise DataError(
            f"{origin} has no column that is called input.NAME: it has {_listed(columns)}.\n"
            "Say which column is which input of the model, and which is the label:\n"
            "  [data.columns]\n"
            '  inputs = { NAME = "COLUMN" }\n'
            '  label = "COLUMN"'
        )
    if "label" in found:
        found["label"] = _label_rule(found["label"], columns, wanted.classes, origin)
    return tuple(found[name] for name in sorted(found))


def make_array(rule: ArrayRule, block: Block, decode: DecodeImages, origin: str) -> Array:
    """One array of some rows, its first axis the row.

    Raises:
        DataError: columns do not fit side by side, a text is no class, or a number is none of the
            type it is converted to.
    """
    parts = [_part(block[name], decode) for name in rule.columns]
    if len(parts) == 1:
        array = parts[0]
    else:
        for name, part in zip(rule.columns, parts, strict=True):
            if part.ndim != 1 or part.dtype.kind not in "biuf":
                raise DataError(
                    f"{origin}: {rule.name} puts columns side by side, and {name} is no column of "
                    f"one number a row ({part.dtype}, shape {part.shape})."
                )
        array = np.stack(parts, axis=1)
    if rule.classes:
        array = _class_numbers(array, rule, origin)
    if rule.dtype is not None:
        return _converted(array, rule, origin)
    is_answer = array.dtype.kind == "b" and rule.name.partition(".")[0] == "label"
    return array.astype(np.int64) if is_answer else array


def _named(wanted: DataColumns) -> Mapping[str, ArrayRule]:
    rules = {
        f"input.{name}": ArrayRule(f"input.{name}", given.columns, given.dtype)
        for name, given in wanted.inputs.items()
    }
    rules |= {
        f"label.{output}": ArrayRule(f"label.{output}", (column,))
        for output, column in wanted.labels.items()
    }
    rules |= {f"slice.{name}": ArrayRule(f"slice.{name}", (name,)) for name in wanted.slices}
    if wanted.label is not None:
        rules["label"] = ArrayRule("label", (wanted.label,))
    if wanted.id is not None:
        rules["id"] = ArrayRule("id", (wanted.id,))
    return rules


def _check_readable(name: str, columns: Mapping[str, Column], origin: str) -> None:
    if name not in columns:
        close = get_close_matches(name, columns, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise DataError(
            f"{origin} has no column {name!r}, which [data.columns] names{hint} It has "
            f"{_listed(columns)}."
        )
    if columns[name].kind == "other":
        raise DataError(
            columns[name].why
            or f"{origin}: column {name!r} holds {columns[name].dtype}. Columns hold numbers, "
            "text, images, or lists of numbers of one length, and no row is empty."
        )


def _label_rule(
    rule: ArrayRule, columns: Mapping[str, Column], classes: tuple[str, ...], origin: str
) -> ArrayRule:
    """The label's classes, where they have to be looked up."""
    column = columns[rule.columns[0]]
    if column.kind == "text" and not classes:
        raise DataError(
            f"{origin}: the label, column {rule.columns[0]!r}, is text. Name the classes in the "
            'order of the model\'s outputs: classes = ["first", "second"] under [data.columns].'
        )
    if column.kind == "text" or (classes and column.classes and classes != column.classes):
        return ArrayRule(rule.name, rule.columns, rule.dtype, _order(column, classes, origin))
    return rule


def _order(column: Column, classes: tuple[str, ...], origin: str) -> tuple[str, ...]:
    """Classes by which values are looked up: texts, or the places of a form's own classes."""
    if column.kind == "text":
        return classes
    unknown = [name for name in column.classes if name not in classes]
    if unknown:
        raise DataError(
            f"{origin} has classes that [data.columns] classes does not list: "
            f"{', '.join(unknown[:_MOST_LISTED])}. List every class, in the order of the model's."
        )
    return tuple(
        str(column.classes.index(name)) if name in column.classes else "" for name in classes
    )


def _part(values: Array | list[bytes], decode: DecodeImages) -> Array:
    return decode(values) if isinstance(values, list) else values


def _class_numbers(array: Array, rule: ArrayRule, origin: str) -> Array:
    """The place of each value among the classes."""
    places = {name: place for place, name in enumerate(rule.classes)}
    texts = array.astype(np.str_)
    unknown = sorted({str(text) for text in np.unique(texts)} - set(places))
    if unknown:
        raise DataError(
            f"{origin}: {rule.name} holds {unknown[0]!r}, which is none of [data.columns] classes "
            f"{list(rule.classes)[:_MOST_LISTED]}."
        )
    return np.array([places[str(text)] for text in texts.ravel()], np.int64).reshape(array.shape)


def _converted(array: Array, rule: ArrayRule, origin: str) -> Array:
    """The values in another type; whole numbers stay what they are."""
    if array.dtype.kind not in "biuf":
        raise DataError(f"{origin}: {rule.name} is {array.dtype}, which is no {rule.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(rule.dtype)
    if converted.dtype.kind in "iub" and not np.array_equal(converted, array):
        place = np.flatnonzero((converted != array).reshape(-1))[0]
        raise DataError(
            f"{origin}: {rule.name} holds {array.reshape(-1)[place]}, which is no {rule.dtype}."
        )
    return converted


def _listed(columns: Mapping[str, Column]) -> str:
    names = list(columns)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
