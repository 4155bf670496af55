"""Reads a live model: Triton's counters over some seconds, and a gentle probe meanwhile.

Triton's counters give means, never percentiles, and miss some failures (a full queue, a version
that is gone), so a few requests are sent as users send them and timed at the client. Not in scope:
judging the numbers (validation/live.py).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt

from enginegate.data import Tensors
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import EarlyEnd, Traffic, run_load
from enginegate.measurement import Load
from enginegate.measuring.pipeline_counts import PipelineCounts
from enginegate.records import Record
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.gpu_memory import memory_in
from enginegate.triton.metrics import Metrics, Series, read_metrics

_FAILURES = "nv_inference_request_failure"
_CANCELED = "CANCELED"
_PENDING = "nv_inference_pending_request_count"
# Enough for a median and to notice an outage; more would be load of its own on a quiet server.
_PROBES = 20
_WAIT_S = 0.2
_NS_PER_MS = 1e6


class ProbeResult(Record):
    """The outcome of the requests that the check itself sent, as users send theirs."""

    sent: NonNegativeInt
    failed: NonNegativeInt = Field(description="no answer in time, or refused")
    over: NonNegativeInt = Field(description="slower than the SLO allows, failures included")
    median_ms: NonNegativeFloat | None = Field(description="None when all failed")
    slowest_ms: NonNegativeFloat | None
    versions: tuple[str, ...] = Field(description="that answered")

    def answered_by(self, version: int) -> int:
        """How many this version has answered at least; 0 when other versions answered too."""
        return self.sent - self.failed if self.versions == (str(version),) else 0


class LiveReading(Record):
    """One version's numbers during one check. The probe's requests are in every server count."""

    lasted_s: NonNegativeFloat
    answered: NonNegativeInt = Field(description="requests answered well")
    failed: NonNegativeInt = Field(
        description="the most that Triton's statistics, its metrics or the probe know of"
    )
    server_ms: NonNegativeFloat | None = Field(
        description="mean time on the server, queue to output; None without a request"
    )
    queue_ms: NonNegativeFloat | None = Field(description="mean wait in the queue")
    pending_before: NonNegativeInt | None = Field(
        default=None, description="waiting requests; None: the metrics address is not known"
    )
    pending: NonNegativeInt | None = None
    gpu_memory_share: NonNegativeFloat | None = Field(
        default=None, description="of the fullest GPU; None: no GPU, or no metrics"
    )
    unread: str = Field(
        default="", description="why the metrics, whose address is known, could not be read"
    )
    probe: ProbeResult

    @property
    def live(self) -> int:
        """Requests that ended in this time, without the probe's."""
        return max(0, self.answered + self.failed - self.probe.sent)

    @property
    def arrived_per_s(self) -> float:
        """Requests that came in: those that ended, and those that began to wait."""
        waiting = (self.pending or 0) - (self.pending_before or 0)
        return max(0.0, (self.answered + self.failed + waiting) / self.lasted_s)


@dataclass(frozen=True, slots=True)
class LiveProber:
    """The requests that a check sends.

    Attributes:
        samples: inputs to draw from, each with its batch axis in front.
        slo_s: a slower answer is over the limit.
        seed: of arrival times and order.
        ended: whether to end the check early; asked several times a second, between requests.
    """

    samples: tuple[Tensors, ...]
    slo_s: float
    seed: int
    ended: Callable[[], bool] = lambda: False

    def send(self, address: str, model: str, duration_s: float) -> ProbeResult:
        """Twenty requests or so, at random times; returns when the last is answered.

        Raises:
            ServerError: no connection could be made.
        """
        traffic = Traffic.of(model, self.samples, order_seed=self.seed)
        load = Load(rate_per_s=_PROBES / duration_s, duration_s=duration_s, seed=self.seed)
        ends = EarlyEnd(self.slo_s, skip_s=0.0, decided=lambda _settled, _over: self.ended())
        sent = run_load(address, traffic, load, ends=ends)
        answered_ms = sent.latency_s[np.isfinite(sent.latency_s)] * 1e3
        return ProbeResult(
            sent=len(sent.latency_s),
            failed=sent.failed,
            over=int((~(sent.latency_s <= self.slo_s)).sum()),
            median_ms=float(np.median(answered_ms)) if len(answered_ms) else None,
            slowest_ms=float(answered_ms.max()) if len(answered_ms) else None,
            versions=tuple(sorted({str(v) for v in sent.versions if v})),
        )

    def wait(self, until_s: float) -> None:
        """Wait until the monotonic clock reaches a time, or the check is ended."""
        while not self.ended() and (left_s := until_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, _WAIT_S))


