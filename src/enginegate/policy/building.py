"""Tables of a policy that decide which engines are built, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from enginegate.candidate import KEPT, Candidate, EngineKindName, Precision, Sha256
from enginegate.policy.data import DataSource
from enginegate.policy.paths import SafePath
from enginegate.records import Record

ONNX, PACKAGE = ".onnx", ".pt2"
_KINDS = {ONNX: "onnxruntime", PACKAGE: "torch_inductor"}
_ARCHIVE = ".ait"
_MADE = "made"


class MadeElsewhere(Record):
    """One candidate that something else made; judged like those that are built here."""

    file: SafePath = Field(
        description="`.onnx` (quantisation-aware training, a converter of your own), `.pt2` (an "
        "AOTInductor package), or AITune's `.ait` with one of these inside"
    )
    precision: Precision = Field(description="that it computes in; this is proven")
    kind: EngineKindName | None = Field(
        default=None,
        description="the engine kind that runs it. none: onnxruntime for ONNX, torch_inductor for "
        "packages. ONNX may also say tensorrt, which compiles it",
    )
    name: str = Field(
        default="made",
        pattern=r"^[a-z][a-z0-9]{0,23}$",
        description="ends the candidate's name: KIND-PRECISION+NAME",
    )
    made_by: str = Field(
        default="", max_length=300, description="tool, version, run; recorded with the engine"
    )
    sha256: Sha256 | None = Field(
        default=None,
        description="refuse any other file; none: the digest is only recorded. Needed with "
        "[devices]",
    )
    allow_code: bool = Field(
        default=False,
        description="load native code: a `.pt2` package runs with all rights, here and in Triton",
    )
    batch: PositiveInt | None = Field(
        default=None,
        description="the one batch size that a `.pt2` package takes; none: any up to the largest",
    )
    inputs: tuple[str, ...] = Field(
        default=(), description="of a `.pt2` package, in its order; empty: in the model's"
    )
    outputs: tuple[str, ...] = Field(default=(), description="likewise")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if f"+{self.name}".startswith(KEPT):
            raise ValueError(f"name {self.name}: {KEPT[1:]} is how repaired candidates are named")
        if self.file.suffix not in {*_KINDS, _ARCHIVE}:
            raise ValueError(
                f"file ends in {self.file.suffix or 'nothing'}, and can end in "
                f"{', '.join((*_KINDS, _ARCHIVE))}"
            )
        if self.file.suffix == _ARCHIVE and self.kind is None:
            raise ValueError("kind says which engine an .ait holds: onnxruntime or torch_inductor")
        takes = PACKAGE if self.kind == _KINDS[PACKAGE] else ONNX
        if self.kind is not None and self.file.suffix not in {takes, _ARCHIVE}:
            raise ValueError(f"{self.kind} takes {takes}, and file ends in {self.file.suffix}")
        return self

    @property
    def engine_kind(self) -> EngineKindName:
        """The engine kind that runs it."""
        return self.kind or _KINDS[self.file.suffix]

    @property
    def engine_suffix(self) -> str:
        """The ending of the engine's own file, which may be inside an archive."""
        return PACKAGE if self.engine_kind == _KINDS[PACKAGE] else ONNX

    @property
    def is_code(self) -> bool:
        """Whether opening it runs native code; ONNX is data."""
        return self.engine_suffix == PACKAGE

    @property
    def candidate(self) -> Candidate:
        """What it is judged as."""
        return Candidate(kind=self.engine_kind, precision=self.precision, variant=f"+{self.name}")


class Candidates(Record):
    """Precisions to build for each engine kind; a kind that is left out builds none.

    Its other keys are the engine kinds' names (`policy_model`).
    """

    made: tuple[MadeElsewhere, ...] = Field(
        default=(), description="candidates that something else made"
    )

    @model_validator(mode="after")
    def _something_to_build(self) -> Self:
        kinds = self.kinds()
        if not self.all():
            raise ValueError(f"name at least one precision for {' or '.join(kinds)}")
        names = [each.candidate.name for each in self.made]
        for each, name in zip(self.made, names, strict=True):
            if each.engine_kind not in kinds:
                raise ValueError(f"made: there is no engine kind {each.engine_kind!r} here")
            if names.count(name) > 1:
                raise ValueError(f"made: two are called {name}; give each a name of its own")
        return self

    @classmethod
    def kinds(cls) -> tuple[EngineKindName, ...]:
        """The engine kinds that precisions may be named for."""
        return tuple(name for name in cls.model_fields if name != _MADE)

    def all(self) -> tuple[Candidate, ...]:
        """Every candidate, kind by kind in the order of the file, without repeats."""
        listed = [(kind, precision) for kind in self.kinds() for precision in getattr(self, kind)]
        built = (Candidate(kind=kind, precision=p) for kind, p in dict.fromkeys(listed))
        return (*built, *(each.candidate for each in self.made))

    def made_as(self, candidate: Candidate) -> MadeElsewhere | None:
        """What the file says of a candidate that something else made; None: it is built here."""
        return next((each for each in self.made if each.candidate == candidate), None)


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
