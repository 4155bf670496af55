"""A policy: what one model family must prove before it may serve, as one TOML file.

Every limit that decides a promotion is stated in the file; only mechanics have defaults. Relative
paths start from the policy's project (`project_of`), and may not contain ``..``.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from enginegate.candidate import Candidate, EngineKind, Precision
from enginegate.errors import PolicyError
from enginegate.policy.benchmarking import Benchmarked, Cost, LoadShape, Search, Slo
from enginegate.policy.building import Building, OnnxRuntime, Shapes, TensorRt
from enginegate.policy.gates import (
    Evaluation,
    Gates,
    Metric,
    MetricName,
    Output,
    OutputTask,
    Slices,
    Task,
    check_gates,
    check_outputs,
    complete_gates,
    output_task,
    tasks_of,
)
from enginegate.policy.limits import Wrong, impossible_numbers, mistyped_numbers, without
from enginegate.policy.model_source import ModelSource
from enginegate.policy.operating import (
    Approval,
    Ensemble,
    Name,
    PromotionTarget,
    Retention,
    Scan,
    Signing,
    Watch,
)
from enginegate.policy.paths import ROOT, project_of
from enginegate.policy.recording import Data, Shadow
from enginegate.records import Record
from enginegate.serving import ServingOptions
from enginegate.validation_messages import explain_validation

_MOST_BYTES = 1 << 20


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


class CalibrationTable(Record):
    """How int8 and fp8 scales are found."""

    method: Literal["auto", "max", "entropy", "percentile"] = Field(
        default="auto",
        description="how activation ranges are chosen; auto tries the others and keeps the best on "
        "held-out calibration samples",
    )
    batch_size: PositiveInt = Field(default=32, description="pinned: scales depend on it")
    max_samples: PositiveInt = Field(
        default=512, description="samples read, the same share of every slice"
    )
    tool: Literal["auto", "onnxruntime", "modelopt"] = Field(
        default="auto",
        description="what converts for TensorRT; auto is modelopt where it is installed "
        "(ENGINEGATE_MODELOPT names its Python), else onnxruntime",
    )


class Repair(Record):
    """How far a candidate that fails its accuracy gates may be repaired."""

    max_builds: NonNegativeInt = Field(
        default=12, description="engines that may be built for one candidate; 0: no repair"
    )
    budget_s: PositiveFloat = Field(
        default=900.0, description="time for one candidate; the best found by then counts"
    )
    max_kept_share: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="most layers that may be kept at fp32; more is not that precision",
    )
    samples: PositiveInt = Field(
        default=128, description="calibration samples that layers are ranked on"
    )


class Policy(Record):
    """One model family's rules. Unknown keys are refused, so a typo cannot loosen a gate."""

    schema_version: Literal[1]
    name: Name = Field(description="the model's name in the live repository")
    task: Task = Field(description="what the outputs mean")
    outputs: dict[str, Output] = Field(
        default_factory=dict, description="by name; needed for multi-output, else the first is it"
    )
    metrics: dict[MetricName, Metric] = Field(
        default_factory=dict, description="scores against labels, besides top-1 accuracy"
    )
    slices: Slices = Slices()
    evaluation: Evaluation = Evaluation()
    model: ModelSource
    data: Data
    shadow: Shadow | None = None
    candidates: Candidates
    calibration: CalibrationTable = CalibrationTable()
    repair: Repair = Repair()
    shapes: Shapes = Shapes()
    onnxruntime: OnnxRuntime = OnnxRuntime()
    tensorrt: TensorRt = TensorRt()
    gates: dict[Literal["default", "fp32", "tf32", "fp16", "bf16", "int8", "fp8"], Gates]
    slo: Slo
    benchmark: Benchmarked = Benchmarked()
    load: LoadShape = LoadShape()
    search: Search
    cost: Cost = Cost()
    serving: ServingOptions = ServingOptions()
    ensemble: Ensemble | None = None
    target: PromotionTarget
    approval: Approval
    signing: Signing = Signing()
    watch: Watch = Watch()
    scan: Scan = Scan()
    retention: Retention = Retention()
    _root: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Remember the folder that relative paths start from; no part of the record."""
        self._root = (context or {}).get(ROOT)

    @property
    def root(self) -> Path | None:
        """The folder that relative paths start from; None if it was not read from a file."""
        return self._root

    @model_validator(mode="before")
    @classmethod
    def _overlay_gates(cls, raw: Any) -> Any:
        """A precision's table states only what differs from [gates.default]."""
        gates = raw.get("gates") if isinstance(raw, dict) else None
        if not isinstance(gates, dict) or not isinstance(gates.get("default"), dict):
            return raw
        outputs = raw.get("outputs") or {}
        tasks = {o.get("task") for o in outputs.values() if isinstance(o, dict)} | {raw.get("task")}
        return {**raw, "gates": complete_gates(gates, frozenset(map(str, tasks)))}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_outputs(self.task, self.outputs, self.metrics)
        if "default" not in self.gates:
            raise ValueError("[gates.default] is missing: state every limit there")
        tasks = tasks_of(self.task, self.outputs)
        if "confidence" in self.slices.discover and "classification" not in tasks:
            raise ValueError("slices.discover: confidence needs an output of classes")
        for table, gates in self.gates.items():
            check_gates(f"gates.{table}", gates, self.metrics, tasks)
        return self

    def output_task(self, name: str = "") -> OutputTask:
        """What an output means; the first one's if no name is given."""
        return output_task(self.task, self.outputs, name)

    @property
    def building(self) -> Building:
        """The tables that decide how engines are built."""
        return Building(shapes=self.shapes, onnxruntime=self.onnxruntime, tensorrt=self.tensorrt)

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        batch, largest = self.shapes.batch, max(self.search.max_batch_sizes)
        if batch is not None and batch.max < largest:
            raise ValueError(
                f"shapes.batch.max is {batch.max}, and search.max_batch_sizes tries {largest}"
            )
        return self

    def gates_for(self, precision: Precision) -> Gates:
        """The limits for one precision: its own table, else the default."""
        return self.gates.get(precision.value, self.gates["default"])

    def with_model(self, uri: str) -> "Policy":
        """The same rules for another version of the model.

        Raises:
            PolicyError: the URI is not one that a policy may name.
        """
        return parse_policy(
            {**self.model_dump(), "model": {**self.model.model_dump(), "uri": uri}},
            f"model {uri!r}",
            self._root,
        )


