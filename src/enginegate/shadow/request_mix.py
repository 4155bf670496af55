"""The requests of a benchmark: recorded ones with sizes and times, else the evaluation data."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginegate.candidate import Sha256, TensorSpec
from enginegate.data import DataSet, read_data
from enginegate.policy.recording import TrafficTables
from enginegate.records import canonical_json, sha256_bytes
from enginegate.shadow.sample import TrafficSample
from enginegate.shadow.store import is_sample, latest_sample, read_traffic_sample

# Sizes are drawn in rounds: more of them follow the recording closer, and make a round longer.
_MOST_SIZES = 2000


@dataclass(frozen=True, slots=True)
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

    @property
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
    where a model's input was not written down.

    Args:
        tables: name data and recordings.
        inputs: of the model; each must be there.
        home: where samples of live traffic are kept.

    Raises:
        InputError: a file is missing or damaged, or does not fit the model.
    """
    mix = _recorded(tables, home)
    if mix is None or {spec.name for spec in inputs} - set(mix.data.inputs):
        mix = RequestMix(read_data(tables.data.evaluation))
    mix = replace(mix, data=mix.data.in_types(inputs))
    mix.data.check_fits(inputs)
    return mix


def _recorded(tables: TrafficTables, home: Path) -> RequestMix | None:
    given, wanted = tables.data.shadow, tables.shadow
    if given is not None:
        return _of(read_traffic_sample(given)) if is_sample(given) else RequestMix(read_data(given))
    if wanted is None:
        return None
    if wanted.traffic is not None:
        return RequestMix(read_data(wanted.traffic))
    newest = latest_sample(home, tables.model)
    return _of(read_traffic_sample(newest)) if newest is not None else None


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
