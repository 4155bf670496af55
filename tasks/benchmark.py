"""Candidates under Triton's dynamic batching, against the SLO."""

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate import __version__
from enginegate.candidate import Engine, Sha256, Unbuilt
from enginegate.canonical import canonical_json, sha256_bytes
from enginegate.data import DataSet, read_data
from enginegate.durable import file_lock
from enginegate.engines import runnable_here, serving
from enginegate.errors import EnginegateError, ServerError
from enginegate.evidence import Benchmark, Finding, Outcome
from enginegate.machine import gpus, processor
from enginegate.policy import Policy
from enginegate.sources import Kept
from enginegate.triton.deploy import Bench, ServedModel, deployed
from enginegate.triton.install import TritonInstall, find_triton
from enginegate.triton.search import Progress, search
from enginegate.triton.server import Server, start
from enginegate.triton.traffic import Traffic
from enginegate.workspace import Workspace, remembered

_log = logging.getLogger("enginegate.benchmark")
_WAIT_FOR_MACHINE_S = 3600.0


@task(task_run_name="benchmark", cache_policy=NO_CACHE)
def benchmark(rules: Policy, attempt: Kept[Engine] | Unbuilt) -> Benchmark | None:
    """What Triton delivers for one engine; None when no device here can run it.

    The same engine, SLO, search and server are measured once on one machine.
    """
    if isinstance(attempt, Unbuilt) or runnable_here(attempt.value) is not None:
        return None
    install = find_triton(Workspace.here().root / "triton")
    traffic = read_data((rules.shadow and rules.shadow.traffic) or rules.data.evaluation)
    found = remembered(
        Workspace.here().results
        / "benchmarks"
        / f"{_key(rules, attempt.value, install, traffic)}.json",
        Benchmark,
        lambda: _measure(rules, attempt, install, traffic),
        worth_keeping=lambda made: made.outcome in {Outcome.PASSED, Outcome.FAILED},
    )
    _log.info("%s: %s", found.candidate, _described(found))
    return found


def _measure(
    rules: Policy, built: Kept[Engine], install: TritonInstall, traffic: DataSet
) -> Benchmark:
    engine, workspace = built.value, Workspace.here()
    model = ServedModel.of(rules.name, engine, serving(engine, built.folder))
    try:
        with _machine(workspace), _bench_server(workspace, install) as server:
            with deployed(server, model, load_timeout_s=rules.target.load_timeout_s) as deployment:
                bench = Bench(
                    deployment,
                    Traffic.from_data(model.name, traffic, order_seed=rules.search.seed),
                    workspace.results / "latencies",
                    rules.slo.p99_ms,
                )
                found = search(bench.measure, rules.search, rules.slo, progress=_progress(engine))
            host = f"Triton {server.version} on {processor()}"
    except EnginegateError as error:
        return _errored(engine, install, str(error))
    return Benchmark(
        candidate=engine.candidate,
        engine_sha256=engine.file.sha256,
        server=host,
        measurements=found.measurements,
        chosen=found.chosen,
        throughput_at_slo_per_s=found.throughput_at_slo_per_s,
        p99_at_slo=found.p99,
        findings=found.findings,
    )


@contextmanager
def _machine(workspace: Workspace) -> Iterator[None]:
    """One measurement at a time: two on one machine would measure each other."""
    with ExitStack() as stack:
        try:
            lock = file_lock(workspace.root / ".measuring.lock", timeout_s=_WAIT_FOR_MACHINE_S)
            stack.enter_context(lock)
        except TimeoutError as error:
            raise ServerError(
                f"Another benchmark ({error}) has used this machine for an hour. Stop it, or wait."
            ) from error
        yield


@contextmanager
def _bench_server(workspace: Workspace, install: TritonInstall) -> Iterator[Server]:
    repository = workspace.scratch / "benchmark" / "repository"
    repository.mkdir(parents=True, exist_ok=True)
    with start(install, repository, folder=workspace.logs / "benchmark") as server:
        yield server


def _progress(engine: Engine) -> Callable[[Progress], None]:
    def say(at: Progress) -> None:
        measured = at.measurement
        p99 = measured.percentile(0.99)
        _log.info(
            "%s: %s %.0f/s, %s: p99 %s%s (%.0f of %.0f s)",
            engine.candidate,
            "confirming" if at.step == "confirm" else "trying",
            measured.load.rate_per_s,
            measured.config,
            f"{p99.value_ms:.1f} ms" if p99 else "unknown",
            f", not valid: {measured.invalid[0]}" if measured.invalid else "",
            at.spent_s,
            at.budget_s,
        )

    return say


def _errored(engine: Engine, install: TritonInstall, why: str) -> Benchmark:
    """A benchmark that broke is evidence too, and is not remembered as a measurement."""
    return Benchmark(
        candidate=engine.candidate,
        engine_sha256=engine.file.sha256,
        server=f"Triton from {install.origin}",
        measurements=(),
        chosen=None,
        throughput_at_slo_per_s=0.0,
        p99_at_slo=None,
        findings=(
            Finding(
                gate="benchmark",
                scope="serving",
                outcome=Outcome.ERRORED,
                reason=f"could not be measured: {why}",
                remedy="Mend what the message names, then qualify again.",
            ),
        ),
    )


def _key(rules: Policy, engine: Engine, install: TritonInstall, traffic: DataSet) -> Sha256:
    """Digest of everything a benchmark depends on, the machine included."""
    deciding = {
        "enginegate": __version__,
        "engine": engine.digest,
        "slo": rules.slo.digest,
        "search": rules.search.digest,
        "traffic": traffic.sha256,
        "server": [install.origin, install.binary.stat().st_size],
        "machine": [platform.node(), processor(), gpus()],
    }
    return sha256_bytes(canonical_json(deciding))


def _described(found: Benchmark) -> str:
    if found.chosen is None:
        return f"{found.outcome.word}: {found.findings[0].reason}"
    p99 = f"{found.p99_at_slo.value_ms:.1f} ms" if found.p99_at_slo else "unknown"
    return f"{found.throughput_at_slo_per_s:.0f} requests/s at p99 {p99} with {found.chosen}"
