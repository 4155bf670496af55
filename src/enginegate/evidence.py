"""What was found out about candidates, and how outcomes combine.

- **Finding**: one check's outcome with its number, relation and limit.
- **Verdict**: the findings of one candidate; the worst outcome wins.
- **Engine speed**: what an engine computes alone, without a server, batch size by batch size.
- **Benchmark**: what Triton delivered for one candidate, validity first.
- **Scorecard**: all verdicts and benchmarks of one qualification; its digest is what a person
  approves.
"""

import math
from collections.abc import Iterator
from datetime import datetime
from enum import IntEnum
from statistics import median
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

from enginegate.candidate import Candidate, FileDigest, Precision, Sha256
from enginegate.measurement import Measurement, Percentile
from enginegate.records import Record
from enginegate.serving import ServingConfig, ServingOptions


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

    of_error: bool = Field(
        default=False, description="a loss that is the growth of an error, e.g. of mae"
    )

    @property
    def measure(self) -> str:
        """What a loss or FP32's own score is measured in, in the field's words, e.g. ``mIoU``."""
        name = self.gate.removeprefix("slice_").removesuffix("_loss").removesuffix(_OF_FP32)
        return measure_words(name)

    @property
    def measure_title(self) -> str:
        """The same at the beginning of a sentence."""
        words = self.measure
        return words if any(letter.isupper() for letter in words) else words.capitalize()

    def as_change(self, loss: float) -> float:
        """A loss as the change against FP32: a share in percentage points.

        A score that is lost changes by less than nothing, an error that grows by more.
        """
        scale = 100.0 if self.in_points else 1.0
        return (scale if self.of_error else -scale) * loss + 0.0

    @property
    def change_ends(self) -> tuple[float, float] | None:
        """The interval of the change, the lower end first; None: it has none."""
        if self.low is None or self.high is None:
            return None
        low, high = sorted((self.as_change(self.low), self.as_change(self.high)))
        return low, high

    @property
    def in_points(self) -> bool:
        """Whether it is a loss of a share of the answers, which is shown in percentage points."""
        return self.unit == "fraction" or self.gate.endswith("accuracy_loss")

    @property
    def of_fp32(self) -> bool:
        """Whether it tells FP32's own score, which is evidence about labels, not a candidate."""
        return self.gate.endswith(_OF_FP32)


_OF_FP32 = "_fp32"
_MEASURES = {
    "dice": "Dice",
    "label_f1": "F1 of labels",
    "macro_f1": "macro F1",
    "mae": "MAE",
    "map": "mAP",
    "map50": "mAP at 0.5",
    "micro_f1": "micro F1",
    "miou": "mIoU",
    "r2": "R²",
    "rmse": "RMSE",
    "top1": "top-1",
}
_SAME_RATE = 1e-6  # rates are of one grid, so only rounding can part them


def measure_words(name: str) -> str:
    """A metric's name as the field writes it; one that a policy made up as it stands there."""
    if name in _MEASURES:
        return _MEASURES[name]
    kind, _, of = name.partition("_")
    if kind in _MEASURES and of:  # the standard metric of one output
        return f"{_MEASURES[kind]} of {of}"
    return name.replace("_", " ")


def loss_gate(gate: str) -> str:
    """The gate whose evidence FP32's own score is, e.g. accuracy_loss for accuracy_fp32."""
    return f"{gate.removesuffix(_OF_FP32)}_loss"


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

    @property
    def task_loss(self) -> Finding | None:
        """The task's loss on all labelled data: accuracy, else the first metric of the policy."""
        losses = [f for f in self.task_losses if "/" not in f.scope]
        return next((f for f in losses if f.gate == "accuracy_loss"), losses[0] if losses else None)

    @property
    def task_losses(self) -> tuple[Finding, ...]:
        """Losses on labelled data that were measured, overall and by slice; none is emulated."""
        return tuple(
            f
            for f in self.findings
            if f.gate.endswith("_loss") and f.value is not None and f.scope.startswith("evaluation")
        )


