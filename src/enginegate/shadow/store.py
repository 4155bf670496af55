"""Where samples are kept: folders that only their owner can read, deleted at the policy's age."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from enginegate.atomic_io import new_folder, write_file
from enginegate.candidate import FileDigest
from enginegate.data import Array, DataSet
from enginegate.data_sources.parquet import read_columns
from enginegate.errors import DataError, InputError
from enginegate.shadow.record_batch import NO_ARRIVAL, NO_LABEL, STAGES
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import (
    SampleInfo,
    SampleOrigin,
    SamplePart,
    SampleWriter,
    TrafficSample,
)

_INFO = "sample.json"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
# A half-written folder of this age is a killed process's; no recording takes so long.
_STALE_DAYS = 1.0
# Larger arrays live in a file without a name instead of memory, and are slower to read.
_IN_MEMORY_BYTES = 64 << 20


@contextmanager
def new_sample(
    target: Path, origin: SampleOrigin, preparation: Preparation
) -> Iterator[SampleWriter]:
    """Write a sample that is at ``target`` when the block ends well, and nowhere if it does not.

    Raises:
        DataError: nothing was written to it, or the redaction does not fit.
    """
    make_private_folder(target.parent)
    with new_folder(target, mode=_FOLDER_MODE) as staging:
        writer = SampleWriter(staging, preparation)
        try:
            yield writer
            info = writer.close(origin)
        except BaseException:
            writer.abandon()
            raise
        write_file(staging / _INFO, info.pretty_json(), mode=_FILE_MODE)


def make_private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can open."""
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    folder.chmod(_FOLDER_MODE)
    return folder


def new_sample_path(home: Path, model: str, now: datetime) -> Path:
    """A path in ``home`` for a sample recorded now."""
    return home / f"{model}-{now.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}"


def is_sample(path: Path) -> bool:
    """Whether a path is a recorded sample, not a set of arrays."""
    return (path / _INFO).is_file()


def sample_info(path: Path) -> SampleInfo:
    """A sample's description, without reading its rows.

    Raises:
        InputError: it is not a sample, or its description is damaged.
    """
    return SampleInfo.read(path / _INFO)


def latest_sample(home: Path, model: str) -> Path | None:
    """The newest sample of a model that was recorded from live traffic."""
    samples = []
    for path in home.glob(f"{model}-*/{_INFO}"):
        try:
            info = SampleInfo.read(path)
        except InputError:
            if path.exists():
                raise
            # It expired meanwhile.
            continue
        if info.model == model:
            samples.append((info.recorded_at, path.parent))
    return max(samples)[1] if samples else None


def read_traffic_sample(path: Path) -> TrafficSample:
    """A sample's largest part; large arrays stay on disk, in files that vanish when they close.

    Raises:
        InputError: it is not a sample, or its description is damaged.
        DataError: a file is not what was recorded.
    """
    info = sample_info(path)
    for part in info.parts:
        _check(path / part.filename, part)
    part = info.parts[0]
    columns = _columns(path, part)
    arrivals = [_arrivals(path / other.filename) for other in info.parts]
    labels = columns["label"]
    data = DataSet(
        origin=str(path),
        inputs=_named(columns, "input."),
        labels=None if (labels == NO_LABEL).any() else labels,
        ids=np.arange(part.rows).astype(np.str_),
        slices=_named(columns, "slice."),
    )
    return TrafficSample(
        info=info,
        data=data,
        outputs=_named(columns, "output."),
        requests=columns["request"],
        request_ids=columns["request_id"],
        arrival_ns=columns["arrival_ns"],
        model_versions=columns["model_version"],
        stages_us={stage: columns[f"stage.{stage}_us"] for stage in STAGES},
        arrivals_s=_in_seconds(np.sort(np.concatenate(arrivals))),
    )


def expire_samples(home: Path, days: float, now: datetime) -> tuple[Path, ...]:
    """Delete the samples that are older than ``days``, and half-written ones of killed processes.

    A sample whose description cannot be read is as old as its files.

    Returns:
        The deleted paths; their names hold the model and the time, nothing of the traffic.
    """
    deleted = []
    for path in sorted(home.iterdir()) if home.is_dir() else []:
        unfinished = path.name.endswith(".tmp")
        if path.name.startswith(".") and not unfinished:
            continue
        limit = timedelta(days=min(days, _STALE_DAYS) if unfinished else days)
        # Another process may expire the same folder, and be first.
        with suppress(FileNotFoundError):
            if now - _recorded_at(path) > limit:
                _delete(path)
                deleted.append(path)
    return tuple(deleted)


def _recorded_at(path: Path) -> datetime:
    try:
        return sample_info(path).recorded_at
    except InputError:
        return datetime.fromtimestamp(path.stat().st_mtime, tz=UTC)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    # Another process that deletes it too makes this one stumble; the rest must go all the same.
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def _check(path: Path, part: SamplePart) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing. Record the sample again.")
    if FileDigest.of(path) != part.file:
        raise DataError(
            f"{path} is not what was recorded: its digest differs. Record the sample again."
        )


def _columns(path: Path, part: SamplePart) -> dict[str, Array]:
    """All rows of a part, by column."""
    columns: dict[str, _Column] = {}
    for block in read_columns(path / part.filename):
        for name, rows in block.items():
            columns.setdefault(name, _Column(path, part.rows)).add(rows)
    return {name: column.whole() for name, column in columns.items()}


@dataclass(slots=True)
class _Column:
    """Rows of one column: in memory, or in a file without a name if they are many."""

    folder: Path
    rows: int
    pieces: list[Array] = field(default_factory=list)
    file: IO[bytes] | None = None

    def add(self, rows: Array) -> None:
        size = rows.nbytes / len(rows) * self.rows
        if rows.dtype.kind == "U" or size <= _IN_MEMORY_BYTES:
            self.pieces.append(rows)
            return
        if self.file is None:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - mapped below
        self.pieces = [rows[:0]]
        self.file.write(np.ascontiguousarray(rows).data)

    def whole(self) -> Array:
        if self.file is None:
            return np.concatenate(self.pieces)
        like = self.pieces[0]
        with self.file as file:
            file.flush()
            return np.memmap(file, like.dtype, "r", shape=(self.rows, *like.shape[1:]))


def _arrivals(path: Path) -> NDArray[np.int64]:
    """When each request of a file arrived: once for all of its rows; those not known left out."""
    parts = []
    for block in read_columns(path, only=("request", "arrival_ns")):
        _, first = np.unique(block["request"], return_index=True)
        parts.append(np.stack([block["request"][first], block["arrival_ns"][first]]))
    both = np.concatenate(parts, axis=1)
    _, first = np.unique(both[0], return_index=True)
    arrival_ns: NDArray[np.int64] = both[1][first]
    return np.asarray(arrival_ns[arrival_ns != NO_ARRIVAL])


def _named(columns: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): array
        for name, array in columns.items()
        if name.startswith(prefix)
    }


def _in_seconds(arrival_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray((arrival_ns - arrival_ns[:1]) / 1e9, np.float64)
