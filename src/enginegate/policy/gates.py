"""What a candidate is held to: what its outputs mean, how they are scored, and the limits.

Every limit that decides is in the policy's file, or comes from the standard tolerances because the
file says ``tolerances = "standard"`` (`enginegate.policy.tolerances`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from enginegate.candidate import Precision
from enginegate.messages import matching
from enginegate.records import Record

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Confidence = Annotated[float, Field(gt=0.5, lt=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]
MetricName = Annotated[
    str, matching(r"^[a-z][a-z0-9_]{0,39}$", "a name of lower-case letters, digits and _")
]
Margins: TypeAlias = dict[MetricName, NonNegativeFloat]
OutputTask: TypeAlias = Literal[
    "classification", "multi-label", "regression", "embedding", "segmentation", "detection"
]
Task: TypeAlias = Literal[OutputTask, "multi-output"]
BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]

METRIC_TASKS: Mapping[str, frozenset[OutputTask]] = MappingProxyType(
    {
        "top1": frozenset({"classification"}),
        "topk": frozenset({"classification"}),
        "macro_f1": frozenset({"classification"}),
        "label_f1": frozenset({"multi-label"}),
        "micro_f1": frozenset({"multi-label"}),
        "exact_match": frozenset({"multi-label"}),
        "r2": frozenset({"regression"}),
        "mae": frozenset({"regression"}),
        "rmse": frozenset({"regression"}),
        "cosine": frozenset({"embedding"}),
        "recall": frozenset({"embedding"}),
        "miou": frozenset({"segmentation"}),
        "dice": frozenset({"segmentation"}),
        "map": frozenset({"detection"}),
        "map50": frozenset({"detection"}),
    }
)
ERRORS = frozenset({"mae", "rmse"})  # less is better
DECIDING_TASKS: frozenset[OutputTask] = frozenset({"multi-label", "segmentation", "detection"})
CLASSIFICATION_LIMITS = (
    "max_accuracy_loss",
    "max_slice_accuracy_loss",
    "min_top1_agreement",
    "max_kl_p99_nats",
)
DISTANCE_LIMITS = (
    "max_abs_error",
    "max_p99_abs_error",
    "max_rel_error",
    "max_p99_rel_error",
    "min_sqnr_db",
    "min_cosine_p1",
)
GATES = frozenset(
    {
        *("samples", "nonfinite", "accuracy_loss", "slice_accuracy_loss", "slice_samples"),
        *("slice_values", "top1_agreement", "slice_top1_agreement", "kl_p99", "max_abs_error"),
        *(
            "max_rel_error",
            "p99_abs_error",
            "p99_rel_error",
            "sqnr",
            "cosine_p1",
            "constant_reference",
            "constant_answers",
        ),
        *("decision_agreement", "accuracy_fp32", "slice_accuracy_fp32"),
        *("noise_floor", "shadow_integrity", "shadow_version", "input_drift"),
    }
)


class Output(Record):
    """What one output of the model means. Several make the task multi-output."""

    task: OutputTask = Field(
        description="logits of classes, of labels, numbers to predict, a vector, classes of "
        "pixels, or boxes"
    )
    threshold: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="a label (`multi-label`), a pixel of a single class (`segmentation`) or a box "
        "(`detection`) counts as found above it; default 0, that of logits; of boxes 0.5",
    )
    class_axis: Literal[1, -1] = Field(
        default=1, description="of `segmentation`: the axis of the classes; -1 is the last"
    )
    ignore_label: int = Field(
        default=-1, description="of `segmentation`: pixels with this label are not scored"
    )
    scores: str = Field(
        default="",
        description="of `detection`: the output with each box's score, `(N, boxes)`; empty: this "
        "output holds x1, y1, x2, y2, score, class",
    )
    classes: str = Field(
        default="", description="of `detection`: the output with each box's class, with `scores`"
    )
    box_format: BoxFormat = Field(
        default="xyxy", description="of `detection`: what the four numbers of a box are"
    )


class Metric(Record):
    """One way to score answers against labels; what may be lost is in max_metric_loss."""

    kind: str = matching(
        rf"^({'|'.join(METRIC_TASKS)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        f"{', '.join(METRIC_TASKS)}, or MODULE:CALLABLE",
        description="`top1`, `topk`, `macro_f1` (classification), `label_f1`, `micro_f1`, "
        "`exact_match` (multi-label), `r2`, `mae`, `rmse` (regression), `cosine`, `recall` "
        "(embedding), `miou`, `dice` (segmentation), `map`, `map50` (detection), or "
        "MODULE:CALLABLE taking outputs and labels and giving one score a sample, higher is better",
    )
    allow_code: bool = Field(
        default=False, description="import and run the Python of a MODULE:CALLABLE"
    )
    unit: str = matching(
        r"^[^\x00-\x1f\x7f]{0,16}$",
        "at most 16 characters in one line",
        default="",
        description="of `mae`, `rmse` and MODULE:CALLABLE, for people: e.g. `°C`",
    )
    output: str = Field(default="", description="the output it scores; empty: the first")
    k: PositiveInt = Field(default=5, description="of `topk` and `recall`")


class Slices(Record):
    """Parts of the data that are judged by themselves, besides the data's own slice columns."""

    discover: tuple[Literal["confidence", "input_norm", "length"], ...] = Field(
        default=(),
        description="parts made from the samples: FP32's confidence, the input's norm (quarters), "
        "the sequence length",
    )
    max_values: PositiveInt = Field(
        default=200, description="a slice column with more values is not judged, and says so"
    )


