"""The requests of a benchmark: recorded ones with sizes and times, else the evaluation data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.candidate import Sha256, TensorSpec
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.policy.data import DataSource, data_source
from enginegate.policy.recording import TrafficTables
from enginegate.records import canonical_json, sha256_bytes
from enginegate.shadow.sample import TrafficSample
from enginegate.shadow.store import is_sample, latest_sample, read_traffic_sample

# Sizes are drawn in rounds: more of them follow the recording closer, and make a round longer.
_MOST_SIZES = 2000
# Mixes that a process keeps: all engines of a qualification are asked the same, most of them with
# the same types. Each holds its data in memory.
_KEPT = 2


@dataclass(frozen=True)
class RequestMix:
    """Requests to draw from.

    Attributes:
        data: their inputs.
        arrivals_s: when they came, seconds from the first, ascending; None where not known.
        batch_sizes: rows of a request, each as often as it was recorded.
    """

    data: DataSet
    arrivals_s: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] = (1,)

    @cached_property
    def sha256(self) -> Sha256:
        """Digest of everything that decides which requests are sent."""
        plain = {"data": self.data.sha256}
        if self.batch_sizes == (1,) and self.arrivals_s is None:
            return sha256_bytes(canonical_json(plain))
        mix = {"sizes": self.batch_sizes, "arrivals": self.arrivals_s}
        return sha256_bytes(canonical_json(plain | mix))


def request_mix(tables: TrafficTables, inputs: tuple[TensorSpec, ...], home: Path) -> RequestMix:
    """The requests that a model is benchmarked with.

    In this order: the policy's recorded sample, the inputs it names under [shadow], the newest
    sample that was recorded from live traffic; and the evaluation data where there is none, or
    where a model's input was not written down. Files that have not changed since are not read
    again by this process.

    Args:
        tables: name data and recordings.
        inputs: of the model; each must be there.
        home: where samples of live traffic are kept.

    Raises:
        InputError: a file is missing or damaged, or does not fit the model.
    """
    recorded = _recorded(tables, home)
    sources = [*([recorded] if recorded else []), tables.data.evaluation]
    key = (tuple(file for source in sources for file in _files(source)), inputs)
    if key not in _kept:
        mix = _read(recorded) if recorded else None
        if mix is None or {spec.name for spec in inputs} - set(mix.data.inputs):
            mix = RequestMix(load_data(tables.data.evaluation))
        mix = replace(mix, data=mix.data.in_types(inputs))
        mix.data.check_fits(inputs)
        while len(_kept) >= _KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = mix
    return _kept[key]


_Files: TypeAlias = tuple[tuple[str, int, int, int], ...]
_kept: dict[tuple[_Files, tuple[TensorSpec, ...]], RequestMix] = {}


def _files(source: DataSource) -> Iterator[tuple[str, int, int, int]]:
    """A file, or those of a folder, each with what changes when it is written.

    What is no file (a function, a dataset of MLflow) is taken to stay as it is in one process.
    """
    rules = f"{source} {source.columns.digest} {source.images.digest}"
    yield rules, 0, 0, 0
    top = source.path
    if top is None:
        return
    for path in [top, *(sorted(top.rglob("*")) if top.is_dir() else [])]:
        if path.exists():
            status = path.stat()
            yield str(path), status.st_ino, status.st_size, status.st_mtime_ns


def _recorded(tables: TrafficTables, home: Path) -> DataSource | None:
    given, wanted = tables.data.shadow, tables.shadow
    if given is not None or wanted is None:
        return given
    newest = None if wanted.traffic else latest_sample(home, tables.model)
    return wanted.traffic or (data_source(newest) if newest else None)


def _read(source: DataSource) -> RequestMix:
    if source.path is not None and is_sample(source.path):
        return _of(read_traffic_sample(source.path))
    return RequestMix(load_data(source))


def _of(sample: TrafficSample) -> RequestMix:
    times = sample.replay_s
    return RequestMix(
        sample.data,
        tuple(times.tolist()) if len(times) > 1 and times[-1] > times[0] else None,
        _sizes(sample.requests),
    )


def _sizes(requests: NDArray[np.int64]) -> tuple[int, ...]:
    """Rows of each request, smallest first; evenly thinned out when there are many."""
    _, counts = np.unique(requests, return_counts=True)
    if not len(counts) or (counts == 1).all():
        return (1,)
    step = -(-len(counts) // _MOST_SIZES)
    return tuple(np.sort(counts)[::step].tolist())
