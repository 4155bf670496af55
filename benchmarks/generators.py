"""Our load generator against perf_analyzer: ``python benchmarks/generators.py``.

The same server, model, shared memory and load for both: closed loops of so many requests in flight,
and open loops at so many requests a second, a round of one driver beside a round of the other. The
model does nothing (Triton's Python backend; ``--backend onnxruntime`` for a native one, where the
server has it), so that what is measured is the sender and the server's own front end; or name a
model that is served already with ``--server``, ``--http`` and ``--model``.

perf_analyzer is named by PERF_ANALYZER (the wheel of tritonclient 2.51.0 has it); without it ours
is measured alone. Prints a table, and writes it as JSON.
"""

import argparse
import json
import math
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from onnx import TensorProto, helper

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.benchmark.generator_baseline import do_nothing
from enginegate.candidate import TensorSpec
from enginegate.data import Tensors
from enginegate.errors import EnginegateError
from enginegate.loadgen.perf_analyzer import find_perf_analyzer, run_perf_analyzer
from enginegate.loadgen.traffic import LoadResult, Traffic, Transport, run_load
from enginegate.measurement import ClosedLoad, Load, SharedMemory, WireProtocol
from enginegate.measuring.measure import throughput
from enginegate.measuring.p99 import nearest_rank
from enginegate.serving import ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import connect, start

_NAME, _BYTES, _SAMPLES = "enginegate_null", 64, 16
_LARGEST_BATCH = 128
_LATE_MS = 2.0


@dataclass(frozen=True)
class Target:
    """A model that answers, and requests for it."""

    grpc: str
    http: str | None
    model: str
    samples: list[Tensors]


@dataclass(frozen=True)
class Row:
    """One driver under one load.

    Attributes:
        load: requests in flight of a closed loop, or requests a second of an open one.
        answered_per_s: good answers after the warm-up.
        late_p99_ms: send time minus schedule; 0 in a closed loop.
        cpu_us: processor time of the sender for each request.
    """

    driver: str
    protocol: WireProtocol
    shared_memory: SharedMemory
    rows: int
    kind: str
    load: float
    answered_per_s: float = 0.0
    failed: int = 0
    late_p99_ms: float = 0.0
    p50_ms: float = math.inf
    p99_ms: float = math.inf
    cpu_us: float = 0.0
    processes: int = 0
    load_average: float = 0.0
    problem: str = ""


def main() -> None:
    """Measure, print, and write the results."""
    asked = _arguments()
    program = find_perf_analyzer()
    drivers = [name for name in ("ours", "perf_analyzer") if name == "ours" or program]
    rows: list[Row] = []
    with _target(asked) as target:
        for protocol in asked.protocols.split(","):
            for kind, load in _loads(asked):
                for _ in range(asked.rounds):
                    for driver in drivers:
                        asked_row = Row(
                            driver, protocol, asked.shared_memory, asked.rows, kind, load
                        )
                        row = _measured(target, asked_row, asked.seconds, asked.processes)
                        rows.append(row)
                        print(_line(row), flush=True)
    print(f"\n{_table(rows)}")
    found = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "model": target.model,
        "rows": [asdict(row) for row in rows],
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nWritten: {asked.output}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rates", default="1000,5000,10000,20000,33000", help="of open loops")
    parser.add_argument("--clients", default="1,16,64,256,512", help="of closed loops")
    parser.add_argument("--protocols", default="grpc,http")
    parser.add_argument("--shared-memory", default="system", choices=["none", "system", "cuda"])
    parser.add_argument("--rows", type=int, default=1, help="of each request")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=0, help="of ours; 0: by load and cores")
    parser.add_argument("--instances", type=int, default=2, help="of the do-nothing model")
    parser.add_argument("--backend", default="python", choices=["python", "onnxruntime"])
    parser.add_argument("--server", default="", help="gRPC HOST:PORT of one that runs already")
    parser.add_argument("--http", default="", help="its HTTP HOST:PORT")
    parser.add_argument("--model", default="", help="that it serves")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/generators.json"))
    return parser.parse_args()


def _loads(asked: argparse.Namespace) -> Iterator[tuple[str, float]]:
    yield from (("closed", float(text)) for text in asked.clients.split(",") if text)
    yield from (("open", float(text)) for text in asked.rates.split(",") if text)


@contextmanager
def _target(asked: argparse.Namespace) -> Iterator[Target]:
    source = np.random.default_rng(0)
    if asked.server:
        with connect(asked.server).client() as client:
            inputs = client.config(asked.model).inputs
        samples = [_random(inputs, asked.rows, source) for _ in range(_SAMPLES)]
        yield Target(asked.server, asked.http or None, asked.model, samples)
        return
    folder = Path(tempfile.mkdtemp(prefix="enginegate-generators-"))
    (folder / "repository").mkdir()
    model = do_nothing(_NAME) if asked.backend == "python" else _identity(folder)
    serving = ServingConfig(
        max_batch_size=max(_LARGEST_BATCH, asked.rows),
        max_queue_delay_us=0,
        instances=asked.instances,
    )
    with (
        start(find_triton(folder), folder / "repository", folder=folder) as server,
        deploy(server, model) as deployment,
    ):
        deployment.serve(serving)
        samples = [
            {"x": source.integers(256, size=(asked.rows, _BYTES)).astype(np.uint8)}
            for _ in range(_SAMPLES)
        ]
        yield Target(server.grpc, server.http, _NAME, samples)