ClusterAddress = Annotated[
    str,
    matching(
        r"^(tcp|tls|ray)://[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}$",
        "tcp://HOST:PORT of Dask or ray://HOST:PORT of Ray",
    ),
]


class Evaluation(Record):
    """How candidates are run over the data. Changes no number, only memory and time."""

    chunk_samples: PositiveInt = Field(
        default=16384, description="samples run, compared and kept at a time"
    )
    workers: PositiveInt = Field(default=2, description="chunks that run at the same time")
    runner: Literal["threads", "dask", "ray"] = Field(
        default="threads",
        description="Prefect's thread pool, or its runner on a Dask (prefect-dask) or Ray cluster "
        "(prefect-ray); its workers share the workspace's folder",
    )
    cluster: ClusterAddress | None = Field(
        default=None,
        description="address of a running cluster (`tcp://HOST:8786` of Dask, `ray://HOST:10001` "
        "of Ray); none: `workers` processes on this host, for as long as chunks run",
    )

    @model_validator(mode="after")
    def _cluster_has_a_runner(self) -> Self:
        if self.cluster is not None and self.runner == "threads":
            raise ValueError(
                "cluster is an address for the runners dask and ray; this one is threads"
            )
        return self


class Gates(Record):
    """How far a candidate may be from FP32. Stated in full under [gates.default]."""

    tolerances: Literal["stated", "standard"] = Field(
        default="stated",
        description="`standard`: limits that are not stated come from docs/gates.md, by precision",
    )
    confidence: Confidence = Field(description="of every interval, e.g. 0.95")
    min_samples: PositiveInt = Field(description="fewer samples is inconclusive")
    max_accuracy_loss: Fraction | None = Field(
        description="non-inferiority margin: the paired interval's lower end must be above -this"
    )
    min_slice_samples: PositiveInt = Field(description="a slice with fewer samples is not judged")
    max_slice_accuracy_loss: Fraction | None = Field(description="the same margin for each slice")
    min_top1_agreement: Fraction | None = Field(
        description="share whose top class equals FP32's; the interval's lower end counts"
    )
    max_kl_p99_nats: NonNegativeFloat | None = Field(
        description="99th percentile over samples of KL(FP32 || candidate)"
    )
    min_decision_agreement: Fraction | None = Field(
        default=None,
        description="mean share of a sample's labels, pixels or boxes that equal FP32's (of "
        "`multi-label`, `segmentation`, `detection`); the interval's lower end counts",
    )
    max_abs_error: NonNegativeFloat | None = Field(
        description="largest difference of any output value"
    )
    max_p99_abs_error: NonNegativeFloat | None = Field(
        default=None, description="99th percentile over samples of a sample's largest difference"
    )
    max_rel_error: NonNegativeFloat | None = Field(
        default=None,
        description="largest difference of a sample relative to its largest output value",
    )
    max_p99_rel_error: NonNegativeFloat | None = Field(
        default=None,
        description="99th percentile of that difference relative to the sample's largest output",
    )
    min_sqnr_db: float | None = Field(
        default=None, description="signal to quantisation noise ratio of the outputs, in dB"
    )
    min_cosine_p1: Cosine | None = Field(
        default=None, description="1st percentile over samples of the cosine with FP32's output"
    )
    max_metric_loss: Margins = Field(
        default_factory=dict,
        description="non-inferiority margin of each of [metrics], in the metric's own unit",
    )
    max_slice_metric_loss: Margins = Field(
        default_factory=dict, description="the same for each slice; metrics not named are not cut"
    )
    advisory: frozenset[str] = Field(
        default=frozenset(), description="gates that are shown but cannot change the verdict"
    )


