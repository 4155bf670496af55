"""A policy: what one model family must prove before it may serve, as one TOML file.

Every limit that decides a promotion is stated in the file, or taken from the standard tolerances
because the file says so; only mechanics have defaults (`enginegate.policy.defaults`). Relative
paths start from the policy's project (`project_of`), and may not contain ``..``.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, create_model, model_validator

from enginegate.candidate import Precision
from enginegate.engine_kinds import KindDeclaration, engine_kinds
from enginegate.errors import PolicyError
from enginegate.messages import explain_validation
from enginegate.policy.benchmarking import (
    Benchmarked,
    BenchmarkTables,
    Cost,
    LoadShape,
    Search,
    Slo,
)
from enginegate.policy.building import (
    CalibrationTable,
    Candidates,
    EngineTables,
    Repair,
    Shapes,
)
from enginegate.policy.data import Data
from enginegate.policy.defaults import fill_in
from enginegate.policy.devices import (
    DeviceKind,
    DeviceName,
    check_devices,
    device_of,
    in_order,
    overlaid,
)
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
    gates_for,
    output_task,
    tasks_of,
)
from enginegate.policy.limits import Wrong, impossible_numbers, mistyped_numbers, without
from enginegate.policy.model_source import ModelSource
from enginegate.policy.operating import (
    Approval,
    Ensemble,
    LiveTables,
    Name,
    PromotionTarget,
    Retention,
    Scan,
    Signing,
    Watch,
)
from enginegate.policy.paths import ROOT, project_of
from enginegate.policy.recording import Shadow, TrafficTables
from enginegate.policy.remedies import with_remedies
from enginegate.policy.tolerances import complete_gates, complete_metrics
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.serving import ServingOptions

__all__ = [
    "Approval",
    "BenchmarkTables",
    "Benchmarked",
    "Building",
    "CalibrationTable",
    "Candidates",
    "Cost",
    "Data",
    "DeviceKind",
    "EngineTables",
    "Ensemble",
    "Evaluation",
    "Gates",
    "LiveTables",
    "LoadShape",
    "Metric",
    "ModelSource",
    "OnnxRuntime",
    "Output",
    "Policy",
    "PromotionTarget",
    "Repair",
    "Retention",
    "Scan",
    "Search",
    "Shadow",
    "Shapes",
    "Signing",
    "Slices",
    "Slo",
    "TensorRt",
    "TrafficTables",
    "Watch",
    "gates_for",
    "parse_policy",
    "policy_model",
    "read_policy",
    "read_tables",
]
_MOST_BYTES = 1 << 20


class Policy(Record):
    """What one model family must prove. Unknown keys are refused, so a typo cannot loosen a gate.

    Its engine kinds' tables are fields of `policy_model`, which every policy is read as.
    """

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
    gates: dict[Literal["default", "fp32", "tf32", "fp16", "bf16", "int8", "fp8"], Gates]
    slo: Slo
    benchmark: Benchmarked = Benchmarked()
    load: LoadShape = LoadShape()
    search: Search
    cost: Cost = Cost()
    serving: ServingOptions = ServingOptions()
    ensemble: Ensemble | None = None
    target: PromotionTarget
    devices: dict[DeviceName, DeviceKind] = Field(
        default={},
        description="kinds of device that releases are served on, by name (docs/devices.md); none: "
        "that of the machine that qualifies",
    )
    approval: Approval
    signing: Signing = Signing()
    watch: Watch = Watch()
    scan: Scan = Scan()
    retention: Retention = Retention()
    _root: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Remember the folder that relative paths start from; no part of the record."""
        self._root = (context or {}).get(ROOT)
        if self.shadow is not None and self.shadow.traffic is not None:
            self.shadow.__dict__["traffic"] = self.data.read_alike(self.shadow.traffic)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made for this process's engine kinds; another process reads it anew."""
        return parse_policy, (self.model_dump(), "a policy of another process", self._root)

    @property
    def root(self) -> Path | None:
        """The folder that relative paths start from; None if it was not read from a file."""
        return self._root

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        """Add what the file may leave out; a precision's table states only what differs."""
        if not isinstance(raw, dict):
            return raw
        raw = fill_in(raw)
        gates = raw.get("gates")
        if not isinstance(gates, dict) or not isinstance(gates.get("default"), dict):
            return raw
        outputs = raw.get("outputs") or {}
        tasks = {o.get("task") for o in outputs.values() if isinstance(o, dict)} | {raw.get("task")}
        metrics = complete_metrics(raw)
        completed = complete_gates(gates, frozenset(map(str, tasks)), metrics)
        return {**raw, "gates": completed, "metrics": metrics}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_outputs(self.task, self.outputs, self.metrics)
        if "default" not in self.gates:
            raise ValueError(
                "[gates.default] is missing: state every limit there, or tolerances = "
                '"standard" (enginegate policy show --table gates prints what that means)'
            )
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
    def engine_tables(self) -> EngineTables:
        """What decides which engines are built, and how."""
        batch = self.shapes.batch
        return EngineTables(
            candidates=self.candidates,
            shapes=self.shapes,
            kinds={kind: getattr(self, kind) for kind in self.candidates.kinds()},
            calibration=self.calibration,
            calibration_data=self.data.calibration,
            max_batch_size=batch.max if batch else max(self.search.max_batch_sizes),
            repair=self.repair,
        )

    @property
    def benchmark_tables(self) -> BenchmarkTables:
        """What serving must deliver, and how that is measured."""
        return BenchmarkTables(
            slo=self.slo,
            search=self.search,
            load=self.load,
            cost=self.cost,
            serving=self.serving,
            load_timeout_s=self.target.load_timeout_s,
        )

    @property
    def traffic_tables(self) -> TrafficTables:
        """Where recorded requests come from, and what they are compared with."""
        return TrafficTables(self.name, self.data, self.shadow, self.calibration)

    @property
    def live_tables(self) -> LiveTables:
        """Where the model is live, and what changing or watching it is held to."""
        return LiveTables(
            self.name,
            self.target,
            self.signing,
            self.retention,
            self.watch,
            self.approval,
            device_of(self.target, self.devices),
        )

    @property
    def device_names(self) -> tuple[str, ...]:
        """Its kinds of device, that of the target's own server first; empty: it names none."""
        return in_order(self.target, self.devices)

    @model_validator(mode="after")
    def _servers_have_known_devices(self) -> Self:
        check_devices(self.devices, self.target, self.ensemble)
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        batch, largest = self.shapes.batch, max(self.search.max_batch_sizes)
        if batch is not None and batch.max < largest:
            raise ValueError(
                f"shapes.batch.max is {batch.max}, and search.max_batch_sizes tries {largest}"
            )
        rows, smallest = max(self.load.batch_sizes or (1,)), min(self.search.max_batch_sizes)
        if rows > smallest:
            raise ValueError(
                f"load.rows sends requests of {rows} rows, and search.max_batch_sizes tries "
                f"{smallest}, which Triton would refuse: leave out sizes below {rows}"
            )
        return self

    def for_device(self, name: str) -> "Policy":
        """What the policy asks on one kind of device: its candidates, and tables that differ there.

        Raises:
            PolicyError: it names no such kind, or what differs there breaks a rule.
        """
        kind = self.devices.get(name)
        if kind is None:
            known = ", ".join(self.devices) or "none"
            raise PolicyError(
                f"The policy of {self.name} names no kind of device {name!r} under [devices] (it "
                f"has {known})."
            )
        try:
            raw = overlaid(self.model_dump(), name, kind, self.candidates.kinds())
        except ValueError as error:
            raise PolicyError(f"{error}.") from error
        return parse_policy(raw, f"devices.{name}", self._root)

    def with_model(self, uri: str) -> "Policy":
        """The same policy for another version of the model.

        Raises:
            PolicyError: the URI is not one that a policy may name.
        """
        if uri == self.model.uri:
            return self
        return parse_policy(
            {**self.model_dump(), "model": {**self.model.model_dump(), "uri": uri}},
            f"model {uri!r}",
            self._root,
        )

    def digest_for(self, uri: str) -> str:
        """Digest of `with_model`, for a URI of the registry: of thousands none is parsed again."""
        tables = self.model_dump(mode="json", exclude_defaults=True)
        return sha256_bytes(canonical_json({**tables, "model": {**tables["model"], "uri": uri}}))


