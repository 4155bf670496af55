"""Judging on clusters: time per million samples, and memory, up to 10,000,000 paired results.

N samples of 10 classes go through FP32 twice and through a candidate, in chunks, on one or two
worker processes of a local Dask or Ray cluster (or in threads), as ``tasks/validate.py`` runs them;
then the whole is judged here. Each measurement is made in a process of its own, on a cluster that
runs already.

``python benchmarks/clusters.py`` prints a table and writes results/clusters.json;
``--samples 100000 --runner dask`` measures less.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prefect import flow  # noqa: E402

SIZES = (1_000_000, 10_000_000)
LIMIT_GIB = 2.0
FEATURES, CLASSES, SITES, CHUNK = 16, 10, 8, 65_536
_EVERY_S = 0.2


class Memory:
    """The largest anonymous memory of this process, and of any worker, while it is watched."""

    def __init__(self) -> None:
        """Watch from now on."""
        self.own_gib = self.worker_gib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.own_gib = max(self.own_gib, _anonymous_gib(os.getpid()))
            for worker in _workers():
                self.worker_gib = max(self.worker_gib, _anonymous_gib(worker.pid))


@dataclass
class Judging:
    """What one measurement judges, and on which workers.

    Attributes:
        seconds: of each part, and the largest memory in GiB, once it has run.
    """

    runner: str
    workers: int
    samples: int
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Judge."""
        from enginegate.policy.gates import Evaluation  # noqa: PLC0415
        from tasks.validate import _run  # noqa: PLC0415
        from validation.chunks import Chunk, chunks_of, gather  # noqa: PLC0415
        from validation.expectations import judge_comparison  # noqa: PLC0415
        from validation.outputs import OutputSpec  # noqa: PLC0415

        asked, scratch = OutputSpec(), ROOT / ".enginegate"
        scratch.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            root = Path(name)
            source, engine = _model(root)
            data = _data(root, self.samples)

            def make(rows: Any, at: int) -> Chunk:
                return Chunk(rows, at, "evaluation", (asked,), source, root / "outputs")

            chunks = tuple(chunks_of(data, CHUNK, make))
            with cluster(self.runner, self.workers) as address:
                how = Evaluation(
                    runner=self.runner,  # type: ignore[arg-type]
                    workers=self.workers,
                    cluster=address,
                )
                _run(how, chunks[:2], None, root / "warm", "warm-up")
                memory = Memory()
                with self.timed("reference"):
                    _run(how, chunks, None, root / "noise", "FP32")
                with self.timed("candidate"):
                    _run(how, chunks, engine, root / "columns", "candidate")
            with self.timed("judge"):
                compared = gather(root / "columns", chunks, data, 0)
                judge_comparison(compared, _gates(), asked)
            memory.stop()
        self.seconds["own_gib"], self.seconds["worker_gib"] = memory.own_gib, memory.worker_gib

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long a part takes, and the processor's time here and in the workers."""
        started, own, theirs = time.perf_counter(), time.process_time(), _workers_cpu_s()
        yield
        self.seconds[name] = time.perf_counter() - started
        self.seconds[f"{name}_own_cpu"] = time.process_time() - own
        self.seconds[f"{name}_workers_cpu"] = _workers_cpu_s() - theirs


# A flow's parameters, and what it closes over, travel with every task to another process.
_judging: list[Judging] = []


@flow(persist_result=False)
def judge() -> None:
    """Run what was put down above, as a flow: Prefect's workers need one."""
    _judging[0].run()


def measure(runner: str, workers: int, samples: int) -> dict[str, float]:
    """Seconds of each part, and the largest memory, of one run."""
    _judging[:] = [Judging(runner, workers, samples)]
    judge()
    return _judging[0].seconds


def _gates() -> Any:
    from enginegate.policy.gates import Gates  # noqa: PLC0415

    return Gates(
        confidence=0.95,
        min_samples=400,
        max_accuracy_loss=0.01,
        min_slice_samples=60,
        max_slice_accuracy_loss=0.08,
        min_top1_agreement=0.97,
        max_kl_p99_nats=0.1,
        max_abs_error=10.0,
        max_p99_rel_error=0.5,
        min_sqnr_db=20.0,
        min_cosine_p1=0.9,
    )


@contextmanager
def cluster(runner: str, workers: int) -> Iterator[str | None]:
    """A running cluster's address; None where this process is known to it, and for threads."""
    if runner == "dask":
        from distributed import LocalCluster  # noqa: PLC0415

        with LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit="2GiB"
        ) as running:
            yield running.scheduler_address
    elif runner == "ray":
        import ray  # noqa: PLC0415

        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            runtime_env=paths,
            object_store_memory=1 << 30,
        )
        yield None
        ray.shutdown()
    else:
        yield None


