"""A recorded sample on disk: a private folder of Parquet files and what is known about them.

Rows whose tensors have other shapes go to another file, so nothing that traffic mixes is lost.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from enginegate.candidate import FileDigest, TensorSpec
from enginegate.data import Array, DataSet, Tensors
from enginegate.data_sources.parquet import PartWriter
from enginegate.errors import DataError
from enginegate.messages import counted
from enginegate.records import Record
from enginegate.shadow.record_batch import RecordBatch, Text, stack_rows
from enginegate.shadow.redaction import Preparation

# Rows wait for a row group of this size: larger ones compress better, and take more memory.
_FLUSH_BYTES = 8 << 20
_FLUSH_ROWS = 1024
# Each is an open file; traffic with more kinds of shapes than this is recorded in part.
_MOST_PARTS = 16
_NAMED_LOSSES = 20


class SamplePart(Record):
    """One file of a sample: rows whose tensors are alike."""

    filename: str
    file: FileDigest
    rows: PositiveInt
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class SampleInfo(Record):
    """Description of a recorded sample; holds no value that users sent."""

    schema_version: Literal[1] = 1
    origin: str = Field(description="where it comes from, for messages")
    model: str
    recorded_at: datetime
    one_in: PositiveInt = Field(description="one request in this many was recorded")
    requests: NonNegativeInt
    rows: NonNegativeInt
    lost: NonNegativeInt = Field(description="records that were damaged, or left out")
    losses: tuple[str, ...] = Field(description="why, the first ones")
    capped: bool = Field(description="whether a limit on bytes ended the recording")
    model_versions: dict[int, PositiveInt] = Field(description="rows by version; 0: not known")
    redaction: str = Field(description="what was redacted")
    rewritten: bool = Field(description="whether the user's code changed inputs or outputs")
    withheld: tuple[str, ...] = Field(description="inputs that were not written down")
    left_out: tuple[str, ...] = Field(default=(), description="columns of an import not taken over")
    parts: tuple[SamplePart, ...] = Field(description="largest first")

    def lines(self) -> tuple[tuple[str, str], ...]:
        """The description for people, as pairs of a heading and its text."""
        versions = ", ".join(
            f"{version or 'not known'} ({counted(rows, 'row')})"
            for version, rows in self.model_versions.items()
        )
        shapes = "; ".join(
            f"{', '.join(map(str, (*part.inputs, *part.outputs)))} ({counted(part.rows, 'row')})"
            for part in self.parts
        )
        first = f", first: {self.losses[0]}" if self.losses else ""
        return (
            ("origin", self.origin),
            ("model", self.model),
            ("recorded", f"{self.recorded_at:%Y-%m-%d %H:%M:%S %Z}"),
            ("requests", f"{self.requests} ({counted(self.rows, 'row')}), one in {self.one_in}"),
            ("ended by", "the limit on bytes" if self.capped else "time or count"),
            ("lost", f"{self.lost}{first}"),
            ("model versions", versions),
            ("redacted", self.redaction),
            ("not written", ", ".join((*self.withheld, *self.left_out)) or "nothing"),
            ("tensors", shapes),
        )


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample comes from."""

    text: str
    model: str
    recorded_at: datetime
    one_in: int = 1


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """The rows of a recorded sample whose shapes are the most common. N rows.

    Attributes:
        data: the inputs that were kept; ids are row numbers, as request ids belong to users.
        outputs: the recorded answers, by name, shape ``(N, ...)``.
        requests: number of the request that a row belongs to, shape ``(N,)``.
        request_ids: shape ``(N,)``; empty where the client gave none.
        arrival_ns: shape ``(N,)``, on the recorder's clock; rows of one request share it.
        model_versions: shape ``(N,)``; 0 where it is not known.
        stages_us: by stage (queue, input, infer, output), shape ``(N,)``; NaN where not known.
        arrivals_s: of every request of the sample, in all shapes, ascending from 0; empty if they
            were not recorded.
    """

    info: SampleInfo
    data: DataSet
    outputs: Tensors
    requests: NDArray[np.int64]
    request_ids: Text
    arrival_ns: NDArray[np.int64]
    model_versions: NDArray[np.int64]
    stages_us: Mapping[str, NDArray[np.float64]]
    arrivals_s: NDArray[np.float64]

    @property
    def replay_s(self) -> NDArray[np.float64]:
        """Arrival times at the rate of the live traffic, of which only a share was recorded.

        Time runs ``one_in`` times faster: the rate is right, and bursts are as many requests in a
        row as were recorded; how they were spaced in between is not known.
        """
        return self.arrivals_s / self.info.one_in


