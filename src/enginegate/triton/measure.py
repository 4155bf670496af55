"""From what was sent and what the server counted to one `Measurement`: validity first.

Not in scope: whether the numbers are good enough (slo.py, search.py).
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginegate.canonical import sha256_bytes, sha256_file
from enginegate.durable import write_file
from enginegate.errors import InputError, TamperedError
from enginegate.evidence import Measurement, Percentile, ServingConfig, StageSplit
from enginegate.triton.answers import Statistics
from enginegate.triton.traffic import LoadResult

QUANTILES = (0.5, 0.9, 0.95, 0.99)

_WARMUP_SHARE = 0.1
_MIN_SAMPLES = 20
_MIN_ACHIEVED = 0.99
_INTERVAL_CONFIDENCE = 0.95
_MIN_LATE_LIMIT_MS = 5.0
_LATE_SHARE_OF_SLO = 0.25


@dataclass(frozen=True, slots=True)
class Sampled:
    """A measurement with its raw latencies.

    Attributes:
        latencies_ms: of every request after the warm-up, infinite for a failure.
    """

    measurement: Measurement
    latencies_ms: NDArray[np.float64]

    def over(self, limit_ms: float) -> int:
        """Requests that took longer than the limit, or failed."""
        return int((~(self.latencies_ms <= limit_ms)).sum())


def allowed_lateness_ms(slo_p99_ms: float) -> float:
    """How late the generator may be before a measurement is void.

    A late request is charged to the server, so lateness can only make a good server look bad: it
    may be a quarter of the SLO, and never needs to be below what a busy machine's timers do.
    """
    return max(_MIN_LATE_LIMIT_MS, _LATE_SHARE_OF_SLO * slo_p99_ms)


def measure(
    result: LoadResult,
    config: ServingConfig,
    *,
    counted: Statistics | None,
    folder: Path,
    late_limit_ms: float,
) -> Sampled:
    """Judge validity, take percentiles and stages, and keep the raw latencies.

    The first tenth of the load's duration is warm-up and is left out of every number but ``sent``.

    Args:
        result: what was sent.
        config: what served it.
        counted: the server's counters after the run minus before; None when they are not known.
        folder: where raw latencies go, compressed, named by their digest.
        late_limit_ms: largest 99th percentile of how late the generator was.
    """
    warm = result.due_s < _WARMUP_SHARE * result.load.duration_s
    latencies_ms = result.latency_s[~warm] * 1e3
    late_p99_ms = _late_p99_ms(result)
    failed = int(np.isinf(latencies_ms).sum())
    return Sampled(
        Measurement(
            config=config,
            load=result.load,
            invalid=_invalid(result, counted, samples=len(latencies_ms), limit_ms=late_limit_ms),
            sent=len(result.due_s),
            completed=len(latencies_ms) - failed,
            failed=failed,
            throughput_per_s=_throughput(result, warm),
            percentiles=percentiles(latencies_ms),
            late_p99_ms=late_p99_ms,
            stages=_stages(counted),
            latencies_sha256=_save(result, warm, folder),
        ),
        latencies_ms,
    )


def percentiles(latencies_ms: NDArray[np.float64]) -> tuple[Percentile, ...]:
    """Nearest-rank percentiles; one that falls on a failure is left out: it has no value."""
    ordered = np.sort(latencies_ms)
    found = [_percentile(ordered, quantile) for quantile in QUANTILES]
    return tuple(percentile for percentile in found if percentile is not None)


def read_latencies(folder: Path, sha256: str) -> NDArray[np.float64]:
    """The latencies that `measure` judged, in milliseconds, from the file with that digest.

    Raises:
        InputError: there is no such file.
        TamperedError: its content is not what its name says.
    """
    path = folder / f"{sha256}.npz"
    if not path.is_file():
        raise InputError(f"The raw latencies {path} are missing: measure again.")
    if sha256_file(path) != sha256:
        raise TamperedError(f"{path} was changed after it was written: measure again.")
    with np.load(path, allow_pickle=False) as archive:
        kept: NDArray[np.float64] = archive["latency_s"][~archive["warm"]] * 1e3
    return kept


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
    below = bdtr(np.arange(count + 1), count, quantile)
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return Ranks(low or None, high if high <= count else None)


def _finite(ordered_ms: NDArray[np.float64], rank: int | None) -> float | None:
    if rank is None or not np.isfinite(ordered_ms[rank - 1]):
        return None
    return float(ordered_ms[rank - 1])


def _invalid(
    result: LoadResult, counted: Statistics | None, *, samples: int, limit_ms: float
) -> tuple[str, ...]:
    reasons = []
    achieved, late_p99_ms = _achieved(result), _late_p99_ms(result)
    if achieved < _MIN_ACHIEVED:
        reasons.append(
            f"the generator sent at {achieved:.1%} of the asked rate (needs {_MIN_ACHIEVED:.0%}): "
            "lower the rate, or give it more processor"
        )
    if late_p99_ms > limit_ms:
        reasons.append(
            f"the generator was {late_p99_ms:.2g} ms late at the 99th percentile (limit "
            f"{limit_ms:.2g} ms): lower the rate, or stop what else runs on this machine"
        )
    if samples < _MIN_SAMPLES:
        reasons.append(
            f"{samples} requests after the warm-up say nothing about a tail (needs "
            f"{_MIN_SAMPLES}): measure longer"
        )
    if counted is not None and counted.requests < 0:
        reasons.append(
            "the server's counters went backwards, so it or the model was restarted meanwhile: "
            "measure again"
        )
    return tuple(reasons)


def _achieved(result: LoadResult) -> float:
    """Asked over taken time between the first and the last request, 1 for a perfect generator."""
    if len(result.due_s) < 2:  # noqa: PLR2004 - two points make a span
        return 1.0
    return float(np.ptp(result.due_s) / max(np.ptp(result.sent_s), 1e-9))


def _late_p99_ms(result: LoadResult) -> float:
    return float(np.quantile(result.late_s, 0.99)) * 1e3 if len(result.due_s) else 0.0


def _throughput(result: LoadResult, warm: NDArray[np.bool_]) -> float:
    """Good answers a second, from the end of the warm-up to the last answer or the load's end."""
    answered_s = (result.due_s + result.latency_s)[~warm & np.isfinite(result.latency_s)]
    if not len(answered_s):
        return 0.0
    end_s = max(result.load.duration_s, float(answered_s.max()))
    return len(answered_s) / (end_s - _WARMUP_SHARE * result.load.duration_s)


def _stages(counted: Statistics | None) -> StageSplit | None:
    if counted is None or counted.requests <= 0 or counted.executions <= 0:
        return None
    to_ms = 1e-6 / counted.requests
    return StageSplit(
        queue_ms=counted.queue_ns * to_ms,
        compute_input_ms=counted.compute_input_ns * to_ms,
        compute_infer_ms=counted.compute_infer_ns * to_ms,
        compute_output_ms=counted.compute_output_ns * to_ms,
        mean_batch_size=counted.inferences / counted.executions,
    )


def _save(result: LoadResult, warm: NDArray[np.bool_], folder: Path) -> str:
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        due_s=result.due_s,
        sent_s=result.sent_s,
        latency_s=result.latency_s,
        warm=warm,
    )
    sha256 = sha256_bytes(buffer.getvalue())
    write_file(folder / f"{sha256}.npz", buffer.getvalue())
    return sha256
