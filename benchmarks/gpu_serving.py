"""What Triton makes of a GPU: ``python benchmarks/gpu_serving.py``.

Each case is a network, an engine, rows a request and an SLO. In the same hour, on one server:
the engine alone; the raw server in closed loops of perf_analyzer (the anchor) and of this program's
generator; Triton's defaults (one instance, no batching) within the SLO; and the configuration that
the search finds and confirms in an open loop. With ``--gpus 0,1`` one GPU and both are searched.
Rates count rows, not requests. Random weights: speed does not depend on them. Without a GPU it says
so and ends; ``--device cpu`` tries the script with a small network.
"""

import argparse
import csv
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_networks import Subject, subject
from gpu_report import Report, table

from enginegate.benchmark.deployment import DeployedBenchmark, ServedModel, deploy
from enginegate.benchmark.session import RUNNER_FROM_CUDA_MS, RUNNER_MS
from enginegate.candidate import Engine
from enginegate.content_store import ContentFolder
from enginegate.data import Tensors
from enginegate.engines import cuda, engine_kind, open_engine, serving
from enginegate.engines.engine_sweep import Sweep, sweep_batches
from enginegate.evidence import Finding
from enginegate.loadgen.perf_analyzer import find_perf_analyzer
from enginegate.loadgen.traffic import Traffic, Transport
from enginegate.measurement import ClosedLoad, LatencySample, Load, Measurement
from enginegate.measuring.bottleneck import largest_stage
from enginegate.measuring.p99 import SequentialTest
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.queueing import EngineTimes
from enginegate.search.search import SearchResult, search
from enginegate.search.trial_runner import SearchProgress
from enginegate.serving import ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, start

CASES = (
    "resnet50:tensorrt-fp16:1:50",
    "resnet50:tensorrt-fp16:8:20",
    "resnet50-u8:tensorrt-fp16:8:20",
    "minilm-l6:tensorrt-fp16:8:20",
    "resnet50:onnxruntime-fp16:8:50",
)
_MODEL = "served"
_CONFIDENCE = 0.99
# The anchors' configuration, and the clients that showed its highest rates: few and many.
_ANCHOR = {"max_queue_delay_us": 500, "instances": 2}
_CLIENTS_IN_ROWS = (64, 256, 512)
_WINDOW_MS, _WINDOWS = 2000, 3
_SHOWN = ("config", "offered_rows_per_s", "rows_per_s", "p99_ms", "invalid", "late_p99_ms")


