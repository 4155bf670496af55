"""Which calibration samples are read: the same share of every slice, in pinned batches."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginegate.candidate import Sha256, TensorSpec
from enginegate.data import DataSet, Tensors
from enginegate.policy import CalibrationTable


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """Some rows of a data set; arrays stay where they are until a batch is read.

    Attributes:
        data: where the rows are.
        rows: indices, ascending; at least one.
        batch_size: samples in one batch.
    """

    data: DataSet
    rows: NDArray[np.int64]
    batch_size: int

    @classmethod
    def of(cls, data: DataSet, rules: CalibrationTable) -> "CalibrationSample":
        """At most ``max_samples``, the same share of each combination of slices.

        Within a combination the first rows are taken. Without slice columns that is the start of
        the data. When there are more combinations than samples, the largest are represented.
        """
        count = min(rules.max_samples, len(data))
        return cls(data, _stratified(data, count), rules.batch_size)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sha256(self) -> Sha256:
        """Digest of everything scales depend on: inputs, rows and the batch size, streamed."""
        digest = hashlib.sha256(f"batches of {self.batch_size}".encode())
        for batch in self.batches():
            for name, array in sorted(batch.items()):
                digest.update(f"{name}|{array.dtype.str}|{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def batches(self) -> Iterator[Tensors]:
        """Inputs, one batch at a time; the last may be smaller."""
        for part in self._parts():
            yield dict(part.inputs)

    def head(self, count: int) -> "CalibrationSample":
        """The first ``count`` rows, for estimates that need fewer."""
        return CalibrationSample(self.data, self.rows[:count], self.batch_size)

    def split(self, every: int) -> tuple["CalibrationSample", "CalibrationSample"]:
        """Two parts without a common row: the second has one row in ``every``.

        With fewer than two rows there is nothing to hold out, and both are the whole.
        """
        held = np.arange(len(self)) % every == every - 1
        if not held.any() or held.all():
            return self, self
        return (
            CalibrationSample(self.data, self.rows[~held], self.batch_size),
            CalibrationSample(self.data, self.rows[held], self.batch_size),
        )

    def check_fits(self, specs: tuple[TensorSpec, ...]) -> None:
        """Refuse samples that a model with these inputs cannot take; read in batches.

        Raises:
            DataError: an input is missing, unknown, of another dtype or shape, or holds NaN or Inf.
        """
        for part in self._parts():
            part.check_fits(specs)

    def _parts(self) -> Iterator[DataSet]:
        for start in range(0, len(self.rows), self.batch_size):
            rows = self.rows[start : start + self.batch_size]
            inputs = {name: np.asarray(array[rows]) for name, array in self.data.inputs.items()}
            yield DataSet(self.data.origin, inputs, None, self.data.ids[rows], {})


def _stratified(data: DataSet, count: int) -> NDArray[np.int64]:
    """Rows by largest remainder: each stratum gets its share of ``count``, rounded."""
    if count == len(data):
        return np.arange(len(data))
    strata = defaultdict(list)
    for row in range(len(data)):
        strata[tuple(column[row] for _, column in sorted(data.slices.items()))].append(row)
    exact = {key: count * len(rows) / len(data) for key, rows in strata.items()}
    quotas = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(strata, key=lambda key: (quotas[key] - exact[key], key))
    for key in by_remainder[: count - sum(quotas.values())]:
        quotas[key] += 1
    chosen = [row for key, rows in strata.items() for row in rows[: quotas[key]]]
    return np.array(sorted(chosen), dtype=np.int64)
