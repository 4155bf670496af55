"""From a policy to engines in the store: the pre-flight, the model as ONNX, one build each."""

import logging
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import Candidate, Engine, OnnxModel, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.data_sources import load_data
from enginegate.engines import build_engine, obstacle_to, open_onnx, plan_engine, this_machine
from enginegate.errors import BuildError, ToolError, tool_errors
from enginegate.policy import Policy
from enginegate.policy.building import EngineTables
from enginegate.policy.data import DataSource
from enginegate.policy.hooks import importable_from
from enginegate.policy.model_source import ModelSource
from enginegate.preflight import check_policy
from enginegate.report.progress import told_as
from enginegate.sources import onnx_from_source
from enginegate.sources.fixed_batch import IN_TURN, OPENED
from enginegate.tracking import Tracker
from enginegate.triton.install import find_triton
from enginegate.workspace import Workspace
from tasks.run_page import of_version

_log = logging.getLogger("enginegate.build")


def _build_end(made: ContentFolder[Engine] | Unbuilt) -> tuple[str, str]:
    if isinstance(made, Unbuilt):
        return ("skipped", "not here") if made.undecidable else ("failed", "not built")
    return "done", "stored" if made.reused else f"{made.value.build_s:.1f} s"


@task(task_run_name="check", cache_policy=NO_CACHE)
def check(
    policy: Policy,
    origin: Path,
    workspace: Workspace,
    *,
    here: bool = True,
    pinned: bool = False,
) -> None:
    """Refuse what could only fail later; say what will be inconclusive.

    Args:
        policy: what is asked.
        origin: its file.
        workspace: has Triton, where it was brought.
        here: whether candidates are built and benchmarked on this machine.
        pinned: whether the policy is one kind of device's part of another one, whose files that
            something else made need their sha256.

    Raises:
        PolicyError: the policy names a file or a function that is not there, or a type that cannot
            be served or recorded.
        ServerError: there is no Triton to benchmark with.
    """
    if policy.root is not None:
        importable_from(policy.root)
    found = check_policy(policy, pinned=pinned)
    found.refuse(origin)
    if here:
        find_triton(workspace.root / "triton")
    for candidate, obstacle in found.undecidable.items() if here else ():
        _log.info("%s will be inconclusive: %s", candidate, obstacle.why)
    for note in found.notes:
        _log.warning("will be inconclusive: %s", note)


@task(task_run_name=of_version("resolve"), cache_policy=NO_CACHE)
def resolve_version(model: ModelSource, workspace: Workspace) -> str:
    """The URI of the version that an alias means now, so that everything names one version.

    Sources outside the registry have no aliases; their content is known by its digest.
    """
    if not model.registered:
        return model.uri
    return Tracker(workspace.tracking_uri, workspace.artifacts).resolve(model.uri)


@task(task_run_name=of_version("export"), cache_policy=NO_CACHE)
@told_as("model to ONNX")
def export(
    model: ModelSource, evaluation: DataSource, workspace: Workspace
) -> ContentFolder[OnnxModel]:
    """Export once for each source, with parity and dynamic axes proved on evaluation samples."""
    _log.info("%s: to ONNX", model.uri)
    found = onnx_from_source(
        model,
        load_data(evaluation),
        onnx_root=workspace.onnx,
        tracking_uri=workspace.tracking_uri,
        open_onnx=open_onnx,
    )
    _log.info("%s: %s", model.uri, _described(found))
    return found


@task(task_run_name="build-{candidate}", cache_policy=NO_CACHE)
@told_as("build", _build_end)
def build(
    candidate: Candidate,
    tables: EngineTables,
    source: ContentFolder[OnnxModel],
    workspace: Workspace,
) -> ContentFolder[Engine] | Unbuilt:
    """Build one engine, or reuse the one with the same plan.

    A candidate that cannot be built, or whose tools break, is a result like any other; the rest go
    on. One that cannot be decided here is not built, unless its engine shows something by itself.
    """
    obstacle = obstacle_to(candidate, tables, this_machine(tables), source.value)
    if obstacle is not None and not obstacle.builds:
        _log.info("%s: not built, it cannot be decided here: %s", candidate, obstacle.why)
        return Unbuilt(
            candidate=candidate, why=obstacle.why, undecidable=True, remedy=obstacle.remedy
        )
    calibration = tables.calibration_data
    data = load_data(calibration) if calibration is not None else None
    try:
        with tool_errors(f"{candidate} could not be built"):
            plan = plan_engine(source, candidate, tables=tables, calibration=data)
            built = build_engine(plan, workspace.engines)
    except BuildError as error:
        return _unbuilt(candidate, str(error), broke=isinstance(error, ToolError))
    engine = built.value
    how = "from the store" if built.reused else f"built in {engine.build_s:.1f} s"
    size_kib = engine.file.size_bytes / 1024
    _log.info("%s: %s, %.0f KiB, %s", candidate, how, size_kib, engine.proof.detail)
    if built.note:
        _log.warning("%s: %s", candidate, built.note)
    return built


def _unbuilt(candidate: Candidate, why: str, *, broke: bool = False) -> Unbuilt:
    _log.warning("%s: not built: %s", candidate, why)
    return Unbuilt(candidate=candidate, why=why, broke=broke)


def _described(found: ContentFolder[OnnxModel]) -> str:
    onnx = found.value
    parity = (
        "ONNX itself, nothing to compare with"
        if onnx.parity_max_abs_error is None
        else f"differs from the framework by at most {onnx.parity_max_abs_error:.2g} on "
        f"{onnx.parity_samples} samples"
    )
    origin = "ONNX from the store" if found.reused else "exported"
    fixed = onnx.exporter in {OPENED, IN_TURN}
    how = f"; {onnx.exporter.removeprefix('none: ')}" if fixed else ""
    return f"{origin}, sha256 {onnx.file.sha256[:12]}, {parity}{how}"
