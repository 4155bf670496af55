"""How long judging takes, and in how much memory: up to 1,000,000 samples of 1,000 classes.

Two claims are measured, each in a process of its own, so that peaks do not mix:

- *judge*: paired results of N samples through the whole judging path: intervals, 40 slices and two
  discovered traits as one family, macro F1 by bootstrap, Great Expectations, its page;
- *stream*: N samples of 1,000 classes through a real ONNX Runtime engine and FP32, in chunks, to
  the same table of small columns. All outputs together would be 8 GB for a million samples.

``python benchmarks/validation.py`` prints a table and writes results/validation.json;
``--samples 10000 100000`` measures less.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from enginegate.candidate import (  # noqa: E402
    Candidate,
    FileDigest,
    OnnxModel,
    Precision,
    TensorSpec,
)
from enginegate.data import DataSet  # noqa: E402
from enginegate.policy.gates import Gates, Metric  # noqa: E402
from validation.agreement import OutputComparison  # noqa: E402
from validation.outputs import OutputSpec  # noqa: E402
from validation.score import BITS  # noqa: E402

SIZES = (10_000, 100_000, 1_000_000)
CLASSES, SLICES = 1000, 40
LIMIT_GIB = 2.0
_ASKED = OutputSpec(metrics={"f1": Metric(kind="macro_f1")}, traits=("confidence", "input_norm"))
_GATES = Gates(
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
    max_metric_loss={"f1": 0.02},
)


def judge(samples: int) -> dict[str, Any]:
    """Judge synthetic results; loading Great Expectations, at the first judgement, is not timed."""
    from validation.expectations import judge_comparison as judged  # noqa: PLC0415 - it loads for seconds

    judged(_results(500), _GATES, _ASKED)
    comparison = _results(samples)
    before, started = _rss_gib(), time.perf_counter()
    found = judged(comparison, _GATES, _ASKED)
    elapsed = time.perf_counter() - started
    return {
        "seconds": elapsed,
        "findings": len(found.findings),
        "table_gib": before,
        "peak_gib": _peak_gib(),
    }


def stream(samples: int) -> dict[str, Any]:
    """Run a 1,000-class engine against FP32 in chunks, and gather the columns."""
    from enginegate.content_store import ContentFolder  # noqa: PLC0415
    from enginegate.engines import build_engine, plan_engine  # noqa: PLC0415
    from enginegate.policy import read_policy  # noqa: PLC0415
    from validation.chunks import (  # noqa: PLC0415
        Chunk,
        chunks_of,
        compare_chunk,
        gather,
        observe_chunk,
    )

    with tempfile.TemporaryDirectory(dir=ROOT / ".enginegate") as scratch:
        root = Path(scratch)
        source = ContentFolder(_onnx(root / "onnx"), root / "onnx", reused=False)
        engine = build_engine(
            plan_engine(
                source,
                Candidate(kind="onnxruntime", precision=Precision.FP32),
                tables=read_policy(ROOT / "policies" / "digits.toml").engine_tables,
                calibration=None,
            ),
            root / "engines",
        )
        data = _inputs(root / "data", samples)

        def chunk(rows: DataSet, start: int) -> Chunk:
            return Chunk(rows, start, "evaluation", (_ASKED,), source, root / "outputs")

        chunks = chunks_of(data, 16384, chunk)
        started = time.perf_counter()
        for each in chunks:
            observe_chunk(each, root / "noise")
        reference_s = time.perf_counter() - started
        for each in chunks:
            compare_chunk(each, engine, root / "columns")
        seconds = time.perf_counter() - started
        gathered = gather(root / "columns", chunks, data, 0)
        stored = sum(f.stat().st_size for f in (root / "outputs").rglob("*") if f.is_file())
    return {
        "seconds": seconds,
        "reference_seconds": reference_s,
        "rows": len(gathered),
        "reference_on_disk_gib": stored / 2**30,
        "peak_gib": _peak_gib(),
    }


def _results(samples: int) -> OutputComparison:
    """What a sound int8 candidate looks like: one answer in a hundred differs."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, samples)
    wrong = rng.integers(0, CLASSES, samples)
    reference = np.where(rng.random(samples) < 0.8, labels, wrong)  # noqa: PLR2004
    candidate = np.where(rng.random(samples) < 0.99, reference, wrong)  # noqa: PLR2004
    noise = rng.exponential(1e-3, samples)
    power = np.empty(samples, dtype=np.complex128)
    power.real, power.imag = 1.0 + rng.random(samples), noise
    sites = np.array([f"site-{number}" for number in range(SLICES)])
    return OutputComparison(
        scope="evaluation",
        ids=np.arange(samples).astype(np.str_),
        slices={"site": sites[rng.integers(0, SLICES, samples)]},
        top1_reference=reference,
        top1_candidate=candidate,
        correct_reference=reference == labels,
        correct_candidate=candidate == labels,
        kl_nats=noise,
        max_abs_error=noise * 10.0,
        nonfinite=np.zeros(samples, dtype=np.bool_),
        rel_error=noise,
        power=power,
        cosine=1.0 - noise,
        scores={"f1": (labels << 2 * BITS) | (reference << BITS) | candidate},
        traits={"confidence": rng.random(samples), "input_norm": rng.random(samples)},
    )