@dataclass(frozen=True)
class Case:
    """What is served, and how it is asked.

    Attributes:
        candidate: KIND-PRECISION.
        rows: samples in one request.
        slo_ms: limit on p99.
    """

    network: str
    candidate: str
    rows: int
    slo_ms: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From ``NETWORK:KIND-PRECISION:ROWS:SLO_MS``."""
        network, candidate, rows, slo_ms = text.split(":")
        return cls(network, candidate, int(rows), float(slo_ms))

    def __str__(self) -> str:
        return f"{self.network} {self.candidate}, {self.rows} rows a request"


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    if given.device == "cuda" and cuda.gpu() is None:
        print("No NVIDIA GPU here: nothing is measured.")
        return
    report = Report(given.out / f"{given.name}.json", limit_s=given.limit_s)
    with tempfile.TemporaryDirectory(prefix="enginegate-serving-") as scratch:
        for text in given.case:
            case = Case.parse(text)
            for backend in given.backend:
                row = {"case": str(case), **asdict(case), "backend": backend}
                bench = _Bench(case, backend, given, Path(scratch), report)
                report.part(row | {"shared_memory": given.shared_memory}, bench.measure)
    _show(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="gpu_serving", help="of the JSON file")
    parser.add_argument("--store", type=Path, help="keeps models and engines from run to run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--case", action="append", help="NETWORK:KIND-PRECISION:ROWS:SLO_MS")
    parser.add_argument(
        "--backend", action="append", choices=["native", "python"], help="python: our runner"
    )
    parser.add_argument("--gpus", default="0", help="e.g. 0,1: also compare one with both")
    parser.add_argument("--parts", default="anchor,ours,default,search", help="any of these")
    parser.add_argument("--budget-s", type=float, default=40.0, help="of one search")
    parser.add_argument("--build-s", type=float, default=150.0, help="limit of one build")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--processes", type=int, default=0, help="that send; 0: as many as needed")
    parser.add_argument("--shared-memory", default="cuda", choices=["none", "system", "cuda"])
    parser.add_argument("--driver", default="python", choices=["python", "perf_analyzer"])
    parser.add_argument("--confirm-requests", type=int, default=1400)
    parser.add_argument("--largest", type=int, help="batch")
    given = parser.parse_args()
    small = given.device == "cpu"
    given.store = given.store or Path(tempfile.mkdtemp(prefix="enginegate-gpu-"))
    given.case = given.case or (["tiny:onnxruntime-fp32:1:50"] if small else list(CASES))
    given.backend = given.backend or (["python"] if small else ["native"])
    given.largest = given.largest or (8 if small else 128)
    given.gpus = tuple(int(gpu) for gpu in given.gpus.split(","))
    given.parts = given.parts.split(",")
    if small and given.shared_memory == "cuda":
        given.shared_memory = "system"
    return given


class _Bench:
    """One case in one backend."""

    def __init__(
        self,
        case: Case,
        backend: str,
        given: argparse.Namespace,
        scratch: Path,
        report: Report,
    ) -> None:
        self.case, self.backend, self.given, self.scratch = case, backend, given, scratch
        self.report = report

    def measure(self, row: dict[str, Any]) -> None:
        """Everything about the case; what was found is in the row even if a later part fails."""
        case, given = self.case, self.given
        made = subject(case.network, given.store, largest=given.largest)
        built = made.build(case.candidate, given.store, given.device, given.build_s)
        alone = _alone(made, built)
        best = max((speed.samples_per_s for speed in alone.batches), default=0.0)
        row["engine_per_s"] = best
        self._tell(f"the engine alone {best:,.0f}/s")
        kind = engine_kind(built.value.candidate.kind)
        native = kind.native_name or ""
        served = serving(
            built.value, built.folder, backend=native if self.backend == "native" else "python"
        )
        row["triton_backend"] = served.backend
        model = ServedModel.of(_MODEL, built.value, served)
        with self._server() as server:
            row["server"] = server.version
            with deploy(server, model, load_timeout_s=300.0) as deployment:
                bench = DeployedBenchmark(
                    deployment,
                    Traffic.of(_MODEL, _requests(made, built.value, case.rows), timeout_s=20.0),
                    self.scratch / "latencies",
                    case.slo_ms,
                    sending=Transport(shared_memory=given.shared_memory, processes=given.processes),
                    driver=given.driver,
                )
                self._parts(row, bench, made, alone, best)

    def _parts(
        self,
        row: dict[str, Any],
        bench: DeployedBenchmark,
        made: Subject,
        alone: Sweep,
        best: float,
    ) -> None:
        parts, case, gpus = self.given.parts, self.case, self.given.gpus
        top = 1.1 * best / case.rows
        anchor = ServingConfig(max_batch_size=made.largest, gpus=gpus[:1], **_ANCHOR)
        if "anchor" in parts:
            self._part(row, "anchor", lambda: self._anchor(bench, anchor, made))
        if "ours" in parts:
            self._part(row, "ours_closed", lambda: self._closed(bench, anchor))
        if "default" in parts:
            self._part(row, "default", lambda: self._default(bench, top, made.largest))
        if "search" in parts:
            times = EngineTimes.fit(
                {speed.batch_size: speed.batch_ms for speed in alone.batches},
                items=float(case.rows),
                shared=self.given.device == "cuda",
                request_ms=0.0 if self.backend == "native" else _runner_ms(self.given),
            )
            for count in range(1, len(gpus) + 1):
                bounds = self._bounds(top * count, gpus[:count], made.largest)
                key = "found" if count == 1 else f"found_on_{count}_gpus"
                # Each GPU adds its speed, and the engine's times are of one.
                hint = times if count == 1 else None
                self._part(row, key, partial(self._search, bench, bounds, hint))

    def _part(self, row: dict[str, Any], key: str, measure: Any) -> None:
        """One part of a case: a failure is kept beside what the others found."""
        if self.report.left_s <= 0:
            row[key] = {"error": "the time limit of this run was used up"}
            return
        try:
            row[key] = measure()
        except Exception as error:  # noqa: BLE001 - the other parts' numbers must not be lost
            row[key] = {"error": f"{type(error).__name__}: {error}"}
        brief = {k: v for k, v in row[key].items() if k not in {"measured", "findings"}}
        self._tell(f"{key}: {brief}")
        self.report.write()

    def _anchor(
        self, bench: DeployedBenchmark, config: ServingConfig, made: Subject
    ) -> dict[str, Any]:
        """The raw server in closed loops of perf_analyzer; the highest rate within the SLO."""
        bench.deployment.serve(config)
        found = []
        for clients in _clients(self.case.rows):
            point = _perf_analyzer(
                bench.deployment.server, self.case.rows, clients, made, self.given.shared_memory
            )
            self._tell(f"perf_analyzer, {clients} clients: {point}")
            found.append(point)
        return _best(found, self.case.slo_ms) | {"config": str(config), "measured": found}

    def _closed(self, bench: DeployedBenchmark, config: ServingConfig) -> dict[str, Any]:
        """This program's generator in the closed loops of the anchor."""
        found = []
        for clients in _clients(self.case.rows):
            load = ClosedLoad(clients=clients, duration_s=4.0, seed=0)
            measured = replace(bench, driver="python").measure(config, load).measurement
            point = _brief(measured, self.case.rows) | {"clients": clients}
            self._tell(f"this generator, {clients} clients: {[point[key] for key in _SHOWN]}")
            found.append(point)
        return _best(found, self.case.slo_ms) | {"measured": found}

    def _default(self, bench: DeployedBenchmark, top: float, largest: int) -> dict[str, Any]:
        def measure(
            config: ServingConfig, load: Load | ClosedLoad, *, ends: SequentialTest | None = None
        ) -> LatencySample:
            plain = config.model_copy(update={"dynamic_batching": False})
            found = bench.measure(plain, load, ends=ends)
            asked = found.measurement.model_copy(update={"config": config})
            return replace(found, measurement=asked)

        bounds = self._bounds(top, self.given.gpus[:1], largest).model_copy(
            update={
                "max_batch_sizes": (largest,),
                "queue_delays_us": (0,),
                "instances": (1,),
                # Its confirmation must fit the budget at the lowest rate.
                "min_rate_per_s": max(5.0, top / 100),
                "max_rate_per_s": max(10.0, top / 2),
            }
        )
        return self._described(search(measure, bounds, self._slo(), progress=self._progress))

    def _search(
        self, bench: DeployedBenchmark, bounds: Search, alone: EngineTimes | None
    ) -> dict[str, Any]:
        found = search(bench.measure, bounds, self._slo(), alone=alone, progress=self._progress)
        return self._described(found)

    def _bounds(self, top: float, gpus: tuple[int, ...], largest: int) -> Search:
        return Search(
            max_batch_sizes=(largest,),
            queue_delays_us=(0, 500, 2000),
            instances=(1, 2, 4),
            processes=(1,) if self.backend == "native" else (1, 2, 3, 4),
            gpus=gpus if self.given.device == "cuda" else (),
            min_rate_per_s=max(5.0, top / 64),
            max_rate_per_s=max(10.0, 1.3 * top),
            measurement_s=4.0,
            budget_s=self.given.budget_s,
            max_measurements=30,
        )

    def _slo(self) -> Slo:
        return Slo(
            p99_ms=self.case.slo_ms,
            min_throughput_per_s=1.0,
            confidence=_CONFIDENCE,
            confirm_requests=self.given.confirm_requests,
        )

    def _described(self, found: SearchResult) -> dict[str, Any]:
        at_best = [m for m in found.measurements if m.config == found.chosen and not m.invalid]
        nearest = min(
            at_best,
            key=lambda m: abs(m.throughput_per_s - found.throughput_at_slo_per_s),
            default=None,
        )
        rows = self.case.rows
        return {
            "rows_per_s": found.throughput_at_slo_per_s * rows,
            "confirmed": found.confirmed,
            "chosen": str(found.chosen),
            "p99_ms": found.p99.value_ms if found.p99 else None,
            "cut_short": found.cut_short,
            "generator_limit_rows_per_s": (found.generator_limit_per_s or 0.0) * rows or None,
            "largest_stage": largest_stage(nearest) if nearest else "",
            "findings": [_sentence(finding) for finding in found.findings],
            "measured": [_brief(each, rows) for each in found.measurements],
        }

    @contextmanager
    def _server(self) -> Iterator[Server]:
        repository = self.scratch / "repository"
        repository.mkdir(exist_ok=True)
        install = find_triton(self.scratch / "triton")
        with start(install, repository, folder=self.scratch / "logs") as server:
            yield server

    def _progress(self, at: SearchProgress) -> None:
        told = _brief(at.measurement, self.case.rows)
        shown = ", ".join(f"{key} {told[key]}" for key in _SHOWN)
        self._tell(f"{at.step}: {shown} ({at.spent_s:.0f} s)")

    def _tell(self, sentence: str) -> None:
        print(f"{self.case} [{self.backend}] {sentence}", flush=True)