def policy_model() -> type[Policy]:
    """The model of a whole policy: with a table, and a key of [candidates], for each engine kind.

    Raises:
        ModelError: an installed engine kind cannot be loaded.
    """
    return _model_with(tuple(engine_kinds().values()))


@cache
def _model_with(kinds: tuple[KindDeclaration, ...]) -> type[Policy]:
    precisions: dict[str, Any] = {
        kind.name: (
            tuple[Precision, ...],
            Field(default=(), description=f"precisions for {kind.title}"),
        )
        for kind in kinds
    }
    tables: dict[str, Any] = {kind.name: (kind.table, kind.table()) for kind in kinds}
    candidates = create_model(
        "Candidates",
        __base__=Candidates,
        __doc__="Precisions to build for each engine kind; a kind that is left out builds none.",
        **precisions,
    )
    return create_model(
        "Policy",
        __base__=Policy,
        __doc__=Policy.__doc__,
        candidates=(candidates, ...),
        **tables,
    )


def read_policy(path: Path) -> Policy:
    """Read and check a policy file; its relative paths start from its project.

    Raises:
        PolicyError: the file cannot be read, is not TOML, or breaks a rule; every problem is listed
            with the place it is at.
    """
    # A link to a policy belongs where the link is: mounted configuration links into hidden folders.
    return parse_policy(read_tables(path), str(path), project_of(path.parent.resolve()))


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a policy file as they are written, not checked.

    Raises:
        PolicyError: the file cannot be read, or is not TOML.
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
        return tomllib.loads(content.decode())
    except OSError as error:
        raise PolicyError(f"Cannot read the policy {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise PolicyError(_too_deep(str(path))) from error
    except ValueError as error:  # not TOML, not UTF-8, or a number that no computer could hold
        raise PolicyError(f"{path} is not TOML: {error}.") from error


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
        policy = policy_model().model_validate(rest, context={ROOT: root})
        lines = [*wrong, *mistyped_numbers(rest, policy)]
        if not lines:
            for device in policy.devices:
                policy.for_device(device)
            return policy
        listed = "\n".join(each.line for each in lines)
    except RecursionError as error:
        raise PolicyError(_too_deep(origin)) from error
    except ValidationError as error:
        listed = _explained(error, origin, wrong)
        raise PolicyError(_invalid(origin, listed, raw)) from error
    raise PolicyError(_invalid(origin, listed, raw))


def _invalid(origin: str, listed: str, raw: Mapping[str, Any]) -> str:
    return f"{origin} is not a valid policy:\n{with_remedies(listed, raw)}"


def _explained(error: ValidationError, origin: str, wrong: tuple[Wrong, ...]) -> str:
    """What is wrong, one line each; what was left out as impossible is not missing too."""
    try:
        found = explain_validation(error, policy_model(), same_as=("gates", "default"))
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
