"""ONNX Runtime's CUDA provider against PyTorch on one GPU: ``python benchmarks/gpu_engines.py``.

ResNet-50 and the encoder of all-MiniLM-L6-v2 at fp32 (TF32 off), tf32, fp16, bf16 and int8, at
batches of 1, 8, 32 and 128: device time with bound buffers and captured graphs, and host to host.
PyTorch eager and compiled run in the same process on the same GPU. Then the check for the silent
fallback is made to fire: the same build in a process that cannot see the CUDA libraries.
Random weights: speed does not depend on them. Without a GPU it says so and ends.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from gpu_points import BATCHES, Point, Report, point, times_of
from networks import Encoder, exported, planned, samples
from torch import nn

from enginegate.candidate import Engine, OnnxModel
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet, Tensors
from enginegate.engines import build_engine, cuda, open_engine, open_reference
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.errors import EnginegateError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.records import Record

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")
CALIBRATION = CalibrationTable(method="max", batch_size=16, max_samples=32)
_LIBRARIES = (
    *("libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13", "libcudnn.so.9"),
    *("libcufft.so.12", "libcurand.so.10", "libnvrtc.so.13"),
)
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
_DTYPES["bf16"] = torch.bfloat16


@dataclass(frozen=True)
class Subject:
    """A network, its inputs at the largest batch, and its ONNX form."""

    name: str
    network: nn.Module
    data: DataSet
    onnx: ContentFolder[OnnxModel]


class Budget:
    """Seconds left of the whole run; optional parts are left out when they are used up."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until optional parts are left out."""
        return self._ends - time.monotonic()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--budget-s", type=float, default=400.0)
    given = parser.parse_args()
    if cuda.gpu() is None or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print("No NVIDIA GPU, or no onnxruntime-gpu, here: nothing is measured.")
        return
    with tempfile.TemporaryDirectory(prefix="enginegate-gpu-") as scratch:
        report = Report(given.out)
        measure(Path(scratch), report, Budget(given.budget_s))
    report.show()


def measure(scratch: Path, report: Report, budget: Budget) -> None:
    """Every part, the most telling first."""
    report.fallback(hidden_check(scratch))
    for make in (encoder, resnet):
        subject = make(scratch)
        for precision in PRECISIONS:
            report.add_engine(partial(onnxruntime_points, subject, precision, scratch))
        report.add(partial(eager_points, subject))
        report.add(partial(compiled_points, subject, Budget(budget.left_s / 2)))


def resnet(scratch: Path) -> Subject:
    """ResNet-50 with random weights on noise of an image's range."""
    from torchvision.models import resnet50  # noqa: PLC0415 - only here, and slow

    torch.manual_seed(0)
    images = np.random.default_rng(0).standard_normal((max(BATCHES), 3, 224, 224), np.float32)
    return _subject("resnet50", resnet50().eval(), {"image": images}, scratch)


def encoder(scratch: Path) -> Subject:
    """The encoder of all-MiniLM-L6-v2 with random weights, 128 tokens a sample."""
    torch.manual_seed(0)
    ids = np.random.default_rng(0).integers(1000, 30000, (max(BATCHES), 128))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return _subject("minilm-l6", Encoder().eval(), inputs, scratch)


def onnxruntime_points(
    subject: Subject, precision: str, scratch: Path
) -> tuple[dict[str, Any], list[Point]]:
    """Build one engine, and run it at every batch: what it is, and how fast."""
    name = f"onnxruntime-{precision}"
    plan = planned(subject.onnx, name, subject.data, tables=_tables(), calibration=CALIBRATION)
    try:
        built = build_engine(plan, scratch / "engines")
        engine = built.value
        with open_engine(engine, built.folder) as runner:
            points = [_run(subject, runner, precision, batch) for batch in BATCHES]
            head = {key: array[:8] for key, array in subject.data.inputs.items()}
            answer = runner.run(head)["output"]
    except EnginegateError as error:
        return {"network": subject.name, "precision": precision, "error": str(error)}, []
    with open_reference(subject.onnx.value, subject.onnx.folder) as reference:
        exact = reference.run(head)["output"]
    error_found = float(np.abs(answer - exact).max() / np.abs(exact).max())
    return _described(subject, precision, engine, error_found), points


