"""Candidates under Triton's dynamic batching, against the SLO."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate import __version__
from enginegate.benchmark.config_comments import measured_config
from enginegate.benchmark.deployment import ServedModel
from enginegate.benchmark.roofline import roofline_of
from enginegate.benchmark.session import (
    BenchmarkPaths,
    BenchmarkSession,
    BenchmarkTarget,
    LiveTarget,
    machine_name,
)
from enginegate.candidate import (
    ONNX_FILE,
    Candidate,
    Engine,
    OnnxModel,
    Sha256,
    Unbuilt,
)
from enginegate.content_store import ContentFolder
from enginegate.engines import engine_kind, runnable_here, serving
from enginegate.errors import EnginegateError, ServerError
from enginegate.evidence import Benchmark, EngineSpeed, Finding, Outcome, Roofline, Verdict
from enginegate.machine import gpus, measuring_lock
from enginegate.messages import per_second, short_number
from enginegate.policy.benchmarking import Benchmarked, BenchmarkTables, Slo
from enginegate.policy.operating import Approval, LiveTables, PromotionTarget
from enginegate.policy.recording import TrafficTables
from enginegate.records import canonical_json, sha256_bytes
from enginegate.report import ServingReport
from enginegate.report.progress import StageProgress, tell, told_as
from enginegate.repository import Layout
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.search.trial_runner import SearchProgress
from enginegate.serving import BackendSettings
from enginegate.shadow.request_mix import request_mix
from enginegate.triton.backends import backend_for
from enginegate.triton.endpoint import live_client
from enginegate.triton.install import find_triton
from enginegate.workspace import Workspace, remembered
from tasks.run_page import ProgressBar, artifact_key, of_candidate
from validation.choice import choose_served, not_benchmarked
from validation.speedup import with_speed

_log = logging.getLogger("enginegate.benchmark")
_DECIDING_TABLES = ("slo", "search", "load", "cost", "serving")
_WORDS = {
    "search": "trying",
    "overload": "just past it",
    "confirm": "confirming",
    "champion": "what is live",
}


def _benchmark_end(found: Benchmark | None) -> tuple[str, str]:
    if found is None:
        return "skipped", "not here"
    if found.chosen is None:
        return found.outcome.word, found.outcome.word
    p99 = f", p99 {short_number(found.p99_at_slo.value_ms)} ms" if found.p99_at_slo else ""
    return found.outcome.word, f"{found.throughput_text}/s{p99}"


@task(task_run_name=of_candidate("benchmark"), cache_policy=NO_CACHE)
@told_as("benchmark", _benchmark_end)
def benchmark_engine(
    attempt: ContentFolder[Engine] | Unbuilt,
    tables: BenchmarkTables,
    live_tables: LiveTables,
    traffic: TrafficTables,
    workspace: Workspace,
    alone: EngineSpeed | None = None,
) -> Benchmark | None:
    """What Triton delivers for one engine; None when no device here can run it.

    The same engine, SLO, search and server are measured once on one machine; and under another SLO
    only what is missing.

    Args:
        attempt: the engine.
        tables: what serving must deliver.
        live_tables: where a release of it would go, and what is live there.
        traffic: requests to send.
        workspace: keeps measurements.
        alone: the engine's speed without a server; the search then starts near the answer.
    """
    if isinstance(attempt, Unbuilt) or runnable_here(attempt.value) is not None:
        return None
    progress = ProgressBar(
        artifact_key(
            "benchmark", live_tables.model, attempt.value.candidate.name.replace("_", "-")
        ),
        f"**{attempt.value.candidate}** of {live_tables.model}",
    )
    session = _session(tables, traffic, attempt.value, workspace)
    live = _live(tables, live_tables, attempt.value)
    try:
        backend = _backend(session, attempt.value, live_tables.target)
        served = serving(attempt.value, attempt.folder, backend=backend)
    except EnginegateError as error:
        return _finished(_errored(attempt.value, session, str(error)), progress)
    key = _key(session, attempt.value, live, backend, served.settings)
    model = ServedModel.of(live_tables.model, attempt.value, served)
    found = remembered(
        workspace.results / "benchmarks" / f"{key}.json",
        Benchmark,
        lambda: _measure(
            replace(session, alone=alone), attempt, model, live, workspace, progress=progress
        ),
        worth_keeping=lambda made: made.outcome in {Outcome.PASSED, Outcome.FAILED},
    )
    _log.info("%s: %s", found.candidate, _described(found))
    return _finished(found, progress)


def _finished(found: Benchmark, progress: ProgressBar) -> Benchmark:
    progress.finish(_described(found))
    return found


@task(task_run_name="who-is-benchmarked", cache_policy=NO_CACHE)
def skip_hopeless(
    verdicts: Sequence[Verdict],
    benchmarked: Benchmarked,
    approval: Approval,
    slo: Slo,
    live_tables: LiveTables,
) -> Mapping[Candidate, str]:
    """The candidates that are not benchmarked, because their verdict keeps them from winning."""
    if benchmarked.also_failed:
        return {}
    skipped = not_benchmarked(
        verdicts,
        also_inconclusive=approval.accept_inconclusive,
        baselines=_compares_with_fp32(slo, live_tables),
        fp32_may_win=slo.fp32_may_win,
    )
    for candidate, why in skipped.items():
        _log.info("%s: not benchmarked: %s", candidate, why)
        tell(StageProgress(candidate.name, "benchmark", "skipped", "cannot win"))
    return skipped


def _compares_with_fp32(slo: Slo, live_tables: LiveTables) -> bool:
    """Whether speedups are over FP32: not while something is live that the policy names instead."""
    champion = slo.faster_than == "champion"
    layout = Layout(live_tables.target.repository, live_tables.model)
    lives = champion and layout.current() is not None
    return slo.min_speedup is not None and not lives


def _session(
    tables: BenchmarkTables, recorded: TrafficTables, engine: Engine, workspace: Workspace
) -> BenchmarkSession:
    traffic = request_mix(recorded, engine.inputs, workspace.shadow)
    return BenchmarkSession(
        tables,
        find_triton(workspace.root / "triton"),
        BenchmarkPaths(
            repository=workspace.scratch / "benchmark" / "repository",
            logs=workspace.logs / "benchmark",
            results=workspace.results,
        ),
        traffic.data,
        traffic.sha256,
        batch_sizes=tables.load.batch_sizes or traffic.batch_sizes,
        arrivals_s=traffic.arrivals_s,
        warn=lambda what: _log.warning("%s: %s", engine.candidate, what),
    )


def _measure(
    session: BenchmarkSession,
    built: ContentFolder[Engine],
    model: ServedModel,
    live: LiveTarget | None,
    workspace: Workspace,
    *,
    progress: ProgressBar,
) -> Benchmark:
    engine = built.value

    def show(at: SearchProgress) -> None:
        words = progress_words(at)
        _log.info("%s: %s", engine.candidate, words)
        progress.update(_share_done(at), words)
        short = f"p99 {short_number(at.measurement.p99.value_ms)} ms" if at.measurement.p99 else ""
        name = engine.candidate.name
        tell(StageProgress(name, "benchmark", "running", short, _share_done(at)))

    try:
        target = BenchmarkTarget.of(model, engine, session.tables.serving.uncached)
        with measuring_lock(workspace.root):
            made = session.benchmark(
                engine,
                target,
                live=live,
                roofline=lambda found: _roofline(session, built, found, workspace),
                progress=show,
            )
        return made.model_copy(update={"backend": model.backend})
    except EnginegateError as error:
        return _errored(engine, session, str(error))


def _backend(session: BenchmarkSession, engine: Engine, target: PromotionTarget) -> str:
    """Triton's own backend for this kind where both servers have it, else the Python backend.

    Where it has a drawback for this engine, only a policy that insists gets it.

    Raises:
        ModelError: the policy insists on a backend that is not there.
    """
    wanted, kind = session.tables.serving.backend, engine_kind(engine.candidate.kind)
    if wanted != "native" and kind.native_drawback(engine) is not None:
        wanted = "python"
    with ExitStack() as stack:
        live = live_client(target)
        if live is not None:
            stack.enter_context(live)
        return backend_for(wanted, kind.native_name, install=session.install, live=live)


def _roofline(
    session: BenchmarkSession, built: ContentFolder[Engine], found: Benchmark, workspace: Workspace
) -> Roofline | None:
    """What limits it; a graph that cannot be counted leaves that open."""
    graph = _graph(built, workspace)
    if graph is None:
        return None
    try:
        return roofline_of(
            found,
            built.value,
            graph,
            shapes={name: array.shape for name, array in session.traffic.inputs.items()},
            machine=machine_name(),
            cache=workspace.results / "ceilings",
        )
    except EnginegateError as error:
        _log.warning("%s: its roofline is not known: %s", found.candidate, error)
        return None


def _graph(built: ContentFolder[Engine], workspace: Workspace) -> Path | None:
    """The engine's own graph, or that of the model it was compiled from."""
    own = engine_kind(built.value.candidate.kind).onnx_graph(built.value, built.folder)
    if own is not None:
        return own
    for manifest in workspace.onnx.glob("[!.]*/manifest.json"):
        if OnnxModel.read(manifest).file.sha256 == built.value.onnx_sha256:
            return manifest.with_name(ONNX_FILE)
    return None


