"""Where a request's time goes in our runner: ``python benchmarks/runner_profile.py``.

A real Triton serves one engine through our runner in its Python backend, in closed loops, with one
process and with several that share the GPU, and with tensors that travel in the message, in system
or in CUDA shared memory. Of each it prints the rate, its share of the engine alone, and the
microseconds that a request takes of the path that one process works through batch after batch:

- *in*: Triton copies the request to where the runner's process sees it;
- *stub*: Triton's part of that process, which makes Python objects of requests, and back;
- *read*, *fill*, *compute*, *reply*: our runner's, *slot* being its wait for an earlier batch;
- *out*: Triton copies the answer from there, and sends it.

``cpu`` are microseconds of processor a request: of Triton, of its busiest thread, and of the
runner's processes. Without an engine it needs no GPU: one that computes nothing is served, and
``--row-us`` and ``--batch-us`` let it take time as a GPU does. On a GPU::

    python benchmarks/runner_profile.py --engine minilm-l6:torch_inductor-fp16 --store DIR
    python benchmarks/runner_profile.py --engine DIR/engines/DIGEST

The first form builds it, or takes it from the store. A case that begins after ``--limit-s`` is left
out, and that is said. Times of a batch are Triton's and the runner's own counters.
"""

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_report import Report, table
from runner_null import BUCKETS, INPUTS, OUTPUTS, null_files

from enginegate.candidate import Engine, TensorSpec
from enginegate.data import Tensors
from enginegate.engines import open_engine, serving
from enginegate.engines.engine_sweep import sweep_batches, sweep_sizes
from enginegate.engines.python_backend.pipeline import STAGES as PIPELINE_STAGES
from enginegate.engines.python_backend.serial import STAGES as SERIAL_STAGES
from enginegate.loadgen.traffic import Traffic, Transport, run_load
from enginegate.measurement import ClosedLoad, SharedMemory
from enginegate.measuring.measure import throughput
from enginegate.serving import ServingConfig
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, model_config
from enginegate.triton.install import find_triton
from enginegate.triton.metrics import read_metrics
from enginegate.triton.server import Server, start
from enginegate.triton.types import Statistics

_MODEL = "profiled"
_TRANSPORTS: tuple[SharedMemory, ...] = ("system", "cuda", "none")
_ANSWERS = ("auto", "returned", "sent")
_SPARE_BATCHES = 3  # that wait in Triton, so that no process waits for requests
_LOAD_S, _SWEEP_S = 300.0, 12.0
_COLUMNS = (
    *(
        "transport",
        "cuda_inputs",
        "processes",
        "answers",
        "rows_per_s",
        "share",
        "mean_batch",
        "p50_ms",
    ),
    *("in_us", "stub_us", "read_us", "slot_us", "fill_us", "compute_us", "reply_us", "out_us"),
    *("path_us", "cpu_triton_us", "cpu_triton_thread_us", "cpu_runner_us", "cpu_runner_thread_us"),
)


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        files: name in the version folder -> file.
        alone: batch size -> rows a second without a server; empty: it takes no time.
        parameters: of the model's configuration.
        imitated: the GPU is.
        gpu: it is for a GPU; else processes are Triton's instances.
    """

    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: int
    alone: Mapping[int, float]
    parameters: Mapping[str, str] = field(default_factory=dict)
    imitated: bool = False
    gpu: bool = True

    @property
    def alone_per_s(self) -> float | None:
        """Rows a second of the engine without a server; None: it takes no time."""
        return max(self.alone.values(), default=None)

    def config(self, case: "Case", delay_us: int) -> Config:
        """Triton's configuration of a case."""
        config = model_config(
            name=_MODEL,
            inputs=self.inputs,
            outputs=self.outputs,
            serving=ServingConfig(
                max_batch_size=self.largest,
                max_queue_delay_us=delay_us,
                instances=case.streams if self.gpu else case.processes,
                processes=case.processes if self.gpu else 1,
                gpus=(0,) if self.gpu and not self.imitated else (),
            ),
            backend="python",
            parameters={**self.parameters, **case.parameters},
            versions=(1,),
            gpu=self.gpu,
        )
        if self.imitated:
            group = config.message.instance_group[0]
            group.kind = group.KIND_CPU
        return config


