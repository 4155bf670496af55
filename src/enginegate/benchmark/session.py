"""One candidate's benchmark: deployed on a server of our own, searched, and put together.

Not in scope: which server, engine and data these are (tasks/benchmark.py), and how a search goes
(search.py).
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from enginegate.benchmark.deployed import DeployedBenchmark, deployed
from enginegate.benchmark.generator_baseline import GeneratorBaseline
from enginegate.benchmark.measurement_cache import CacheKey, measure_cached
from enginegate.benchmark.restarting_server import RestartingServer, Running
from enginegate.benchmark.stress_mixes import LARGE, RECORDED, heavier, largest
from enginegate.benchmark.target import BenchmarkPaths, BenchmarkTarget, LiveTargetPlaces
from enginegate.candidate import Engine, Sha256
from enginegate.data import DataSet
from enginegate.errors import EnginegateError
from enginegate.evidence import Benchmark, Pattern, Roofline
from enginegate.loadgen.traffic import Traffic, Transport
from enginegate.machine import gpus, processor
from enginegate.measurement import Generator, Load, Measurement
from enginegate.policy.benchmarking import BenchmarkTables
from enginegate.search.search import SearchResult, confirm_upper_bound, search
from enginegate.search.trial_runner import Champion, Measure, SearchProgress
from enginegate.serving import ServingOptions
from enginegate.triton.install import TritonInstall
from enginegate.triton.server import start

_CANDIDATE, _CHAMPION = "candidate", "champion"
_SPARE = 1.2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchmarkSession:
    """What all candidates of a qualification are measured with.

    Attributes:
        traffic: requests to draw from, with ``batch_sizes`` and ``arrivals_s`` as recorded.
        traffic_sha256: digest of everything that decides what is sent.
        said: told what a person should know while it runs.
    """

    tables: BenchmarkTables
    install: TritonInstall
    places: BenchmarkPaths
    traffic: DataSet
    traffic_sha256: Sha256
    batch_sizes: tuple[int, ...] = (1,)
    arrivals_s: tuple[float, ...] | None = None
    said: Callable[[str], None] = lambda _: None

    @property
    def sending(self) -> Transport:
        """How requests travel."""
        load = self.tables.load
        return Transport(load.protocol, load.shared_memory, load.processes)

    def requests(self, model: str) -> Traffic:
        """The traffic for a model of that name."""
        return Traffic.from_data(
            model,
            self.traffic,
            order_seed=self.tables.search.seed,
            timeout_s=self.tables.load.timeout_s,
            arrivals_s=self.arrivals_s,
            batch_sizes=self.batch_sizes,
        )


def benchmarked(
    stage: BenchmarkSession,
    engine: Engine,
    subject: BenchmarkTarget,
    *,
    live: LiveTargetPlaces | None = None,
    roofline: Callable[[Benchmark], Roofline | None] = lambda _: None,
    progress: Callable[[SearchProgress], None] = lambda _: None,
) -> Benchmark:
    """Search, confirm, and look at heavier patterns; measurements made before are used again.

    Args:
        stage: what is measured with.
        engine: whose benchmark this is.
        subject: how it is served.
        live: measured in turns with it, where something is live.
        roofline: what limits the engine in what was found; asked when the server is down again.
        progress: called after each measurement.

    Raises:
        ServerError: servers died again and again, or the model does not load.
    """
    tables = stage.tables
    generators: list[Generator] = []
    up = partial(_up, stage, subject, live, generators.append)
    with RestartingServer(up, said=stage.said) as stand:
        rival = _rival(stage, stand, live)
        measure = _kept(stage, stand.bench(_CANDIDATE), subject)
        found = search(
            measure,
            tables.search,
            tables.slo,
            champion=rival,
            price_per_hour=tables.cost.price_per_hour,
            arrivals=tables.load.arrivals,
            progress=progress,
        )
        found = found if found.cut_short else _past(stage, measure, found)
        patterns = _advisory(stage, lambda: _patterns(stage, stand, subject, found))
    made = _benchmark(stage, engine, subject.options, found)
    known: dict[str, object] = {
        "cut_short": found.cut_short,
        "generator_per_s": generators[-1].trusted_per_s if generators else None,
        "patterns": patterns or (),
        "rival": found.rival,
        "roofline": _advisory(stage, lambda: roofline(made)),
    }
    return made.model_copy(update=known)


def _past(stage: BenchmarkSession, measure: Measure, found: SearchResult) -> SearchResult:
    """What a comparison of throughputs needs besides, where the policy asks for one."""
    tables = stage.tables
    if tables.slo.min_speedup is None:
        return found
    look = partial(confirm_upper_bound, found, measure, tables.search, tables.slo)
    return _advisory(stage, lambda: look(arrivals=tables.load.arrivals)) or found


def _advisory(stage: BenchmarkSession, look: Callable[[], T]) -> T | None:
    """What is only shown must not cost what was found: where it breaks, it is left out."""
    try:
        return look()
    except EnginegateError as error:
        stage.said(f"left out of what is shown: {error}")
        return None


def _rival(
    stage: BenchmarkSession, stand: RestartingServer, live: LiveTargetPlaces | None
) -> Champion | None:
    if live is None:
        return None
    measure = _kept(stage, stand.bench(_CHAMPION), live.subject)
    return Champion(measure, live.config, live.release)


def _patterns(
    stage: BenchmarkSession, stand: RestartingServer, subject: BenchmarkTarget, found: SearchResult
) -> tuple[Pattern, ...]:
    """The chosen configuration under heavier mixes, where the policy asks for it."""
    if not stage.tables.load.heavier or found.chosen is None:
        return ()
    measures = {RECORDED: _kept(stage, stand.bench(_CANDIDATE), subject)}
    if largest(stage.requests(subject.model.name)) is not None:
        measures[LARGE] = _kept(stage, stand.bench(LARGE), subject, part=LARGE)
    return heavier(measures, found.chosen, _confirmed_load(stage, found))


def _benchmark(
    stage: BenchmarkSession, engine: Engine, options: ServingOptions, found: SearchResult
) -> Benchmark:
    chosen = [m for m in found.measurements if m.config == found.chosen and not m.invalid]
    loaded = (m for m in found.measurements if m.config == found.chosen)
    # Also of a void measurement: what voids it is the sender, and this came before.
    starts = [m.cold_start_s for m in loaded if m.cold_start_s is not None]
    return Benchmark(
        candidate=engine.candidate,
        engine_sha256=engine.file.sha256,
        server=server_name(stage.install),
        measurements=found.measurements,
        chosen=found.chosen,
        throughput_at_slo_per_s=found.throughput_at_slo_per_s,
        confirmed_rate_per_s=found.confirmed_rate_per_s,
        ceiling_per_s=stage.tables.search.ceiling_per_s,
        decisions=found.decisions,
        engine_bytes=engine.size_bytes,
        p99_at_slo=found.p99,
        findings=found.findings,
        options=options,
        rejected_rate_per_s=found.rejected_rate_per_s,
        reasons=found.reasons,
        pareto=found.pareto,
        rival=found.rival,
        cold_start_s=starts[0] if starts else None,
        cost_per_million=_cost(chosen, found.throughput_at_slo_per_s),
        currency=stage.tables.cost.currency if stage.tables.cost.price_per_hour is not None else "",
    )


def server_name(install: TritonInstall) -> str:
    """Which server, and on what: the same text for the same machine, whether or not it runs."""
    device = f", {gpus()}" if gpus() else ""
    return f"Triton ({install.origin}) on {processor()}{device}"


def _cost(chosen: list[Measurement], throughput_per_s: float) -> float | None:
    """Of a million requests at the confirmed rate, at the price that each measurement was given."""
    for m in chosen:
        cost = m.resources.cost_per_million
        if cost is not None and throughput_per_s > 0.0:
            return cost * m.throughput_per_s / throughput_per_s
    return None


def _confirmed_load(stage: BenchmarkSession, found: SearchResult) -> Load:
    """At the confirmed rate, for about as many requests as it was confirmed with."""
    tables, rate = stage.tables, found.throughput_at_slo_per_s
    return Load(
        rate_per_s=rate,
        duration_s=max(tables.search.measurement_s, _SPARE * tables.slo.confirm_requests / rate),
        seed=tables.search.seed,
        arrivals=tables.load.arrivals,
    )


def _kept(
    stage: BenchmarkSession, measure: Measure, subject: BenchmarkTarget, *, part: str = ""
) -> Measure:
    """What was measured before is not measured again; ``part`` names a part of the traffic."""
    load = stage.tables.load
    sending = [load.driver, load.protocol, load.shared_memory, load.processes, load.timeout_s]
    setup = CacheKey(
        files=dict(subject.files),
        backend=subject.model.backend,
        server=_identity(stage.install),
        machine=machine(),
        options=subject.options,
        traffic=stage.traffic_sha256,
        sending=":".join([*map(str, sending), *([part] if part else [])]),
        gpu=subject.model.gpu,
        settings=subject.model.settings,
    )
    return measure_cached(measure, setup, stage.places.shelf, limit_ms=stage.tables.slo.p99_ms)


def _identity(install: TritonInstall) -> str:
    return f"{install.origin}, {install.binary.stat().st_size} bytes"


def machine() -> str:
    """What a measurement holds for."""
    return f"{platform.node()}; {processor()}; {gpus()}"


@contextmanager
def _up(
    stage: BenchmarkSession,
    subject: BenchmarkTarget,
    live: LiveTargetPlaces | None,
    calibrated: Callable[[Generator], None],
) -> Iterator[Running]:
    """A server with the candidate, and what is live beside it, in place; nothing is loaded yet."""
    places = stage.places
    places.repository.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(start(stage.install, places.repository, folder=places.logs))
        generator = Generator(driver="perf_analyzer")
        if stage.tables.load.driver != "perf_analyzer":
            calibration = _calibration(stage)
            calibrated(found := calibration.of(server))
            generator = calibration.stated(found)

        def bench(which: BenchmarkTarget, traffic: Traffic) -> DeployedBenchmark:
            timeout_s = stage.tables.load_timeout_s
            place = deployed(server, which.model, load_timeout_s=timeout_s)
            return DeployedBenchmark(
                stack.enter_context(place),
                traffic,
                places.shelf.latencies,
                stage.tables.slo.p99_ms,
                generator=generator,
                price_per_hour=stage.tables.cost.price_per_hour,
                options=which.options,
                sending=stage.sending,
                driver=stage.tables.load.driver,
            )

        traffic = stage.requests(subject.model.name)
        candidate = bench(subject, traffic)
        benches: dict[str, Measure] = {_CANDIDATE: candidate.measure}
        large = largest(traffic)
        if large is not None:
            benches[LARGE] = replace(candidate, traffic=large).measure
        if live is not None:
            model = live.subject.model
            benches[_CHAMPION] = bench(live.subject, stage.requests(model.name)).measure
        yield Running(benches, server.check_alive)


def _calibration(stage: BenchmarkSession) -> GeneratorBaseline:
    return GeneratorBaseline(
        stage.sending,
        stage.tables.search.max_rate_per_s,
        (machine(), _identity(stage.install), stage.tables.load.digest),
        stage.places.results / "generators",
        stage.said,
    )
