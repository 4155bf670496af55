"""What is built: candidates, the ONNX model they come from, and engines.

- **Candidate**: one engine kind x precision of one model version.
- **OnnxModel**: the FP32 ONNX form of a model version; the reference is this model, run at FP32.
- **Engine**: a candidate's built file plus its manifest, addressed by content.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from enginegate.errors import ModelError, TamperedError
from enginegate.records import Record, sha256_file

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Which runtime executes an engine, e.g. tensorrt. Open: `engine_kinds` knows those that are here.
EngineKindName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]

# A repaired candidate's variant begins so, and then says how many nodes stay FP32.
KEPT = "+keep"
ONNX_FILE = "model.onnx"
PROGRAM_FILE = "program.pt2"
# How a version of MLflow's model registry is named.
BY_VERSION = r"models:/(?P<name>[^/@]+)/(?P<version>[0-9]+)"
BY_ALIAS = r"models:/(?P<name>[^/@]+)@(?P<alias>[A-Za-z0-9_-]+)"


class Precision(StrEnum):
    """The arithmetic a candidate is meant to use; `fp32` means IEEE, with TF32 off."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def needs_calibration(self) -> bool:
        """Whether activations are quantised with scales that come from data."""
        return self in {Precision.INT8, Precision.FP8}

    @property
    def is_as_exported(self) -> bool:
        """Whether the exported graph is built as it is; all others are converted."""
        return self in {Precision.FP32, Precision.TF32}

    @property
    def is_16_bit(self) -> bool:
        """Whether weights and activations are floats of 16 bits."""
        return self in {Precision.FP16, Precision.BF16}


class Candidate(Record):
    """One engine kind x precision of one model version."""

    kind: EngineKindName
    precision: Precision
    variant: str = Field(
        default="", pattern=r"^[a-z0-9+-]*$", description="suffix for a repaired or tuned form"
    )

    @property
    def name(self) -> str:
        """For example ``onnxruntime-int8``; unique within a qualification."""
        return f"{self.kind}-{self.precision}{self.variant}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The candidate of a name such as ``tensorrt-fp16``.

        Raises:
            ModelError: the name is not ``KIND-PRECISION``.
        """
        precisions = "|".join(Precision)
        match = re.fullmatch(rf"([a-z][a-z0-9_]*)-({precisions})([a-z0-9+-]*)", name)
        if match is None:
            raise ModelError(
                f"{name!r} is not a candidate. A candidate is KIND-PRECISION with KIND an engine "
                f"kind and PRECISION one of {precisions}, for example onnxruntime-int8."
            )
        return cls(kind=match[1], precision=Precision(match[2]), variant=match[3])

    @property
    def is_repaired(self) -> bool:
        """Whether its name says that nodes are kept at FP32."""
        return self.variant.startswith(KEPT)

    def __str__(self) -> str:
        return self.name


class TensorSpec(Record):
    """Name, NumPy dtype name and shape of one input or output; -1 marks a dynamic axis.

    The first axis is the batch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        free = ("any" if position else "batch" for position in range(len(self.shape)))
        sizes = zip(free, self.shape, strict=True)
        axes = (name if axis < 0 else str(axis) for name, axis in sizes)
        return f"{self.name}: {self.dtype}[{', '.join(axes)}]"


class FileDigest(Record):
    """What a file must be: its sha256 and size, checked where it is opened."""

    sha256: Sha256
    size_bytes: NonNegativeInt

    @classmethod
    def of(cls, path: Path) -> Self:
        """Digest and size of the file at ``path``."""
        return cls(sha256=sha256_file(path), size_bytes=path.stat().st_size)

    def check(self, path: Path) -> None:
        """Refuse a file that is not the one that was recorded.

        Raises:
            TamperedError: the file is missing, or differs in size or content.
        """
        if not path.is_file():
            raise TamperedError(
                f"{path} is missing; it should hold {self.size_bytes} bytes, sha256 {self.sha256}."
            )
        found = FileDigest.of(path)
        if found != self:
            raise TamperedError(
                f"{path} is not the file that was recorded.\n"
                f"  recorded: {self.size_bytes} bytes, sha256 {self.sha256}\n"
                f"  found:    {found.size_bytes} bytes, sha256 {found.sha256}"
            )


class TorchProgram(Record):
    """A torch.export program beside an ONNX model: ``program.pt2``, FP32, for the CPU."""

    file: FileDigest
    inputs: tuple[str, ...] = Field(description="the ONNX model's names, in the program's order")
    outputs: tuple[str, ...] = Field(description="likewise")
    parity_max_abs_error: NonNegativeFloat = Field(
        description="largest difference between the framework and the program, read back"
    )


class OnnxModel(Record):
    """An FP32 ONNX model in the store: ``model.onnx`` beside this record, ``manifest.json``.

    The digest of ``model.onnx`` stands for the whole model: the file names the sha256 of its
    external weights.
    """

    schema_version: Literal[1] = 1
    source: str = Field(description="where it came from, e.g. models:/digits/1")
    source_sha256: Sha256 = Field(description="digest of the source's files")
    file: FileDigest
    external: dict[str, FileDigest] = Field(
        default_factory=dict,
        description="weight files beside model.onnx, when one ONNX file cannot hold them all",
    )
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: PositiveInt
    ir_version: PositiveInt
    producer: str
    exporter: str = Field(description="library and version that exported it")
    parity_max_abs_error: NonNegativeFloat | None = Field(
        description="largest difference between framework and ONNX over the samples "
        "(docs/sources.md); None if the source is ONNX"
    )
    parity_tolerance: NonNegativeFloat | None
    parity_samples: NonNegativeInt
    proven_batch_sizes: tuple[PositiveInt, ...]
    proven_lengths: dict[str, tuple[PositiveInt, ...]] = Field(
        default_factory=dict, description="sizes that were run, by dynamic axis besides the batch"
    )
    program: TorchProgram | None = Field(
        default=None, description="the same model for engine kinds that compile PyTorch programs"
    )
    no_program: str = Field(default="", description="why there is none")

    def check(self, folder: Path) -> None:
        """Refuse files that are not the ones that were recorded.

        Raises:
            TamperedError: a file is missing, or differs in size or content.
        """
        self.file.check(folder / ONNX_FILE)
        for name, digest in self.external.items():
            digest.check(folder / name)
        if self.program is not None:
            self.program.file.check(folder / PROGRAM_FILE)