class Roofline(Record):
    """What limits an engine on this device: arithmetic or memory traffic.

    Williams, Waterman, Patterson: Roofline, CACM 52 (4), 2009. Work is counted on the graph;
    ceilings are measured on the device, or None where they could not be.
    """

    batch_size: PositiveInt
    flops: NonNegativeFloat = Field(description="floating-point operations of one batch")
    bytes_moved: NonNegativeFloat = Field(description="weights and activations read and written")
    peak_flops_per_s: NonNegativeFloat | None = None
    peak_bytes_per_s: NonNegativeFloat | None = None
    bound: Literal["compute", "memory", "unknown"]
    reached: NonNegativeFloat | None = Field(
        default=None, description="share of what the roofline allows that the engine reached"
    )


class BatchSpeed(Record):
    """One batch size, run back to back on one stream, in several windows of time."""

    batch_size: PositiveInt
    windows_per_s: tuple[NonNegativeFloat, ...] = Field(
        min_length=1, description="samples a second, one for each window"
    )
    runs: PositiveInt = Field(description="of the engine in each window")

    @property
    def samples_per_s(self) -> float:
        """Median of the windows."""
        return median(self.windows_per_s)

    @property
    def batch_ms(self) -> float:
        """Time of one run."""
        return 1e3 * self.batch_size / self.samples_per_s if self.samples_per_s else math.inf

    def ties_with(self, other: "BatchSpeed") -> bool:
        """Whether the windows of both overlap, so that neither is shown to be faster."""
        one, two = self.windows_per_s, other.windows_per_s
        return max(one) >= min(two) and max(two) >= min(one)


class SpeedSweep(Record):
    """What a model computes alone, without a server: one stream, warm, real samples."""

    device: str = Field(description="what ran it, as its runtime names it")
    inputs_on: Literal["device", "host"] = Field(description="where the inputs lay")
    graphs: bool | None = Field(
        default=None, description="whether captured graphs were replayed; None: not known"
    )
    batches: tuple[BatchSpeed, ...] = Field(description="ascending batch sizes")
    unmeasured: str = Field(default="", description="batch sizes without a number, and why")

    @property
    def best(self) -> BatchSpeed | None:
        """The batch size with the most samples a second."""
        return max(self.batches, key=lambda batch: batch.samples_per_s, default=None)

    def at(self, batch_size: int) -> BatchSpeed | None:
        """The speed at one batch size, where it was measured."""
        return next((b for b in self.batches if b.batch_size == batch_size), None)


class EngineSpeed(SpeedSweep):
    """The sweep of one engine."""

    candidate: Candidate
    engine_sha256: Sha256
    opened_mib: NonNegativeFloat | None = Field(
        default=None, description="device memory that opening it took; None: not known"
    )
    largest_batch_mib: NonNegativeFloat | None = Field(
        default=None, description="device memory in use at its largest measured batch"
    )


class EagerSpeed(SpeedSweep):
    """The sweep of the source's own PyTorch model, not compiled: what engines must beat."""

    precision: Precision
    library: str = Field(description="e.g. torch 2.11.0")


class Rival(Record):
    """The candidate's chosen configuration against what is live, measured in turns (A/B/A/B)."""

    release: PositiveInt = Field(description="the live release it was compared with")
    rate_per_s: NonNegativeFloat
    candidate_p99_ms: tuple[NonNegativeFloat, ...] = Field(description="one for each turn")
    champion_p99_ms: tuple[NonNegativeFloat, ...] = Field(description="one for each turn")
    noise_ms: NonNegativeFloat = Field(description="spread of the champion against itself (A/A)")
    champion_throughput_per_s: NonNegativeFloat = Field(description="that met the SLO; 0: none")
    champion_rejected_per_s: NonNegativeFloat | None = Field(
        default=None, description="lowest rate shown not to meet the SLO; None: none was"
    )


class Pattern(Record):
    """The chosen configuration under a heavier mix than was recorded."""

    name: str = Field(description="e.g. recorded, bursts, large together")
    rate_per_s: NonNegativeFloat
    percentiles: tuple[Percentile, ...]
    failed_share: NonNegativeFloat


