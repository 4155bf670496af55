"""The reader protocol: data of any form as named columns, some rows at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from enginegate.candidate import Sha256
from enginegate.data import Array
from enginegate.records import canonical_json, sha256_bytes, sha256_file

BLOCK_BYTES = 4 << 20
"""So much of a column is held at a time: more is no faster, and less is decoded row by row."""
BLOCK_ROWS = 4096

Block: TypeAlias = Mapping[str, Array | list[bytes]]
"""Rows by column: arrays of shape ``(N, ...)``, or the encoded bytes of N images."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column as its form describes it, without values.

    Attributes:
        kind: ``other`` cannot become an array; ``dtype`` then says what it is.
        dtype: NumPy's name of numbers, e.g. ``float32``; empty for text and images.
        shape: of one row; empty for a number a row.
        why: what keeps a column of another kind from being an array, where that is known.
        classes: names that its whole numbers stand for, in their order; empty where not known.
    """

    kind: Literal["number", "text", "image", "other"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    why: str = ""


class DataReader(Protocol):
    """Data of one form, opened; nothing of it is read before it is asked for.

    Attributes:
        form: what people call it, e.g. ``Parquet``.
        origin: where it is, for messages.
        samples: how many rows it has; None where only reading to the end would tell.
        columns: by name.
    """

    form: str
    origin: str
    samples: int | None
    columns: Mapping[str, Column]

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Some rows of these columns at a time, in the data's order.

        Raises:
            DataError: a value is missing or damaged, or rows differ in shape.
        """
        ...

    def content_digest(self) -> Sha256 | None:
        """Digest of everything that decides the values; None where only reading would tell."""
        ...


def files_digest(files: Sequence[Path]) -> Sha256:
    """Digest of the files' contents in their order, whatever they are called.

    A file whose size and time of change are as before is not read again by this process.
    """
    return sha256_bytes(canonical_json([_file_digest(file) for file in files]))


_known: dict[tuple[str, int, int, int], Sha256] = {}


def _file_digest(file: Path) -> Sha256:
    status = file.stat()
    key = (str(file), status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _known:
        _known[key] = sha256_file(file)
    return _known[key]
