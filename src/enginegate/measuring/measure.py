"""From what was sent and what the server counted to one `Measurement`: validity first.

Not in scope: whether the numbers are good enough (slo.py, sequential.py, search.py).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import (
    ClosedLoad,
    Generator,
    Load,
    Measurement,
    Percentile,
    Resources,
    StageSplit,
)
from enginegate.measuring.raw_requests import Requests, read_requests, save_requests
from enginegate.measuring.resources import Usage
from enginegate.measuring.validity import Limits, achieved_share, invalid, late_p99_ms, warming_up
from enginegate.serving import ServingConfig
from enginegate.triton.types import Statistics

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

_SKIPPED_SHARE = 0.1
_MOST_SKIPPED_S = 2.0
_INTERVAL_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class LatencySample:
    """A measurement with its raw latencies.

    Attributes:
        latencies_ms: of every request after the warm-up and of every failure, which is infinite.
        before: whether it was made earlier and kept.
    """

    measurement: Measurement
    latencies_ms: NDArray[np.float64]
    before: bool = False

    def over(self, limit_ms: float) -> int:
        """Requests that took longer than the limit, or failed."""
        return int((~(self.latencies_ms <= limit_ms)).sum())


@dataclass(frozen=True, slots=True)
class Beside:
    """What was noted beside a run, besides the server's counters.

    Attributes:
        usage: GPU, power and processor.
        calibration: what is known of the generator from a do-nothing model.
        price_per_hour: of one GPU, or of the machine where there is none.
        cold_start_s: from the load call to the first answer, if this was the first run after it.
    """

    usage: Usage = field(default_factory=Usage)
    calibration: Generator = field(default_factory=Generator)
    price_per_hour: float | None = None
    cold_start_s: float | None = None

    @property
    def just_loaded(self) -> bool:
        """Whether the model may still have been warming up."""
        return self.cold_start_s is not None


_NOTHING = Beside()


def measure(
    result: LoadResult,
    config: ServingConfig,
    *,
    counted: Statistics | None,
    folder: Path,
    slo_p99_ms: float,
    beside: Beside = _NOTHING,
) -> LatencySample:
    """Judge validity, take percentiles and stages, and keep the raw latencies.

    The warm-up (`judged`) is in no number but ``sent`` and the server's own: those are totals.

    Args:
        result: what was sent.
        config: what served it.
        counted: the server's counters after the run minus before; None when they are not known.
        folder: where raw latencies go, compressed, named by their digest.
        slo_p99_ms: sets how late the generator may be; nothing else depends on it.
        beside: what else was noted.
    """
    start_s, requests = skipped_s(result.load), judged(result)
    latencies_ms = requests.latencies_ms
    failed, limits = int(np.isinf(latencies_ms).sum()), Limits.of(slo_p99_ms)
    health = _health(result, requests, beside, counted, limits=limits)
    return LatencySample(
        Measurement(
            config=config,
            load=result.load,
            invalid=health.invalid,
            sent=len(result.due_s),
            completed=len(latencies_ms) - failed,
            failed=failed,
            throughput_per_s=health.throughput_per_s,
            percentiles=percentiles(latencies_ms),
            late_p99_ms=late_p99_ms(result),
            stages=_stages(result, requests, counted),
            latencies_sha256=save_requests(requests, folder),
            errors=dict(sorted(result.errors.items())),
            lasted_s=result.lasted_s,
            warmup_s=start_s,
            cold_start_s=beside.cold_start_s,
            late=_late(result, limits.late_ms),
            achieved_share=achieved_share(result),
            generator=health.generator,
            resources=health.resources,
        ),
        latencies_ms,
    )


def skipped_s(load: Load | ClosedLoad) -> float:
    """Warm-up of a load: a tenth of it, at most two seconds; a run cannot end before."""
    return min(_SKIPPED_SHARE * load.duration_s, _MOST_SKIPPED_S)


def judged(result: LoadResult) -> Requests:
    """Which requests are judged: all but those of the warm-up that were answered.

    The cut depends on the load alone, and a failure counts wherever it is: see warmup.py.
    """
    warm = (result.due_s < skipped_s(result.load)) & np.isfinite(result.latency_s)
    return Requests(result.due_s, result.sent_s, result.latency_s, warm)


def sampled_of(measurement: Measurement, folder: Path) -> LatencySample:
    """A measurement as `measure` returned it, from the folder that it was given.

    Raises:
        InputError: its raw latencies are missing.
        TamperedError: they were changed.
    """
    return LatencySample(measurement, read_latencies(folder, measurement.latencies_sha256))


def read_latencies(folder: Path, sha256: str) -> NDArray[np.float64]:
    """The latencies that `measure` judged, in milliseconds, from the file with that digest.

    Raises:
        InputError: there is no such file.
        TamperedError: its content is not what its name says.
    """
    return read_requests(folder, sha256).latencies_ms


def percentiles(latencies_ms: NDArray[np.float64]) -> tuple[Percentile, ...]:
    """Nearest-rank percentiles; one that falls on a failure is left out: it has no value."""
    ordered = np.sort(latencies_ms)
    found = [_percentile(ordered, quantile) for quantile in QUANTILES]
    return tuple(percentile for percentile in found if percentile is not None)


def _percentile(ordered_ms: NDArray[np.float64], quantile: float) -> Percentile | None:
    count = len(ordered_ms)
    rank = math.ceil(quantile * count)
    if count == 0 or not np.isfinite(ordered_ms[rank - 1]):
        return None
    ranks = order_statistics(count, quantile, confidence=_INTERVAL_CONFIDENCE)
    return Percentile(
        quantile=quantile,
        value_ms=float(ordered_ms[rank - 1]),
        low_ms=_finite(ordered_ms, ranks.low),
        high_ms=_finite(ordered_ms, ranks.high),
        samples=count,
    )


class Ranks(NamedTuple):
    """Ranks (from 1) of the order statistics that bound a quantile; None: no such rank."""

    low: int | None
    high: int | None


def order_statistics(count: int, quantile: float, *, confidence: float) -> Ranks:
    """Ranks between which a quantile lies with at least the given confidence, for any distribution.

    The number of samples below the true quantile is binomial (David and Nagaraja, Order
    Statistics, section 7.1); each side gets half of what may go wrong.
    """
    from scipy.special import bdtr  # type: ignore[import-untyped]  # noqa: PLC0415

    tail = (1.0 - confidence) / 2.0
    # Further out the tails are below 1e-14; of a million requests some thousand ranks are left.
    reach = 8.0 * math.sqrt(count * quantile * (1.0 - quantile)) + 8.0
    first = max(0, math.floor(count * quantile - reach))
    last = min(count, math.ceil(count * quantile + reach))
    below = bdtr(np.arange(first, last + 1), count, quantile)
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = first + int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return Ranks(low or None, high if high <= count else None)


def _finite(ordered_ms: NDArray[np.float64], rank: int | None) -> float | None:
    if rank is None or not np.isfinite(ordered_ms[rank - 1]):
        return None
    return float(ordered_ms[rank - 1])


class _Health(NamedTuple):
    invalid: tuple[str, ...]
    throughput_per_s: float
    generator: Generator
    resources: Resources


def _health(
    result: LoadResult,
    requests: Requests,
    beside: Beside,
    counted: Statistics | None,
    *,
    limits: Limits,
) -> _Health:
    known = beside.calibration
    generator = result.generator.model_copy(
        update={
            "null_p50_ms": known.null_p50_ms,
            "null_p99_ms": known.null_p99_ms,
            "trusted_per_s": known.trusted_per_s,
        }
    )
    throughput_per_s = throughput(result)
    reasons = invalid(
        result,
        requests,
        generator,
        counted,
        throughput_per_s=throughput_per_s,
        limits=limits,
    )
    if beside.just_loaded:
        reasons += warming_up(result, skipped_s(result.load))
    resources = beside.usage.resources(
        completed=len(result.due_s) - result.failed,
        throughput_per_s=throughput_per_s,
        price_per_hour=beside.price_per_hour,
    )
    return _Health(reasons, throughput_per_s, generator, resources)


def _late(result: LoadResult, limit_ms: float) -> int:
    if isinstance(result.load, ClosedLoad):
        return 0
    return int((result.late_s * 1e3 > limit_ms).sum())


def throughput(result: LoadResult) -> float:
    """Good answers a second that came in from the end of the warm-up to the last one.

    Also those to requests of the warm-up: a queue that was long by then is served first. In an open
    loop never more than was sent.
    """
    start_s = skipped_s(result.load)
    answered_s = (result.due_s + result.latency_s)[np.isfinite(result.latency_s)]
    answered_s = answered_s[answered_s >= start_s]
    measured = int((result.due_s >= start_s).sum())
    if not len(answered_s) or not measured or result.lasted_s <= start_s:
        return 0.0
    served = len(answered_s) / (max(result.lasted_s, float(answered_s.max())) - start_s)
    if isinstance(result.load, ClosedLoad):
        return served
    return min(served, measured / (result.lasted_s - start_s))


def _stages(
    result: LoadResult, requests: Requests, counted: Statistics | None
) -> StageSplit | None:
    if counted is None or counted.requests <= 0 or counted.executions <= 0:
        return None
    to_ms = 1e-6 / counted.requests
    answered_s = result.latency_s[np.isfinite(result.latency_s)]
    client_ms = None
    if counted.success_ns > 0 and len(answered_s):
        client_ms = max(0.0, float(answered_s.mean()) * 1e3 - counted.success_ns * to_ms)
    return StageSplit(
        queue_ms=counted.queue_ns * to_ms,
        compute_input_ms=counted.compute_input_ns * to_ms,
        compute_infer_ms=counted.compute_infer_ns * to_ms,
        compute_output_ms=counted.compute_output_ns * to_ms,
        mean_batch_size=counted.inferences / counted.executions,
        batches={size: count for size, count in counted.batches.items() if count > 0},
        client_ms=client_ms,
        judged_server_ms=_judged_server_ms(requests, counted),
    )


def _judged_server_ms(requests: Requests, counted: Statistics) -> float | None:
    """The server's total without the warm-up, which took no longer there than at the client.

    Where more was counted than was answered here, somebody else sent too.
    """
    answered = np.isfinite(requests.latency_s)
    judged_requests = int((answered & ~requests.warm).sum())
    if counted.success_ns <= 0 or counted.requests > answered.sum() or not judged_requests:
        return None
    since_sent_s = requests.latency_s - (requests.sent_s - requests.due_s)
    warm_ms = float(since_sent_s[requests.warm].sum()) * 1e3
    return max(0.0, counted.success_ns * 1e-6 - warm_ms) / judged_requests