def take_reading(
    addresses: LiveAddresses, model: str, version: int, *, duration_s: float, prober: LiveProber
) -> LiveReading:
    """Read one version's numbers over some seconds, or until the prober is ended.

    Raises:
        ServerError: the server or that version does not answer, or was loaded anew meanwhile.
    """
    started = time.monotonic()
    with TritonClient(addresses.grpc) as client:
        before, early = client.statistics(model, str(version)), _Scrape.of(addresses)
        pipeline = PipelineCounts.begin(addresses.metrics, model, str(version))
        probe = prober.send(addresses.grpc, model, duration_s)
        prober.wait(started + duration_s)
        change = client.statistics_since(
            model, before, answers=probe.answered_by(version), version=str(version)
        )
    gauges = _Gauges.of(early, _Scrape.of(addresses), model, version)
    if change.requests < 0 or change.failures < 0:
        raise ServerError(
            f"Version {version} of {model} at {addresses.grpc} was loaded anew during the check, "
            "so its counters began again. Check again."
        )
    # Without counters of a pipeline there is none, or nobody can tell.
    if pipeline.before is not None:
        change = pipeline.complete(change)
    requests, are_split = change.requests, pipeline.before is None or change.executions > 0
    compute_ns = change.compute_input_ns + change.compute_infer_ns + change.compute_output_ns
    return LiveReading(
        lasted_s=time.monotonic() - started,
        answered=requests,
        failed=max(change.failures, gauges.failed, probe.failed),
        server_ms=(change.queue_ns + compute_ns) / requests / _NS_PER_MS
        if requests and are_split
        else None,
        queue_ms=change.queue_ns / requests / _NS_PER_MS if requests else None,
        pending_before=gauges.pending_before,
        pending=gauges.pending,
        gpu_memory_share=gauges.gpu_memory_share,
        unread=gauges.unread,
        probe=probe,
    )


@dataclass(frozen=True, slots=True)
class _Scrape:
    """One reading of the metrics, or why there is none; neither when no address is known."""

    metrics: Metrics | None = None
    unread: str = ""

    @classmethod
    def of(cls, addresses: LiveAddresses) -> "_Scrape":
        if addresses.metrics is None:
            return cls()
        try:
            return cls(read_metrics(addresses.metrics))
        except ServerError as error:
            return cls(unread=str(error))


@dataclass(frozen=True, slots=True)
class _Gauges:
    failed: int
    pending_before: int | None
    pending: int | None
    gpu_memory_share: float | None
    unread: str = ""

    @classmethod
    def of(cls, early: _Scrape, late: _Scrape, model: str, version: int) -> "_Gauges":
        if early.metrics is None or late.metrics is None:
            return cls(0, None, None, None, early.unread or late.unread)
        which = {"model": model, "version": str(version)}
        try:
            return cls(
                failed=max(0, _failures(late.metrics, which) - _failures(early.metrics, which)),
                pending_before=_pending(early.metrics, which),
                pending=_pending(late.metrics, which),
                gpu_memory_share=max(
                    (gpu.used_bytes / gpu.total_bytes for gpu in memory_in(late.metrics)),
                    default=None,
                ),
            )
        except ServerError as error:
            return cls(0, None, None, None, str(error))


def _failures(metrics: Metrics, which: dict[str, str]) -> int:
    """Requests that failed, without those that the client cancelled."""
    failed = metrics.matching(_FAILURES, **which)
    return sum(_count(each) for each in failed if each.labels.get("reason") != _CANCELED)


def _pending(metrics: Metrics, which: dict[str, str]) -> int | None:
    counts = [_count(series) for series in metrics.matching(_PENDING, **which)]
    return sum(counts) if counts else None


def _count(series: Series) -> int:
    if not 0.0 <= series.value < math.inf:
        raise ServerError(
            f"Triton's metrics say {series.value:g} for {series.name}{series.labels}, which is no "
            "count. See what answers at the metrics address, and restart Triton if it does."
        )
    return round(series.value)