def gates_for(gates: Mapping[Any, Gates], precision: Precision) -> Gates:
    """The limits for one precision: its own table, else the default."""
    return gates.get(precision.value, gates["default"])


def tasks_of(task: str, outputs: Mapping[str, Output]) -> frozenset[str]:
    """What a model's outputs mean, each once."""
    if task != "multi-output":
        return frozenset({task})
    return frozenset(output.task for output in outputs.values())


def output_task(task: Task, outputs: Mapping[str, Output], name: str) -> OutputTask:
    """What an output means; the first one's if ``name`` is empty."""
    if task != "multi-output":
        return task
    return outputs[name or next(iter(outputs))].task


def known_gates(metrics: Mapping[str, Metric]) -> frozenset[str]:
    """Names that ``advisory`` may hold."""
    return GATES | {
        f"{part}{name}_{what}"
        for name in metrics
        for part in ("", "slice_")
        for what in ("loss", "fp32")
    }


def check_outputs(task: Task, outputs: Mapping[str, Output], metrics: Mapping[str, Metric]) -> None:
    """Refuse outputs that are not of the task, and metrics that are not of their output.

    Raises:
        ValueError: says which, for pydantic to report.
    """
    several = task == "multi-output"
    if several and len(outputs) < 2:  # noqa: PLR2004 - several
        raise ValueError("task multi-output: name each output under [outputs.NAME], two or more")
    if not several and (len(outputs) > 1 or {o.task for o in outputs.values()} - {task}):
        raise ValueError(f"task {task} takes one output of that task, or none named")
    for name, metric in metrics.items():
        if name == "accuracy":
            raise ValueError("metrics.accuracy: that is max_accuracy_loss; use another name")
        if metric.output and metric.output not in outputs:
            raise ValueError(f"metrics.{name}: there is no [outputs.{metric.output}]")
        wanted = METRIC_TASKS.get(metric.kind)
        if wanted is None and not metric.allow_code:
            raise ValueError(
                f"metrics.{name}: {metric.kind} is Python that would be run; set allow_code = true "
                f"under [metrics.{name}] if you trust it"
            )
        if wanted is not None and output_task(task, outputs, metric.output) not in wanted:
            raise ValueError(
                f"metrics.{name}: {metric.kind} scores a {' or '.join(sorted(wanted))} output"
            )
    for name, output in outputs.items():
        _check_output(name, output)


def check_gates(
    where: str, gates: Gates, metrics: Mapping[str, Metric], tasks: frozenset[str]
) -> None:
    """Refuse a table that names no known gate or metric, or limits what the outputs do not have.

    Raises:
        ValueError: says which, for pydantic to report.
    """
    known = known_gates(metrics)
    if unknown := sorted(gates.advisory - known):
        raise ValueError(f"{where}.advisory: {unknown} are no gates; known: {sorted(known)}")
    if gates.max_metric_loss.keys() != metrics.keys():
        named = sorted(metrics) or "none are declared"
        raise ValueError(f"{where}.max_metric_loss must name exactly the [metrics]: {named}")
    if extra := sorted(gates.max_slice_metric_loss.keys() - metrics.keys()):
        raise ValueError(f"{where}.max_slice_metric_loss: {extra} are no [metrics]")
    stated = [key for key in CLASSIFICATION_LIMITS if getattr(gates, key) is not None]
    if "classification" not in tasks and stated:
        raise ValueError(f"{where}: {stated} are for classification outputs only")
    if not tasks & DECIDING_TASKS and gates.min_decision_agreement is not None:
        raise ValueError(
            f"{where}: min_decision_agreement is for outputs of {', '.join(sorted(DECIDING_TASKS))}"
        )
    distances = [key for key in DISTANCE_LIMITS if getattr(gates, key) is not None]
    if tasks == {"detection"} and distances:
        raise ValueError(
            f"{where}: {distances} compare numbers at one place, and boxes change theirs; limit "
            "min_decision_agreement instead"
        )


def _check_output(name: str, output: Output) -> None:
    of = {
        "class_axis": ("segmentation",),
        "ignore_label": ("segmentation",),
        "threshold": tuple(sorted(DECIDING_TASKS)),
        **dict.fromkeys(("scores", "classes", "box_format"), ("detection",)),
    }
    for key, wanted in of.items():
        if key in output.model_fields_set and output.task not in wanted:
            raise ValueError(f"outputs.{name}.{key}: is for {', '.join(wanted)} only")
    if bool(output.scores) != bool(output.classes):
        raise ValueError(f"outputs.{name}: name both scores and classes, or neither")
