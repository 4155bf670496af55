"""What was found out about candidates, and how outcomes combine.

- **Finding**: one check's outcome with its number, relation and limit.
- **Verdict**: the findings of one candidate; the worst outcome wins.
- **Benchmark**: what Triton delivered for one candidate, validity first.
- **Scorecard**: all verdicts and benchmarks of one qualification; its digest is what a person
  approves.
"""

from datetime import datetime
from enum import IntEnum
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
)

from enginegate.candidate import Candidate, Sha256
from enginegate.canonical import Record


class Outcome(IntEnum):
    """How a check ended; larger is worse, so ``max`` combines outcomes."""

    PASSED = 0
    INCONCLUSIVE = 1
    FAILED = 2
    ERRORED = 3

    @property
    def word(self) -> str:
        """The word shown to people and written to JSON."""
        return self.name.lower()

    @classmethod
    def of_word(cls, value: object) -> object:
        """Read an outcome from its word; anything else is left for validation to refuse."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        return value


OutcomeWord = Annotated[
    Outcome,
    BeforeValidator(Outcome.of_word),
    PlainSerializer(lambda outcome: outcome.word, return_type=str),
]


class Finding(Record):
    """One check's outcome, with the number it was decided on."""

    gate: str = Field(description="what was checked, e.g. accuracy_loss")
    scope: str = Field(description="on what, e.g. evaluation, shadow, evaluation/digit=8, engine")
    outcome: OutcomeWord
    reason: str = Field(description="number, relation, limit and count in one sentence")
    value: float | None = Field(default=None, allow_inf_nan=False)
    limit: float | None = Field(default=None, allow_inf_nan=False)
    relation: Literal["<=", ">=", "=="] | None = None
    unit: str = ""
    low: float | None = Field(default=None, allow_inf_nan=False, description="interval, lower end")
    high: float | None = Field(default=None, allow_inf_nan=False, description="interval, upper end")
    samples: NonNegativeInt = 0
    advisory: bool = Field(default=False, description="shown, but cannot change the verdict")
    remedy: str = Field(default="", description="what to do about it, when it did not pass")
    would_pass: float | None = Field(
        default=None, allow_inf_nan=False, description="the limit it would just have passed"
    )


def worst(findings: tuple[Finding, ...]) -> Outcome:
    """The worst outcome of the findings that count; no evidence is INCONCLUSIVE, never PASSED."""
    return max((f.outcome for f in findings if not f.advisory), default=Outcome.INCONCLUSIVE)


class Verdict(Record):
    """Every finding about one candidate."""

    candidate: Candidate
    engine_sha256: Sha256 | None = Field(description="None when no engine could be built")
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of the findings that count."""
        return worst(self.findings)

    @property
    def blocking(self) -> tuple[Finding, ...]:
        """The findings that keep this verdict from passing, worst first."""
        found = [f for f in self.findings if not f.advisory and f.outcome is not Outcome.PASSED]
        return tuple(sorted(found, key=lambda finding: -finding.outcome))

    def finding(self, gate: str, scope: str) -> Finding | None:
        """The finding of one gate in one scope, if there is one."""
        return next((f for f in self.findings if (f.gate, f.scope) == (gate, scope)), None)


class ServingConfig(Record):
    """How Triton is told to serve an engine: the axes of the search."""

    max_batch_size: PositiveInt
    max_queue_delay_us: NonNegativeInt
    instances: PositiveInt

    def __str__(self) -> str:
        return (
            f"batch <= {self.max_batch_size}, delay {self.max_queue_delay_us} us, "
            f"{self.instances} instance{'s' if self.instances > 1 else ''}"
        )


class Load(Record):
    """Open-loop Poisson arrivals: sent on schedule, whether or not the server keeps up."""

    rate_per_s: PositiveFloat
    duration_s: PositiveFloat
    seed: NonNegativeInt


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


class Measurement(Record):
    """One load against one configuration. Read ``invalid`` first: not empty means no verdict."""

    config: ServingConfig
    load: Load
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

    def percentile(self, quantile: float) -> Percentile | None:
        """The percentile that was asked for, or None when nothing completed."""
        return next((p for p in self.percentiles if p.quantile == quantile), None)


class Benchmark(Record):
    """What Triton delivered for one candidate."""

    candidate: Candidate
    engine_sha256: Sha256
    server: str = Field(description="Triton's version and the device it ran on")
    measurements: tuple[Measurement, ...]
    chosen: ServingConfig | None = Field(description="the configuration that holds the SLO best")
    throughput_at_slo_per_s: NonNegativeFloat = Field(description="0 when none holds the SLO")
    p99_at_slo: Percentile | None
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of the findings that count."""
        return worst(self.findings)


class DataDigests(Record):
    """Digests of the data the evidence was made from; None when that data was not given."""

    evaluation: Sha256
    calibration: Sha256 | None
    shadow: Sha256 | None


class Scorecard(Record):
    """All evidence of one qualification. Its ``digest`` is what a person approves."""

    schema_version: Literal[1] = 1
    model: str = Field(description="name in the live repository")
    model_uri: str = Field(description="resolved registry version, e.g. models:/digits/1")
    created_at: datetime
    onnx_sha256: Sha256
    policy_sha256: Sha256
    data: DataDigests
    environment: dict[str, str] = Field(description="versions, processor, GPU and driver")
    verdicts: tuple[Verdict, ...]
    benchmarks: tuple[Benchmark, ...]
    replaces: PositiveInt | None = Field(
        default=None, description="release that was live when this evidence was made; None: nothing"
    )
    winner: Candidate | None = Field(description="None when no candidate passed every gate")
    reason: str = Field(description="why the winner won, or why there is none")
    ledger_run: str = Field(default="", description="MLflow run id of the qualification")

    def verdict(self, candidate: Candidate) -> Verdict | None:
        """The verdict on one candidate."""
        return next((v for v in self.verdicts if v.candidate == candidate), None)

    def benchmark(self, candidate: Candidate) -> Benchmark | None:
        """The benchmark of one candidate."""
        return next((b for b in self.benchmarks if b.candidate == candidate), None)

    def outcome(self, candidate: Candidate) -> Outcome:
        """A candidate's outcome over verdict and benchmark; without a benchmark never PASSED."""
        verdict, benchmark = self.verdict(candidate), self.benchmark(candidate)
        judged = verdict.outcome if verdict else Outcome.INCONCLUSIVE
        return max(judged, benchmark.outcome if benchmark else Outcome.INCONCLUSIVE)
