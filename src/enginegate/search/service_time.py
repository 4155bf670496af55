"""What one measurement says about how long batches take: what the queueing model is fitted to."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from enginegate.measurement import LatencySample, Measurement, StageSplit
from enginegate.measuring.p99 import P99
from enginegate.serving import ServingConfig

_NEARLY_FULL = 0.6
_SATURATED = 0.92
_WARM_SHARE = 0.1


def instances_of(config: ServingConfig) -> int:
    """Over all GPUs it names."""
    return config.instances * max(1, len(config.gpus))


def largest_batch(config: ServingConfig) -> int:
    """The largest batch that Triton forms: the largest preferred one where some are preferred."""
    if not config.dynamic_batching:
        return 1
    return max(config.preferred_batch_sizes or (config.max_batch_size,))


@dataclass(frozen=True, slots=True)
class ServiceTimeEstimate:
    """What one valid measurement says about service times.

    Attributes:
        instances: over all GPUs.
        items: samples in a request, on average.
        batch: size of the batch that a sample was in, on average.
        service_ms: that such a batch took.
        busy: share of the instances' time that was spent on batches.
        saturated: whether more was offered than was served.
    """

    config: ServingConfig
    rate_per_s: float
    instances: int
    items: float
    batch: float
    service_ms: float
    busy: float
    p99_ms: float
    client_ms: float
    saturated: bool

    @classmethod
    def of(cls, sampled: LatencySample) -> "ServiceTimeEstimate | None":
        """None when the server did not count, or nothing was answered."""
        measured, stages = sampled.measurement, sampled.measurement.stages
        answered = sampled.latencies_ms[np.isfinite(sampled.latencies_ms)]
        if stages is None or not len(answered) or stages.mean_batch_size <= 0.0:
            return None
        service_ms = stages.compute_input_ms + stages.compute_infer_ms + stages.compute_output_ms
        if service_ms <= 0.0:
            return None
        items, batch = _batches(stages, measured.sent)
        p99 = measured.percentile(P99)
        client_ms = stages.client_ms
        if client_ms is None:
            client_ms = max(0.0, float(answered.mean()) - stages.queue_ms - service_ms)
        instances = instances_of(measured.config)
        served_per_s = _served_per_s(measured)
        executed_per_s = served_per_s * items / stages.mean_batch_size
        return cls(
            config=measured.config,
            rate_per_s=measured.rate_per_s,
            instances=instances,
            items=items,
            batch=max(1.0, batch),
            service_ms=service_ms,
            busy=executed_per_s * service_ms / 1e3 / instances,
            p99_ms=p99.value_ms if p99 else float("inf"),
            client_ms=client_ms,
            saturated=served_per_s < _SATURATED * measured.rate_per_s,
        )

    def tells_capacity_of(self, config: ServingConfig) -> bool:
        """Whether as many instances served batches nearly as large as it allows."""
        return instances_of(
            config
        ) == self.instances and self.batch >= _NEARLY_FULL * largest_batch(config)


class _Batches(NamedTuple):
    """Samples in a request, and size of the batch that a sample was in; both on average."""

    items: float
    batch: float


def _batches(stages: StageSplit, sent: int) -> _Batches:
    seen = sum(size * count for size, count in stages.batches.items())
    if not seen or not sent:
        return _Batches(1.0, stages.mean_batch_size)
    squares = sum(size**2 * count for size, count in stages.batches.items())
    return _Batches(max(1.0, seen / sent), squares / seen)


def _served_per_s(measured: Measurement) -> float:
    """Answers a second from the first request to the last answer, the warm-up's among them.

    Throughput leaves the warm-up's requests out, but not the time they took from the others, which
    matters where a short run was overloaded.
    """
    answered, asked_s = measured.completed + measured.failed, measured.load.duration_s
    lasted_s = asked_s if measured.lasted_s is None else measured.lasted_s
    warm_s = _WARM_SHARE * lasted_s if measured.warmup_s is None else measured.warmup_s
    if measured.throughput_per_s <= 0.0 or lasted_s <= warm_s:
        return 0.0
    sent = answered * lasted_s / (lasted_s - warm_s)
    return sent / (answered / measured.throughput_per_s + warm_s)
