"""Tables of a policy that say what serving must deliver, how it is measured, and its budget."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from enginegate.measurement import Arrivals, DriverChoice, SharedMemory, WireProtocol
from enginegate.policy.gates import Confidence
from enginegate.records import Record
from enginegate.serving import ServingOptions

_LISTS = ("max_batch_sizes", "preferred_batch_sizes", "queue_delays_us", "instances", "processes")
_MOST_CONFIGURATIONS = 10_000
_FINITE = ConfigDict(allow_inf_nan=False)

# As many as follow any mix closely; a round of requests uses each size once.
Rows = Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=2000)]
BatchSizes = Annotated[tuple[PositiveInt, ...], Field(max_length=16)]


class Slo(Record):
    """What serving must deliver."""

    model_config = _FINITE

    p99_ms: PositiveFloat = Field(description="99th percentile of latency at the client")
    min_throughput_per_s: PositiveFloat = Field(description="requests a second within the SLO")
    confidence: Confidence = Field(
        description="that the SLO is met, by the binomial rule, e.g. 0.99"
    )
    confirmations: PositiveInt = Field(
        default=3, description="fresh seeds with which the chosen configuration must meet the SLO"
    )
    confirm_requests: PositiveInt = Field(
        default=10_000, description="requests it is confirmed with, all seeds together"
    )
    min_speedup: PositiveFloat | None = Field(
        default=None,
        description="throughput at the SLO over that of `faster_than`; a candidate below fails. "
        "Without it no candidate has to be faster than anything",
    )
    faster_than: Literal["fp32", "champion"] = Field(
        default="fp32",
        description="what min_speedup compares with: the FP32 engine of the same runtime, or what "
        "is live (fp32 while nothing is), which is then measured in turns with every candidate",
    )
    fp32_may_win: bool = Field(
        default=True,
        description="false: an FP32 engine is measured as what the others are compared with, and "
        "never wins a qualification: a version whose smaller precisions all fail is refused",
    )


class Benchmarked(Record):
    """Which candidates are benchmarked, and how long each engine is measured alone before."""

    model_config = _FINITE

    also_failed: bool = Field(
        default=False,
        description="also those that no speed can make win: whose verdict failed, or is "
        "inconclusive where approval.accept_inconclusive is off. It takes minutes for each",
    )
    engine_alone_s: NonNegativeFloat = Field(
        default=5.0,
        description="time for one engine's speed without a server, over batch sizes; what does "
        "not fit is said. It starts the search near the answer. 0: not measured",
    )


class LoadShape(Record):
    """How requests are sent while measuring."""

    model_config = _FINITE

    arrivals: Arrivals = Field(
        default="poisson",
        description="load pattern: poisson, constant, bursts, replay (the shadow sample's own "
        "arrival times), or one that an installed package adds; with parameters of its own, "
        "{ name, ... }",
    )
    protocol: WireProtocol = Field(default="grpc", description="grpc or http")
    shared_memory: SharedMemory = Field(
        default="none",
        description="where inputs, and outputs of a known size, are for a server on this machine: "
        "none (they travel), system, or cuda (memory of GPU 0)",
    )
    rows: PositiveInt | Rows | None = Field(
        default=None,
        description="rows of each request, e.g. 8; a list draws each size as often as it is named; "
        "without it, as recorded, else 1. Rates and the SLO stay in requests",
    )
    driver: DriverChoice = Field(
        default="python",
        description="what sends: python (this program), perf_analyzer (where it is installed), or "
        "auto: this program, unless it cannot send [search] max_rate_per_s to a do-nothing model "
        "in time and perf_analyzer sends more",
    )
    processes: NonNegativeInt = Field(
        default=0, description="processes that send; 0: as many as the rate and the cores allow"
    )
    timeout_s: PositiveFloat = Field(
        default=5.0, description="a request without an answer by then has failed"
    )
    heavier: bool = Field(
        default=False,
        description="also report how the tail moves under bursts and with large requests together",
    )

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Rows of each request, each size as often as it is drawn; None: as recorded."""
        return (self.rows,) if isinstance(self.rows, int) else self.rows