def _live(tables: BenchmarkTables, live_tables: LiveTables, engine: Engine) -> LiveTarget | None:
    """What is live, when the policy compares with it, it is another engine, and it can be served.

    Its own bytes are served, from the live repository, after their digests were checked.
    """
    layout = Layout(live_tables.target.repository, live_tables.model)
    if tables.slo.faster_than != "champion" or (current := layout.current()) is None:
        return None
    release = layout.release(current.version)
    if release.engine.engine_sha256 == engine.file.sha256:
        return None
    folder = layout.version_folder(release.version)
    try:
        ReleaseFiles(layout, release).check()
        if release.engine.parts or (release.engine.gpu and not gpus()):
            raise ServerError("it is an ensemble, or needs a GPU that is not here")
    except EnginegateError as error:
        _log.warning("live release %d is not measured: %s", release.version, error)
        return None
    model = ServedModel(
        name=f"{live_tables.model}.live",
        backend=release.engine.backend,
        inputs=release.inputs,
        outputs=release.outputs,
        files={name: folder / name for name in release.engine.files},
        gpu=release.engine.gpu,
        settings=release.engine.settings,
    )
    digests = {name: digest.sha256 for name, digest in release.engine.files.items()}
    target = BenchmarkTarget(model, digests, release.engine.options.uncached)
    return LiveTarget(target, release.engine.serving, release.version)


