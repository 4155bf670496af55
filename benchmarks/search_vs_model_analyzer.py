"""The search against NVIDIA's Model Analyzer: same server binary, same machine, same run.

Two models that sleep (benchmarks/sleep_model), so their best configuration is known to be many
instances with large batches: *slow* takes 20 ms + 1 ms a sample, with 3 % jitter and 20 ms more in
1 % of the calls, p99 <= 120 ms; *fast* takes 4 ms + 0.25 ms a sample with 3 % jitter, p99 <= 20 ms.
At most 4 instances and batches of 32. For each model:

- *search*: ours, open loop, confirmed with three fresh seeds;
- *quick* (and *brute* with ``--full``): Model Analyzer, stopped after ``--minutes``;
- *open*: our search on the one configuration that Model Analyzer chose: what it sustains in an open
  loop, whose requests do not wait for the answers to others as those of a closed loop do;
- *grid*: our search on every single configuration; the best confirmed point is the yardstick;
- *again*: each winner, as it was found (ours in an open loop at its rate, theirs in a closed loop
  with its clients), five times 3,000 requests.

``python benchmarks/search_vs_model_analyzer.py`` prints a table and writes
results/search_vs_model_analyzer.json. Parts that are there are not run again (``--again`` does), so
a stopped run goes on where it was. Expect 50 minutes; 15 with ``--quick`` (a grid of the largest
batches only); hours with ``--full``. Nothing else should run on the machine.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from model_analyzer import VERSION, Analyzer  # noqa: E402 - beside this file

from enginegate.benchmark.deployment import DeployedBenchmark, ServedModel, deploy  # noqa: E402
from enginegate.candidate import TensorSpec  # noqa: E402
from enginegate.loadgen.traffic import Traffic, Transport  # noqa: E402
from enginegate.machine import processor  # noqa: E402
from enginegate.measurement import ClosedLoad, Load  # noqa: E402
from enginegate.policy.benchmarking import Search, Slo  # noqa: E402
from enginegate.search.search import SearchResult, search  # noqa: E402
from enginegate.search.trial_runner import SearchProgress  # noqa: E402
from enginegate.serving import BackendSettings, ServingConfig  # noqa: E402
from enginegate.triton.install import TritonInstall, find_triton  # noqa: E402
from enginegate.triton.server import start  # noqa: E402

RESULTS = ROOT / "results" / "search_vs_model_analyzer.json"
RERUNS, REQUESTS = 5, 3000
NAME = "sleeper"
# Nothing that Model Analyzer would have to keep or undo: it writes its variants from this.
_CONFIG = f"""name: "{NAME}"
backend: "python"
max_batch_size: 32
input [{{ name: "x" data_type: TYPE_FP32 dims: [4] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [4] }}]
dynamic_batching {{}}
"""
Json = dict[str, Any]


@dataclass(frozen=True)
class Sleeper:
    """A model and what is asked of it. ``most_per_s``: what the generator is trusted with."""

    base_ms: float
    item_ms: float
    outliers: float
    p99_ms: float
    most_per_s: float = 4000.0

    def parameters(self) -> dict[str, str]:
        values = {
            "base_ms": self.base_ms,
            "item_ms": self.item_ms,
            "jitter": 0.03,
            "outliers": self.outliers,
            "outlier_ms": 20.0,
        }
        return {name: str(value) for name, value in values.items()}

    def served(self) -> ServedModel:
        return ServedModel(
            name=NAME,
            backend="python",
            inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 4)),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 4)),),
            files={"model.py": ROOT / "sleep_model" / "model.py"},
            settings=BackendSettings(parameters=self.parameters()),
        )

    def bounds(self, **only: tuple[int, ...]) -> Search:
        space = {
            "max_batch_sizes": (1, 2, 4, 8, 16, 32),
            "queue_delays_us": (0, 1000, 5000),
            "instances": (1, 2, 3, 4),
            **only,
        }
        return Search(
            **space,
            min_rate_per_s=40,
            max_rate_per_s=self.most_per_s,
            resolution=0.03,
            measurement_s=2.0,
            budget_s=900.0,
        )

    def slo(self) -> Slo:
        return Slo(p99_ms=self.p99_ms, min_throughput_per_s=40, confidence=0.99)


MODELS = {
    "slow": Sleeper(20.0, 1.0, outliers=0.01, p99_ms=120.0),
    "fast": Sleeper(4.0, 0.25, outliers=0.0, p99_ms=20.0, most_per_s=3000.0),
}


@dataclass(frozen=True)
class Course:
    """One model's parts: where they are kept, and what they need.

    Parts that were made with another model, load or driver are made anew.
    """

    name: str
    sleeper: Sleeper
    kept: Json
    work: Path
    install: TritonInstall
    tools: Analyzer
    asked: argparse.Namespace

    def part(self, name: str, make: Callable[[], Json]) -> Json:
        """Made once; the results file is written after each."""
        parts = self.kept["models"].setdefault(self.name, {})
        made_with = asdict(self.sleeper)
        if parts.get("made_with") != made_with:
            parts.clear()
            parts["made_with"] = made_with
        if name not in parts or self.asked.again:
            print(f"{self.name}: {name} ...", flush=True)
            parts[name] = make()
            RESULTS.write_text(json.dumps(self.kept, indent=2, sort_keys=True) + "\n")
        found: Json = parts[name]
        return found

    @contextmanager
    def bench(self) -> Iterator[DeployedBenchmark]:
        """The model on a server of its own."""
        source = np.random.default_rng(0)
        samples = [{"x": source.normal(size=(1, 4)).astype(np.float32)} for _ in range(50)]
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            repository = Path(folder) / "repository"
            repository.mkdir()
            with (
                start(self.install, repository, folder=Path(folder)) as server,
                deploy(server, self.sleeper.served()) as deployment,
            ):
                traffic = Traffic.of(NAME, samples)
                # HTTP costs the sender half of what gRPC does, and the sender is the narrow place.
                yield DeployedBenchmark(
                    deployment,
                    traffic,
                    Path(folder) / "raw",
                    self.sleeper.p99_ms,
                    sending=Transport(protocol="http"),
                )

    def search(self) -> Json:
        started = time.monotonic()
        with self.bench() as bench:
            found = search(bench.measure, self.sleeper.bounds(), self.sleeper.slo(), progress=_say)
        return {**_found(found), "seconds": time.monotonic() - started}

    def analyzer(self, mode: str) -> Json:
        """Model Analyzer, on a repository with the same model."""
        folder = self.work / f"{self.name}-{mode}"
        shutil.rmtree(folder, ignore_errors=True)
        _repository(folder / "model_repository", self.sleeper)
        return self.tools.run(
            folder / "model_repository",
            folder,
            mode=mode,
            p99_ms=self.sleeper.p99_ms,
            within_s=60.0 * self.asked.minutes,
        ).json()

    def open(self, winner: Json | None) -> Json:
        """What Model Analyzer's winner holds when it is asked as ours is."""
        if winner is None:
            return {"throughput_per_s": 0.0}
        only = self.sleeper.bounds(
            max_batch_sizes=(winner["max_batch_size"],),
            instances=(winner["instances"],),
            queue_delays_us=(0,),
        )
        with self.bench() as bench:
            return _found(search(bench.measure, only, self.sleeper.slo(), progress=_say))

    def grid(self) -> Json:
        """Every configuration by itself; one that cannot beat the best so far is left early."""
        best: Json = {"throughput_per_s": 0.0}
        small = {"max_batch_sizes": (16, 32), "instances": (3, 4)} if self.asked.quick else {}
        bounds = self.sleeper.bounds(**small)
        with self.bench() as bench:
            for size in sorted(bounds.max_batch_sizes, reverse=True):
                for instances in sorted(bounds.instances, reverse=True):
                    for delay_us in bounds.queue_delays_us:
                        found = search(
                            bench.measure,
                            self.sleeper.bounds(
                                max_batch_sizes=(size,),
                                instances=(instances,),
                                queue_delays_us=(delay_us,),
                            ),
                            self.sleeper.slo(),
                            floor_per_s=best["throughput_per_s"],
                        )
                        best = max(best, _found(found), key=lambda one: one["throughput_per_s"])
        return best

    def again(self, parts: Json) -> Json:
        """Each winner five times more."""
        runs = {}
        with self.bench() as bench:
            for name, part in parts.items():
                config, load = _as_found(name, part)
                if config is None or load is None:
                    continue
                seeds = range(1, RERUNS + 1)
                loads = [load.model_copy(update={"seed": 7000 + seed}) for seed in seeds]
                measured = [bench.measure(config, one).measurement for one in loads]
                runs[name] = [
                    {
                        "requests": one.completed + one.failed,
                        "throughput_per_s": one.throughput_per_s,
                        "p99_ms": p99.value_ms if (p99 := one.percentile(0.99)) else None,
                        "invalid": list(one.invalid),
                        "missed": p99 is None or p99.value_ms > self.sleeper.p99_ms,
                    }
                    for one in measured
                ]
        return runs


