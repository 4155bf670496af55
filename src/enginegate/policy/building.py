"""Tables of a policy that decide which engines are built, and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from enginegate.candidate import Candidate, EngineKind, Precision
from enginegate.records import Record
from enginegate.validation_messages import matching

Device = Literal["cpu", "cuda"]


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


class OnnxRuntime(Record):
    """How ONNX Runtime engines are run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the GPU if ONNX Runtime and the driver show one"
    )
    batch_buckets: tuple[PositiveInt, ...] = Field(
        default=(),
        description="batch sizes that run on a GPU, others are padded; empty: powers of two",
    )
    cuda_graphs: bool = Field(
        default=True, description="replay one captured graph a bucket, where the model allows it"
    )


class TensorRt(Record):
    """How TensorRT plans are built."""

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        default="auto", description="auto: the full library where it is installed, else RTX"
    )
    targets: tuple[
        Annotated[str, matching(r"^sm[0-9]{2,3}$", "sm and two or three digits, e.g. sm90")], ...
    ] = Field(
        default=("sm89",), description="compute capabilities to build for ahead of time (RTX only)"
    )
    workspace_mib: PositiveInt = Field(default=1024, description="builder workspace limit")
    timeout_s: PositiveFloat = Field(
        default=900.0, description="a build is stopped after this long"
    )
    memory_mib: PositiveInt = Field(
        default=16384, description="address space the builder may use beyond what it starts with"
    )
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = Field(
        default="none", description="on which other GPUs a plan may run (full library only)"
    )
    version_compatible: bool = Field(
        default=False,
        description="plans that newer TensorRT versions load too; they carry code that the loader "
        "must be allowed to trust (full library only)",
    )
    timing_cache: bool = Field(
        default=True,
        description="keep kernel timings, one file a version and GPU (full library only)",
    )


class Building(Record):
    """The three tables together, as a plan carries them."""

    shapes: Shapes = Shapes()
    onnxruntime: OnnxRuntime = OnnxRuntime()
    tensorrt: TensorRt = TensorRt()


@dataclass(frozen=True, slots=True)
class EngineTables:
    """Everything in a policy that decides which engines are built, and how.

    Attributes:
        calibration_data: file that int8 and fp8 scales come from.
        max_batch_size: the largest batch that an engine must take.
    """

    candidates: Candidates
    building: Building
    calibration: CalibrationTable
    calibration_data: Path | None
    max_batch_size: int
    repair: Repair
