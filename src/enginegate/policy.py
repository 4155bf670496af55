"""A policy: what one model family must prove before it may serve, as one TOML file.

Every limit that decides a promotion is stated in the file; only mechanics have defaults. Relative
paths are relative to the folder ``enginegate`` runs in, and may not contain ``..``.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from enginegate.candidate import Candidate, EngineKind, Precision
from enginegate.canonical import Record, explain_validation
from enginegate.errors import PolicyError


def _stays_below(path: Path) -> Path:
    if ".." in PurePath(path).parts:
        message = "a path in a policy may not contain '..'; use an absolute path, or move the file"
        raise ValueError(message)
    return path


SafePath = Annotated[Path, AfterValidator(_stays_below)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Confidence = Annotated[float, Field(gt=0.5, lt=1.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}$")]


class ModelSource(Record):
    """Where the model comes from."""

    uri: str = Field(
        description="registry version: models:/NAME/VERSION or models:/NAME@ALIAS",
        pattern=r"^models:/[^/@]+(/[0-9]+|@[A-Za-z0-9_-]+)$",
    )
    allow_pickle: bool = Field(
        default=False,
        description="load formats that can run code when opened (pickle): only if you trust it",
    )
    parity_max_abs_error: PositiveFloat = Field(
        default=1e-3, description="largest difference allowed between framework and ONNX outputs"
    )


class Data(Record):
    """Files the candidates are judged on: .npz, or a folder of .npy (see docs/data.md)."""

    evaluation: SafePath = Field(description="labelled inputs, with slice columns")
    calibration: SafePath | None = Field(
        default=None,
        description="representative inputs; without it no int8 or fp8 candidate is built",
    )
    shadow: SafePath | None = Field(
        default=None, description="recorded live requests; without it [shadow] records a sample"
    )


class Shadow(Record):
    """How a shadow sample is recorded through Triton's trace extension."""

    traffic: SafePath = Field(description="production-shaped inputs to send to the FP32 reference")
    rate_per_s: PositiveFloat = Field(description="requests a second to send")
    trace_rate: PositiveInt = Field(description="one request in this many is recorded")
    max_samples: PositiveInt = Field(description="recording stops after this many requests")


class Candidates(Record):
    """Precisions to build for each engine kind; an empty list builds none of that kind."""

    onnxruntime: tuple[Precision, ...] = Field(description="precisions for ONNX Runtime")
    tensorrt: tuple[Precision, ...] = Field(description="precisions for TensorRT or TensorRT-RTX")

    @model_validator(mode="after")
    def _something_to_build(self) -> Self:
        if not self.all():
            raise ValueError("name at least one precision for onnxruntime or tensorrt")
        return self

    def all(self) -> tuple[Candidate, ...]:
        """Every candidate, in the order of the file, without repeats."""
        listed = [(EngineKind.ONNXRUNTIME, p) for p in self.onnxruntime]
        listed += [(EngineKind.TENSORRT, p) for p in self.tensorrt]
        return tuple(Candidate(kind=kind, precision=p) for kind, p in dict.fromkeys(listed))


class Calibration(Record):
    """How int8 and fp8 scales are found."""

    method: Literal["max", "entropy", "percentile"] = Field(
        default="entropy", description="how activation ranges are chosen from calibration data"
    )
    batch_size: PositiveInt = Field(default=32, description="pinned: scales depend on it")
    max_samples: PositiveInt = Field(default=512, description="samples read, from the start")


class TensorRt(Record):
    """How TensorRT plans are built."""

    targets: tuple[Annotated[str, Field(pattern=r"^sm[0-9]{2,3}$")], ...] = Field(
        default=("sm89",), description="compute capabilities to build for ahead of time (RTX only)"
    )
    workspace_mib: PositiveInt = Field(default=1024, description="builder workspace limit")
    timeout_s: PositiveFloat = Field(
        default=900.0, description="a build is stopped after this long"
    )
    memory_mib: PositiveInt = Field(
        default=16384, description="address space the builder may use beyond what it starts with"
    )


class Gates(Record):
    """How far a candidate may be from FP32. Stated in full under [gates.default]."""

    confidence: Confidence = Field(description="of every interval, e.g. 0.95")
    min_samples: PositiveInt = Field(description="fewer samples is inconclusive")
    max_accuracy_loss: Fraction = Field(
        description="non-inferiority margin: the paired interval's lower end must be above -this"
    )
    min_slice_samples: PositiveInt = Field(description="a slice with fewer samples is not judged")
    max_slice_accuracy_loss: Fraction = Field(description="the same margin for each slice")
    min_top1_agreement: Fraction = Field(
        description="share whose top class equals FP32's; the interval's lower end counts"
    )
    max_kl_p99_nats: NonNegativeFloat = Field(
        description="99th percentile over samples of KL(FP32 || candidate)"
    )
    max_abs_error: NonNegativeFloat = Field(description="largest difference of any output value")
    advisory: frozenset[str] = Field(
        default=frozenset(), description="gates that are shown but cannot change the verdict"
    )


