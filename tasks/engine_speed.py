"""Every engine that runs here, alone: before any of them is served."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.benchmark.engine_alone import EngineMeter
from enginegate.benchmark.session import machine_name
from enginegate.candidate import Engine, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.engines import runnable_here
from enginegate.errors import EnginegateError
from enginegate.evidence import EngineSpeed
from enginegate.machine import measuring_lock
from enginegate.messages import per_second
from enginegate.policy.benchmarking import Benchmarked, Search
from enginegate.policy.recording import TrafficTables
from enginegate.shadow.request_mix import request_mix
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.engine_speed")


@task(task_run_name="engine-alone", cache_policy=NO_CACHE)
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
        mix = request_mix(traffic, engine.inputs, workspace.shadow)
        meter = EngineMeter(
            mix.data,
            mix.sha256,
            tuple(sorted(set(search.max_batch_sizes))),
            benchmarked.engine_alone_s,
            machine_name(),
            workspace.results / "engine-speeds",
        )
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