def main() -> None:
    """Run the parts that are missing, then print the table."""
    asked = _asked()
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not asked.again else {}
    kept |= {
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "model_analyzer": VERSION,
        "models": kept.get("models", {}),
    }
    asked.work.mkdir(parents=True, exist_ok=True)
    install = find_triton(asked.work / "triton")
    tools = Analyzer.prepared(asked.work / "model_analyzer", install, program=asked.model_analyzer)
    print(f"about {25 if not asked.quick else 8} minutes for each of {', '.join(asked.models)}")
    for name in asked.models:
        course = Course(name, MODELS[name], kept, asked.work, install, tools, asked)
        found = {"search": course.part("search", course.search)}
        for mode in ("quick", "brute") if asked.full else ("quick",):
            found[mode] = course.part(mode, lambda mode=mode, at=course: at.analyzer(mode))
        theirs = found["quick"]["winner"]
        held = course.part("open", lambda at=course, theirs=theirs: at.open(theirs))
        grid = course.part("grid", course.grid) if not asked.no_grid else None
        again = course.part("again", lambda at=course, parts=found: at.again(parts))
        _table(name, found, again, grid)
        print(f"quick's winner in an open loop holds {held['throughput_per_s']:.0f}/s")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--model-analyzer", type=Path, help="its program; else it is installed")
    parser.add_argument("--minutes", type=float, default=20.0, help="for one run of it")
    parser.add_argument("--full", action="store_true", help="its brute mode too")
    parser.add_argument("--quick", action="store_true", help="a grid of the largest batches only")
    parser.add_argument("--no-grid", action="store_true", help="without the yardstick")
    parser.add_argument("--again", action="store_true", help="run parts that are there already")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "search_vs_ma")
    return parser.parse_args()


