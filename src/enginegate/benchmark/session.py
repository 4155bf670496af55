"""One candidate's benchmark: deployed on a server of our own, searched, and put together.

Not in scope: which server, engine and data these are (tasks/benchmark.py), and how a search goes
(search/).
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from enginegate.benchmark.deployment import DeployedBenchmark, ServedModel, deploy
from enginegate.benchmark.generator_baseline import GeneratorBaseline, best_driver
from enginegate.benchmark.measurement_cache import CacheKey, MeasurementCache
from enginegate.benchmark.restarting_server import RestartingServer, RunningServer
from enginegate.benchmark.stress_mixes import LARGE, RECORDED, largest_requests, measure_mixes
from enginegate.candidate import Engine, Sha256
from enginegate.data import DataSet
from enginegate.errors import EnginegateError
from enginegate.evidence import Benchmark, EngineSpeed, Pattern, Roofline
from enginegate.loadgen.perf_analyzer import find_perf_analyzer
from enginegate.loadgen.traffic import Traffic, Transport
from enginegate.machine import gpus, processor
from enginegate.measurement import Generator, Load
from enginegate.messages import per_second
from enginegate.policy.benchmarking import BenchmarkTables, Search
from enginegate.records import sha256_file
from enginegate.search.queueing import EngineTimes
from enginegate.search.search import SearchResult, confirm_upper_bound, search
from enginegate.search.trial_runner import Champion, Measure, SearchProgress
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.install import TritonInstall
from enginegate.triton.server import Server, start

_CANDIDATE, _CHAMPION = "candidate", "champion"
# Requests sent beyond those that confirmed the answer: a tenth is warm-up, and arrivals vary.
_SPARE = 1.2
# What our runner on a GPU spends on a request besides computing, in each process: how many of them
# are tried first, and at which rate. As it was on an H200 (runner_profile.py): 0.094 ms of eight
# rows of 128 tokens; from CUDA shared memory, which Triton copies request by request, 0.25 ms of
# those, and about 0.4 of images. With less the first trial is refuted; with more it takes another.
RUNNER_MS, RUNNER_FROM_CUDA_MS = 0.1, 0.4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchmarkPaths:
    """Folders of a benchmark.

    Attributes:
        repository: of the embedded server; emptied of what a benchmark put there.
        logs: of the server.
        results: where measurements, raw latencies and calibrations are kept.
    """

    repository: Path
    logs: Path
    results: Path

    @property
    def cache(self) -> MeasurementCache:
        """Where measurements are kept."""
        return MeasurementCache(self.results / "measurements", self.results / "latencies")


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """A model to measure.

    Attributes:
        files: path inside the version folder -> digest.
        options: what it is served with besides batching and instances.
    """

    model: ServedModel
    files: Mapping[str, Sha256]
    options: ServingOptions

    @property
    def runs_in_our_processes(self) -> bool:
        """Whether our runner in the Python backend serves it on a GPU."""
        return self.model.gpu and self.model.backend == "python"

    @classmethod
    def of(cls, model: ServedModel, engine: Engine, options: ServingOptions) -> "BenchmarkTarget":
        """An engine of the store, whose own files were checked against its manifest."""
        known = {engine.filename: engine.file, **engine.external}
        files = {
            name: known[path.name].sha256 if path.name in known else sha256_file(path)
            for name, path in model.files.items()
        }
        return cls(model, files, options)


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """What is live, to be measured in turns with a candidate."""

    target: BenchmarkTarget
    config: ServingConfig
    release: int


@dataclass(frozen=True, slots=True)
class BenchmarkSession:
    """What all candidates of a qualification are measured with.

    Attributes:
        traffic: requests to draw from, with ``batch_sizes`` and ``arrivals_s`` as recorded.
        traffic_sha256: digest of everything that decides what is sent.
        warn: called with what a person should know while it runs.
        alone: the speed of the engine that is benchmarked, without a server.
    """

    tables: BenchmarkTables
    install: TritonInstall
    paths: BenchmarkPaths
    traffic: DataSet
    traffic_sha256: Sha256
    batch_sizes: tuple[int, ...] = (1,)
    arrivals_s: tuple[float, ...] | None = None
    warn: Callable[[str], None] = lambda _: None
    alone: EngineSpeed | None = None

    @property
    def server_name(self) -> str:
        """Which server, and on what: equal for equal machines, whether or not it runs."""
        device = f", {gpus()}" if gpus() else ""
        return f"Triton ({self.install.origin}) on {processor()}{device}"

    def benchmark(
        self,
        engine: Engine,
        target: BenchmarkTarget,
        *,
        live: LiveTarget | None = None,
        roofline: Callable[[Benchmark], Roofline | None] = lambda _: None,
        progress: Callable[[SearchProgress], None] = lambda _: None,
    ) -> Benchmark:
        """Search, confirm, and try heavier mixes; measurements made before are used again.

        Args:
            engine: whose benchmark this is.
            target: how it is served.
            live: measured in turns with it, where something is live.
            roofline: what limits the engine in what was found; asked when the server is down again.
            progress: called after each measurement.

        Raises:
            ServerError: servers died again and again, or the model does not load.
        """
        tables = self.tables
        baselines: list[Generator] = []
        start_server = partial(self._serve, target, live, baselines.append)
        with RestartingServer(start_server, warn=self.warn) as server:
            measure = self._cached(server.measure(_CANDIDATE), target)
            champion = None
            if live is not None:
                measure_live = self._cached(server.measure(_CHAMPION), live.target)
                champion = Champion(measure_live, live.config, live.release)
            found = search(
                measure,
                self._bounds(target),
                tables.slo,
                champion=champion,
                price_per_hour=tables.cost.price_per_hour,
                arrivals=tables.load.arrivals,
                alone=self._engine_times(target),
                progress=progress,
            )
            if tables.slo.min_speedup is not None and not found.cut_short:
                found = self._advisory(partial(self._bounded, found, measure)) or found
            patterns = self._advisory(partial(self._patterns, server, target, found))
        benchmark = self._put_together(engine, target.options, found)
        return benchmark.model_copy(
            update={
                "generator_per_s": baselines[-1].trusted_per_s if baselines else None,
                "patterns": patterns or (),
                "roofline": self._advisory(lambda: roofline(benchmark)),
            }
        )

    def _bounds(self, target: BenchmarkTarget) -> Search:
        """The policy's; only our runner on a GPU has processes to choose the number of."""
        if target.runs_in_our_processes:
            return self.tables.search
        return self.tables.search.model_copy(update={"processes": (1,)})

    def _engine_times(self, target: BenchmarkTarget) -> EngineTimes | None:
        """What the search expects of service times before it measured any."""
        speed, sizes = self.alone, self.batch_sizes
        if speed is None:
            return None
        batch_ms = {b.batch_size: b.batch_ms for b in speed.batches if b.samples_per_s}
        request_ms = 0.0
        if target.runs_in_our_processes:
            on_gpu = self.tables.load.shared_memory == "cuda"
            request_ms = RUNNER_FROM_CUDA_MS if on_gpu else RUNNER_MS
        return EngineTimes.fit(
            batch_ms,
            items=sum(sizes) / len(sizes),
            shared=speed.inputs_on == "device",
            request_ms=request_ms,
        )

    def _bounded(self, found: SearchResult, measure: Measure) -> SearchResult:
        """What a comparison of throughputs needs besides."""
        tables = self.tables
        return confirm_upper_bound(
            found, measure, tables.search, tables.slo, arrivals=tables.load.arrivals
        )

    def _advisory(self, find_out: Callable[[], T]) -> T | None:
        """What is only shown must not cost what was found: where it breaks, it is left out."""
        try:
            return find_out()
        except EnginegateError as error:
            self.warn(f"left out of what is shown: {error}")
            return None

    def _patterns(
        self, server: RestartingServer, target: BenchmarkTarget, found: SearchResult
    ) -> tuple[Pattern, ...]:
        """The chosen configuration under heavier mixes, where the policy asks for it."""
        tables, rate_per_s = self.tables, found.throughput_at_slo_per_s
        if not tables.load.heavier or found.chosen is None:
            return ()
        measures = {RECORDED: self._cached(server.measure(_CANDIDATE), target)}
        if largest_requests(self._requests(target.model.name)) is not None:
            measures[LARGE] = self._cached(server.measure(LARGE), target, part=LARGE)
        # For about as many requests as it was confirmed with.
        confirmed_s = _SPARE * tables.slo.confirm_requests / rate_per_s
        load = Load(
            rate_per_s=rate_per_s,
            duration_s=max(tables.search.measurement_s, confirmed_s),
            seed=tables.search.seed,
            arrivals=tables.load.arrivals,
        )
        return measure_mixes(measures, found.chosen, load)

    def _put_together(
        self, engine: Engine, options: ServingOptions, found: SearchResult
    ) -> Benchmark:
        # Also of an invalid measurement: what makes it invalid is the sender, and this came before.
        of_chosen = [m for m in found.measurements if m.config == found.chosen]
        cold_starts_s = (m.cold_start_s for m in of_chosen if m.cold_start_s is not None)
        # Of a million requests at the confirmed rate, at the price each measurement was given.
        costs = (
            m.resources.cost_per_million * m.throughput_per_s / found.throughput_at_slo_per_s
            for m in of_chosen
            if not m.invalid and m.resources.cost_per_million is not None
        )
        cost = self.tables.cost
        return Benchmark(
            candidate=engine.candidate,
            engine_sha256=engine.file.sha256,
            server=self.server_name,
            measurements=found.measurements,
            chosen=found.chosen,
            throughput_at_slo_per_s=found.throughput_at_slo_per_s,
            confirmed_rate_per_s=found.confirmed_rate_per_s,
            ceiling_per_s=self.tables.search.ceiling_per_s,
            decisions=found.decisions,
            engine_bytes=engine.size_bytes,
            p99_at_slo=found.p99,
            findings=found.findings,
            options=options,
            rejected_rate_per_s=found.rejected_rate_per_s,
            reasons=found.reasons,
            pareto=found.pareto,
            rival=found.rival,
            cold_start_s=next(cold_starts_s, None),
            cost_per_million=next(costs, None),
            currency=cost.currency if cost.price_per_hour is not None else "",
            cut_short=found.cut_short,
            generator_limit_per_s=found.generator_limit_per_s,
            rows_per_request=sum(self.batch_sizes) / len(self.batch_sizes),
        )

    def _requests(self, model: str) -> Traffic:
        """The traffic for a model of that name."""
        return Traffic.from_data(
            model,
            self.traffic,
            order_seed=self.tables.search.seed,
            timeout_s=self.tables.load.timeout_s,
            arrivals_s=self.arrivals_s,
            batch_sizes=self.batch_sizes,
        )

    def _cached(self, measure: Measure, target: BenchmarkTarget, *, part: str = "") -> Measure:
        """What was measured before is not measured again; ``part`` names a part of the traffic."""
        load = self.tables.load
        sending = [load.driver, load.protocol, load.shared_memory, load.processes, load.timeout_s]
        rows = [] if load.rows is None else [f"rows {load.rows}"]
        key = CacheKey(
            files=dict(target.files),
            backend=target.model.backend,
            server=_identity(self.install),
            machine=machine_name(),
            options=target.options,
            traffic=self.traffic_sha256,
            sending=":".join([*map(str, sending), *rows, *([part] if part else [])]),
            gpu=target.model.gpu,
            settings=target.model.settings,
        )
        return self.paths.cache.measure_with(measure, key, limit_ms=self.tables.slo.p99_ms)

    @contextmanager
    def _serve(
        self,
        target: BenchmarkTarget,
        live: LiveTarget | None,
        note_baseline: Callable[[Generator], None],
    ) -> Iterator[RunningServer]:
        """A server with the candidate, and what is live beside it, in place; nothing is loaded."""
        tables, paths, load = self.tables, self.paths, self.tables.load
        transport = Transport(load.protocol, load.shared_memory, load.processes)
        paths.repository.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            server = stack.enter_context(start(self.install, paths.repository, folder=paths.logs))
            generator = Generator(driver="perf_analyzer")
            if load.driver != "perf_analyzer":
                generator = self._sender(server, transport, note_baseline)

            def deployed(which: BenchmarkTarget) -> DeployedBenchmark:
                deployment = deploy(server, which.model, load_timeout_s=tables.load_timeout_s)
                return DeployedBenchmark(
                    stack.enter_context(deployment),
                    self._requests(which.model.name),
                    paths.cache.latencies,
                    tables.slo.p99_ms,
                    generator=generator,
                    price_per_hour=tables.cost.price_per_hour,
                    options=which.options,
                    sending=transport,
                    driver=generator.driver,
                    failures_counted=load.driver == "auto",
                )

            candidate = deployed(target)
            measures: dict[str, Measure] = {_CANDIDATE: candidate.measure}
            large = largest_requests(candidate.traffic)
            if large is not None:
                measures[LARGE] = replace(candidate, traffic=large).measure
            if live is not None:
                measures[_CHAMPION] = deployed(live.target).measure
            yield RunningServer(measures, server.check_alive)

    def _sender(
        self, server: Server, transport: Transport, note_baseline: Callable[[Generator], None]
    ) -> Generator:
        """Who sends, and what that costs against a do-nothing model."""
        up_to_per_s = self.tables.search.max_rate_per_s
        ours = GeneratorBaseline(
            transport,
            up_to_per_s,
            (machine_name(), _identity(self.install), self.tables.load.digest),
            self.paths.results / "generators",
            self.warn,
        )
        found = ours.measure(server)
        if self.tables.load.driver == "auto" and find_perf_analyzer() is not None:
            theirs = replace(ours, driver="perf_analyzer")
            found = best_driver(found, up_to_per_s, lambda: theirs.measure(server))
        if found.driver == "perf_analyzer":
            self.warn(
                f"perf_analyzer sends: up to {per_second(found.trusted_per_s or 0.0)} in time, "
                "more than this program does here"
            )
        note_baseline(found)
        return ours.for_measurements(found)


def _identity(install: TritonInstall) -> str:
    return f"{install.origin}, {install.binary.stat().st_size} bytes"


def machine_name() -> str:
    """The machine that a measurement is valid for."""
    return f"{platform.node()}; {processor()}; {gpus()}"