def _model(root: Path) -> tuple[Any, Any]:
    """One dense layer from 16 numbers to 10 classes, and its ONNX Runtime engine."""
    import onnx  # noqa: PLC0415
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    from enginegate.candidate import (  # noqa: PLC0415
        Candidate,
        FileDigest,
        OnnxModel,
        Precision,
        TensorSpec,
    )
    from enginegate.content_store import ContentFolder  # noqa: PLC0415
    from enginegate.engines import build_engine, plan_engine  # noqa: PLC0415
    from enginegate.policy import read_policy  # noqa: PLC0415

    weights = np.random.default_rng(1).normal(size=(FEATURES, CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["logits"], "dense")],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", FEATURES))],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", CLASSES))],
        [numpy_helper.from_array(weights, "w")],
    )
    folder = root / "onnx"
    folder.mkdir()
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "model.onnx")
    model = OnnxModel(
        source="benchmark",
        source_sha256="0" * 64,
        file=FileDigest.of(folder / "model.onnx"),
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, FEATURES)),),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=(-1, CLASSES)),),
        opset=17,
        ir_version=8,
        producer="benchmark",
        exporter="benchmark",
        parity_max_abs_error=None,
        parity_tolerance=None,
        parity_samples=0,
        proven_batch_sizes=(1,),
    )
    source = ContentFolder(model, folder, reused=False)
    tables = read_policy(ROOT / "policies" / "digits.toml").engine_tables
    candidate = Candidate(kind="onnxruntime", precision=Precision.FP32)
    plan = plan_engine(source, candidate, tables=tables, calibration=None)
    return source, build_engine(plan, root / "engines")


def _data(root: Path, samples: int) -> Any:
    """Memory-mapped inputs, labels, numbers as ids and eight sites."""
    from enginegate.data import DataSet  # noqa: PLC0415

    rng = np.random.default_rng(2)
    inputs = _mapped(root / "x.npy", np.dtype(np.float32), (samples, FEATURES))
    ids = _mapped(root / "ids.npy", np.dtype("<U8"), (samples,))
    sites = _mapped(root / "sites.npy", np.dtype("<U2"), (samples,))
    for start in range(0, samples, CHUNK):
        rows = slice(start, min(start + CHUNK, samples))
        count = rows.stop - start
        inputs[rows] = rng.normal(size=(count, FEATURES))
        ids[rows] = np.arange(start, rows.stop).astype("<U8")
        sites[rows] = np.array([f"s{n}" for n in range(SITES)])[rng.integers(0, SITES, count)]
    labels = rng.integers(0, CLASSES, samples)
    return DataSet("synthetic", {"x": inputs}, labels, ids, {"site": sites})


def _mapped(path: Path, kind: Any, shape: tuple[int, ...]) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)


def _workers() -> Iterator[Any]:
    """Processes of Dask's and Ray's workers below this one."""
    import psutil  # noqa: PLC0415

    for child in psutil.Process().children(recursive=True):
        try:
            name = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "spawn_main" in name or "default_worker" in name or name.startswith("ray::"):
            yield child


def _workers_cpu_s() -> float:
    """Processor seconds of all workers so far."""
    times = [worker.cpu_times() for worker in _workers()]
    return sum(each.user + each.system for each in times)


def _anonymous_gib(process: int) -> float:
    """Memory that no file backs; the system takes the pages of files back when it is short."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon")), "RssAnon: 0")
    return int(line.split()[1]) / 2**20


def main() -> None:
    """Measure each combination in a process of its own; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--runner", nargs="+", default=["threads", "dask", "ray"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "clusters.json"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        # By its name, so that workers in other processes find the flow.
        own = importlib.import_module("benchmarks.clusters")
        found = own.measure(options.runner[0], options.workers[0], options.samples[0])
        print(json.dumps(found))
        return
    results = [
        _measured(runner, workers, samples)
        for runner in options.runner
        for samples in options.samples
        for workers in options.workers
    ]
    target = options.output
    about = {"python": platform.python_version(), "cores": os.cpu_count()}
    record = {"schema_version": 1, "limit_gib": LIMIT_GIB, "environment": about, "results": results}
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {target}")


def _measured(runner: str, workers: int, samples: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", "--runner", runner]
    command += ["--workers", str(workers), "--samples", str(samples)]
    quiet = os.environ | {"PREFECT_LOGGING_LEVEL": "ERROR", "DO_NOT_TRACK": "1"}
    with tempfile.TemporaryDirectory() as home:
        own = quiet | {
            "PREFECT_HOME": home,
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        }
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=own)  # noqa: S603
    if ran.returncode:
        sys.exit(ran.stderr)
    found = json.loads(ran.stdout.splitlines()[-1])
    each = 1_000_000 / samples
    print(
        f"{runner:>8} {workers} workers {samples:>11,} samples, per million: "
        f"FP32 twice {found['reference'] * each:6.1f} s, "
        f"candidate {found['candidate'] * each:6.1f} s, "
        f"judge {found['judge'] * each:5.1f} s; largest: worker {found['worker_gib']:.2f} GiB, "
        f"this process {found['own_gib']:.2f} GiB",
        flush=True,
    )
    return {"runner": runner, "workers": workers, "samples": samples, **found}


if __name__ == "__main__":
    main()