class Point(Record):
    """The best that one configuration was seen to do; Pareto points are kept for people."""

    config: ServingConfig
    rate_per_s: NonNegativeFloat
    p99: Percentile | None
    cost_per_million: NonNegativeFloat | None = None
    confirmed: bool = False


class PointDecision(Record):
    """Whether one configuration is shown to meet the SLO at one rate: the rule of gate p99_ms.

    All valid measurements there together, at the policy's confidence, at the number of independent
    requests that they are worth.
    """

    config: ServingConfig
    rate_per_s: NonNegativeFloat
    outcome: OutcomeWord = Field(description="passed: it meets the SLO; failed: it does not")
    requests: NonNegativeInt
    over: NonNegativeInt = Field(description="took longer than the limit, or failed")


class Benchmark(Record):
    """What Triton delivered for one candidate."""

    candidate: Candidate
    engine_sha256: Sha256
    server: str = Field(description="Triton's version and the device it ran on")
    measurements: tuple[Measurement, ...]
    chosen: ServingConfig | None = Field(description="the configuration that meets the SLO best")
    throughput_at_slo_per_s: NonNegativeFloat = Field(description="0 when none meets the SLO")
    confirmed_rate_per_s: NonNegativeFloat | None = Field(
        default=None, description="rate that was offered there; of it so much was answered"
    )
    ceiling_per_s: NonNegativeFloat | None = Field(
        default=None, description="highest rate that the policy allows to try"
    )
    decisions: tuple[PointDecision, ...] = Field(
        default=(), description="one for each point that was measured validly"
    )
    engine_bytes: NonNegativeInt | None = Field(
        default=None, description="the engine's files; None: not known"
    )
    p99_at_slo: Percentile | None
    findings: tuple[Finding, ...]
    options: ServingOptions = Field(
        default=ServingOptions(), description="what it was served with besides"
    )
    backend: str = Field(
        default="", description="Triton backend it was measured in; empty: the engine kind's usual"
    )
    rejected_rate_per_s: NonNegativeFloat | None = Field(
        default=None,
        description="lowest rate at which the chosen configuration was not seen to meet the SLO",
    )
    cut_short: str = Field(
        default="",
        description="why the search may have missed a higher rate, and what to do; empty: it ended "
        "by itself",
    )
    generator_per_s: NonNegativeFloat | None = Field(
        default=None,
        description="highest rate that the sender was shown to keep up with, against a do-nothing "
        "model; None: not measured",
    )
    generator_limit_per_s: NonNegativeFloat | None = Field(
        default=None,
        description="lowest rate above the answer that could not be measured because the sender, "
        "not the server, was the limit; the answer is then a lower bound. None: there was none",
    )
    rows_per_request: PositiveFloat = Field(
        default=1.0, description="mean; rates are in requests, rows are this many times as many"
    )
    reasons: dict[str, str] = Field(
        default_factory=dict,
        description="field of the configuration -> the measurements that chose its value",
    )
    pareto: tuple[Point, ...] = ()
    rival: Rival | None = None
    patterns: tuple[Pattern, ...] = ()
    roofline: Roofline | None = None
    cold_start_s: NonNegativeFloat | None = None
    cost_per_million: NonNegativeFloat | None = Field(
        default=None, description="requests at the SLO, at the policy's price"
    )
    currency: str = ""

    @property
    def outcome(self) -> Outcome:
        """The worst of the findings that count."""
        return worst(self.findings)

    @property
    def offered_at_slo_per_s(self) -> float:
        """The rate that was confirmed, as it was offered; its throughput where that is not kept."""
        rate = self.confirmed_rate_per_s
        return self.throughput_at_slo_per_s if rate is None else rate

    @property
    def samples_at_slo_per_s(self) -> float:
        """Rows a second that were answered within the SLO."""
        return self.throughput_at_slo_per_s * self.rows_per_request

    @property
    def at_ceiling(self) -> bool:
        """Whether nothing above its rate could be tried, so that it may sustain more."""
        top = self.ceiling_per_s
        return top is not None and self.offered_at_slo_per_s >= top * (1.0 - _SAME_RATE)

    @property
    def is_lower_bound(self) -> bool:
        """Whether it may sustain more, because nothing above its rate could be offered."""
        return self.at_ceiling or self.generator_limit_per_s is not None

    @property
    def throughput_text(self) -> str:
        """Requests a second within the SLO, for people: ``≥ 800`` where it is a lower bound."""
        return f"{'≥ ' if self.is_lower_bound else ''}{self.throughput_at_slo_per_s:,.0f}"

    @property
    def rows_text(self) -> str:
        """The same in rows, in brackets; empty where each request has one row."""
        if self.rows_per_request == 1.0:
            return ""
        rows_per_s = self.throughput_at_slo_per_s * self.rows_per_request
        return f" ({rows_per_s:,.0f} rows/s, {self.rows_per_request:g} a request)"

    @property
    def gpu_bytes(self) -> int | None:
        """GPU memory that the chosen configuration takes of the fullest GPU; None: not measured."""
        measured = self.at_slo
        return measured.resources.gpu_model_bytes if measured else None

    @property
    def at_slo(self) -> Measurement | None:
        """The valid measurement of what was chosen, nearest to the rate that was confirmed.

        Nearest in what was offered: an overloaded server answers about as much as at its best, and
        late. Of several at one rate, the one that answered nearest to the throughput it was given.
        """
        usable = [m for m in self.measurements if m.config == self.chosen and not m.invalid]
        offered, answered = self.offered_at_slo_per_s, self.throughput_at_slo_per_s

        def distance(measured: Measurement) -> tuple[float, float]:
            return abs(measured.rate_per_s - offered), abs(measured.throughput_per_s - answered)

        return min(usable, key=distance, default=None)


