"""A queueing model fitted to what was measured. It proposes what to measure; it proves nothing.

A batch of ``b`` occupies an instance for ``s(b) = a + c b`` (affine, as Inoue found for GPUs:
Queueing analysis of GPU-based inference servers with dynamic batching, Performance Evaluation 147,
2021), and ``k`` instances slow one another down: not at all
where each has a processor of its own, ``k``-fold where they share one. From that:

- capacity: ``k B / s(B)`` (batch service at full batches: Neuts, Annals of Mathematical Statistics
  38, 1967);
- batches of a server that takes what waits: ``b = rate s(b) / k``;
- waiting for a full queue: Allen-Cunneen's form of Kingman's bound for ``k`` servers whose
  customers are full batches, with an exponential tail;
- waiting for an instance: the least of ``k`` uniform residual services.

What the model gets wrong everywhere alike (clients, network, timers) is learned as one factor on
p99. The engine's own times, measured alone, are where it starts, and say how one measured batch
size extends to others. What was not measured enough to fit is not guessed: every prediction is an
interval over the values that are still possible (``a, c >= 0``; slowdowns between those of the
numbers of instances that were measured, and between none and all).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.measurement import LatencySample, Measurement, StageSplit
from enginegate.search.space import instances_of, largest_batch
from enginegate.serving import ServingConfig

Floats = NDArray[np.float64]
Splits: TypeAlias = tuple[tuple[float, float], ...]

# Service times of one batch size vary by a few percent on a machine with nothing else to do.
_SERVICE_CV = 0.05
# Standard deviations to the 99th percentile of a normal distribution.
_SPREAD = 2.33
# Two batch sizes closer than this fit no line: its slope would be noise.
_TELLING_RATIO = 1.4
# Where p99 crosses the limit is looked for at these shares of the capacity, then bisected: seven
# halvings of the widest gap leave less than the finest resolution of a policy.
_SHARES = (1e-3, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.995)
_STEPS = 7
# At capacity the formula for waiting is infinite.
_MOST_RHO = 0.995
# Above this load a run's p99 depends on its length; it is left out of the learned factor.
_PLAIN_RHO = 0.85
# The learned factor is between a half and two (in the logarithm), so that one odd run misleads
# little; on simulated servers 0.3 and 1.5 find the same optimum.
_MOST_BIAS = 0.7
# Batches of more than that are formed by waiting, not by chance.
_GATHERED = 1.5
# Batches at least this full show what full ones take; lower, the line is extrapolated further.
_NEARLY_FULL = 0.6
# Served less than this share of what was offered: the server, not chance, was the limit.
SATURATED = 0.92
# How much instances of one processor are expected to slow one another down before it was seen, from
# not at all (0) to sharing everything (1); on simulated servers 0.5 saves most measurements where
# serving takes 1 to 3 times as long as the engine alone (12 %, and 12 % of the time).
_LEANING = 0.5
_LINE = 2  # points that a line needs
# The warm-up of measurements that do not say how long theirs was.
_WARM_SHARE = 0.1
# Share of a device's own speed that is tried first: on an H200 1.0 was refuted each time, 0.95 met
# an SLO of ten batches' time.
_OF_ALONE = 0.95
# Rates and counters disagree by less than this where nothing overlaps; a full pipeline of one
# stream has three batches at once.
_OVERLAPPING = 1.5


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
    def of(cls, sample: LatencySample) -> "ServiceTimeEstimate | None":
        """None when the server did not count, or nothing was answered."""
        measurement, stages = sample.measurement, sample.measurement.stages
        answered = sample.latencies_ms[np.isfinite(sample.latencies_ms)]
        if stages is None or not len(answered) or stages.mean_batch_size <= 0.0:
            return None
        service_ms = stages.compute_input_ms + stages.compute_infer_ms + stages.compute_output_ms
        if service_ms <= 0.0:
            return None
        items, batch = _batches(stages, measurement.sent)
        p99 = measurement.p99
        client_ms = stages.client_ms
        if client_ms is None:
            client_ms = max(0.0, float(answered.mean()) - stages.queue_ms - service_ms)
        instances = instances_of(measurement.config)
        answered_per_s = served_per_s(measurement)
        executed_per_s = answered_per_s * items / stages.mean_batch_size
        # Much more than all of the time is waiting inside a pipeline, behind other batches.
        busy = executed_per_s * service_ms / 1e3 / instances
        overlap = busy if busy > _OVERLAPPING else 1.0
        return cls(
            config=measurement.config,
            rate_per_s=measurement.rate_per_s,
            instances=instances,
            items=items,
            batch=max(1.0, batch),
            service_ms=service_ms / overlap,
            busy=busy / overlap,
            p99_ms=p99.value_ms if p99 else float("inf"),
            client_ms=client_ms,
            saturated=answered_per_s < SATURATED * measurement.rate_per_s,
        )

    def shows_saturation_of(self, config: ServingConfig) -> bool:
        """Whether as many instances served batches nearly as large as it allows."""
        return instances_of(
            config
        ) == self.instances and self.batch >= _NEARLY_FULL * largest_batch(config)


def _batches(stages: StageSplit, sent: int) -> tuple[float, float]:
    """Samples in a request, and size of the batch that a sample was in; both on average."""
    counted = sum(size * count for size, count in stages.batches.items())
    if not counted or not sent:
        return 1.0, stages.mean_batch_size
    squares = sum(size**2 * count for size, count in stages.batches.items())
    return max(1.0, counted / sent), squares / counted


def served_per_s(measurement: Measurement) -> float:
    """Answers a second from the first request to the last answer, the warm-up's among them.

    Throughput leaves the warm-up's requests out, but not the time they took from the others, which
    matters where a short run was overloaded.
    """
    answered, lasted_s = measurement.completed + measurement.failed, measurement.sent_for_s
    warm_s = _WARM_SHARE * lasted_s if measurement.warmup_s is None else measurement.warmup_s
    if measurement.throughput_per_s <= 0.0 or lasted_s <= warm_s:
        return 0.0
    sent = answered * lasted_s / (lasted_s - warm_s)
    return sent / (answered / measurement.throughput_per_s + warm_s)


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Times of batches on the engine alone: service times, but for what serving adds to them.

    Attributes:
        fixed_ms: of every batch, >= 0.
        item_ms: of each sample in it, >= 0.
        items: samples in a request, on average.
        shared: instances share one device, as on a GPU: together they are as fast as one.
        request_ms: that a serving process spends on each request while it computes nothing.
    """

    fixed_ms: float
    item_ms: float
    items: float = 1.0
    shared: bool = False
    request_ms: float = 0.0

    @classmethod
    def fit(
        cls,
        batch_ms: Mapping[int, float],
        *,
        items: float = 1.0,
        shared: bool = False,
        request_ms: float = 0.0,
    ) -> "EngineTimes | None":
        """By least squares of relative errors; None from fewer than two batch sizes.

        Args:
            batch_ms: batch size -> time of such a batch.
            items: samples in a request, on average.
            shared: whether instances share one device.
            request_ms: that a serving process spends on each request.
        """
        if len(batch_ms) < _LINE:
            return None
        batch = np.array(sorted(batch_ms), dtype=np.float64)
        took = np.array([batch_ms[size] for size in sorted(batch_ms)])
        fixed, item = _line(batch, took, 1.0 / took)
        return cls(fixed, item, items, shared, request_ms)

    def splits(self, batch: float, service_ms: float) -> Splits:
        """Services of one measured batch size: serving adds to each batch, each sample, or both."""
        added_ms = service_ms - (self.fixed_ms + self.item_ms * batch)
        slower = service_ms / (service_ms - added_ms)
        both = (self.fixed_ms * slower, self.item_ms * slower)
        if added_ms <= 0.0:
            return (both,)
        return (
            both,
            (self.fixed_ms + added_ms, self.item_ms),
            (self.fixed_ms, self.item_ms + added_ms / batch),
        )

    def expected_per_s(self, config: ServingConfig, limit_ms: float) -> float:
        """Where to expect a configuration's capacity before serving was measured at all."""
        row = np.array([[self.fixed_ms, self.item_ms, 1.0 if self.shared else _LEANING]])
        service = _Service(row[:, :1], row[:, 1:2], row[:, 2:], (1,), (1.0,))
        model = QueueingModel(service, self.items, client_ms=0.0, efficiency=1.0, bias=1.0)
        expected_per_s = float(model.capacity([config], limit_ms).expected[0])
        if not self.shared:
            return expected_per_s
        return min(expected_per_s, _OF_ALONE * self.served_per_s(config))

    def most_per_s(self, config: ServingConfig) -> float:
        """Requests a second that the devices compute in full batches, with nothing to serve."""
        batch = largest_batch(config)
        whole_ms = (self.fixed_ms + self.item_ms * batch) * self.items / batch
        return max(1, len(config.gpus)) * 1e3 / whole_ms

    def served_per_s(self, config: ServingConfig) -> float:
        """Requests a second in full batches, where each process computes or reads and replies.

        Mean value analysis of a closed network (Reiser and Lavenberg 1980): the processes are its
        customers, the GPU its one queue, and ``request_ms`` their time apart from it. On an H200
        two processes served 8,923 requests a second where it expects 9,090.
        """
        most_per_s = self.most_per_s(config)
        if self.request_ms <= 0.0:
            return most_per_s
        computing_ms = max(1, len(config.gpus)) * 1e3 / most_per_s
        waiting, rate = 0.0, 0.0
        for processes in range(1, config.processes + 1):
            at_gpu_ms = computing_ms * (1.0 + waiting)
            rate = processes / (self.request_ms + at_gpu_ms)
            waiting = rate * at_gpu_ms
        return max(1, len(config.gpus)) * rate * 1e3