def _runner_ms(given: argparse.Namespace) -> float:
    """That our runner spends on a request, in each process."""
    return RUNNER_FROM_CUDA_MS if given.shared_memory == "cuda" else RUNNER_MS


def _alone(made: Subject, built: ContentFolder[Engine]) -> Sweep:
    """Samples a second of the engine alone."""
    with open_engine(built.value, built.folder) as runner:
        return sweep_batches(runner.bound, made.rows, made.buckets, limit_s=3.0)


def _requests(made: Subject, engine: Engine, rows: int) -> list[Tensors]:
    """In the types that the engine takes: TensorRT 8 has no INT64."""
    types = {spec.name: spec.dtype for spec in engine.inputs}
    return [
        {name: array.astype(types[name]) for name, array in made.rows(rows, at).items()}
        for at in range(0, made.largest - rows + 1, rows)
    ]


def _clients(rows: int) -> tuple[int, ...]:
    return tuple(max(1, count // rows) for count in _CLIENTS_IN_ROWS)


def _best(points: list[dict[str, Any]], slo_ms: float) -> dict[str, Any]:
    """The highest rate at which the tail is within the SLO, and the highest of all."""
    within = [p for p in points if p["p99_ms"] is not None and p["p99_ms"] <= slo_ms]
    return {
        "rows_per_s": max((p["rows_per_s"] for p in within), default=0.0),
        "highest_rows_per_s": max((p["rows_per_s"] for p in points), default=0.0),
    }


def _perf_analyzer(
    server: Server, rows: int, clients: int, made: Subject, shared_memory: str
) -> dict[str, Any]:
    """One closed loop of perf_analyzer: windows of its own, its stability test switched off."""
    program = find_perf_analyzer()
    if program is None:
        raise RuntimeError("there is no perf_analyzer: name it with PERF_ANALYZER")
    libraries = os.environ.get("PERF_ANALYZER_LIBRARY_PATH", "")
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{inherited}"}
    # Random integers would be tokens that the encoder does not have.
    tokens = any(spec.dtype == "int64" for spec in made.onnx.value.inputs)
    with tempfile.TemporaryDirectory() as folder:
        table_file = Path(folder) / "found.csv"
        command = [
            *(str(program), "-m", _MODEL, "-u", server.grpc, "-i", "grpc", "-a"),
            *("-b", str(rows), "--concurrency-range", f"{clients}:{clients}"),
            *("--shared-memory", shared_memory, "--output-shared-memory-size", "4194304"),
            *("--input-data", "zero" if tokens else "random", "-s", "1000"),
            *("-p", str(_WINDOW_MS), "-r", str(_WINDOWS), "--percentile", "99"),
            *("-f", str(table_file)),
        ]
        ended = subprocess.run(  # noqa: S603 - the program is this machine's own
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        if not table_file.is_file():
            raise RuntimeError(
                f"perf_analyzer ended with {ended.returncode}: {ended.stdout[-600:]}"
                f"{ended.stderr[-600:]}"
            )
        with table_file.open() as file:
            (line,) = csv.DictReader(file)
    return {
        "clients": clients,
        "rows_per_s": float(line["Inferences/Second"]),
        "p50_ms": float(line["p50 latency"]) / 1e3,
        "p99_ms": float(line["p99 latency"]) / 1e3,
    }


def _brief(measurement: Measurement, rows: int) -> dict[str, Any]:
    p99 = measurement.percentile(0.99)
    return {
        "config": str(measurement.config),
        "offered_rows_per_s": round(measurement.rate_per_s * rows, 1),
        "rows_per_s": round(measurement.throughput_per_s * rows, 1),
        "p99_ms": round(p99.value_ms, 2) if p99 else None,
        "failed": measurement.failed,
        "invalid": measurement.invalid,
        "late_p99_ms": round(measurement.late_p99_ms, 3),
        "stages": measurement.stages.model_dump() if measurement.stages else None,
    }


def _sentence(finding: Finding) -> str:
    return f"{finding.gate}: {finding.outcome.word}: {finding.reason} {finding.remedy}"


def _show(report: Report) -> None:
    """Print the table: rows a second."""
    keys = ("anchor", "ours_closed", "default", "found", "found_on_2_gpus")
    columns = ["case", "backend", "SLO ms", "engine alone", *keys, "confirmed", "x default"]
    columns += ["of anchor", "of engine", "two GPUs"]
    lines = []
    for row in report.rows:
        rates = {key: row.get(key, {}).get("rows_per_s") for key in keys}
        found = rates["found"]
        both = row.get("found_on_2_gpus", {})
        shares = [
            found / value if found and value else None
            for value in (rates["default"], rates["anchor"], row.get("engine_per_s"))
        ]
        two = rates["found_on_2_gpus"]
        confirmed = row.get("found", {}).get("confirmed"), both.get("confirmed")
        lines.append(
            [
                *(row["case"], row["backend"], row["slo_ms"], row.get("engine_per_s")),
                *rates.values(),
                "/".join(str(each) for each in confirmed if each is not None) or None,
                *shares,
                two / found if two and found else None,
            ]
        )
    table(columns, lines)
    for row in report.rows:
        problems = [row.get("error"), *(row.get(key, {}).get("error") for key in keys)]
        for problem in filter(None, problems):
            print(f"{row['case']} [{row['backend']}]: {problem[:600]}")
        for key in ("found", "found_on_2_gpus"):
            if row.get(key, {}).get("chosen"):
                told = row[key]
                print(f"    {key}: {told['chosen']}; {told['largest_stage']}; {told['cut_short']}")


if __name__ == "__main__":
    main()
