"""What serving through Triton makes of a GPU: ``python benchmarks/gpu_serving.py``.

ResNet-50 and the encoder of all-MiniLM-L6-v2 through ONNX Runtime's CUDA provider, under the SLO:
the configuration that the search finds, against Triton's defaults (one instance, no batching) at
the same SLO, and against the engine alone at the largest batch with bound buffers. Samples a second
count rows, not requests: a request carries as many rows as its case says. With ``--gpus 0,1`` the
found configuration also runs on one of them and on both. Random weights: speed does not depend on
them. Without a GPU it says so and ends.
"""

import argparse
import json
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
from gpu_engines import CALIBRATION, Subject, encoder, resnet
from gpu_pixels import pixels
from gpu_points import machine, times_of
from networks import planned

from enginegate.benchmark.deployment import DeployedBenchmark, ServedModel, deploy
from enginegate.candidate import Engine
from enginegate.content_store import ContentFolder
from enginegate.data import Array, Tensors
from enginegate.engines import build_engine, cuda, open_engine, serving
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.evidence import Finding
from enginegate.loadgen.traffic import Traffic, Transport
from enginegate.measurement import ClosedLoad, LatencySample, Load, Measurement
from enginegate.measuring.bottleneck import largest_stage
from enginegate.measuring.p99 import SequentialTest
from enginegate.policy.benchmarking import Search, Slo
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.records import Record
from enginegate.search.search import SearchResult, search
from enginegate.search.trial_runner import SearchProgress
from enginegate.serving import ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, start

LARGEST = 128
_BUCKETS = (8, 16, 32, 64, 128)
_MODEL = "served"
_CONFIDENCE = 0.99