@dataclass(frozen=True, slots=True)
class CapacityInterval:
    """Rates (requests/s) up to which p99 is expected within a limit, one for each configuration."""

    low: Floats
    expected: Floats
    high: Floats


# Arrays have shape (H, C): H hypotheses about the service, C configurations.
@dataclass(frozen=True, slots=True)
class _Case:
    """What each configuration would do under each hypothesis; times in ms, rates in items a ms.

    Attributes:
        fixed, item: ``a`` and ``c`` of its batches, slowed down by its other instances.
        instances, batch, delay, fill: of the configuration, shape (1, C).
        capacity: with every batch full and no instance idle.
    """

    fixed: Floats
    item: Floats
    instances: Floats
    batch: Floats
    delay: Floats
    fill: Floats
    capacity: Floats


@dataclass(frozen=True, slots=True)
class _Service:
    """Possible services: ``(fixed + item b) slowdown(k)``, in ms; fixed and item of shape (H, 1).

    Attributes:
        seen: numbers of instances that were measured, ascending.
        slowdowns: theirs, relative to the number that ``fixed`` and ``item`` were fitted to.
        leaning: shape (H, 1), where in its interval an unmeasured slowdown is taken, 0 to 1.
    """

    fixed: Floats
    item: Floats
    leaning: Floats
    seen: tuple[int, ...]
    slowdowns: tuple[float, ...]

    def slowdown(self, instances: Floats) -> Floats:
        """Shape (H, C): of service times, for numbers of instances of shape (1, C)."""
        counts, places = np.unique(instances[0], return_inverse=True)
        bounds = np.log(np.array([self._possible(int(count)) for count in counts]))[places]
        low, high = bounds[None, :, 0], bounds[None, :, 1]
        return np.asarray(np.exp(low + self.leaning * (high - low)))

    def _possible(self, instances: int) -> tuple[float, float]:
        """More instances never speed one up, nor slow it down more than if they shared it all."""
        low, high = 0.0, math.inf
        for count, slowdown in zip(self.seen, self.slowdowns, strict=True):
            shared = slowdown * instances / count
            low = max(low, min(slowdown, shared))
            high = min(high, max(slowdown, shared))
        return low, max(low, high)


