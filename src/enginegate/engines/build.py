"""Plans -> engines in the store: built once, whole or not at all."""

from contextlib import suppress
from pathlib import Path

from enginegate.atomic_io import write_file
from enginegate.candidate import Candidate, Engine, OnnxModel
from enginegate.content_store import ContentFolder, make_once
from enginegate.data import DataSet
from enginegate.engines import cuda
from enginegate.engines.made_elsewhere import MadeFile
from enginegate.engines.onnxruntime.gpu import load_cuda_libraries
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import engine_kind
from enginegate.errors import BuildError, ModelError, tool_errors
from enginegate.object_storage import fetch_or_make
from enginegate.policy.building import EngineTables
from enginegate.precision import CalibrationSample, converter_of, reads_data
from enginegate.sources.onnx_form import ONE_FILE_BYTES

MANIFEST = "manifest.json"
_WAIT_S = 600.0


def plan_engine(
    onnx: ContentFolder[OnnxModel],
    candidate: Candidate,
    *,
    tables: EngineTables,
    calibration: DataSet | None,
    keep: tuple[str, ...] = (),
) -> BuildPlan:
    """Collect everything that decides the engine's bytes, with this machine's tools.

    Args:
        onnx: the FP32 model and its folder.
        tables: the policy's, about engines.
        calibration: the policy's calibration data; ignored by precisions that need none.
        keep: nodes that stay FP32, in a repaired candidate.

    Raises:
        BuildError: the file of a candidate that something else made is missing or another, or is
            code, which the policy does not allow.
    """
    calibrating, made = tables.calibration, tables.candidates.made_as(candidate)
    kind, table = engine_kind(candidate.kind), tables.kinds[candidate.kind]
    reads = made is None and reads_data(candidate, calibrating)
    data = calibration if reads else None
    if data is not None and calibrating.device != "cpu" and cuda.gpu() is not None:
        with suppress(ImportError):
            load_cuda_libraries()  # else ONNX Runtime calibrates on the CPU, without an error
    return BuildPlan(
        onnx=onnx.value,
        folder=onnx.folder,
        candidate=candidate,
        max_batch_size=tables.max_batch_size,
        calibration=data,
        calibration_sha256=CalibrationSample.of(data, calibrating).sha256 if data else None,
        calibrating=calibrating,
        shapes=tables.shapes,
        table=table,
        deciding=kind.deciding_settings(table),
        converter="made elsewhere"
        if made is not None
        else converter_of(candidate, data=data, rules=calibrating),
        toolchain=kind.toolchain(table),
        keep=keep,
        takes_program=kind.takes_program,
        made=None if made is None else MadeFile.open(made),
    )


def build_engine(plan: BuildPlan, engines_root: Path) -> ContentFolder[Engine]:
    """The plan's engine: the one in the store if its bytes are sound, else built now.

    Flows that want the same engine at once build it once. On failure nothing is left.

    Raises:
        BuildError: it cannot be built here; says why and what to change. A ToolError where a
            vendor's tool raised something of its own.
        DataError: int8 or fp8 without calibration data, or with data that does not fit.
    """
    return make_once(
        engines_root / plan.key,
        read=read_engine,
        make=fetch_or_make(
            plan.key, "engines", read=read_engine, make=lambda folder: _build(plan, folder)
        ),
        wait_s=_WAIT_S + engine_kind(plan.candidate.kind).build_limit_s(plan.table),
    )


def read_engine(folder: Path) -> Engine:
    """The record of an engine in the store; its file's digest is checked.

    Raises:
        InputError: the manifest is missing or damaged.
        TamperedError: the file is not the one that was recorded.
    """
    engine = Engine.read(folder / MANIFEST)
    engine.check(folder)
    return engine


def _build(plan: BuildPlan, folder: Path) -> Engine:
    kind = engine_kind(plan.candidate.kind)
    here = kind.toolchain(plan.table)
    if plan.toolchain != here:
        raise BuildError(
            f"{plan.candidate} was planned with {plan.toolchain}, but {here} is here. "
            "Plan and build it in one environment."
        )
    plan.onnx.check(plan.folder)
    _check_convertible(plan)
    try:
        with tool_errors(f"{plan.candidate} could not be built"):
            engine = kind.build(plan, folder)
    except ModelError as error:
        raise BuildError(f"{plan.candidate}: {error}") from error
    write_file(folder / MANIFEST, engine.pretty_json())
    return engine


def _check_convertible(plan: BuildPlan) -> None:
    weights = sum(file.size_bytes for file in plan.onnx.external.values())
    converted = not (plan.candidate.precision.is_as_exported or plan.takes_program)
    if weights > ONE_FILE_BYTES and converted and plan.made is None:
        raise BuildError(
            f"{plan.candidate}: {plan.onnx.source} holds {weights / 2**30:.1f} GiB of weights, and "
            "the tools that change a precision take ONNX files of up to 2 GiB. Models of that size "
            f"exist at fp32 and tf32; drop {plan.candidate.precision} from [candidates]."
        )
