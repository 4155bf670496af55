"""What passes between a flow and the process that builds a plan for it."""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from enginegate.candidate import ShapeRange
from enginegate.records import Record


class BuildJob(Record):
    """One plan to build. The precision is in the ONNX, except TF32, a flag.

    Files beside ``onnx`` in a scratch folder: the process appends one `BuildStep` a line to
    ``progress``, stops when ``cancel`` appears, and reads and writes ``timing_cache``.
    """

    library: str
    onnx: Path
    plan: Path
    profiles: dict[str, ShapeRange]
    tf32: bool
    targets: tuple[str, ...]
    workspace_mib: PositiveInt
    memory_mib: PositiveInt
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    keep_timings: bool = True
    layers: Path | None = Field(default=None, description="where to write the inspector's JSON")

    @property
    def progress(self) -> Path:
        """Steps so far, one JSON a line."""
        return self.onnx.with_name("progress.jsonl")

    @property
    def cancel(self) -> Path:
        """The builder stops at its next step when this file exists."""
        return self.onnx.with_name("cancel")

    @property
    def timing_cache(self) -> Path:
        """Kernel timings: of earlier builds before, of this one too after."""
        return self.onnx.with_name("timing.cache")


class BuildStep(Record):
    """How far the builder is."""

    phase: str
    step: NonNegativeInt
    steps: NonNegativeInt


class BuildReport(Record):
    """What the process did: an error a person can read, or what the parser saw."""

    error: str = ""
    cancelled: bool = False
    weighted: dict[str, NonNegativeInt] = Field(default={}, description="layers by type")
    quantise: dict[str, NonNegativeInt] = Field(default={}, description="Quantize by type")
    tf32: bool = False
    flags: dict[str, str] = Field(default={}, description="what the builder was told")
