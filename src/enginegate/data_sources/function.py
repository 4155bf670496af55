"""A Python function of the user's own that returns data, or yields it in pieces."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from enginegate.candidate import Sha256
from enginegate.data import Array
from enginegate.data_sources.numpy_files import rows_of
from enginegate.data_sources.reader import Block, Column
from enginegate.errors import DataError, PolicyError
from enginegate.policy.data import DataSource
from enginegate.policy.hooks import importable_from


class FunctionReader:
    """``python:MODULE:CALLABLE``, called without arguments.

    It returns arrays by name, or yields such pieces of rows, one after another. It must give the
    same samples each time: the data's digest is evidence.
    """

    form = "Python function"

    def __init__(self, source: DataSource) -> None:
        """Call the function, and take its first piece.

        Raises:
            PolicyError: the policy does not allow code, or there is no such function.
            DataError: it raised, or gave no arrays.
        """
        self.origin = source.written
        pieces = self._pieces(_call(source))
        first = next(pieces, None)
        if first is None:
            raise DataError(f"{self.origin} gave no samples.")
        self.samples: int | None = None
        self.columns: Mapping[str, Column] = {
            name: _column_like(array) for name, array in first.items()
        }
        self._rest = chain([first], pieces)

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """See `DataReader.blocks`; the pieces can be had once."""
        for piece in self._rest:
            missing = [name for name in names if name not in piece]
            if missing:
                raise DataError(f"{self.origin}: a later piece has no array {missing[0]!r}.")
            yield from rows_of({name: piece[name] for name in names})

    def content_digest(self) -> Sha256 | None:
        """None: only the samples themselves tell."""
        return None

    def _pieces(self, returned: Any) -> Iterator[Mapping[str, Array]]:
        if isinstance(returned, Mapping):
            yield self._arrays(returned)
            return
        if not isinstance(returned, Iterable):
            raise DataError(
                f"{self.origin} returned {type(returned).__name__}; return arrays by name, or "
                "yield such pieces of rows."
            )
        pieces = iter(returned)
        while True:
            try:
                piece = next(pieces, None)
            except Exception as error:
                raise _failed(self.origin, error) from error
            if piece is None:
                return
            yield self._arrays(piece)

    def _arrays(self, piece: Any) -> Mapping[str, Array]:
        if not isinstance(piece, Mapping) or not piece:
            raise DataError(f"{self.origin} gave {type(piece).__name__}; give arrays by name.")
        arrays = {str(name): np.asarray(values) for name, values in piece.items()}
        for name, array in arrays.items():
            if array.dtype.hasobject or not array.ndim:
                raise DataError(
                    f"{self.origin}: {name} is no array with one row a sample (dtype "
                    f"{array.dtype}, shape {array.shape})."
                )
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self.origin}: the arrays of a piece differ in length: {lengths}.")
        return arrays


def _column_like(array: Array) -> Column:
    if array.dtype.kind in "US":
        return Column("text", "", array.shape[1:])
    known = array.dtype.kind in "biuf"
    return Column("number" if known else "other", array.dtype.name, array.shape[1:])


def _call(source: DataSource) -> Any:
    if not source.allow_code:
        raise PolicyError(
            f"{source} was not called: it imports and runs Python code of yours, with all that "
            "this program may do.\n"
            "If you trust that code, set allow_code = true under [data] in the policy."
        )
    if source.root is not None:
        importable_from(source.root)
    module, _, name = source.location.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"{source} cannot be imported: {error}. It must be importable from the policy's "
            "project or the folder that enginegate runs in, or be installed."
        ) from error
    try:
        return function()
    except Exception as error:
        raise _failed(source.written, error) from error


def _failed(origin: str, error: Exception) -> DataError:
    return DataError(
        f"{origin} failed: {type(error).__name__}: {error}\nIt is called without arguments."
    )