class Slo(Record):
    """What serving must deliver."""

    p99_ms: PositiveFloat = Field(description="99th percentile of latency at the client")
    min_throughput_per_s: PositiveFloat = Field(description="requests a second while p99 holds")
    confidence: Confidence = Field(description="of 'p99 holds', by the binomial rule, e.g. 0.99")
    confirmations: PositiveInt = Field(
        default=3, description="fresh seeds the chosen configuration must hold the SLO with"
    )


class Search(Record):
    """Configurations and loads to try, and how much may be spent."""

    max_batch_sizes: tuple[PositiveInt, ...] = Field(description="max_batch_size values")
    queue_delays_us: tuple[NonNegativeInt, ...] = Field(description="max_queue_delay values")
    instances: tuple[PositiveInt, ...] = Field(description="instance counts")
    rates_per_s: tuple[PositiveFloat, ...] = Field(description="offered loads, ascending")
    measurement_s: PositiveFloat = Field(description="length of one measurement")
    budget_s: PositiveFloat = Field(
        description="time for one candidate; what was found then counts"
    )
    seed: NonNegativeInt = Field(default=0, description="seed of arrivals and input order")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        for field in ("max_batch_sizes", "queue_delays_us", "instances", "rates_per_s"):
            if not getattr(self, field):
                raise ValueError(f"{field} is empty: nothing would be measured")
        if list(self.rates_per_s) != sorted(set(self.rates_per_s)):
            raise ValueError("rates_per_s must ascend without repeats")
        return self


class Target(Record):
    """Where a promoted release goes live."""

    repository: SafePath = Field(description="the live Triton model repository")
    endpoint: Address | None = Field(
        default=None, description="gRPC HOST:PORT of the live Triton; none: an embedded one"
    )
    load_timeout_s: PositiveFloat = Field(default=120.0, description="limit on one model load")


class Approval(Record):
    """Who may approve, and for how long an approval stands."""

    approvers: tuple[str, ...] = Field(
        default=(), description="names that may approve; empty: anybody who gives a name"
    )
    expires_hours: PositiveFloat = Field(description="an approval older than this is void")
    timeout_hours: PositiveFloat = Field(
        default=24.0, description="how long a suspended promotion waits; no answer means no"
    )


class Retention(Record):
    """What is kept."""

    releases: PositiveInt = Field(default=5, description="releases kept in the live repository")
    shadow_days: PositiveInt = Field(
        default=30, description="age at which shadow samples are deleted"
    )


class Policy(Record):
    """One model family's rules. Unknown keys are refused, so a typo cannot loosen a gate."""

    schema_version: Literal[1]
    name: Name = Field(description="the model's name in the live repository")
    task: Literal["classification"] = Field(description="what the outputs mean")
    model: ModelSource
    data: Data
    shadow: Shadow | None = None
    candidates: Candidates
    calibration: Calibration = Calibration()
    tensorrt: TensorRt = TensorRt()
    gates: dict[Literal["default", "fp32", "tf32", "fp16", "bf16", "int8", "fp8"], Gates]
    slo: Slo
    search: Search
    target: Target
    approval: Approval
    retention: Retention = Retention()

    @model_validator(mode="before")
    @classmethod
    def _overlay_gates(cls, raw: Any) -> Any:
        """A precision's table states only what differs from [gates.default]."""
        gates = raw.get("gates") if isinstance(raw, dict) else None
        default = gates.get("default") if isinstance(gates, dict) else None
        if not isinstance(gates, dict) or not isinstance(default, dict):
            return raw
        overlaid = {
            name: {**default, **table} if isinstance(table, dict) else table
            for name, table in gates.items()
        }
        return {**raw, "gates": overlaid}

    @model_validator(mode="after")
    def _default_gates(self) -> Self:
        if "default" not in self.gates:
            raise ValueError("[gates.default] is missing: state every limit there")
        return self

    def gates_for(self, precision: Precision) -> Gates:
        """The limits for one precision: its own table, else the default."""
        return self.gates.get(precision.value, self.gates["default"])

    def with_model(self, uri: str) -> "Policy":
        """The same rules for another version of the model.

        Raises:
            PolicyError: the URI is not a registry version.
        """
        return parse_policy(
            {**self.model_dump(), "model": {**self.model.model_dump(), "uri": uri}},
            f"model {uri!r}",
        )


def read_policy(path: Path) -> Policy:
    """Read and check a policy file.

    Raises:
        PolicyError: the file cannot be read, is not TOML, or breaks a rule; every problem is listed
            with the place it is at.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise PolicyError(f"Cannot read the policy {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not TOML: {error}.") from error
    return parse_policy(raw, str(path))


def parse_policy(raw: Mapping[str, Any], origin: str) -> Policy:
    """Check a policy that was already read; ``origin`` names it in errors."""
    try:
        return Policy.model_validate(raw)
    except ValidationError as error:
        raise PolicyError(
            f"{origin} is not a valid policy:\n{explain_validation(error)}\n"
            "docs/policy.md lists every key with its meaning and unit."
        ) from error
