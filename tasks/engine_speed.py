"""Every engine that runs here, alone: before any of them is served."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.benchmark.engine_alone import EngineMeter
from enginegate.benchmark.session import machine_name
from enginegate.candidate import Engine, OnnxModel, TensorSpec, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.engines import runnable_here
from enginegate.errors import EnginegateError
from enginegate.evidence import EagerSpeed, EngineSpeed
from enginegate.machine import measuring_lock
from enginegate.messages import per_second
from enginegate.policy.benchmarking import Benchmarked, Search
from enginegate.policy.building import EngineTables
from enginegate.policy.recording import TrafficTables
from enginegate.report.progress import told_as
from enginegate.shadow.request_mix import request_mix
from enginegate.workspace import Workspace
from tasks.run_page import of_candidate

_log = logging.getLogger("enginegate.engine_speed")


def _speed_end(found: EngineSpeed | None) -> tuple[str, str]:
    best = found.best if found else None
    return ("done", per_second(best.samples_per_s)) if best else ("skipped", "not here")


@task(task_run_name=of_candidate("engine-alone"), cache_policy=NO_CACHE)
@told_as("alone", _speed_end)
def measure_alone(
    attempt: ContentFolder[Engine] | Unbuilt,
    benchmarked: Benchmarked,
    search: Search,
    traffic: TrafficTables,
    workspace: Workspace,
) -> EngineSpeed | None:
    """An engine's speed without a server; None where it does not run here, or could not be timed.

    A candidate whose verdict failed is measured too: its speed says what mending it would bring.

    Args:
        attempt: the engine.
        benchmarked: says how much time one engine gets.
        search: its batch sizes are measured besides the usual ones.
        traffic: real inputs.
        workspace: keeps what was measured.
    """
    if isinstance(attempt, Unbuilt) or not benchmarked.engine_alone_s:
        return None
    engine = attempt.value
    if runnable_here(engine) is not None:
        return None
    try:
        meter = _meter(engine.inputs, benchmarked, search, traffic, workspace)
        with measuring_lock(workspace.root):
            found = meter.measure(engine, attempt.folder)
    except EnginegateError as error:
        _log.warning("%s: its speed alone is not known: %s", engine.candidate, error)
        return None
    best = found.best
    if best is not None:
        rate = per_second(best.samples_per_s)
        _log.info("%s alone: %s at a batch of %d", engine.candidate, rate, best.batch_size)
    if found.unmeasured:
        _log.info("%s alone: %s", engine.candidate, found.unmeasured)
    return found


@task(task_run_name="eager-alone", cache_policy=NO_CACHE)
@told_as("PyTorch itself")
def measure_eager(
    source: ContentFolder[OnnxModel],
    tables: EngineTables,
    benchmarked: Benchmarked,
    search: Search,
    traffic: TrafficTables,
    workspace: Workspace,
) -> tuple[EagerSpeed, ...]:
    """The source's own PyTorch model without compiling, which engines must beat; empty: not known.

    Args:
        source: the model; only one of PyTorch's has a program.
        tables: the candidates' precisions, and the largest batch.
        benchmarked: says how much time each precision gets.
        search: its batch sizes are measured besides the usual ones.
        traffic: real inputs.
        workspace: keeps what was measured.
    """
    onnx = source.value
    if onnx.program is None or not benchmarked.engine_alone_s:
        return ()
    precisions = tuple({candidate.precision for candidate in tables.candidates.all()})
    try:
        meter = _meter(onnx.inputs, benchmarked, search, traffic, workspace)
        with measuring_lock(workspace.root):
            found = meter.measure_eager(onnx, source.folder, tables.max_batch_size, precisions)
    except EnginegateError as error:
        _log.warning("PyTorch's own speed is not known: %s", error)
        return ()
    for speed in found:
        best = speed.best
        if best is not None:
            rate = per_second(best.samples_per_s)
            size = best.batch_size
            _log.info(
                "%s %s alone: %s at a batch of %d", speed.library, speed.precision, rate, size
            )
    return found


def _meter(
    inputs: tuple[TensorSpec, ...],
    benchmarked: Benchmarked,
    search: Search,
    traffic: TrafficTables,
    workspace: Workspace,
) -> EngineMeter:
    mix = request_mix(traffic, inputs, workspace.shadow)
    return EngineMeter(
        mix.data,
        mix.sha256,
        tuple(sorted(set(search.max_batch_sizes))),
        benchmarked.engine_alone_s,
        machine_name(),
        workspace.results / "engine-speeds",
    )
