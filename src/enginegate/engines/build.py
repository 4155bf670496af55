"""Plans -> engines in the store: built once, whole or not at all."""

from pathlib import Path

from enginegate.candidate import Candidate, Engine, OnnxModel
from enginegate.data import DataSet
from enginegate.durable import write_file
from enginegate.engines.kinds import KINDS
from enginegate.engines.plan import BuildPlan
from enginegate.errors import BuildError
from enginegate.policy import Policy
from enginegate.precision import converter_of
from enginegate.sources import Kept
from enginegate.sources.once import kept

MANIFEST = "manifest.json"
_WAIT_S = 600.0


def plan_engine(
    onnx: Kept[OnnxModel], candidate: Candidate, *, policy: Policy, calibration: DataSet | None
) -> BuildPlan:
    """Collect everything that decides the engine's bytes, with this machine's tools.

    Args:
        onnx: the FP32 model and its folder.
        calibration: the policy's calibration data; ignored by precisions that need none.
    """
    data = calibration if candidate.precision.needs_calibration else None
    rules = policy.calibration
    return BuildPlan(
        onnx=onnx.value,
        folder=onnx.folder,
        candidate=candidate,
        max_batch_size=max(policy.search.max_batch_sizes),
        calibration=data,
        calibration_sha256=data.head(rules.max_samples).sha256 if data else None,
        calibrating=rules,
        tensorrt=policy.tensorrt,
        converter=converter_of(candidate, data=data, rules=rules),
        toolchain=KINDS[candidate.kind].toolchain(),
    )


def build_engine(plan: BuildPlan, engines_root: Path) -> Kept[Engine]:
    """The plan's engine: the one in the store if its bytes are sound, else built now.

    Flows that want the same engine at once build it once. On failure nothing is left.

    Raises:
        BuildError: it cannot be built here; says why and what to change.
        DataError: int8 or fp8 without calibration data, or with data that does not fit.
    """
    return kept(
        engines_root / plan.key,
        read=read_engine,
        make=lambda folder: _build(plan, folder),
        wait_s=_WAIT_S + plan.tensorrt.timeout_s,
    )


def read_engine(folder: Path) -> Engine:
    """The record of an engine in the store; its file's digest is checked.

    Raises:
        InputError: the manifest is missing or damaged.
        TamperedError: the file is not the one that was recorded.
    """
    engine = Engine.read(folder / MANIFEST)
    engine.file.check(folder / engine.filename)
    return engine


def _build(plan: BuildPlan, folder: Path) -> Engine:
    kind = KINDS[plan.candidate.kind]
    if plan.toolchain != kind.toolchain():
        raise BuildError(
            f"{plan.candidate} was planned with {plan.toolchain}, but {kind.toolchain()} is here. "
            "Plan and build it in one environment."
        )
    plan.onnx.file.check(plan.onnx_path)
    engine = kind.build(plan, folder)
    write_file(folder / MANIFEST, engine.pretty_json())
    return engine