class DataDigests(Record):
    """Digests of the data the evidence was made from; None when that data was not given."""

    evaluation: Sha256
    calibration: Sha256 | None
    shadow: Sha256 | None


class ReplacedRelease(Record):
    """What was live when a scorecard was made, by the evidence that it went live with.

    Without that evidence (made on another machine, or deleted) only what its manifest says.
    """

    release: PositiveInt
    model_uri: str
    candidate: Candidate
    engine_sha256: Sha256
    scorecard_sha256: Sha256 = Field(description="that it was published of")
    promised_p99_ms: NonNegativeFloat
    promised_per_s: NonNegativeFloat
    engine_bytes: NonNegativeInt | None = Field(
        default=None, description="of its files; None: not known"
    )
    gpu_bytes: NonNegativeInt | None = Field(
        default=None, description="memory that it took of the fullest GPU; None: not measured"
    )
    qualified_at: datetime | None = Field(
        default=None, description="when its evidence was made; None: that is not here"
    )
    onnx_sha256: Sha256 | None = None
    evaluation_sha256: Sha256 | None = Field(
        default=None, description="of the labelled data that it was judged on"
    )
    benchmark: Benchmark | None = Field(
        default=None, description="its result, without the measurements that led to it"
    )
    loss: Finding | None = Field(default=None, description="the task's loss against its FP32")
    fp32_score: Finding | None = Field(default=None, description="FP32's own score there")


class DeviceEvidence(Record):
    """What was found out on one kind of device; the fields are those of a scorecard."""

    device: str = Field(description="its name under [devices]")
    environment: dict[str, str]
    verdicts: tuple[Verdict, ...]
    benchmarks: tuple[Benchmark, ...]
    winner: Candidate | None
    reason: str
    tied: tuple[Candidate, ...] = ()
    unmeasured: dict[str, str] = Field(default={})
    engine_speeds: tuple[EngineSpeed, ...] = ()
    eager_speeds: tuple[EagerSpeed, ...] = ()
    speed_findings: tuple[Finding, ...] = ()
    golden: dict[str, FileDigest] = Field(
        default={},
        description="samples with the answers that the engine gave on this device, by candidate",
    )


