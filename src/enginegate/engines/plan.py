"""Everything that decides an engine's bytes."""

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from enginegate.candidate import (
    ONNX_FILE,
    PROGRAM_FILE,
    Candidate,
    Engine,
    FileDigest,
    OnnxModel,
    PrecisionProof,
    Sha256,
    ShapeRange,
    TensorSpec,
)
from enginegate.data import DataSet
from enginegate.engines.made_elsewhere import MadeFile
from enginegate.engines.precision_check import check_precision_proof
from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.precision import Conversion, convert
from enginegate.records import Record, canonical_json, sha256_bytes

Table = TypeVar("Table", bound=Record)
_RECIPE = 3  # raise when the same plan comes to mean other bytes, or another manifest


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """One engine to build. `key` names it in the store: two equal plans need one build.

    Attributes:
        onnx: the FP32 model.
        folder: the folder of the store that holds it.
        max_batch_size: the largest batch the engine must take.
        calibration: representative samples; int8 and fp8 need them.
        calibration_sha256: digest of those that are read; None if the precision needs none.
        calibrating: how they are read.
        shapes: sizes of dynamic axes.
        table: the kind's own table of the policy.
        deciding: settings of that table that decide the bytes, or what the manifest says of them.
        converter: tool, version and settings that change the precision, or ``none``.
        toolchain: the kind's library, version and device; ``absent`` if it is not installed.
        keep: nodes that stay FP32, as `precision.sensitivities` names them.
        takes_program: whether the kind compiles the model's torch program.
        made: the file that the candidate is, if something else made it.
    """

    onnx: OnnxModel
    folder: Path
    candidate: Candidate
    max_batch_size: int
    calibration: DataSet | None
    calibration_sha256: Sha256 | None
    calibrating: CalibrationTable
    shapes: Shapes
    table: Record
    deciding: Mapping[str, object]
    converter: str
    toolchain: str
    keep: tuple[str, ...] = ()
    takes_program: bool = False
    made: MadeFile | None = None

    def table_as(self, model: type[Table]) -> Table:
        """The kind's own table, as the kind's model."""
        if not isinstance(self.table, model):
            raise TypeError(f"the plan of {self.candidate} holds {type(self.table).__name__}")
        return self.table

    @property
    def onnx_path(self) -> Path:
        """The FP32 ONNX file."""
        return self.folder / ONNX_FILE

    @property
    def program(self) -> Path | None:
        """The model's torch program: FP32, for the CPU; None if the model has none."""
        return None if self.onnx.program is None else self.folder / PROGRAM_FILE

    def bring_weights(self, folder: Path) -> dict[str, FileDigest]:
        """Put the weight files of an fp32 or tf32 form beside it; other forms hold theirs."""
        if self.made is not None or not self.candidate.precision.is_as_exported:
            return {}
        for name in self.onnx.external:
            shutil.copyfile(self.folder / name, folder / name)  # onnx refuses links
        return self.onnx.external

    def convert(self) -> Conversion:
        """The model at the candidate's precision, in the form that its kind takes.

        Raises:
            BuildError: the model cannot be had at this precision.
            DataError: int8 or fp8 without calibration data, or with data that does not fit.
        """
        if self.made is not None:
            return self.made.conversion(self.onnx)
        return convert(
            self.onnx_path,
            self.candidate,
            data=self.calibration,
            rules=self.calibrating,
            keep=self.keep,
        )

    def proof(
        self,
        converted: Conversion,
        *,
        device: str,
        doubts: tuple[str, ...] = (),
        executed: Mapping[str, int] | None = None,
        types: Mapping[str, str] | None = None,
    ) -> PrecisionProof:
        """Whether the converted graph computes in what the candidate's name says.

        Args:
            device: what runs it.
            doubts: what else was found that contradicts the name; any of it refutes the proof.
            executed: layers by type in the graph that the runtime made of it; None if unknown.
            types: node -> the type that the runtime gave it, where it may choose another one than
                the graph's.
        """
        shapes = {name: shape.best for name, shape in self.profiles.items()}
        return check_precision_proof(
            self.candidate,
            converted.stats(shapes, types),
            device=device,
            doubts=doubts,
            executed=executed,
        )

    def engine(  # noqa: PLR0913 - one argument for each part of the record that a kind decides
        self,
        path: Path,
        converted: Conversion,
        *,
        builder: str,
        target: str,
        proof: PrecisionProof,
        started_s: float,
        flags: Mapping[str, str] | None = None,
        beside: Iterable[Path] = (),
        external: Mapping[str, FileDigest] | None = None,
        inputs: tuple[TensorSpec, ...] | None = None,
        outputs: tuple[TensorSpec, ...] | None = None,
    ) -> Engine:
        """The record of the engine that was built.

        Args:
            path: its file.
            converted: what was compiled.
            builder: library and version.
            target: the device it was built for.
            started_s: when its build began, by the monotonic clock.
            flags: what the builder was given, by name.
            beside: other files of its folder, as far as they are there.
            external: weight files beside it.
            inputs: those that the engine takes, where they differ from the model's.
            outputs: likewise.
        """
        return Engine(
            candidate=self.candidate,
            filename=path.name,
            file=FileDigest.of(path),
            onnx_sha256=self.onnx.file.sha256,
            source_sha256=self.onnx.source_sha256,
            converted_sha256=sha256_bytes(converted.onnx),
            converter=converted.converter,
            calibration_sha256=self.calibration_sha256,
            kept_nodes=self.keep,
            builder=builder,
            target=target,
            inputs=inputs or self.onnx.inputs,
            outputs=outputs or self.onnx.outputs,
            max_batch_size=self.max_batch_size,
            flags=dict(flags or {}),
            profiles=self.profiles,
            beside={each.name: FileDigest.of(each) for each in beside if each.is_file()},
            external=dict(external or {}),
            build_s=round(time.monotonic() - started_s, 3),
            made=None if self.made is None else self.made.provenance,
            proof=proof,
        )

    @property
    def key(self) -> Sha256:
        """Digest of everything that decides the engine's bytes."""
        deciding: dict[str, object] = {
            "recipe": _RECIPE,
            "onnx": self.onnx.file.sha256,
            "candidate": self.candidate.name,
            "max_batch_size": self.max_batch_size,
            "calibration": self.calibration_sha256,
            "converter": self.converter,
            "toolchain": self.toolchain,
            "keep": sorted(self.keep),
        }
        deciding["shapes"] = {name: shape.model_dump() for name, shape in self.profiles.items()}
        deciding["settings"] = dict(self.deciding)
        if self.made is not None:
            # "whole": keys without it also stood for files whose weights lay outside the digest.
            table = self.made.table.model_dump(mode="json")
            deciding["made"] = ["whole", table, self.made.digest.sha256]
        elif self.takes_program and self.onnx.program is not None:
            deciding["program"] = self.onnx.program.file.sha256
        return sha256_bytes(canonical_json(deciding))

    def check_profiles(self) -> None:
        """Refuse a model with dynamic axes that the policy gives no range for.

        Raises:
            BuildError: there is such an axis besides the batch.
        """
        for spec in self.onnx.inputs:
            if -1 in spec.shape and spec.name not in self.profiles:
                axis = next(
                    i
                    for i, size in enumerate(spec.shape)
                    if i and size < 0 and not self.shapes.of(spec.name, i)
                )
                raise BuildError(
                    f"{spec} has dynamic axes besides the batch, and the policy gives no range "
                    f"for axis {axis}. Set sequence = {{ min = 8, best = 128, max = 512 }} under "
                    f'[shapes], or that range for "{spec.name}.{axis}" under [shapes.axes].'
                )

    @property
    def profiles(self) -> dict[str, ShapeRange]:
        """Shapes of the inputs with dynamic axes for which the policy gives every range."""
        specs = [spec for spec in self.onnx.inputs if -1 in spec.shape]
        shapes = ((spec.name, self._shape(spec)) for spec in specs)
        return {name: shape for name, shape in shapes if shape is not None}

    def _shape(self, spec: TensorSpec) -> ShapeRange | None:
        ranges = [self._axis(spec, index) for index in range(len(spec.shape))]
        axes = [each for each in ranges if each is not None]
        if len(axes) < len(ranges):
            return None
        return ShapeRange(
            min=tuple(axis.min for axis in axes),
            best=tuple(axis.best for axis in axes),
            max=tuple(axis.max for axis in axes),
        )

    def _axis(self, spec: TensorSpec, index: int) -> DimensionRange | None:
        size = spec.shape[index]
        if size >= 0:
            return DimensionRange(min=size, best=size, max=size)
        if index:
            return self.shapes.of(spec.name, index)
        most = self.max_batch_size
        return self.shapes.batch or DimensionRange(min=1, best=most, max=most)