def read_policy(path: Path) -> Policy:
    """Read and check a policy file; its relative paths start from its project.

    Raises:
        PolicyError: the file cannot be read, is not TOML, or breaks a rule; every problem is listed
            with the place it is at.
    """
    try:
        if path.is_fifo() and path.resolve().is_fifo():
            raise PolicyError(f"{path} is a named pipe, not a policy: reading it may never end.")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise PolicyError(
                f"{path} is larger than {_MOST_BYTES:,} bytes, which no policy is. Name a policy."
            )
        raw = tomllib.loads(content.decode())
    except OSError as error:
        raise PolicyError(f"Cannot read the policy {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise PolicyError(_too_deep(str(path))) from error
    except ValueError as error:  # not TOML, not UTF-8, or a number that no computer could hold
        raise PolicyError(f"{path} is not TOML: {error}.") from error
    # A link to a policy belongs where the link is: mounted configuration links into hidden folders.
    return parse_policy(raw, str(path), project_of(path.parent.resolve()))


def parse_policy(raw: Mapping[str, Any], origin: str, root: Path | None = None) -> Policy:
    """Check a policy that was already read.

    Args:
        raw: its tables.
        origin: names it in errors.
        root: the folder that relative paths start from; None leaves them to the current folder.

    Raises:
        PolicyError: it breaks a rule.
    """
    wrong = impossible_numbers(raw)
    try:
        rest = without(raw, frozenset(each.key for each in wrong))
        policy = Policy.model_validate(rest, context={ROOT: root})
        lines = [*wrong, *mistyped_numbers(rest, policy)]
        if not lines:
            return policy
        listed = "\n".join(each.line for each in lines)
    except RecursionError as error:
        raise PolicyError(_too_deep(origin)) from error
    except ValidationError as error:
        raise PolicyError(_invalid(origin, _explained(error, origin, wrong))) from error
    raise PolicyError(_invalid(origin, listed))


def _invalid(origin: str, listed: str) -> str:
    return (
        f"{origin} is not a valid policy:\n{listed}\n"
        "docs/policy.md lists every key with its meaning and unit."
    )


def _explained(error: ValidationError, origin: str, wrong: tuple[Wrong, ...]) -> str:
    """What is wrong, one line each; what was left out as impossible is not missing too."""
    try:
        found = explain_validation(error, Policy, same_as=("gates", "default"))
    except RecursionError as deep:
        raise PolicyError(_too_deep(origin)) from deep
    said = tuple(f"  {each.key}{end}" for each in wrong for end in (":", "."))
    rest = (line for line in found.splitlines() if not line.startswith(said))
    return "\n".join([*(each.line for each in wrong), *rest])


def _too_deep(origin: str) -> str:
    return (
        f"{origin} is nested too deep: a policy has tables, and lists in them. Take the brackets "
        "or dots out that nobody needs."
    )