class Scorecard(Record):
    """All evidence of one qualification. Its ``digest`` is what a person approves.

    With several kinds of device the fields are about that of the target's own server, and
    ``further`` holds the others: `on` shows each as a scorecard of its own.
    """

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
    replaced: ReplacedRelease | None = Field(
        default=None, description="the same release in numbers, to compare the winner with"
    )
    winner: Candidate | None = Field(description="None when no candidate passed every gate")
    reason: str = Field(description="why the winner won, or why there is none")
    tied: tuple[Candidate, ...] = Field(
        default=(), description="candidates that the measurements do not tell from the winner"
    )
    mlflow_run: str = Field(default="", description="MLflow run id of the qualification")
    unmeasured: dict[str, str] = Field(
        default={}, description="candidates that were not benchmarked, by name -> why not"
    )
    requested_by: str = Field(default="", description="who ran the qualification")
    approval_hours: PositiveFloat | None = Field(
        default=None, description="for how long an approval stands, by the policy; None: not kept"
    )
    engine_speeds: tuple[EngineSpeed, ...] = Field(
        default=(), description="of the engines that run here, each measured without a server"
    )
    eager_speeds: tuple[EagerSpeed, ...] = Field(
        default=(), description="of the source's PyTorch model on that device, by precision"
    )
    speed_findings: tuple[Finding, ...] = Field(
        default=(), description="what engines alone say about the winner; they decide nothing"
    )
    device: str = Field(
        default="", description="kind of device that this is about; empty: the policy names none"
    )
    golden: dict[str, FileDigest] = Field(
        default={},
        description="samples with the answers that the engine gave on that device, by candidate",
    )
    further: tuple[DeviceEvidence, ...] = Field(
        default=(), description="of the other kinds of device, in the order of the policy"
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """Its kinds of device, that of the target's own server first; empty: none is named."""
        return (self.device, *(each.device for each in self.further)) if self.device else ()

    def on(self, device: str) -> "Scorecard":
        """What it says of one kind of device, to be shown and looked up; its digest is no one's.

        Raises:
            KeyError: it has nothing about that kind.
        """
        if device == self.device:
            return self.model_copy(update={"further": ()})
        found = next((each for each in self.further if each.device == device), None)
        if found is None:
            raise KeyError(device)
        own = {name: getattr(found, name) for name in DeviceEvidence.model_fields}
        return self.model_copy(update={**own, "further": ()})

    @property
    def by_device(self) -> tuple["Scorecard", ...]:
        """One scorecard for each kind of device; this one where it names none."""
        return tuple(self.on(device) for device in self.devices) or (self,)

    def verdict(self, candidate: Candidate) -> Verdict | None:
        """The verdict on one candidate."""
        return next((v for v in self.verdicts if v.candidate == candidate), None)

    def benchmark(self, candidate: Candidate) -> Benchmark | None:
        """The benchmark of one candidate."""
        return next((b for b in self.benchmarks if b.candidate == candidate), None)

    def engine_speed(self, candidate: Candidate) -> EngineSpeed | None:
        """What one candidate's engine computes alone."""
        return next((s for s in self.engine_speeds if s.candidate == candidate), None)

    def engine_share(self, candidate: Candidate) -> float | None:
        """Samples a second within the SLO over the engine's own best; None where one is not known.

        Above 1 where several instances work side by side: the engine alone is one stream.
        """
        benchmark, speed = self.benchmark(candidate), self.engine_speed(candidate)
        best = speed.best if speed else None
        if benchmark is None or benchmark.chosen is None or best is None or not best.samples_per_s:
            return None
        return benchmark.samples_at_slo_per_s / best.samples_per_s

    @property
    def fp32_scores(self) -> tuple[Finding, ...]:
        """FP32's own scores on labelled data, overall and by slice, as the first verdict has them.

        They are the same in every verdict, but for intervals where precisions differ in confidence.
        """
        found = (
            tuple(f for f in v.findings if f.of_fp32 and f.scope.startswith("evaluation"))
            for v in self.verdicts
        )
        return next((scores for scores in found if scores), ())

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Its candidates as people read them: the winner, the tied, then by outcome and rate."""

        def place(candidate: Candidate) -> tuple[bool, bool, Outcome, float]:
            benchmark = self.benchmark(candidate)
            rate = benchmark.throughput_at_slo_per_s if benchmark else -1.0
            ties = candidate in self.tied
            return candidate != self.winner, not ties, self.outcome(candidate), -rate

        return tuple(sorted((verdict.candidate for verdict in self.verdicts), key=place))

    def fp32_score_of(self, loss: Finding | None) -> Finding | None:
        """FP32's own score of the measure that a loss is about, on the same data."""
        return next(
            (
                score
                for score in self.fp32_scores
                if loss is not None
                and (loss_gate(score.gate), score.scope) == (loss.gate, loss.scope)
            ),
            None,
        )

    def outcome(self, candidate: Candidate) -> Outcome:
        """A candidate's outcome over verdict and benchmark; without a benchmark never PASSED."""
        verdict, benchmark = self.verdict(candidate), self.benchmark(candidate)
        judged = verdict.outcome if verdict else Outcome.INCONCLUSIVE
        return max(judged, benchmark.outcome if benchmark else Outcome.INCONCLUSIVE)


# Decided on the lower end of an interval that the finding does not have.
_OTHERWISE_DECIDED = frozenset({"input_drift"})
_ROUNDING = 1e-9


def contradictions(scorecard: Scorecard) -> Iterator[str]:
    """What on a scorecard does not follow from what else is on it; nothing where all of it does.

    Only what can be recomputed: whoever edits an outcome and its numbers and the digest is found by
    comparing with MLflow's run, or by the signature.
    """
    if len(set(scorecard.devices)) < len(scorecard.devices):
        yield "a kind of device is judged twice"
        return
    for each in scorecard.by_device:
        where = f" (on {each.device})" if each.device else ""
        yield from (f"{said}{where}" for said in _contradictions(each))


def _contradictions(scorecard: Scorecard) -> Iterator[str]:
    named = [verdict.candidate for verdict in scorecard.verdicts]
    measured = [benchmark.candidate for benchmark in scorecard.benchmarks]
    for candidate in {c for each in (named, measured) for c in each if each.count(c) > 1}:
        yield f"{candidate} is judged twice"
    for benchmark in scorecard.benchmarks:
        verdict = scorecard.verdict(benchmark.candidate)
        if verdict is not None and verdict.engine_sha256 != benchmark.engine_sha256:
            yield f"{benchmark.candidate} was benchmarked with another engine than was judged"
    for speed in scorecard.engine_speeds:
        verdict = scorecard.verdict(speed.candidate)
        if verdict is not None and verdict.engine_sha256 != speed.engine_sha256:
            yield f"{speed.candidate} was measured alone with another engine than was judged"
    winner = scorecard.winner
    if winner is not None and scorecard.outcome(winner) is not Outcome.PASSED:
        yield f"its winner {winner} {scorecard.outcome(winner).word}"
    found = [(v.candidate, finding) for v in scorecard.verdicts for finding in v.findings]
    found += [(b.candidate, finding) for b in scorecard.benchmarks for finding in b.findings]
    for candidate, finding in found:
        if _passed_beyond(finding):
            yield (
                f"{finding.gate} of {candidate} on {finding.scope} passed with "
                f"{finding.value:g}, which is not {finding.relation} {finding.limit:g}"
            )


def _passed_beyond(finding: Finding) -> bool:
    """Whether a finding passed although not even the better end of its interval is within."""
    if finding.outcome is not Outcome.PASSED or finding.gate in _OTHERWISE_DECIDED:
        return False
    if finding.value is None or finding.limit is None or finding.relation is None:
        return False
    limit = finding.limit
    known = [end for end in (finding.value, finding.low, finding.high) if end is not None]
    slack = _ROUNDING * max(1.0, abs(limit))
    if finding.relation == "<=":
        return min(known) > limit + slack
    if finding.relation == ">=":
        return max(known) < limit - slack
    return not any(math.isclose(end, limit, rel_tol=_ROUNDING) for end in known)
