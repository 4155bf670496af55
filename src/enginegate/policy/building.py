"""Tables of a policy that decide which engines are built, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from enginegate.candidate import Candidate, EngineKindName
from enginegate.policy.data import DataSource
from enginegate.records import Record


class Candidates(Record):
    """Precisions to build for each engine kind; a kind that is left out builds none.

    Its keys are the engine kinds' names (`policy_model`).
    """

    @model_validator(mode="after")
    def _something_to_build(self) -> Self:
        if not self.all():
            kinds = " or ".join(type(self).model_fields)
            raise ValueError(f"name at least one precision for {kinds}")
        return self

    def all(self) -> tuple[Candidate, ...]:
        """Every candidate, kind by kind in the order of the file, without repeats."""
        listed = [(kind, precision) for kind, precisions in self for precision in precisions]
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
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="what runs the model on the samples; auto is the GPU where ONNX Runtime gets "
        "one, else the CPU. An engine says where, for scales may differ in their last digits",
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


class DimensionRange(Record):
    """Sizes that one dynamic axis may take."""

    min: PositiveInt = Field(description="smallest size that is served")
    best: PositiveInt = Field(description="size that the engine is tuned for")
    max: PositiveInt = Field(description="largest size that is served")

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.min <= self.best <= self.max:
            raise ValueError(f"min {self.min} <= best {self.best} <= max {self.max} does not hold")
        return self


class Shapes(Record):
    """Sizes of the inputs' dynamic axes. An engine takes no others."""

    batch: DimensionRange | None = Field(
        default=None,
        description="the first axis; none: 1 to the largest of search.max_batch_sizes",
    )
    sequence: DimensionRange | None = Field(
        default=None, description="every other dynamic axis, e.g. tokens of an encoder"
    )
    axes: dict[str, DimensionRange] = Field(
        default={}, description='single axes that differ, by INPUT.AXIS, e.g. "image.2"'
    )

    def of(self, name: str, axis: int) -> DimensionRange | None:
        """The range of an input's dynamic axis besides the batch, or None if none is given."""
        return self.axes.get(f"{name}.{axis}", self.sequence)


@dataclass(frozen=True, slots=True)
class EngineTables:
    """Everything in a policy that decides which engines are built, and how.

    Attributes:
        kinds: each engine kind's own table.
        calibration_data: samples that int8 and fp8 scales come from.
        max_batch_size: the largest batch that an engine must take.
    """

    candidates: Candidates
    shapes: Shapes
    kinds: Mapping[EngineKindName, Record]
    calibration: CalibrationTable
    calibration_data: DataSource | None
    max_batch_size: int
    repair: Repair
