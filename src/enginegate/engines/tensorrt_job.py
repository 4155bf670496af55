"""What passes between a flow and the process that builds a plan for it."""

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from enginegate.candidate import TensorSpec
from enginegate.canonical import Record


class Job(Record):
    """One plan to build.

    Attributes are limits and inputs only; the precision is in the ONNX, except TF32, a flag.
    """

    library: str
    onnx: Path
    plan: Path
    inputs: tuple[TensorSpec, ...]
    max_batch_size: PositiveInt
    tf32: bool
    targets: tuple[str, ...]
    workspace_mib: PositiveInt
    memory_mib: PositiveInt


class Report(Record):
    """What the process did: an error a person can read, or what the parser saw."""

    error: str = ""
    weighted: dict[str, NonNegativeInt] = Field(default={}, description="layers by type")
    quantise: dict[str, NonNegativeInt] = Field(default={}, description="Quantize by type")
    tf32: bool = False