@dataclass(frozen=True, slots=True)
class QueueingModel:
    """Fitted to estimates; predicts p99 and the rate at the SLO's limit."""

    service: _Service
    items: float
    client_ms: float
    efficiency: float
    bias: float

    @classmethod
    def fit(
        cls,
        estimates: Sequence[ServiceTimeEstimate],
        *,
        around: int | None = None,
        alone: EngineTimes | None = None,
    ) -> "QueueingModel":
        """Fit to at least one estimate; best where as many instances serve as in ``around``.

        The engine's own times say how one measured batch size extends to others.
        """
        model = cls(
            service=_services(estimates, around, alone),
            items=float(np.median([estimate.items for estimate in estimates])),
            client_ms=float(np.median([estimate.client_ms for estimate in estimates])),
            efficiency=_efficiency(estimates),
            bias=1.0,
        )
        return replace(model, bias=_bias(model, estimates))

    def capacity(self, configs: Sequence[ServingConfig], limit_ms: float) -> CapacityInterval:
        """Where each configuration's p99 reaches the limit, over all that is still possible.

        With a queue delay p99 may first fall with the rate, as batches fill sooner: the highest
        rate within the limit counts.
        """
        case = self._case(configs)
        low, high = case.capacity * _SHARES[0], case.capacity * _SHARES[1]
        for share, following in pairwise((*_SHARES[1:], _SHARES[-1])):
            within = self._p99(case, case.capacity * share) <= limit_ms
            low = np.where(within, case.capacity * share, low)
            high = np.where(within, case.capacity * following, high)
        for _ in range(_STEPS):
            middle = np.sqrt(low * high)
            within = self._p99(case, middle) <= limit_ms
            low, high = np.where(within, middle, low), np.where(within, high, middle)
        rate = low * 1e3 / self.items
        return CapacityInterval(rate.min(axis=0), np.median(rate, axis=0), rate.max(axis=0))

    def saturation_per_s(self, config: ServingConfig) -> float:
        """Requests a second with every batch full and no instance idle, as expected."""
        return float(np.median(self._case([config]).capacity)) * 1e3 / self.items

    def p99_ms(self, configs: Sequence[ServingConfig], rate_per_s: float) -> Floats:
        """The lowest p99 that is still possible for each configuration, shape (C,)."""
        case = self._case(configs)
        rate = np.full(case.capacity.shape, rate_per_s * self.items / 1e3)
        found = self._p99(case, np.minimum(rate, case.capacity * _MOST_RHO))
        return np.asarray(np.where(rate < case.capacity, found, np.inf).min(axis=0))

    def bias_of(self, estimate: ServiceTimeEstimate) -> float | None:
        """Logarithm of measured over predicted p99; None where the server was nearly full."""
        case = self._case([estimate.config])
        rate = np.full(case.capacity.shape, estimate.rate_per_s * self.items / 1e3)
        full = float(np.median(rate / case.capacity)) > _PLAIN_RHO
        if full or not math.isfinite(estimate.p99_ms):
            return None
        return math.log(max(estimate.p99_ms, 1e-6) / float(np.median(self._p99(case, rate))))

    def _case(self, configs: Sequence[ServingConfig]) -> _Case:
        counts = [instances_of(config) for config in configs]
        instances = np.array([counts], dtype=np.float64)
        batch = np.array([[largest_batch(config) for config in configs]], dtype=np.float64)
        slow = self.service.slowdown(instances)
        fixed, item = self.service.fixed * slow, self.service.item * slow
        fill = [[min(c.preferred_batch_sizes or (largest_batch(c),)) for c in configs]]
        return _Case(
            fixed=fixed,
            item=item,
            instances=instances,
            batch=batch,
            delay=np.array([[config.max_queue_delay_us / 1e3 for config in configs]]),
            fill=np.array(fill, dtype=np.float64),
            capacity=self.efficiency * instances * batch / (fixed + item * batch),
        )

    def _p99(self, case: _Case, rate: Floats) -> Floats:
        forming = np.minimum(case.delay, (case.fill - 1.0) / rate)
        free = case.instances - rate * case.item
        taken = np.where(free > 0.0, rate * case.fixed / np.maximum(free, 1e-9), np.inf)
        formed = 1.0 + rate * forming
        batch = np.clip(np.maximum(taken, formed), 1.0, case.batch)
        service = case.fixed + case.item * batch
        most = np.minimum(case.batch, batch + _SPREAD * np.sqrt(batch))
        slowest = (case.fixed + case.item * most) * (1.0 + _SPREAD * _SERVICE_CV)
        busy = np.clip(rate * service / (batch * case.instances), 1e-3, 1.0)
        residual = service * np.maximum(0.0, 1.0 - 0.01 ** (1.0 / case.instances) / busy)
        # Batches that fill while an instance is idle meet a free one; else requests wait for one.
        waited = np.where((formed > taken) & (formed > _GATHERED), forming, residual)
        waited = waited + _queued(case, rate)
        return np.asarray(self.bias * (self.client_ms + waited + slowest))


