"""Engines alone on one GPU, all kinds side by side: ``python benchmarks/gpu_engines.py``.

Each candidate is built as the pipeline builds it, compared with FP32, and swept over batch sizes:
inputs on the device, back to back, medians of windows, a captured graph where the runner uses one.
PyTorch eager runs in the same process on the same GPU, and AITune's tuned module where that is
installed. ``--fallback`` also makes the check for ONNX Runtime's silent fallback fire. Random
weights: speed does not depend on them. Without a GPU it says so and ends; ``--device cpu`` tries
the script with small networks.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_networks import Subject, subject
from gpu_report import Report, table
from networks import exported
from torch import nn

from enginegate.candidate import Engine
from enginegate.data import Tensors
from enginegate.engines import cuda, open_engine, open_reference
from enginegate.engines.engine_sweep import Sweep, sweep_batches

CANDIDATES = (
    *("tensorrt-fp16", "torch_inductor-fp16", "onnxruntime-fp16"),
    *("tensorrt-tf32", "torch_inductor-tf32", "onnxruntime-tf32"),
    *("tensorrt-fp32", "torch_inductor-fp32", "onnxruntime-fp32"),
    *("torch_inductor-bf16", "onnxruntime-int8", "tensorrt-int8"),
)
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
_DTYPES["bf16"] = torch.bfloat16
_COMPARED = 8  # rows whose answers are compared with FP32's
_LIBRARIES = (
    *("libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13", "libcudnn.so.9"),
    *("libcufft.so.12", "libcurand.so.10", "libnvrtc.so.13"),
)


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    if given.device == "cuda" and cuda.gpu() is None:
        print("No NVIDIA GPU here: nothing is measured.")
        return
    report = Report(given.out / "gpu_engines.json", limit_s=given.limit_s)
    if given.fallback:
        report.part({"candidate": "silent fallback"}, _fallback)
    for name in given.network:
        made = subject(name, given.store, largest=given.largest)
        for candidate in given.candidate:
            report.part(
                {"network": name, "candidate": candidate},
                lambda row, made=made, candidate=candidate: _engine(made, candidate, given, row),
            )
        for precision in given.eager:
            report.part(
                {"network": name, "candidate": f"eager-{precision}"},
                lambda row, made=made, at=precision: _eager(made, at, given, row),
            )
        if given.aitune:
            report.part(
                {"network": name, "candidate": "aitune"},
                lambda row, made=made: _aitune(made, given, row),
            )
    _show(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--store", type=Path, help="keeps models and engines from run to run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--network", action="append")
    parser.add_argument("--candidate", action="append", help="KIND-PRECISION")
    parser.add_argument("--eager", nargs="*", default=["fp16"], help="precisions of PyTorch eager")
    parser.add_argument("--aitune", action="store_true", help="beside it, if it is installed")
    parser.add_argument("--fallback", action="store_true")
    parser.add_argument("--largest", type=int, help="batch")
    parser.add_argument("--sweep-s", type=float, default=4.0, help="of one engine alone")
    parser.add_argument("--build-s", type=float, default=150.0, help="limit of one build")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole run")
    given = parser.parse_args()
    small = given.device == "cpu"
    given.store = given.store or Path(tempfile.mkdtemp(prefix="enginegate-gpu-"))
    given.network = given.network or (["tiny"] if small else ["resnet50", "minilm-l6"])
    given.candidate = given.candidate or list(CANDIDATES)
    given.largest = given.largest or (8 if small else 128)
    if small and given.eager == ["fp16"]:
        given.eager = ["fp32"]
    return given


def _engine(made: Subject, name: str, given: argparse.Namespace, row: dict[str, Any]) -> None:
    started = time.monotonic()
    built = made.build(name, given.store, given.device, given.build_s)
    engine = built.value
    row |= {"reused": built.reused, "build_wall_s": round(time.monotonic() - started, 1)}
    row |= _described(engine)
    # A release of the device memory between kinds: PyTorch keeps what it once took.
    torch.cuda.empty_cache()
    with cuda.used_memory() as used:
        before = used()
        with open_engine(engine, built.folder) as runner:
            row["runs_on"] = runner.device
            _put(row, _sweep(made, runner.bound, given.sweep_s))
            after = used()
            answer = runner.run(made.rows(_COMPARED))
    row["device_mib"] = None if before is None or after is None else round(after - before)
    with open_reference(made.onnx.value, made.onnx.folder) as reference:
        exact = reference.run(made.rows(_COMPARED))
    row["relative_error"] = _relative_error(answer, exact)


def _described(engine: Engine) -> dict[str, Any]:
    proof = engine.proof
    return {
        "build_s": engine.build_s,
        "size_mib": round(engine.file.size_bytes / 2**20, 1),
        "proven": proof.proven,
        "detail": proof.detail,
        "executed_layers": proof.executed_layers,
        "builder": engine.builder,
        "flags": engine.flags,
    }


def _sweep(made: Subject, bind: Any, limit_s: float) -> Sweep:
    return sweep_batches(bind, made.rows, made.buckets, limit_s=limit_s)


def _put(row: dict[str, Any], found: Sweep) -> None:
    row["samples_per_s"] = {str(s.batch_size): round(s.samples_per_s, 1) for s in found.batches}
    row["measured"] = [speed.model_dump() for speed in found.batches]
    if found.unmeasured:
        row["unmeasured"] = found.unmeasured


def _relative_error(answer: Tensors, exact: Tensors) -> float:
    name = next(iter(exact))
    scale = float(np.abs(exact[name]).max()) or 1.0
    return float(np.abs(answer[name].astype(np.float32) - exact[name]).max()) / scale


def _eager(made: Subject, precision: str, given: argparse.Namespace, row: dict[str, Any]) -> None:
    """PyTorch as it is."""
    with _torch_at(made.network, precision, given.device) as (network, cast):
        _put(row, _sweep(made, _bound(network, cast, given.device), given.sweep_s))


def _aitune(made: Subject, given: argparse.Namespace, row: dict[str, Any]) -> None:
    """AITune's choice for the FP16 network at the largest batch, as its users call it."""
    if importlib.util.find_spec("aitune") is None:
        row["error"] = "aitune is not installed"
        return
    import aitune.torch as ait  # noqa: PLC0415
    from aitune.torch.backend import TorchInductorAotBackend  # noqa: PLC0415

    with _torch_at(made.network, "fp16", given.device) as (network, cast):
        samples = [[array[0] for array in cast(made.rows(1))] for _ in range(made.largest)]
        strategy = ait.OneBackendStrategy(TorchInductorAotBackend())
        module = ait.Module(network, "aitune", strategy=strategy)
        started = time.perf_counter()
        batches = [1, made.largest]
        ait.tune(module, samples, batches, 1, given.device, ignore_failing_modules=False)
        row["built_s"] = round(time.perf_counter() - started, 1)
        _put(row, _sweep(made, _bound(module, cast, given.device), given.sweep_s))


