"""The ``[tensorrt]`` table of a policy, and what it means for one builder: pure."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from enginegate.candidate import Precision
from enginegate.engines.tensorrt.library import TensorRtLibrary
from enginegate.messages import matching
from enginegate.records import Record

# Kernels that TensorRT itself brings; all others come from cuDNN and cuBLAS.
BUILT_IN_TACTICS = ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")
LOWERED_LEVEL = 1  # the second attempt's: level 0 takes the first tactic that works, untimed
# The first attempt's share of the time when a second one may follow: it has the faster plan, and
# the second one times a fraction of its kernels. On an H200 ResNet-50 in INT8 was not built at
# level 3 in five minutes, and nearly done at level 1 after one, beside eight other builds.
FIRST_ATTEMPT = 0.6
_DEFAULT_LEVEL = 3
_REDUCED = {Precision.FP16: ("FP16",), Precision.INT8: ("INT8", "FP16")}


class TensorRtTable(Record):
    """How TensorRT plans are built."""

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        default="auto",
        description="auto: the full library where it is installed (ENGINEGATE_TENSORRT may name "
        "another Python that has it), else RTX",
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
    when_slow: Literal["fail", "lower"] = Field(
        default="fail",
        description="a build that runs out of time: give up, or try once more within timeout_s at "
        "builder_optimization_level = 1 (full library only)",
    )
    builder_optimization_level: Annotated[NonNegativeInt, Field(le=5)] | None = Field(
        default=None,
        description="how long the builder looks for fast kernels, 0 to 5; none: the library's own "
        "choice, 3 (full library only)",
    )
    tactic_sources: tuple[
        Literal["CUBLAS", "CUBLAS_LT", "CUDNN", "EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"], ...
    ] = Field(
        default=(),
        description="where kernels may come from; empty: the library's own choice, without cuDNN "
        "and cuBLAS where only placeholders of them are installed (full library only)",
    )
    memory_mib: PositiveInt = Field(
        default=16384, description="memory the builder may use beyond what it starts with"
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
    cuda_graphs: bool = Field(
        default=True, description="replay one captured graph for each set of shapes"
    )


@dataclass(frozen=True, slots=True)
class BuilderSettings:
    """How one library is to build one candidate.

    Attributes:
        strong: whether the network's types decide the precision; else flags allow it.
        set_flags: builder flags that are switched on, by name.
        clear_flags: those that are switched off; TF32 is on by default.
        tactic_sources: where kernels come from, or None for the library's own choice.
        optimization_level: 0 to 5, or None for the library's own choice.
    """

    strong: bool
    set_flags: tuple[str, ...]
    clear_flags: tuple[str, ...]
    tactic_sources: tuple[str, ...] | None
    optimization_level: int | None

    @property
    def lowered(self) -> int | None:
        """The level of a second, quicker attempt; None where the first was as quick already."""
        level = _DEFAULT_LEVEL if self.optimization_level is None else self.optimization_level
        return LOWERED_LEVEL if level > LOWERED_LEVEL else None


def builder_settings(
    library: TensorRtLibrary, precision: Precision, table: TensorRtTable
) -> BuilderSettings:
    """Flags, kernels and level for one candidate: pure.

    In a weakly typed network flags allow what the builder may choose from, FP32 always included;
    what it chose is read from the plan. INT8 networks get FP16 for the layers without scales.
    """
    tf32 = precision is Precision.TF32
    wanted = _REDUCED.get(precision, ()) if library.is_weakly_typed else ()
    version = ("VERSION_COMPATIBLE",) if table.version_compatible else ()
    sources = table.tactic_sources or (BUILT_IN_TACTICS if library.lacks_kernels else None)
    return BuilderSettings(
        strong=not library.is_weakly_typed,
        set_flags=(*wanted, *(("TF32",) if tf32 else ()), *version),
        clear_flags=() if tf32 else ("TF32",),
        tactic_sources=sources,
        optimization_level=table.builder_optimization_level,
    )