def _random(inputs: tuple[TensorSpec, ...], rows: int, source: np.random.Generator) -> Tensors:
    shapes = {spec.name: (rows, *(max(size, 1) for size in spec.shape[1:])) for spec in inputs}
    return {
        spec.name: source.integers(2, size=shapes[spec.name]).astype(spec.dtype) for spec in inputs
    }


def _identity(folder: Path) -> ServedModel:
    """A graph that returns its input, for a native backend."""
    shape: list[int | str | None] = ["batch", _BYTES]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, shape)],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), folder / "model.onnx")
    spec = TensorSpec(name="x", dtype="uint8", shape=(-1, _BYTES))
    return ServedModel(
        name=_NAME,
        backend="onnxruntime",
        inputs=(spec,),
        outputs=(spec.model_copy(update={"name": "y"}),),
        files={"model.onnx": folder / "model.onnx"},
    )


def _measured(target: Target, row: Row, seconds: float, processes: int) -> Row:
    load: Load | ClosedLoad = (
        ClosedLoad(clients=int(row.load), duration_s=seconds, seed=1)
        if row.kind == "closed"
        else Load(rate_per_s=row.load, duration_s=seconds, seed=1)
    )
    address = (target.http or "") if row.protocol == "http" else target.grpc
    traffic = Traffic.of(target.model, target.samples)
    sending = Transport(row.protocol, row.shared_memory, processes, target.grpc)
    used_s = _used_s()
    try:
        if row.driver == "ours":
            result = run_load(address, traffic, load, sending=sending)
            cpu_s = _own_s(result)
        else:
            result = run_perf_analyzer(
                address,
                traffic,
                load,
                protocol=row.protocol,
                shared_memory=row.shared_memory,
            )
            cpu_s = _used_s() - used_s
    except EnginegateError as error:
        return replace(row, problem=str(error)[-300:])
    if not np.isfinite(result.latency_s).any():
        return replace(row, problem=f"no answer: {result.errors}")
    return replace(
        row,
        answered_per_s=throughput(result),
        failed=result.failed,
        late_p99_ms=nearest_rank(result.late_s) * 1e3,
        p50_ms=float(np.median(result.latency_s)) * 1e3,
        p99_ms=nearest_rank(result.latency_s) * 1e3,
        cpu_us=cpu_s * 1e6 / len(result.due_s),
        processes=result.generator.processes,
        load_average=os.getloadavg()[0],
    )


def _own_s(result: LoadResult) -> float:
    """Processor time of our sending processes, as if all were as busy as the busiest."""
    return result.cpu_share * result.lasted_s * result.generator.processes


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(row: Row) -> str:
    return (
        f"{row.driver:13} {row.protocol} {row.kind:6} {row.load:7,.0f}: "
        f"{row.answered_per_s:8,.0f}/s, {row.failed} failed, late {row.late_p99_ms:.2f} ms, p50 "
        f"{row.p50_ms:.2f} p99 {row.p99_ms:.2f} ms, {row.cpu_us:.0f} us a request in "
        f"{row.processes}, load average {row.load_average:.1f} {row.problem}"
    )


def _table(rows: list[Row]) -> str:
    """Medians over the rounds, ours beside perf_analyzer's."""
    head = (
        "| protocol | load | ours/s | perf_analyzer/s | ours over it | late p99, ms | < 2 ms "
        "| p99, ms | perf_analyzer p99, ms | us a request | perf_analyzer us |"
    )
    lines = [head, "|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|"]
    for protocol, kind, load in dict.fromkeys((r.protocol, r.kind, r.load) for r in rows):
        here = [r for r in rows if (r.protocol, r.kind, r.load) == (protocol, kind, load)]
        ours = [r for r in here if r.driver == "ours"]
        theirs = [r for r in here if r.driver != "ours" and not r.problem]
        mine = median(r.answered_per_s for r in ours)
        its = median(r.answered_per_s for r in theirs) if theirs else None
        late_ms = median(r.late_p99_ms for r in ours)
        what = f"{load:,.0f} in flight" if kind == "closed" else f"{load:,.0f}/s"
        cells = [
            protocol,
            what,
            f"{mine:,.0f}",
            f"{its:,.0f}" if its is not None else "n/a",
            f"{mine / its:.2f}" if its else "n/a",
            "" if kind == "closed" else f"{late_ms:.2f}",
            "" if kind == "closed" else ("yes" if late_ms < _LATE_MS else "no"),
            f"{median(r.p99_ms for r in ours):.2f}",
            f"{median(r.p99_ms for r in theirs):.2f}" if theirs else "n/a",
            f"{median(r.cpu_us for r in ours):.0f}",
            f"{median(r.cpu_us for r in theirs):.0f}" if theirs else "n/a",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
