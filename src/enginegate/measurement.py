"""What was sent to a server, and what came back.

- **Load**: what is offered: open loop (on a schedule, whether or not the server keeps up) or closed
  loop (so many clients, each waiting for its answer).
- **Measurement**: one load against one configuration, validity first. Raw latencies are kept beside
  it, so that another percentile or another SLO needs no new run; together they are a
  **LatencySample**.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from enginegate.candidate import Sha256
from enginegate.messages import per_second
from enginegate.records import Record
from enginegate.serving import ServingConfig

WireProtocol = Literal["grpc", "http"]
SharedMemory = Literal["none", "system", "cuda"]
Driver = Literal["python", "perf_analyzer"]
DriverChoice = Literal["auto", "python", "perf_analyzer"]

# The percentile that an SLO limits; `enginegate.measuring.p99` decides about it.
P99 = 0.99
# How late timers and event loops of a busy machine are by themselves, whatever sends.
TIMERS_MS = 5.0


class ArrivalPattern(Record):
    """A load pattern with parameters of its own, which are the further keys."""

    model_config = ConfigDict(extra="allow")

    name: str

    def __str__(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in (self.model_extra or {}).items())
        return f"{self.name} ({given})"


Arrivals: TypeAlias = str | ArrivalPattern


class Load(Record):
    """Open loop: requests leave on schedule, whether or not the server keeps up.

    ``arrivals`` names a load pattern, e.g. ``poisson`` (loadgen/schedule.py has them all).
    """

    rate_per_s: PositiveFloat
    duration_s: PositiveFloat
    seed: NonNegativeInt = Field(description="of the arrivals")
    arrivals: Arrivals = "poisson"
    order_seed: NonNegativeInt | None = Field(
        default=None, description="of the inputs' order; None: the traffic's own"
    )

    @property
    def offered_per_s(self) -> float:
        """Requests a second that are asked for."""
        return self.rate_per_s

    def __str__(self) -> str:
        return f"{per_second(self.rate_per_s)} {self.arrivals}"


class ClosedLoad(Record):
    """Closed loop: so many clients, each sending its next request when its last is answered.

    It slows down with the server, so its latencies say nothing about a tail under real arrivals;
    use it for the highest throughput, and to compare with tools that know nothing else.
    """

    clients: PositiveInt
    duration_s: PositiveFloat
    seed: NonNegativeInt = Field(description="of the inputs' order")

    @property
    def offered_per_s(self) -> float:
        """Nothing is asked for; what was achieved is the measurement's throughput."""
        return 0.0

    def __str__(self) -> str:
        return f"{self.clients} clients"


class Percentile(Record):
    """A latency percentile with a distribution-free interval (binomial order statistics)."""

    quantile: float = Field(gt=0.0, lt=1.0)
    value_ms: NonNegativeFloat
    low_ms: NonNegativeFloat | None = Field(description="None: too few samples for a bound")
    high_ms: NonNegativeFloat | None = Field(description="None: too few samples for a bound")
    samples: PositiveInt


class StageSplit(Record):
    """Where Triton's own counters say the time went, mean milliseconds a request."""

    queue_ms: NonNegativeFloat
    compute_input_ms: NonNegativeFloat
    compute_infer_ms: NonNegativeFloat
    compute_output_ms: NonNegativeFloat
    mean_batch_size: NonNegativeFloat
    batches: dict[int, int] = Field(
        default_factory=dict, description="batch size -> executions of that size"
    )
    client_ms: NonNegativeFloat | None = Field(
        default=None,
        description="mean end-to-end latency minus the server's own: client and network",
    )
    judged_server_ms: NonNegativeFloat | None = Field(
        default=None,
        description="what the answered requests after the warm-up took on the server, mean, or "
        "less; None: not known of them alone",
    )

    @property
    def server_ms(self) -> float:
        """Mean time on the server, from the queue to the output."""
        return (
            self.queue_ms + self.compute_input_ms + self.compute_infer_ms + self.compute_output_ms
        )