def _found(result: SearchResult) -> Json:
    chosen = result.chosen
    return {
        "measurements": len(result.measurements),
        "throughput_per_s": result.throughput_at_slo_per_s,
        "p99_ms": result.p99.value_ms if result.p99 else None,
        "winner": chosen.model_dump(mode="json") if chosen else None,
        "findings": [finding.reason for finding in result.findings],
    }


def _as_found(name: str, part: Json) -> tuple[ServingConfig | None, Load | ClosedLoad | None]:
    """The winner's configuration and its own kind of load, long enough for the requests."""
    winner = part["winner"]
    if winner is None:
        return None, None
    spare = 1.2 * REQUESTS
    if name == "search":
        rate = part["throughput_per_s"]
        return ServingConfig(**winner), Load(rate_per_s=rate, duration_s=spare / rate, seed=0)
    config = ServingConfig(
        max_batch_size=winner["max_batch_size"],
        max_queue_delay_us=0,
        instances=winner["instances"],
    )
    duration_s = spare / winner["throughput_per_s"]
    return config, ClosedLoad(clients=winner["clients"], duration_s=duration_s, seed=0)


def _repository(folder: Path, sleeper: Sleeper) -> None:
    model = folder / NAME
    (model / "1").mkdir(parents=True)
    shutil.copyfile(ROOT / "sleep_model" / "model.py", model / "1" / "model.py")
    parameters = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in sleeper.parameters().items()
    )
    (model / "config.pbtxt").write_text(_CONFIG + parameters)


def _say(at: SearchProgress) -> None:
    measured = at.measurement
    p99 = measured.percentile(0.99)
    print(
        f"  {at.done:2} {at.step:8} {measured.load} {measured.config}: "
        f"p99 {f'{p99.value_ms:.1f} ms' if p99 else 'unknown'}, {at.left} left "
        f"(about {at.left_s:.0f} s) {'; '.join(measured.invalid)}",
        flush=True,
    )


def _table(name: str, found: Json, again: Json, grid: Json | None) -> None:
    print(f"\n{name}, p99 <= {MODELS[name].p99_ms:g} ms")
    print(f"{'':8}{'measured':>9}{'seconds':>9}{'claims/s':>10}{'again/s':>9}{'missed':>8}  winner")
    for kind, part in found.items():
        runs = again.get(kind, [])
        rate = np.median([run["throughput_per_s"] for run in runs]) if runs else 0.0
        winner = part["winner"] or {}
        claims = part.get("throughput_per_s", winner.get("throughput_per_s", 0.0))
        missed = f"{sum(run['missed'] for run in runs)}/{len(runs)}"
        print(
            f"{kind:8}{part['measurements']:9}{part['seconds']:9.0f}{claims:10.0f}{rate:9.0f}"
            f"{missed:>8}  {winner.get('instances')} x batch {winner.get('max_batch_size')}"
        )
    if grid is not None:
        print(f"best confirmed point of the grid: {grid['throughput_per_s']:.0f}/s")


if __name__ == "__main__":
    main()