def _queued(case: _Case, rate: Floats) -> Floats:
    """99th percentile of the wait for batches ahead (Allen-Cunneen), in ms."""
    rho = np.minimum(rate / case.capacity, _MOST_RHO)
    waits = np.power(rho, np.sqrt(2.0 * (case.instances + 1.0)) - 1.0)
    full = (case.fixed + case.item * case.batch) / case.instances
    mean = full / (1.0 - rho) * (1.0 / case.batch + _SERVICE_CV**2) / 2.0
    return np.asarray(mean * np.maximum(0.0, np.log(100.0 * waits)))


def _services(
    estimates: Sequence[ServiceTimeEstimate], around: int | None, alone: EngineTimes | None
) -> _Service:
    """Every service that is still possible: the fit where it is one, else its extremes."""
    groups: dict[int, list[ServiceTimeEstimate]] = {}
    for estimate in sorted(estimates, key=lambda estimate: estimate.instances):
        groups.setdefault(estimate.instances, []).append(estimate)
    reference = max(groups, key=lambda count: _spread(groups[count]))
    if around in groups and _spread(groups[around]) >= _TELLING_RATIO:
        reference = around
    splits, seen = _affine(groups[reference], alone), tuple(groups)
    slowdowns = np.maximum.accumulate([_slowdown(groups[count], splits[0]) for count in seen])
    rows = [(fixed, item, leaning) for leaning in (0.0, 0.5, 1.0) for fixed, item in splits]
    columns = np.array(rows, dtype=np.float64)
    return _Service(
        columns[:, :1], columns[:, 1:2], columns[:, 2:], seen, tuple(map(float, slowdowns))
    )