def _share_done(at: SearchProgress) -> float:
    """Of the search: by the measurements that are left where that is known, else by its time."""
    if at.left:
        return at.done / (at.done + at.left)
    return at.spent_s / at.budget_s if at.budget_s else 0.0


def progress_words(at: SearchProgress) -> str:
    """One measurement, what it showed, and how far the search is; or that it was made before."""
    measured = at.measurement
    p99 = measured.p99
    shown = (
        f"{per_second(measured.rate_per_s)}, {measured.config}: p99 "
        f"{f'{short_number(p99.value_ms)} ms' if p99 else 'unknown'}"
    )
    if at.cached:
        return f"measured before: {shown}"
    invalid = f", not valid: {measured.invalid[0]}" if measured.invalid else ""
    left = f"; about {at.left} more, {at.left_s:.0f} s" if at.left else ""
    spent = f"({at.spent_s:.0f} of {at.budget_s:.0f} s{left})"
    return f"{_WORDS[at.step]} {shown}{invalid} {spent}"


def _errored(engine: Engine, session: BenchmarkSession, why: str) -> Benchmark:
    """A benchmark that broke is evidence too, and is not remembered as a measurement."""
    return Benchmark(
        candidate=engine.candidate,
        engine_sha256=engine.file.sha256,
        server=session.server_name,
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
                remedy="Mend what the message names, then run it again: what was measured is kept.",
            ),
        ),
    )