def eager_points(subject: Subject) -> list[Point]:
    """PyTorch as it is, inputs on the device."""
    points = []
    for precision in _DTYPES:
        with torch_at(subject, precision) as (network, inputs):
            for batch in BATCHES:
                part = [array[:batch] for array in inputs]
                call = _synchronised(network, part)
                points.append(point((subject.name, "torch", precision, batch), call))
    return points


def compiled_points(subject: Subject, budget: Budget) -> list[Point]:
    """torch.compile with CUDA graphs, most telling points first, while the time lasts."""
    points, wanted = [], [("fp16", 32), ("fp16", 1), ("fp16", 128), ("fp16", 8)]
    wanted += [("tf32", 32), ("tf32", 1), ("tf32", 128), ("bf16", 32), ("fp32", 32)]
    for precision, batch in wanted:
        if budget.left_s < 0:
            points.append(
                Point(subject.name, "compile", precision, batch, 0, 0, 0, 0, note="no time")
            )
            continue
        torch._dynamo.reset()  # noqa: SLF001 - PyTorch documents it under this name
        with torch_at(subject, precision) as (network, inputs):
            compiled = torch.compile(network, mode="reduce-overhead", dynamic=False)
            part = [array[:batch] for array in inputs]
            started = time.monotonic()
            call = _synchronised(compiled, part)
            call()
            note = f"compiled in {time.monotonic() - started:.0f} s"
            points.append(point((subject.name, "compile", precision, batch), call, note=note))
    return points


@contextmanager
def torch_at(subject: Subject, precision: str) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    """The network and its inputs on the GPU at a precision."""
    dtype, allowed = _DTYPES[precision], precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = True
    network = deepcopy(subject.network).to("cuda", dtype)
    inputs = [torch.from_numpy(array).cuda() for array in subject.data.inputs.values()]
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    try:
        with torch.no_grad():
            yield network, inputs
    finally:
        torch.cuda.empty_cache()


def hidden_check(scratch: Path) -> dict[str, Any]:
    """Build for the GPU in a process without its libraries: the proof must fail."""
    folder = scratch / "hidden"
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    exported(network, {"image": np.ones((2, 1, 8, 8), np.float32)}, folder)
    hidden = {**os.environ, "LD_LIBRARY_PATH": str(_hidden_libraries(scratch))}
    script = Path(__file__).with_name("gpu_hidden.py")
    command = [sys.executable, str(script), str(folder / "model.onnx")]
    ended = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)  # noqa: S603
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        return {"fired": False, "error": ended.stderr[-2000:]}
    return dict(json.loads(lines[-1]))


def _hidden_libraries(scratch: Path) -> Path:
    """A folder that comes first on the loader's path, with empty files where the libraries are."""
    folder = scratch / "libraries"
    folder.mkdir()
    for name in _LIBRARIES:
        (folder / name).touch()
    return folder


def _tables() -> dict[str, Record]:
    batch = DimensionRange(min=1, best=max(BATCHES), max=max(BATCHES))
    return {
        "shapes": Shapes(batch=batch),
        "onnxruntime": OnnxRuntimeTable(device="cuda", batch_buckets=BATCHES),
    }


def _subject(name: str, network: nn.Module, inputs: Tensors, scratch: Path) -> Subject:
    example = {key: array[:2] for key, array in inputs.items()}
    onnx_model = exported(network, example, scratch / f"onnx-{name}")
    return Subject(name, network, samples(inputs, "synthetic"), onnx_model)


def _run(subject: Subject, runner: Any, precision: str, batch: int) -> Point:
    inputs = {key: array[:batch] for key, array in subject.data.inputs.items()}
    buffers = runner.bucketed.buffers(inputs)
    buffers.load(inputs)
    whole = times_of(lambda: runner.run(inputs))
    return point(
        (subject.name, "onnxruntime", precision, batch),
        buffers.execute,
        host=batch * len(whole) / sum(whole),
    )


def _synchronised(network: Any, inputs: list[torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        network(*inputs)
        torch.cuda.synchronize()

    return call


def _described(subject: Subject, precision: str, engine: Engine, error: float) -> dict[str, Any]:
    proof = engine.proof
    return {
        "network": subject.name,
        "precision": precision,
        "proven": proof.proven,
        "device": proof.device,
        "detail": proof.detail,
        "executed_layers": proof.executed_layers,
        "flops": proof.flops,
        "flags": engine.flags,
        "size_bytes": engine.file.size_bytes,
        "build_s": engine.build_s,
        "relative_error": error,
    }


if __name__ == "__main__":
    main()
