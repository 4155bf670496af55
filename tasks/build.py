"""Candidates -> engines in the store."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import Candidate, Engine, OnnxModel, Unbuilt
from enginegate.data import read_data
from enginegate.engines import build_engine, obstacle_to, plan_engine, this_machine
from enginegate.errors import BuildError, ToolError, tool_errors
from enginegate.policy.building import EngineTables
from enginegate.sources import ContentFolder
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.build")


@task(task_run_name="build-{candidate}", cache_policy=NO_CACHE)
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
    obstacle = obstacle_to(candidate, tables, this_machine(tables))
    if obstacle is not None and not obstacle.builds:
        _log.info("%s: not built, it cannot be decided here: %s", candidate, obstacle.why)
        return Unbuilt(
            candidate=candidate, why=obstacle.why, undecidable=True, remedy=obstacle.remedy
        )
    calibration = tables.calibration_data
    data = read_data(calibration) if calibration is not None else None
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