class Search(Record):
    """Configurations and loads to try, and how much may be spent."""

    model_config = _FINITE

    objective: Literal["throughput", "cost", "latency"] = Field(
        default="throughput",
        description="what the best is: highest rate that meets the SLO, lowest cost of a request "
        "there, or lowest p99 at `at_rate_per_s`",
    )
    at_rate_per_s: PositiveFloat | None = Field(
        default=None, description="needed with the objective latency"
    )
    max_batch_sizes: tuple[PositiveInt, ...] = Field(description="max_batch_size values")
    preferred_batch_sizes: tuple[BatchSizes, ...] = Field(
        default=((),), description="lists of preferred sizes to try; an empty list: none preferred"
    )
    queue_delays_us: tuple[NonNegativeInt, ...] = Field(description="max_queue_delay values")
    instances: tuple[PositiveInt, ...] = Field(description="instance counts (of each GPU)")
    processes: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 3, 4),
        description="of this program's runner on a GPU: how many processes may share each GPU. "
        "The fewest that are expected to serve 80 % of the engine alone are tried first, more "
        "where they serve less. Each takes the memory of the engine and of a CUDA context",
    )
    gpus: tuple[NonNegativeInt, ...] = Field(
        default=(), description="GPUs to place instances on; empty: every one there is"
    )
    min_rate_per_s: PositiveFloat = Field(description="lowest offered load worth knowing about")
    max_rate_per_s: PositiveFloat = Field(
        description="highest offered load that is tried; the trial past the answer, at overload, "
        "needs 1.2 times the answer to be within it"
    )
    resolution: float = Field(
        default=0.05,
        gt=0.0,
        le=0.5,
        description="how closely the highest rate that meets the SLO is found, as a share of it",
    )
    measurement_s: PositiveFloat = Field(
        description="longest one trial of the search may last; it ends earlier once it is decided. "
        "A confirmation lasts as long, or longer where its share of [slo] confirm_requests takes "
        "longer"
    )
    budget_s: PositiveFloat = Field(
        description="time for one candidate; what was found then counts"
    )
    max_measurements: PositiveInt = Field(
        default=60, description="measurements of one candidate, confirmations included"
    )
    seed: NonNegativeInt = Field(default=0, description="seed of arrivals and input order")

    @property
    def configurations(self) -> int:
        """How many different ones can be used: none prefers batches larger than it allows."""
        preferred = set(self.preferred_batch_sizes)
        batching = sum(
            all(wanted <= size for wanted in sizes)
            for size in set(self.max_batch_sizes)
            for sizes in preferred
        )
        placements = len(self.gpus) if self.objective == "cost" and self.gpus else 1
        return batching * len(set(self.queue_delays_us)) * len(set(self.instances)) * placements

    @property
    def ceiling_per_s(self) -> float:
        """The highest rate that a search of this objective tries."""
        if self.objective == "latency" and self.at_rate_per_s is not None:
            return self.at_rate_per_s
        return self.max_rate_per_s

    @model_validator(mode="after")
    def _some_can_be_used(self) -> Self:
        for field in _LISTS:
            if not getattr(self, field):
                raise ValueError(f"{field} is empty: nothing would be measured")
        if not self.configurations:
            raise ValueError(
                f"every list of preferred_batch_sizes has a size above the largest of "
                f"max_batch_sizes, {max(self.max_batch_sizes)}: nothing would be measured"
            )
        if self.configurations > _MOST_CONFIGURATIONS:
            raise ValueError(
                f"{self.configurations} configurations; {_MOST_CONFIGURATIONS} at most: shorten a "
                "list"
            )
        return self

    @model_validator(mode="after")
    def _rates_fit(self) -> Self:
        low, high, at = self.min_rate_per_s, self.max_rate_per_s, self.at_rate_per_s
        if high < low:
            raise ValueError("max_rate_per_s is below min_rate_per_s")
        if self.objective == "latency" and at is None:
            raise ValueError("the objective latency needs at_rate_per_s")
        if at is not None and not low <= at <= high:
            raise ValueError(
                f"at_rate_per_s, {at:g}, is not between min_rate_per_s, {low:g}, and "
                f"max_rate_per_s, {high:g}"
            )
        return self


class Cost(Record):
    """What serving costs."""

    model_config = _FINITE

    price_per_hour: NonNegativeFloat | None = Field(
        default=None, description="of the machine, or of one GPU where there are GPUs"
    )
    currency: str = Field(default="USD", max_length=8, description="shown beside the price")


@dataclass(frozen=True, slots=True)
class BenchmarkTables:
    """Everything in a policy that decides what a benchmark measures and what it must show."""

    slo: Slo
    search: Search
    load: LoadShape
    cost: Cost
    serving: ServingOptions
    load_timeout_s: float