Cast = Callable[[Tensors], list[torch.Tensor]]


@contextmanager
def _torch_at(source: nn.Module, precision: str, device: str) -> Iterator[tuple[nn.Module, Cast]]:
    """The network on the device at a precision, and how inputs get there."""
    dtype, allowed = _DTYPES[precision], precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = True
    network = deepcopy(source).to(device, dtype)

    def cast(rows: Tensors) -> list[torch.Tensor]:
        placed = [torch.from_numpy(array).to(device) for array in rows.values()]
        return [each.to(dtype) if each.is_floating_point() else each for each in placed]

    try:
        with torch.no_grad():
            yield network, cast
    finally:
        del network
        torch.cuda.empty_cache()


def _bound(network: Any, cast: Cast, device: str) -> Any:
    """As `Runner.bound`, for a PyTorch module."""

    @contextmanager
    def bind(rows: Tensors) -> Iterator[Callable[[int], float]]:
        placed = cast(rows)

        def repeat(count: int) -> float:
            started = time.perf_counter()
            for _ in range(count):
                network(*placed)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        yield repeat

    return bind


def _fallback(row: dict[str, Any]) -> None:
    """Build for the GPU in a process without its libraries: the proof must fail."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        exported(network, {"image": np.ones((2, 1, 8, 8), np.float32)}, scratch / "hidden")
        libraries = scratch / "libraries"
        libraries.mkdir()
        for library in _LIBRARIES:  # empty files, first on the loader's path
            (libraries / library).touch()
        hidden = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        script = Path(__file__).with_name("gpu_hidden.py")
        command = [sys.executable, str(script), str(scratch / "hidden" / "model.onnx")]
        ended = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)  # noqa: S603
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        raise RuntimeError(ended.stderr[-2000:])
    row |= json.loads(lines[-1])


def _show(report: Report) -> None:
    rows = [row for row in report.rows if "samples_per_s" in row]
    sizes = sorted({int(size) for row in rows for size in row["samples_per_s"]})
    columns = ["network", "candidate", *(f"at {size}" for size in sizes), "proven", "error", "s"]
    table(
        columns,
        [
            [
                row["network"],
                row["candidate"],
                *(row["samples_per_s"].get(str(size)) for size in sizes),
                row.get("proven"),
                row.get("relative_error"),
                row.get("build_s"),
            ]
            for row in rows
        ],
    )
    for row in report.rows:
        if "error" in row:
            print(f"{row.get('network', '')} {row['candidate']}: {row['error'].splitlines()[0]}")


if __name__ == "__main__":
    main()