class PrecisionProof(Record):
    """What the built graph really computes in: evidence that a candidate is what its name says."""

    weighted_layers: dict[str, NonNegativeInt] = Field(
        description="count of Conv, MatMul, Gemm and recurrent layers by the type they compute in"
    )
    quantised_layers: NonNegativeInt = Field(description="layers fed by Quantize/Dequantize pairs")
    flops: dict[str, NonNegativeInt] = Field(
        default={}, description="operations of those layers for one sample, by type"
    )
    weights: dict[str, NonNegativeInt] = Field(
        default={}, description="numbers stored in the graph, by type"
    )
    executed_layers: dict[str, NonNegativeInt] = Field(
        default={},
        description="layers of the graph that the runtime made of it, by type; empty if not shown",
    )
    device: str = Field(description="what runs it, e.g. CPUExecutionProvider, or 'none here'")
    proven: bool
    detail: str = Field(description="one sentence a person can read")


class ShapeRange(Record):
    """Shapes of one input that an engine takes: every axis from ``min`` to ``max``."""

    min: tuple[PositiveInt, ...]
    best: tuple[PositiveInt, ...] = Field(description="what it is tuned for")
    max: tuple[PositiveInt, ...]


class Unbuilt(Record):
    """A candidate without an engine, and why.

    Either its build broke, or nothing here could have decided it, so that none was tried.
    """

    candidate: Candidate
    why: str
    undecidable: bool = Field(
        default=False, description="no device, library or data here allows it; it is not at fault"
    )
    remedy: str = ""
    broke: bool = Field(
        default=False, description="a tool broke, so whether it can be built is not known"
    )


class Provenance(Record):
    """Where a candidate comes from that something else made."""

    file: str = Field(description="as the policy names it")
    sha256: Sha256
    size_bytes: NonNegativeInt
    made_by: str = Field(default="", description="in the words of the policy")

    def __str__(self) -> str:
        by = f", by {self.made_by}" if self.made_by else ""
        return f"made elsewhere{by}: {self.file}, sha256 {self.sha256[:12]}"


class Engine(Record):
    """A built engine in the store: its file beside this record, ``manifest.json``."""

    schema_version: Literal[1] = 1
    candidate: Candidate
    filename: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    file: FileDigest
    onnx_sha256: Sha256 = Field(description="the FP32 ONNX model it was made from")
    converted_sha256: Sha256 = Field(description="the ONNX at this precision, which was compiled")
    converter: str = Field(description="tool and version that changed the precision, or 'none'")
    calibration_sha256: Sha256 | None
    builder: str = Field(description="library and version, e.g. tensorrt_rtx 1.7.1.116")
    target: str = Field(description="device it was built for, e.g. cpu, or sm80+sm89")
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: PositiveInt
    build_s: NonNegativeFloat
    proof: PrecisionProof
    source_sha256: Sha256 | None = Field(default=None, description="the source of the ONNX model")
    kept_nodes: tuple[str, ...] = Field(
        default=(), description="nodes that stay fp32, in a repaired candidate"
    )
    flags: dict[str, str] = Field(default={}, description="what the builder was given, by name")
    profiles: dict[str, ShapeRange] = Field(
        default={}, description="sizes it takes, by input with dynamic axes"
    )
    beside: dict[str, FileDigest] = Field(
        default={}, description="other files of its folder, e.g. a log, by name"
    )
    external: dict[str, FileDigest] = Field(
        default={}, description="weight files beside it, when one ONNX file cannot hold them all"
    )
    made: Provenance | None = Field(
        default=None, description="the file it comes from, if something else made it"
    )

    @property
    def size_bytes(self) -> int:
        """Of the engine and its weight files."""
        return self.file.size_bytes + sum(each.size_bytes for each in self.external.values())

    def check(self, folder: Path) -> None:
        """Refuse files that are not the ones that were recorded.

        Raises:
            TamperedError: a file is missing, or differs in size or content.
        """
        self.file.check(folder / self.filename)
        for name, digest in self.external.items():
            digest.check(folder / name)


class RegistryUri(NamedTuple):
    """``models:/NAME/VERSION`` or ``models:/NAME@ALIAS``.

    Attributes:
        name: of the registered model.
        version: its number; None where an alias stands for it.
        alias: empty where there is a number.
    """

    name: str
    version: int | None
    alias: str = ""

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """What a URI names; None: no version of the registry."""
        for pattern in (BY_VERSION, BY_ALIAS):
            found = re.fullmatch(pattern, uri)
            if found is not None:
                parts = found.groupdict()
                number = parts.get("version")
                return cls(parts["name"], int(number) if number else None, parts.get("alias", ""))
        return None

    def __str__(self) -> str:
        tail = f"@{self.alias}" if self.version is None else f"/{self.version}"
        return f"models:/{self.name}{tail}"


def registered_version(uri: str) -> tuple[str, int] | None:
    """Name and number that a resolved URI means; None: it is of no registry, or an alias."""
    found = RegistryUri.parse(uri)
    return None if found is None or found.version is None else (found.name, found.version)
