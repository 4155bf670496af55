"""Everything that decides an engine's bytes."""

from dataclasses import dataclass
from pathlib import Path

from enginegate.candidate import Candidate, EngineKind, OnnxModel, Sha256
from enginegate.canonical import canonical_json, sha256_bytes
from enginegate.data import DataSet
from enginegate.policy import Calibration, TensorRt
from enginegate.sources.export import ONNX_FILE

_RECIPE = 1  # raise when the same plan comes to mean other bytes, or another manifest


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
        tensorrt: targets and limits; other kinds ignore them.
        converter: tool, version and settings that change the precision, or ``none``.
        toolchain: the kind's library, version and device; ``absent`` if it is not installed.
    """

    onnx: OnnxModel
    folder: Path
    candidate: Candidate
    max_batch_size: int
    calibration: DataSet | None
    calibration_sha256: Sha256 | None
    calibrating: Calibration
    tensorrt: TensorRt
    converter: str
    toolchain: str

    @property
    def onnx_path(self) -> Path:
        """The FP32 ONNX file."""
        return self.folder / ONNX_FILE

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
        }
        if self.candidate.kind is EngineKind.TENSORRT:
            deciding["targets"] = self.tensorrt.targets
            deciding["workspace_mib"] = self.tensorrt.workspace_mib
        return sha256_bytes(canonical_json(deciding))
