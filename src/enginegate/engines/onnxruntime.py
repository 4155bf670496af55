"""ONNX Runtime engines; the only door to ONNX Runtime for running models.

An engine is the ONNX file at its precision. Sessions use one thread each, so that throughput comes
from instances, and what was validated is what Triton runs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginegate.candidate import Engine, EngineKind, FileDigest, Precision, TensorSpec
from enginegate.canonical import sha256_bytes
from enginegate.data import Tensors
from enginegate.durable import write_file
from enginegate.engines.plan import BuildPlan
from enginegate.engines.proof import prove
from enginegate.engines.protocol import Availability, Runner, Served, missing
from enginegate.engines.rows import run_rows
from enginegate.errors import BuildError, ModelError
from enginegate.precision import convert

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

ENGINE_FILE = "model.onnx"
PROVIDER = "CPUExecutionProvider"
_PRECISIONS = frozenset({Precision.FP32, Precision.INT8})
_REMEDY = "pip install 'enginegate[cpu]'"
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}


@dataclass(frozen=True, slots=True)
class _Runner:
    session: "InferenceSession"
    specs: tuple[TensorSpec, ...]
    limit: int

    @property
    def device(self) -> str:
        return str(self.session.get_providers()[0])

    def run(self, inputs: Tensors) -> Tensors:
        return run_rows(inputs, self.specs, limit=self.limit, run_once=self._once)

    def _once(self, inputs: Tensors) -> Tensors:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


def toolchain() -> str:
    """Library and version; the engine is portable, so no device."""
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        return "absent"
    return f"onnxruntime {onnxruntime.__version__}"


def build(plan: BuildPlan, folder: Path) -> Engine:
    """Convert, load once as proof, and write ``model.onnx``.

    Raises:
        BuildError: the CPU provider has no such precision, or ONNX Runtime refuses the model.
        DataError: int8 without calibration data, or with data that does not fit.
    """
    if plan.toolchain == "absent":
        raise BuildError(f"ONNX Runtime is not installed here. Run: {_REMEDY}")
    if plan.candidate.precision not in _PRECISIONS:
        raise BuildError(
            f"ONNX Runtime's {PROVIDER} computes in fp32 or int8, not in "
            f"{plan.candidate.precision}; that needs the CUDA provider and a GPU. Drop "
            f"{plan.candidate.precision} from onnxruntime under [candidates]."
        )
    started = time.monotonic()
    converted = convert(
        plan.onnx_path, plan.candidate, data=plan.calibration, rules=plan.calibrating
    )
    path = folder / ENGINE_FILE
    write_file(path, converted.onnx)
    try:
        device = str(_session(path, optimised=True).get_providers()[0])
    except ModelError as error:
        raise BuildError(f"{plan.candidate}: {error}") from error
    doubts = () if device == PROVIDER else (f"Asked for {PROVIDER}, got {device}.",)
    return Engine(
        candidate=plan.candidate,
        filename=ENGINE_FILE,
        file=FileDigest.of(path),
        onnx_sha256=plan.onnx.file.sha256,
        converted_sha256=sha256_bytes(converted.onnx),
        converter=converted.converter,
        calibration_sha256=plan.calibration_sha256,
        builder=plan.toolchain,
        target="cpu",
        inputs=plan.onnx.inputs,
        outputs=plan.onnx.outputs,
        max_batch_size=plan.max_batch_size,
        build_s=round(time.monotonic() - started, 3),
        proof=prove(plan.candidate, converted.census, device=device, doubts=doubts),
    )


def obstacle(_engine: Engine) -> str | None:
    """None: a CPU is enough; or that the library is missing."""
    try:
        import onnxruntime  # noqa: F401, PLC0415
    except ImportError:
        return f"ONNX Runtime is not installed here. Run: {_REMEDY}"
    return None


@contextmanager
def load(engine: Engine, path: Path) -> Iterator[Runner]:
    """Load the engine as Triton will: every optimisation, one thread."""
    session = _session(path, optimised=True)
    yield _Runner(session, _specs(session), engine.max_batch_size)


@contextmanager
def open_onnx(path: Path) -> Iterator[Runner]:
    """Load an FP32 ONNX file to compare others with: no optimisation, any batch up to 64 rows.

    Raises:
        ModelError: ONNX Runtime cannot load it.
    """
    session = _session(path, optimised=False)
    yield _Runner(session, _specs(session), limit=64)


def serving(engine: Engine, path: Path) -> Served:
    """Triton's Python backend: this room's model file, the engine, and what it must be.

    The engine's digest travels in the version folder, because versions of a model share one
    configuration. The parameters are the defaults, so they may be left out.
    """
    return Served(
        backend="python",
        files={
            "model.py": Path(__file__).with_name("serve_onnxruntime.py"),
            "engine.json": path.with_name("manifest.json"),
            engine.filename: path,
        },
        parameters={"provider": PROVIDER, "intra_op_threads": "1"},
    )


def availability() -> Availability:
    """Whether the library is here; a CPU can do the rest."""
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        reason = "onnxruntime is not installed"
        return missing(EngineKind.ONNXRUNTIME, reason, _REMEDY)
    library = f"onnxruntime {onnxruntime.__version__}"
    return Availability(EngineKind.ONNXRUNTIME, library, can_build=True, can_run=True)


def _session(path: Path, *, optimised: bool) -> "InferenceSession":
    import onnxruntime as ort  # noqa: PLC0415

    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    )
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if optimised:
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
    try:
        return ort.InferenceSession(str(path), options, providers=[PROVIDER])
    except Exception as error:  # ONNX Runtime's errors share no base class of its own
        raise ModelError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {str(error).strip()}\n"
            "If it names an operator, export the model at another opset or without it."
        ) from error


def _specs(session: "InferenceSession") -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=value.name,
            dtype=_TYPES.get(value.type, value.type),
            shape=tuple(axis if isinstance(axis, int) else -1 for axis in value.shape),
        )
        for value in session.get_inputs()
    )