def _onnx(folder: Path) -> OnnxModel:
    """One dense layer from 64 numbers to 1,000 classes: outputs are what costs memory."""
    import onnx  # noqa: PLC0415
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    weights = np.random.default_rng(1).normal(size=(64, CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["logits"], "dense")],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 64))],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", CLASSES))],
        [numpy_helper.from_array(weights, "w")],
    )
    folder.mkdir(parents=True)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "model.onnx")
    return OnnxModel(
        source="benchmark",
        source_sha256="0" * 64,
        file=FileDigest.of(folder / "model.onnx"),
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 64)),),
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


def _inputs(folder: Path, samples: int) -> DataSet:
    """Memory-mapped inputs, written a block at a time."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2)
    mapped = np.lib.format.open_memmap(
        folder / "x.npy", mode="w+", dtype=np.float32, shape=(samples, 64)
    )
    for start in range(0, samples, 65536):
        mapped[start : start + 65536] = rng.normal(size=mapped[start : start + 65536].shape)
    mapped.flush()
    labels = rng.integers(0, CLASSES, samples)
    inputs = {"x": np.load(folder / "x.npy", mmap_mode="r")}
    return DataSet("synthetic", inputs, labels, np.arange(samples).astype(np.str_), {})


def _rss_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def _peak_gib() -> float:
    """Peak resident memory of this process, pages of mapped files included."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 2**20


def main() -> None:
    """Measure each claim at each size in a process of its own; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--only", choices=["judge", "stream"])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps({"judge": judge, "stream": stream}[options.only](options.one)))
        return
    claims = [options.only] if options.only else ["judge", "stream"]
    found = [_measured(claim, samples) for claim in claims for samples in options.samples]
    target = ROOT / "benchmarks" / "results" / "validation.json"
    target.parent.mkdir(exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine()}
    record = {"schema_version": 1, "limit_gib": LIMIT_GIB, "environment": about, "results": found}
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {target.relative_to(ROOT)}")


def _measured(claim: str, samples: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", claim, "--one", str(samples)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode:
        sys.exit(ran.stderr)
    found = {"claim": claim, "samples": samples, **json.loads(ran.stdout.splitlines()[-1])}
    verdict = "within" if found["peak_gib"] <= LIMIT_GIB else "ABOVE"
    print(
        f"{claim:>7} {samples:>10,} samples {found['seconds']:8.2f} s "
        f"{samples / found['seconds']:>12,.0f} samples/s "
        f"peak {found['peak_gib']:5.2f} GiB ({verdict} {LIMIT_GIB:g} GiB)",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