@dataclass(slots=True)
class SampleWriter:
    """Takes batches in any order and of any shapes; few rows are in memory at a time."""

    folder: Path
    preparation: Preparation
    requests: int = 0
    lost: int = 0
    losses: list[str] = field(default_factory=list)
    capped: bool = False
    left_out: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    versions: Counter[int] = field(default_factory=Counter)
    _parts: dict[tuple[object, ...], "_OpenPart"] = field(default_factory=dict)

    def add(self, batch: RecordBatch) -> None:
        """Slice, redact and write rows.

        Raises:
            DataError: the redaction does not fit the inputs, or the user's code broke.
        """
        inputs = tuple(batch.inputs)
        batch = replace(batch, requests=batch.requests + self.requests)
        columns = self.preparation.apply(batch).columns()
        key = tuple(
            (name, array.dtype.kind if array.dtype.kind == "U" else array.dtype.str, *shape)
            for name, array in columns.items()
            for shape in [array.shape[1:]]
        )
        if key not in self._parts and len(self._parts) == _MOST_PARTS:
            self.add_loss(f"more than {_MOST_PARTS} kinds of shapes")
            return
        if key not in self._parts:
            path = self.folder / f"part-{len(self._parts)}.parquet"
            self._parts[key] = _OpenPart(PartWriter(path, columns))
        self._parts[key].add(columns)
        self.requests = int(batch.requests[-1]) + 1
        self.versions.update(batch.model_versions.tolist())
        self.withheld = self.preparation.redaction.withheld(inputs)

    def add_loss(self, reason: str, *, requests: int = 1) -> None:
        """Count requests that are not in the sample."""
        self.lost += requests
        if len(self.losses) < _NAMED_LOSSES:
            self.losses.append(reason)

    def close(self, origin: SampleOrigin) -> SampleInfo:
        """Finish the files and describe them.

        Raises:
            DataError: nothing was recorded.
        """
        parts = sorted((part.close() for part in self._parts.values()), key=lambda p: -p.rows)
        if not parts:
            first = f" {self.lost} were lost, first: {self.losses[0]}" if self.lost else ""
            raise DataError(
                f"{origin.text}: no request was recorded.{first}\n"
                "Send more traffic while recording, or record a larger share of it."
            )
        return SampleInfo(
            origin=origin.text,
            model=origin.model,
            recorded_at=origin.recorded_at,
            one_in=origin.one_in,
            requests=self.requests,
            rows=sum(part.rows for part in parts),
            lost=self.lost,
            losses=tuple(self.losses),
            capped=self.capped,
            model_versions=dict(sorted(self.versions.items())),
            redaction=str(self.preparation.redaction),
            rewritten=self.preparation.redaction.redactor is not None,
            withheld=self.withheld,
            left_out=self.left_out,
            parts=tuple(parts),
        )

    def abandon(self) -> None:
        """Close the files of a sample that will not be kept."""
        for part in self._parts.values():
            part.writer.close()


def _specs(columns: Mapping[str, Array], prefix: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=name.removeprefix(prefix), dtype=array.dtype.name, shape=(-1, *array.shape[1:])
        )
        for name, array in columns.items()
        if name.startswith(prefix)
    )


@dataclass(slots=True)
class _OpenPart:
    writer: PartWriter
    waiting: list[dict[str, Array]] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def add(self, columns: dict[str, Array]) -> None:
        if not self.waiting:
            self.inputs, self.outputs = _specs(columns, "input."), _specs(columns, "output.")
        self.waiting.append(columns)
        self.waiting_rows += len(columns["arrival_ns"])
        self.waiting_bytes += sum(array.nbytes for array in columns.values())
        if self.waiting_rows >= _FLUSH_ROWS or self.waiting_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.writer.write(stack_rows(self.waiting))
        self.waiting, self.waiting_rows, self.waiting_bytes = [], 0, 0

    def close(self) -> SamplePart:
        self.flush()
        self.writer.close()
        path = self.writer.path
        return SamplePart(
            filename=path.name,
            file=FileDigest.of(path),
            rows=self.writer.rows,
            inputs=self.inputs,
            outputs=self.outputs,
        )