class Resources(Record):
    """What serving used, over the measured time. None: not known on this machine."""

    gpu_utilisation: float | None = Field(default=None, ge=0.0, le=1.0)
    gpu_memory_bytes: NonNegativeInt | None = None
    gpu_model_bytes: NonNegativeInt | None = Field(
        default=None,
        description="what the model itself takes of the fullest of its GPUs, by what was in use "
        "before it was loaded",
    )
    gpu_power_w: NonNegativeFloat | None = None
    server_cores: NonNegativeFloat | None = Field(
        default=None, description="processor time of the server and its models over wall time"
    )
    joules_per_request: NonNegativeFloat | None = None
    cost_per_million: NonNegativeFloat | None = Field(
        default=None, description="requests, at the policy's price per hour"
    )


class Generator(Record):
    """Who sent the load, and what sending alone costs: the same load against a do-nothing model."""

    driver: Driver = "python"
    processes: PositiveInt = 1
    cpu_share: NonNegativeFloat = Field(
        default=0.0, description="processor time over wall time, of its busiest process"
    )
    null_p50_ms: NonNegativeFloat | None = Field(
        default=None, description="against a do-nothing model"
    )
    null_p99_ms: NonNegativeFloat | None = None
    trusted_per_s: NonNegativeFloat | None = Field(
        default=None, description="highest rate it was shown to keep up with"
    )


class Measurement(Record):
    """One load against one configuration. Read ``invalid`` first: not empty means no verdict."""

    config: ServingConfig
    load: Load | ClosedLoad
    invalid: tuple[str, ...] = Field(description="why the numbers must not be used; empty if valid")
    sent: NonNegativeInt
    completed: NonNegativeInt
    failed: NonNegativeInt = Field(
        description="errors and rejections; they count as over the limit"
    )
    throughput_per_s: NonNegativeFloat
    percentiles: tuple[Percentile, ...]
    late_p99_ms: NonNegativeFloat = Field(description="how late the generator itself sent")
    stages: StageSplit | None
    latencies_sha256: Sha256 = Field(description="raw latencies in the store")
    errors: dict[str, int] = Field(default_factory=dict, description="status -> failures")
    lasted_s: NonNegativeFloat | None = Field(
        default=None, description="how long was sent; less than asked when it was decided early"
    )
    warmup_s: NonNegativeFloat | None = Field(
        default=None, description="from the start; what was answered then is in no number but sent"
    )
    cold_start_s: NonNegativeFloat | None = Field(
        default=None, description="from the load call to the first answer, of this configuration"
    )
    generator_limited: bool = Field(
        default=False,
        description="whether it is invalid because the sender, not the server, was the limit",
    )
    late: NonNegativeInt = Field(default=0, description="requests sent later than may be")
    achieved_share: NonNegativeFloat | None = Field(
        default=None, description="rate that was sent over the rate asked for"
    )
    generator: Generator = Generator()
    resources: Resources = Resources()

    def percentile(self, quantile: float) -> Percentile | None:
        """The percentile that was asked for, or None when it falls on a failure."""
        return next((p for p in self.percentiles if p.quantile == quantile), None)

    @property
    def p99(self) -> Percentile | None:
        """The percentile that the SLO limits."""
        return self.percentile(P99)

    @property
    def rate_per_s(self) -> float:
        """What was offered; in a closed loop, what was achieved."""
        return self.load.offered_per_s or self.throughput_per_s

    @property
    def sent_for_s(self) -> float:
        """How long requests were sent: the load's duration unless it was decided early."""
        return self.load.duration_s if self.lasted_s is None else self.lasted_s


@dataclass(frozen=True, slots=True)
class LatencySample:
    """A measurement with its raw latencies.

    Attributes:
        latencies_ms: of every request after the warm-up and of every failure, which is infinite.
        cached: whether it was made earlier, so that nothing was sent now.
    """

    measurement: Measurement
    latencies_ms: NDArray[np.float64]
    cached: bool = False

    def over(self, limit_ms: float) -> int:
        """Requests that took longer than the limit, or failed."""
        return int((~(self.latencies_ms <= limit_ms)).sum())