def _spread(estimates: Sequence[ServiceTimeEstimate]) -> float:
    """Largest over smallest batch: how well a line can be fitted."""
    sizes = [estimate.batch for estimate in estimates]
    return max(sizes) / min(sizes)


def _slowdown(estimates: Sequence[ServiceTimeEstimate], split: tuple[float, float]) -> float:
    """Measured over fitted service; a busy server says more about it than an idle one."""
    ratios = [r.service_ms / max(split[0] + split[1] * r.batch, 1e-9) for r in estimates]
    return float(np.average(ratios, weights=[max(r.busy, 0.05) ** 2 for r in estimates]))


def _affine(estimates: Sequence[ServiceTimeEstimate], alone: EngineTimes | None) -> Splits:
    """``(a, c)`` by least squares, both >= 0; with one batch size only, every split of it."""
    batch = np.array([estimate.batch for estimate in estimates])
    service = np.array([estimate.service_ms for estimate in estimates])
    if batch.max() < _TELLING_RATIO * batch.min():
        mean, at = float(service.mean()), float(batch.mean())
        if alone is not None:
            return alone.splits(at, mean)
        return (mean, 0.0), (mean / 2.0, mean / 2.0 / at), (0.0, mean / at)
    weight = np.array([max(estimate.busy, 0.05) for estimate in estimates]) / service
    return (_line(batch, service, weight),)


def _line(batch: Floats, service: Floats, weight: Floats) -> tuple[float, float]:
    """``(a, c)`` of ``a + c batch``, both >= 0."""
    design = np.stack([np.ones_like(batch), batch], axis=1) * weight[:, None]
    (fixed, item), *_ = np.linalg.lstsq(design, service * weight, rcond=None)
    if item < 0.0:
        return (float(np.average(service, weights=weight)), 0.0)
    if fixed < 0.0:
        return (0.0, float(np.average(service / batch, weights=weight)))
    return (float(fixed), float(item))


def _efficiency(estimates: Sequence[ServiceTimeEstimate]) -> float:
    """Share of its time that an instance can be busy: as seen where more was offered than served.

    The rest is handing over, which no counter shows.
    """
    if not any(estimate.saturated for estimate in estimates):
        return 1.0
    return float(np.clip(max(estimate.busy for estimate in estimates), 0.5, 1.0))


def _bias(model: QueueingModel, estimates: Sequence[ServiceTimeEstimate]) -> float:
    """Median of measured over predicted p99, where the server was not nearly full."""
    logs = [log for estimate in estimates if (log := model.bias_of(estimate)) is not None]
    return math.exp(min(_MOST_BIAS, max(-_MOST_BIAS, median(logs)))) if logs else 1.0