@dataclass(frozen=True)
class Case:
    """One way to serve it and to send to it."""

    transport: SharedMemory
    processes: int
    answers: str
    streams: int
    rows: int
    cuda_inputs: str = "device"

    @property
    def parameters(self) -> dict[str, str]:
        """Of the model's configuration."""
        given = {} if self.answers == "auto" else {"answers": self.answers}
        if self.cuda_inputs == "host":
            given["FORCE_CPU_ONLY_INPUT_TENSORS"] = "yes"
        return given


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    report = Report(given.output, limit_s=given.limit_s)
    with tempfile.TemporaryDirectory(prefix="enginegate-runner-") as name:
        folder = Path(name)
        served = _engine(given) if given.engine else _nothing(given, folder / "nothing")
        head = {"part": "alone", "engine": given.engine or "computes nothing"}
        report.part(head, lambda row: row.update(rows_per_s=dict(served.alone)))
        version = folder / "repository" / _MODEL / "1"
        version.mkdir(parents=True)
        for file_name, source in served.files.items():
            shutil.copyfile(source, version / file_name)
        install = find_triton(folder / "triton")
        with start(install, folder / "repository", folder=folder / "server") as server:
            for case in _cases(given):
                report.part(asdict(case), partial(_measure, server, served, case, given))
    shown = [row for row in report.rows if "processes" in row]
    table(list(_COLUMNS), [[row.get(column) for column in _COLUMNS] for row in shown])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="", help="NETWORK:KIND-PRECISION, or an engine's path")
    parser.add_argument("--store", type=Path, help="keeps models and engines from run to run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=8, help="of a request")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="of each process")
    parser.add_argument("--transports", nargs="+", choices=_TRANSPORTS, default=None)
    parser.add_argument("--answers", nargs="+", choices=_ANSWERS, default=["auto"])
    parser.add_argument(
        "--cuda-inputs",
        nargs="+",
        choices=("device", "host"),
        default=["device"],
        help="where the runner gets inputs in CUDA shared memory",
    )
    parser.add_argument("--clients", type=int, default=0, help="0: a few batches beside those run")
    parser.add_argument("--senders", type=int, default=0, help="processes; 0: as many as needed")
    parser.add_argument("--delay-us", type=int, default=500, help="Triton's queue delay")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--limit-s", type=float, default=170.0, help="of the whole run")
    parser.add_argument("--output", type=Path, default=Path("runner_profile.json"))
    parser.add_argument("--largest", type=int, default=128, help="batch")
    parser.add_argument("--row-us", type=float, default=0.0, help="of the engine that does nothing")
    parser.add_argument("--batch-us", type=float, default=0.0, help="likewise")
    given = parser.parse_args()
    given.transports = given.transports or (
        [*_TRANSPORTS] if given.engine and given.device == "cuda" else ["system"]
    )
    return given


def _cases(given: argparse.Namespace) -> Iterator[Case]:
    """The usual transport first, so that a run that is cut short has what matters."""
    for processes, answers, streams, transport in itertools.product(
        given.processes, given.answers, given.streams, given.transports
    ):
        for where in given.cuda_inputs if transport == "cuda" else ("device",):
            yield Case(transport, processes, answers, streams, given.rows, where)


def _nothing(given: argparse.Namespace, folder: Path) -> Served:
    took_s = {size: (given.batch_us + given.row_us * size) / 1e6 for size in BUCKETS}
    return Served(
        files=null_files(folder),
        inputs=INPUTS,
        outputs=OUTPUTS,
        largest=BUCKETS[-1],
        alone={size: size / each_s for size, each_s in took_s.items() if each_s > 0.0},
        parameters={"row_s": str(given.row_us / 1e6), "batch_s": str(given.batch_us / 1e6)},
        imitated=True,
    )


def _engine(given: argparse.Namespace) -> Served:
    engine, folder = _found(given)
    with open_engine(engine, folder) as runner:
        sweep = sweep_batches(
            runner.bound,
            lambda count: _rows(engine.inputs, count),
            sweep_sizes(given.largest),
            limit_s=_SWEEP_S,
        )
    files = serving(engine, folder, backend="python")
    return Served(
        files=files.files,
        inputs=engine.inputs,
        outputs=engine.outputs,
        largest=given.largest,
        alone={speed.batch_size: speed.samples_per_s for speed in sweep.batches},
        parameters=files.settings.parameters,
        gpu=files.gpu,
    )


def _found(given: argparse.Namespace) -> tuple[Engine, Path]:
    """The engine at a path, or built (or found in the store) for a network of the benchmarks."""
    path = Path(given.engine)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        return Engine.read(folder / "manifest.json"), folder
    from gpu_networks import subject  # noqa: PLC0415 - needs PyTorch

    network, _, candidate = given.engine.partition(":")
    store = given.store or Path(tempfile.mkdtemp(prefix="enginegate-gpu-"))
    made = subject(network, store, largest=given.largest)
    built = made.build(candidate, store, given.device, _LOAD_S)
    return built.value, built.folder


def _rows(specs: tuple[TensorSpec, ...], count: int) -> Tensors:
    """Samples that every network takes: small whole numbers are tokens, bytes, and a mask."""
    random = np.random.default_rng(0)
    shapes = {spec.name: (count, *(max(axis, 1) for axis in spec.shape[1:])) for spec in specs}
    return {
        spec.name: random.integers(0, 2, shapes[spec.name]).astype(spec.dtype)
        if np.dtype(spec.dtype).kind in "iub"
        else random.standard_normal(shapes[spec.name]).astype(spec.dtype)
        for spec in specs
    }


def _measure(
    server: Server, served: Served, case: Case, given: argparse.Namespace, row: dict[str, Any]
) -> None:
    requests_a_batch = max(1, served.largest // case.rows)
    clients = given.clients or requests_a_batch * (case.processes + _SPARE_BATCHES)
    traffic = Traffic.of(_MODEL, [_rows(served.inputs, case.rows) for _ in range(clients)])
    sending = Transport(shared_memory=case.transport, processes=given.senders)
    load = ClosedLoad(clients=clients, duration_s=given.seconds, seed=1)
    with server.client(timeout_s=_LOAD_S) as client:
        started_s = time.monotonic()
        _serve(client, served.config(case, given.delay_us))
        row["load_s"] = round(time.monotonic() - started_s, 1)
        # The first requests find caches cold, and shared memory too small.
        run_load(server.grpc, traffic, load.model_copy(update={"duration_s": 0.5}), sending=sending)
        before, stages, busy = client.statistics(_MODEL), _stages(server), _busy(server)
        result = run_load(server.grpc, traffic, load, sending=sending)
        worked = _busy(server)
        answered = len(result.latency_s) - result.failed
        counted = client.statistics_since(_MODEL, before, answers=answered)
        time.sleep(0.2)  # the runner writes its counters every 0.05 s
        after = _stages(server)
    row["clients"] = clients
    row["failed"] = result.failed
    row["requests_per_s"] = throughput(result)
    row["rows_per_s"] = throughput(result) * case.rows
    row["share"] = row["rows_per_s"] / served.alone_per_s if served.alone_per_s else None
    row["p50_ms"] = float(np.median(result.latency_s)) * 1e3
    row["sender_share"] = result.cpu_share
    row |= _path(counted, {name: after[name] - stages.get(name, 0.0) for name in after})
    row |= _processor(busy, worked, server.pid or 0, max(counted.requests, 1))


def _serve(client: TritonClient, config: Config) -> None:
    """Load it unless it is in force: only the transport changed."""
    try:
        now = client.config(_MODEL)
        same = now.serving == config.serving and now.parameters == config.parameters
    except Exception:  # noqa: BLE001 - nothing was loaded so far
        same = False
    if not same:
        client.load(_MODEL, config, timeout_s=_LOAD_S)


def _path(counted: Statistics, stages: Mapping[str, float]) -> dict[str, float]:
    """Microseconds that a request takes of one process's path, part by part.

    Triton's counters have a batch's time for each of its requests.
    """
    requests_a_batch = counted.requests / max(counted.executions, 1)

    def share(nanoseconds: int) -> float:
        return nanoseconds / max(counted.requests, 1) / requests_a_batch / 1e3

    infer_us = share(counted.compute_infer_ns)
    found = {"mean_batch": counted.inferences / max(counted.executions, 1)}
    found["in_us"], found["out_us"] = (
        share(counted.compute_input_ns),
        share(counted.compute_output_ns),
    )
    found["execute_us"], found["path_us"] = infer_us, infer_us + found["in_us"] + found["out_us"]
    done = stages.get("requests", 0.0)
    if done:
        ours = {
            f"{name}_us": stages[name] / done * 1e6
            for name in {**dict.fromkeys(PIPELINE_STAGES), **dict.fromkeys(SERIAL_STAGES)}
            if name in stages
        }
        found |= ours
        waited = stages.get("pending", 0.0) > 0.0
        # Where answers are sent later, most of this does not hold up the next batch.
        found["stub_us"] = float("nan") if waited else infer_us - sum(ours.values())
    return found


def _stages(server: Server) -> dict[str, float]:
    """The runner's counters, summed over its processes."""
    found: dict[str, float] = {}
    for series in read_metrics(str(server.metrics)).matching("enginegate_runner", model=_MODEL):
        name = series.labels["counted"]
        found[name] = found.get(name, 0.0) + series.value
    return found


def _busy(server: Server) -> dict[tuple[int, int], float]:
    """Seconds of processor by process and thread, of Triton and the processes it started."""
    found = {}
    for process in _family(server.pid or 0):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            try:
                nanoseconds = int((thread / "schedstat").read_text().split()[0])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            found[process, int(thread.name)] = nanoseconds / 1e9
    return found


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            found += _family(int(child))
    return found


def _processor(
    before: Mapping[tuple[int, int], float],
    after: Mapping[tuple[int, int], float],
    triton: int,
    requests: int,
) -> dict[str, float]:
    """Microseconds of processor a request: Triton's, its runners', and of the busiest thread."""
    spent = {key: after[key] - before.get(key, 0.0) for key in after}
    groups = {
        "triton": [seconds for (process, _), seconds in spent.items() if process == triton],
        "runner": [seconds for (process, _), seconds in spent.items() if process != triton],
    }
    found = {}
    for name, seconds in groups.items():
        found[f"cpu_{name}_us"] = sum(seconds) / requests * 1e6
        found[f"cpu_{name}_thread_us"] = max(seconds, default=0.0) / requests * 1e6
    return found


if __name__ == "__main__":
    main()
