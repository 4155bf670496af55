"""Points of a benchmark on a GPU: timed, printed as they come, and on disk after every part."""

import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from enginegate.engines import cuda

BATCHES = (1, 8, 32, 128)
_MEASURE_S, _SETTLE_RUNS, _LEAST_RUNS = 0.5, 10, 20


@dataclass(frozen=True)
class Point:
    """One network, runtime, precision and batch; times are of one batch, on the device."""

    network: str
    runtime: str
    precision: str
    batch: int
    samples_per_s: float
    p50_ms: float
    p99_ms: float
    runs: int
    host_samples_per_s: float | None = None
    note: str = ""

    @property
    def row(self) -> tuple[str, str, str, int]:
        """What was measured."""
        return (self.network, self.runtime, self.precision, self.batch)


class Report:
    """What was found so far; on disk after every part, because a rented GPU may be taken away."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gpu_engines.json"
        self._found: dict[str, Any] = {"machine": machine(), "fallback_check": {}}
        self._points: list[Point] = []
        self._engines: list[dict[str, Any]] = []
        self._failures: list[str] = []

    def add(self, part: Callable[[], list[Point]]) -> None:
        """Run one part; if it fails, that is told, and the others go on."""
        try:
            self._points += shown(part())
        except Exception:  # noqa: BLE001 - the other parts' numbers must not be lost
            self._failures.append(traceback.format_exc(limit=-4))
            print(self._failures[-1], flush=True)
        self._write()

    def add_engine(self, part: Callable[[], tuple[dict[str, Any], list[Point]]]) -> None:
        """Run one engine."""

        def described() -> list[Point]:
            record, points = part()
            self._engines.append(record)
            return points

        self.add(described)

    def fallback(self, found: dict[str, Any]) -> None:
        """Keep what the check for the silent fallback said."""
        self._found["fallback_check"] = found
        print(f"silent fallback: {found}", flush=True)
        self._write()

    def show(self) -> None:
        """Print samples a second, one row a runtime and precision."""
        print(f"\n{json.dumps(self._found)}\n")
        print("| network | runtime | precision | " + " | ".join(f"{b}" for b in BATCHES) + " |")
        print("|---|---|---|" + "---|" * len(BATCHES))
        rates = {p.row: p.samples_per_s for p in self._points}
        for row in dict.fromkeys(p.row[:3] for p in self._points):
            cells = [rates.get((*row, batch), 0.0) for batch in BATCHES]
            print("| " + " | ".join([*row, *(f"{c:,.0f}" if c else "-" for c in cells)]) + " |")
        for engine in self._engines:
            print(json.dumps(engine))
        print(f"{len(self._failures)} parts failed")

    def _write(self) -> None:
        found = self._found | {"engines": self._engines, "failures": self._failures}
        found["points"] = [asdict(point) for point in self._points]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> dict[str, str]:
    """What the numbers are of."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit"]
    told = subprocess.run(  # noqa: S603 - a fixed command
        [*query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": str(cuda.gpu()),
        "nvidia_smi": told.stdout.strip(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "weights": "random",
    }


def shown(points: list[Point]) -> list[Point]:
    """Print each as it comes, so that a run that is cut short told what it had."""
    for point in points:
        print(
            f"{point.network} {point.runtime} {point.precision} batch {point.batch}: "
            f"{point.samples_per_s:.0f}/s p50 {point.p50_ms:.3f} ms {point.note}",
            flush=True,
        )
    return points


def point(
    which: tuple[str, str, str, int],
    call: Callable[[], None],
    *,
    host: float | None = None,
    note: str = "",
) -> Point:
    """Time a call of one batch; ``which`` is network, runtime, precision and batch."""
    times, batch = times_of(call), which[-1]
    return Point(
        *which,
        samples_per_s=batch * len(times) / sum(times),
        p50_ms=float(np.percentile(times, 50) * 1e3),
        p99_ms=float(np.percentile(times, 99) * 1e3),
        runs=len(times),
        host_samples_per_s=host,
        note=note,
    )


def times_of(call: Callable[[], object]) -> list[float]:
    """Seconds of each call, after calls that are not counted."""
    for _ in range(_SETTLE_RUNS):
        call()
    times: list[float] = []
    while sum(times) < _MEASURE_S or len(times) < _LEAST_RUNS:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times