@dataclass(frozen=True)
class Case:
    """What is served, and how it is asked.

    Attributes:
        rows: samples in one request.
        slo_ms: limit on p99.
    """

    network: str
    precision: str
    rows: int
    slo_ms: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From ``NETWORK:PRECISION:ROWS:SLO_MS``."""
        network, precision, rows, slo_ms = text.split(":")
        return cls(network, precision, int(rows), float(slo_ms))

    def __str__(self) -> str:
        return f"{self.network} {self.precision}, {self.rows} rows a request"


CASES = (
    "resnet50-u8:fp16:8:100",
    "resnet50-u8:tf32:8:100",
    "resnet50:fp16:8:60",
    "minilm-l6:fp16:8:30",
    "minilm-l6:tf32:4:30",
)


_MAKE = {"resnet50": resnet, "resnet50-u8": pixels, "minilm-l6": encoder}


class Report:
    """What was found so far; on disk after every case, because a rented GPU may be taken away."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gpu_serving.json"
        self._found: dict[str, Any] = {"schema_version": 1, "machine": machine(), "cases": []}

    def add(self, row: dict[str, Any]) -> None:
        """Keep one case."""
        self._found["cases"].append(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1, default=str) + "\n")

    def show(self) -> None:
        """Print the table."""
        print(
            "\n| case | SLO ms | engine alone /s | default /s | found /s | x default | of engine |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for row in self._found["cases"]:
            if "error" in row:
                print(f"| {row['case']} | failed: {row['error'].splitlines()[-1]} |")
                continue
            numbers = [row["slo_ms"], row["engine_per_s"], row["default_per_s"], row["found_per_s"]]
            times = row["found_per_s"] / row["default_per_s"] if row["default_per_s"] else 0.0
            share = row["found_per_s"] / row["engine_per_s"]
            cells = " | ".join(f"{number:,.0f}" for number in numbers)
            print(f"| {row['case']} | {cells} | {times:.1f} | {share:.0%} |")
            print(f"    {row['chosen']}; {row['largest_bucket']}")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--case", action="append", help="NETWORK:PRECISION:ROWS:SLO_MS")
    parser.add_argument("--gpus", default="0", help="e.g. 0,1: also compare one with both")
    parser.add_argument("--budget-s", type=float, default=120.0, help="of one search")
    parser.add_argument("--processes", type=int, default=6, help="that send")
    parser.add_argument("--shared-memory", default="system", choices=["none", "system", "cuda"])
    given = parser.parse_args()
    if cuda.gpu() is None or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print("No NVIDIA GPU, or no onnxruntime-gpu, here: nothing is measured.")
        return
    report = Report(given.out)
    with tempfile.TemporaryDirectory(prefix="enginegate-serving-") as scratch:
        lab = Lab(Path(scratch), tuple(int(gpu) for gpu in given.gpus.split(",")), given)
        for text in given.case or CASES:
            case = Case.parse(text)
            try:
                report.add(lab.measured(case))
            except Exception:  # noqa: BLE001 - the other cases' numbers must not be lost
                print(traceback.format_exc(), flush=True)
                report.add({"case": str(case), "error": traceback.format_exc(limit=-3)})
    report.show()


class Lab:
    """Engines and servers of one run."""

    def __init__(self, scratch: Path, gpus: tuple[int, ...], given: argparse.Namespace) -> None:
        self._scratch, self._gpus = scratch, gpus
        self._budget_s = given.budget_s
        self._sending = Transport(shared_memory=given.shared_memory, processes=given.processes)
        self._subjects: dict[str, Subject] = {}

    def measured(self, case: Case) -> dict[str, Any]:
        """Everything about one case."""
        subject = self._subject(case.network)
        built = _built(subject, case.precision, self._scratch)
        row: dict[str, Any] = {"case": str(case), **asdict(case)}
        row |= _alone(subject, built)
        print(f"{case}: the engine alone {row['engine_per_s']:,.0f}/s", flush=True)
        repository = self._scratch / "repository"
        repository.mkdir(exist_ok=True)
        install = find_triton(self._scratch / "triton")
        with start(install, repository, folder=self._scratch / "logs") as server:
            row["server"] = server.version
            return row | self._served(case, subject, built, server, row["engine_per_s"])

    def _subject(self, name: str) -> Subject:
        if name not in self._subjects:
            self._subjects[name] = _MAKE[name](self._scratch)
        return self._subjects[name]

    def _served(
        self,
        case: Case,
        subject: Subject,
        built: ContentFolder[Engine],
        server: Server,
        engine_per_s: float,
    ) -> dict[str, Any]:
        model = ServedModel.of(_MODEL, built.value, serving(built.value, built.folder))
        traffic = Traffic.of(_MODEL, _requests(subject.data.inputs, case.rows), timeout_s=20.0)
        top = 1.1 * engine_per_s / case.rows * len(self._gpus)
        row: dict[str, Any] = {}
        with deploy(server, model, load_timeout_s=300.0) as deployment:
            bench = DeployedBenchmark(
                deployment,
                traffic,
                self._scratch / "latencies",
                case.slo_ms,
                sending=self._sending,
            )
            row["default_per_s"] = 0.0
            if len(self._gpus) == 1:
                default = self._default(case, bench, top)
                row |= {"default_per_s": default.throughput_at_slo_per_s * case.rows}
                print(f"{case}: Triton's defaults {row['default_per_s']:,.0f}/s", flush=True)
            for gpus in [self._gpus[:count] for count in range(1, len(self._gpus) + 1)]:
                found = self._search(case, bench, top, gpus)
                key = "found_per_s" if len(gpus) == 1 else f"found_on_{len(gpus)}_gpus_per_s"
                row[key] = found.throughput_at_slo_per_s * case.rows
                row |= _described(found) if len(gpus) == len(self._gpus) else {}
                row.setdefault("measured", []).append(_measured(found, case, gpus))
        return row

    def _default(self, case: Case, bench: DeployedBenchmark, top: float) -> SearchResult:
        def measure(
            config: ServingConfig, load: Load | ClosedLoad, *, ends: SequentialTest | None = None
        ) -> LatencySample:
            plain = config.model_copy(update={"dynamic_batching": False})
            found = bench.measure(plain, load, ends=ends)
            asked = found.measurement.model_copy(update={"config": config})
            return replace(found, measurement=asked)

        bounds = _bounds(top, 0.75 * self._budget_s, self._gpus[:1]).model_copy(
            update={
                "max_batch_sizes": (LARGEST,),
                "queue_delays_us": (0,),
                "instances": (1,),
                "min_rate_per_s": max(5.0, top / 500),
                "max_rate_per_s": top / 3,
            }
        )
        return search(measure, bounds, _slo(case), progress=_say)

    def _search(
        self, case: Case, bench: DeployedBenchmark, top: float, gpus: tuple[int, ...]
    ) -> SearchResult:
        bounds = _bounds(top, self._budget_s, gpus)
        return search(bench.measure, bounds, _slo(case), progress=_say)


def _built(subject: Subject, precision: str, scratch: Path) -> ContentFolder[Engine]:
    tables: dict[str, Record] = {
        "shapes": Shapes(batch=DimensionRange(min=1, best=LARGEST, max=LARGEST)),
        "onnxruntime": OnnxRuntimeTable(device="cuda", batch_buckets=_BUCKETS),
    }
    name = f"onnxruntime-{precision}"
    plan = planned(subject.onnx, name, subject.data, tables=tables, calibration=CALIBRATION)
    return build_engine(plan, scratch / "engines")


def _alone(subject: Subject, built: ContentFolder[Engine]) -> dict[str, Any]:
    """Samples a second of the engine at the largest batch: on the device, and host to host."""
    with open_engine(built.value, built.folder) as runner:
        inputs = {key: array[:LARGEST] for key, array in subject.data.inputs.items()}
        buffers = runner.bucketed.buffers(inputs)
        buffers.load(inputs)
        device, whole = times_of(buffers.execute), times_of(lambda: runner.run(inputs))
    return {
        "engine_per_s": LARGEST * len(device) / sum(device),
        "engine_host_per_s": LARGEST * len(whole) / sum(whole),
    }


def _requests(inputs: Mapping[str, Array], rows: int) -> list[Tensors]:
    count = len(next(iter(inputs.values())))
    return [
        {name: array[at : at + rows] for name, array in inputs.items()}
        for at in range(0, count - rows + 1, rows)
    ]


def _bounds(top: float, budget_s: float, gpus: tuple[int, ...]) -> Search:
    return Search(
        max_batch_sizes=(32, 64, LARGEST),
        queue_delays_us=(0, 1000, 4000),
        instances=(1, 2, 4),
        gpus=gpus,
        min_rate_per_s=max(10.0, top / 64),
        max_rate_per_s=top,
        measurement_s=4.0,
        budget_s=budget_s,
        max_measurements=24,
    )


def _slo(case: Case) -> Slo:
    return Slo(
        p99_ms=case.slo_ms,
        min_throughput_per_s=1.0,
        confidence=_CONFIDENCE,
        confirm_requests=1400,
    )


def _say(at: SearchProgress) -> None:
    measured = at.measurement
    p99 = measured.percentile(0.99)
    print(
        f"  {at.step} {measured.rate_per_s:.0f}/s {measured.config}: "
        f"p99 {p99.value_ms if p99 else float('inf'):.1f} ms, "
        f"{measured.throughput_per_s:.0f}/s {'; '.join(measured.invalid)} ({at.spent_s:.0f} s)",
        flush=True,
    )


def _described(found: SearchResult) -> dict[str, Any]:
    at_best = [m for m in found.measurements if m.config == found.chosen and not m.invalid]
    nearest = min(
        at_best, key=lambda m: abs(m.throughput_per_s - found.throughput_at_slo_per_s), default=None
    )
    return {
        "chosen": str(found.chosen),
        "p99_ms": found.p99.value_ms if found.p99 else None,
        "largest_bucket": largest_stage(nearest) if nearest else "",
        "resources": nearest.resources.model_dump() if nearest else {},
        "findings": [_sentence(finding) for finding in found.findings],
    }


def _sentence(finding: Finding) -> str:
    return f"{finding.gate}: {finding.outcome.word}: {finding.reason} {finding.remedy}"


def _measured(found: SearchResult, case: Case, gpus: tuple[int, ...]) -> dict[str, Any]:
    return {
        "gpus": gpus,
        "throughput_per_s": found.throughput_at_slo_per_s * case.rows,
        "measurements": [_brief(measurement) for measurement in found.measurements],
    }


def _brief(measurement: Measurement) -> dict[str, Any]:
    p99 = measurement.percentile(0.99)
    return {
        "config": str(measurement.config),
        "rate_per_s": measurement.rate_per_s,
        "throughput_per_s": measurement.throughput_per_s,
        "p99_ms": p99.value_ms if p99 else None,
        "invalid": measurement.invalid,
        "stages": measurement.stages.model_dump() if measurement.stages else None,
        "resources": measurement.resources.model_dump(exclude_none=True),
        "late_p99_ms": measurement.late_p99_ms,
    }


if __name__ == "__main__":
    main()
