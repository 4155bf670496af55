"""Tables of a policy that say where recorded traffic comes from, and what is kept of it."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from enginegate.messages import matching
from enginegate.policy.building import CalibrationTable
from enginegate.policy.data import Data, SourceOfData
from enginegate.records import Record

Hook = Annotated[str, matching(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "MODULE:FUNCTION")]


class Shadow(Record):
    """How a sample of live requests is recorded, kept private, and compared with calibration."""

    traffic: SourceOfData | None = Field(
        default=None,
        description="production-shaped inputs to send to the FP32 reference; without it the newest "
        "sample of `enginegate shadow record` is used",
    )
    rate_per_s: PositiveFloat | None = Field(
        default=None, description="requests a second to send; needed with traffic"
    )
    trace_rate: PositiveInt = Field(default=100, description="one request in this many is recorded")
    max_samples: PositiveInt = Field(
        default=10_000, description="recording stops after this many requests"
    )
    max_mib: PositiveInt = Field(
        default=512,
        description="recording stops once Triton has written this much text; with traffic, once "
        "tensors of this size were kept",
    )
    drop: tuple[str, ...] = Field(
        default=(), description="inputs never written down; `request_id` drops that too"
    )
    hash: tuple[str, ...] = Field(
        default=(),
        description="inputs (or `request_id`) of which only a keyed digest is written down; "
        "the key is thrown away",
    )
    outputs_only: bool = Field(default=False, description="write down no input at all")
    redactor: Hook | None = Field(
        default=None,
        description="`module:callable` that rewrites inputs and outputs before they are written; "
        "runs your code",
    )
    slice_parameters: tuple[str, ...] = Field(
        default=(), description="request parameters that become slices"
    )
    slicer: Hook | None = Field(
        default=None,
        description="`module:callable` that names slices from the inputs; runs your code",
    )
    embedder: Hook | None = Field(
        default=None,
        description="`module:callable` from token inputs to vectors, for drift; none: hashed "
        "counts of tokens. Runs your code",
    )
    max_psi: PositiveFloat | None = Field(
        default=None,
        description="population stability index above which drifted inputs make the verdict "
        "inconclusive; none: judged at 0.25 and advisory",
    )

    @model_validator(mode="after")
    def _rate_for_traffic(self) -> Self:
        if self.traffic is not None and self.rate_per_s is None:
            raise ValueError("state rate_per_s: traffic is sent at that rate")
        return self


@dataclass(frozen=True, slots=True)
class TrafficTables:
    """Everything in a policy about one model's recorded requests.

    Attributes:
        calibration: how many calibration samples recorded inputs are compared with.
    """

    model: str
    data: Data
    shadow: Shadow | None
    calibration: CalibrationTable
