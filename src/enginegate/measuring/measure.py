"""From what was sent and what the server counted to one `Measurement`: validity first."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import (
    ClosedLoad,
    Generator,
    LatencySample,
    Load,
    Measurement,
    StageSplit,
)
from enginegate.measuring.p99 import percentiles
from enginegate.measuring.raw_requests import RawRequests, read_raw_requests, save_raw_requests
from enginegate.measuring.resources import Usage
from enginegate.measuring.validity import (
    allowed_lateness_ms,
    generator_reasons,
    late_p99_ms,
    reasons_invalid,
    share_of_rate_sent,
    still_warming_up,
)
from enginegate.serving import ServingConfig
from enginegate.triton.types import Statistics

# Long enough for connections and clocks to settle; a tenth costs a short run little of its sample.
_WARMUP_SHARE, _MOST_WARMUP_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What is known of a run besides its requests and the server's counters.

    Attributes:
        usage: GPU, power and processor.
        baseline: what is known of the generator from a do-nothing model.
        price_per_hour: of one GPU, or of the machine where there is none.
        cold_start_s: from the load call to the first answer, if this was the first run after it:
            the model may still have been warming up.
    """

    usage: Usage = field(default_factory=Usage)
    baseline: Generator = field(default_factory=Generator)
    price_per_hour: float | None = None
    cold_start_s: float | None = None


def measure(
    result: LoadResult,
    config: ServingConfig,
    *,
    counted: Statistics | None,
    folder: Path,
    slo_p99_ms: float,
    conditions: RunConditions | None = None,
) -> LatencySample:
    """Judge validity, take percentiles and stages, and keep the raw latencies.

    The warm-up (`without_warmup`) is in no number but ``sent`` and the server's own: those are
    totals.

    Args:
        result: what was sent.
        config: what served it.
        counted: the server's counters after the run minus before; None when they are not known.
        folder: where raw latencies go, compressed, named by their digest.
        slo_p99_ms: sets how late the generator may be; nothing else depends on it.
        conditions: of the run.
    """
    conditions = conditions or RunConditions()
    requests, served_per_s = without_warmup(result), throughput(result)
    latencies_ms, late_limit_ms = requests.latencies_ms, allowed_lateness_ms(slo_p99_ms)
    failed, baseline = int(np.isinf(latencies_ms).sum()), conditions.baseline
    generator = result.generator.model_copy(
        update={
            "null_p50_ms": baseline.null_p50_ms,
            "null_p99_ms": baseline.null_p99_ms,
            "trusted_per_s": baseline.trusted_per_s,
        }
    )
    invalid = reasons_invalid(
        result, requests, generator, counted, throughput_per_s=served_per_s, slo_ms=slo_p99_ms
    )
    limited = generator_reasons(
        result, requests, generator, throughput_per_s=served_per_s, slo_ms=slo_p99_ms
    )
    if conditions.cold_start_s is not None:
        invalid += still_warming_up(result, warmup_s(result.load))
    closed = isinstance(result.load, ClosedLoad)
    measurement = Measurement(
        config=config,
        load=result.load,
        invalid=invalid,
        sent=len(result.due_s),
        completed=len(latencies_ms) - failed,
        failed=failed,
        throughput_per_s=served_per_s,
        percentiles=percentiles(latencies_ms),
        late_p99_ms=late_p99_ms(result),
        stages=_stages(result, requests, counted),
        latencies_sha256=save_raw_requests(requests, folder),
        errors=dict(sorted(result.errors.items())),
        lasted_s=result.lasted_s,
        warmup_s=warmup_s(result.load),
        cold_start_s=conditions.cold_start_s,
        generator_limited=bool(limited),
        late=0 if closed else int((result.late_s * 1e3 > late_limit_ms).sum()),
        achieved_share=share_of_rate_sent(result),
        generator=generator,
        resources=conditions.usage.resources(
            completed=len(result.due_s) - result.failed,
            throughput_per_s=served_per_s,
            price_per_hour=conditions.price_per_hour,
        ),
    )
    return LatencySample(measurement, latencies_ms)


def warmup_s(load: Load | ClosedLoad) -> float:
    """Warm-up of a load: a tenth of it, at most two seconds; a run cannot end before."""
    return min(_WARMUP_SHARE * load.duration_s, _MOST_WARMUP_S)


def without_warmup(result: LoadResult) -> RawRequests:
    """Mark the answered requests of the warm-up, which are not judged.

    The cut depends on the load alone, and a failure counts wherever it is, so no choice of this
    program turns a run that misses an SLO into one that meets it (see validity.py).
    """
    warm = (result.due_s < warmup_s(result.load)) & np.isfinite(result.latency_s)
    return RawRequests(result.due_s, result.sent_s, result.latency_s, warm)


def read_latency_sample(measurement: Measurement, folder: Path) -> LatencySample:
    """Read the raw latencies of a measurement that `measure` returned.

    Raises:
        InputError: its raw latencies are missing.
        TamperedError: they were changed.
    """
    return LatencySample(
        measurement, read_raw_requests(folder, measurement.latencies_sha256).latencies_ms
    )


def throughput(result: LoadResult) -> float:
    """Good answers a second that came in from the end of the warm-up to the last one.

    Also those to requests of the warm-up: a queue that was long by then is served first. In an open
    loop never more than was sent.
    """
    start_s = warmup_s(result.load)
    answered_s = (result.due_s + result.latency_s)[np.isfinite(result.latency_s)]
    answered_s = answered_s[answered_s >= start_s]
    measured = int((result.due_s >= start_s).sum())
    if not len(answered_s) or not measured or result.lasted_s <= start_s:
        return 0.0
    served_per_s = len(answered_s) / (max(result.lasted_s, float(answered_s.max())) - start_s)
    if isinstance(result.load, ClosedLoad):
        return served_per_s
    return min(served_per_s, measured / (result.lasted_s - start_s))


def _stages(
    result: LoadResult, requests: RawRequests, counted: Statistics | None
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


def _judged_server_ms(requests: RawRequests, counted: Statistics) -> float | None:
    """The server's total without the warm-up, which took no longer there than at the client.

    Where more was counted than was answered here, somebody else sent too.
    """
    answered = np.isfinite(requests.latency_s)
    judged = int((answered & ~requests.warm).sum())
    if counted.success_ns <= 0 or counted.requests > answered.sum() or not judged:
        return None
    since_sent_s = requests.latency_s - (requests.sent_s - requests.due_s)
    warm_ms = float(since_sent_s[requests.warm].sum()) * 1e3
    return max(0.0, counted.success_ns * 1e-6 - warm_ms) / judged
