"""Everything that decides an engine's bytes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from enginegate.candidate import (
    ONNX_FILE,
    Candidate,
    EngineKind,
    FileDigest,
    OnnxModel,
    Precision,
    Sha256,
    ShapeRange,
    TensorSpec,
)
from enginegate.data import DataSet
from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import Building, DimensionRange
from enginegate.records import canonical_json, sha256_bytes

_RECIPE = 2  # raise when the same plan comes to mean other bytes, or another manifest
_LIMITS = {"timeout_s", "memory_mib", "timing_cache"}  # these stop a build, or hasten it
AS_EXPORTED = {Precision.FP32, Precision.TF32}


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
        building: shapes, devices, targets and limits.
        converter: tool, version and settings that change the precision, or ``none``.
        toolchain: the kind's library, version and device; ``absent`` if it is not installed.
        keep: nodes that stay FP32, as `precision.sensitivities` names them.
    """

    onnx: OnnxModel
    folder: Path
    candidate: Candidate
    max_batch_size: int
    calibration: DataSet | None
    calibration_sha256: Sha256 | None
    calibrating: CalibrationTable
    building: Building
    converter: str
    toolchain: str
    keep: tuple[str, ...] = ()

    @property
    def onnx_path(self) -> Path:
        """The FP32 ONNX file."""
        return self.folder / ONNX_FILE

    def bring_weights(self, folder: Path) -> dict[str, FileDigest]:
        """Put the weight files of an fp32 or tf32 form beside it; other forms hold theirs."""
        if self.candidate.precision not in AS_EXPORTED:
            return {}
        for name in self.onnx.external:
            shutil.copyfile(self.folder / name, folder / name)  # onnx refuses links
        return self.onnx.external

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
        deciding["shapes"] = {
            name: shape.model_dump() for name, shape in self.known_profiles.items()
        }
        if self.candidate.kind is EngineKind.TENSORRT:
            deciding["tensorrt"] = self.building.tensorrt.model_dump(exclude=_LIMITS)
        return sha256_bytes(canonical_json(deciding))

    @property
    def profiles(self) -> dict[str, ShapeRange]:
        """Shapes of every input with a dynamic axis.

        Raises:
            BuildError: the policy gives no range for a dynamic axis besides the batch.
        """
        found = self.known_profiles
        for spec in self.onnx.inputs:
            if -1 in spec.shape and spec.name not in found:
                axis = next(
                    i
                    for i, size in enumerate(spec.shape)
                    if i and size < 0 and not self.building.shapes.of(spec.name, i)
                )
                raise BuildError(
                    f"{spec} has dynamic axes besides the batch, and the policy gives no range "
                    f"for axis {axis}. Set sequence = {{ min = 8, best = 128, max = 512 }} under "
                    f'[shapes], or that range for "{spec.name}.{axis}" under [shapes.axes].'
                )
        return found

    @property
    def known_profiles(self) -> dict[str, ShapeRange]:
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
            return self.building.shapes.of(spec.name, index)
        most = self.max_batch_size
        return self.building.shapes.batch or DimensionRange(min=1, best=most, max=most)