def _key(
    session: BenchmarkSession,
    engine: Engine,
    live: LiveTarget | None,
    backend: str,
    settings: BackendSettings,
) -> Sha256:
    """Digest of everything a benchmark depends on, the machine included."""
    tables = session.tables
    deciding = {
        "enginegate": __version__,
        "engine": engine.digest,
        **{name: getattr(tables, name).digest for name in _DECIDING_TABLES},
        "backend": backend,
        "settings": settings.digest,
        "traffic": session.traffic_sha256,
        "server": [session.install.origin, session.install.binary.stat().st_size],
        "machine": machine_name(),
        "live": _identity(live) if live else None,
    }
    return sha256_bytes(canonical_json(deciding))


def _identity(live: LiveTarget) -> dict[str, object]:
    """What is live: another repository may have other bytes under the same number."""
    target = live.target
    return {
        "release": live.release,
        "config": live.config.digest,
        "files": dict(target.files),
        "options": target.options.digest,
        "backend": target.model.backend,
        "settings": target.model.settings.digest,
    }


def _described(found: Benchmark) -> str:
    if found.chosen is None:
        return f"{found.outcome.word}: {found.findings[0].reason}"
    p99 = f"{found.p99_at_slo.value_ms:.1f} ms" if found.p99_at_slo else "unknown"
    return f"{found.throughput_text} requests/s{found.rows_text} at p99 {p99} with {found.chosen}"


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """What a benchmark run ends in.

    Attributes:
        report: every candidate that could be measured, and the best of them.
        config_pbtxt: the winner's, with what chose each line; empty without a winner.
        unmeasured: candidate -> why it was not measured.
    """

    report: ServingReport
    config_pbtxt: str
    unmeasured: dict[Candidate, str]


@task(task_run_name="report-benchmarks", cache_policy=NO_CACHE)
def report_benchmarks(
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    benchmarks: Sequence[Benchmark | None],
    tables: BenchmarkTables,
    live_tables: LiveTables,
    *,
    model_uri: str,
    left_out: set[Candidate],
) -> BenchmarkReport:
    """The best of what was measured, and its configuration.

    Args:
        attempts: the engines.
        benchmarks: one for each; None: it was not measured.
        tables: what serving had to deliver.
        live_tables: where the model is live.
        model_uri: which version of it was measured.
        left_out: candidates of the policy that are no part of this run.
    """
    layout = Layout(live_tables.target.repository, live_tables.model)
    current = layout.current()
    live = layout.release(current.version).engine.engine_sha256 if current else None
    judged = with_speed(benchmarks, tables.slo, tables.search, live=live, left_out=left_out)
    measured = tuple(found for found in judged if found is not None)
    choice = choose_served(measured, tables.search)
    report = ServingReport(
        model=live_tables.model,
        model_uri=model_uri,
        slo=tables.slo,
        candidates=measured,
        winner=choice.winner,
        reason=choice.reason,
        tied=choice.tied,
    )
    return BenchmarkReport(report, _config(report, attempts), dict(_unmeasured(attempts)))


def _config(report: ServingReport, attempts: Sequence[ContentFolder[Engine] | Unbuilt]) -> str:
    best = report.best
    for attempt in attempts:
        if best is None or isinstance(attempt, Unbuilt):
            continue
        if attempt.value.candidate == best.candidate:
            return measured_config(
                report.model, attempt.value, attempt.folder, best, model_uri=report.model_uri
            )
    return ""


def _unmeasured(
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
) -> Iterator[tuple[Candidate, str]]:
    for attempt in attempts:
        if isinstance(attempt, Unbuilt):
            yield attempt.candidate, f"not built: {attempt.why}"
        elif (obstacle := runnable_here(attempt.value)) is not None:
            yield attempt.value.candidate, obstacle
