"""What a plan is made of, on the device that will run it: inputs, outputs, layers and their times.

The times are of single layers, waited for one by one, so their sum is more than a run takes; their
shares say where it goes.
"""

import json
from pathlib import Path
from typing import Any

from .driver import CudaDevice
from .library import import_library, logger
from .run import OpenPlan

_WARM_RUNS = 3
_TIMED_RUNS = 10  # medians would need more; shares of layers are steady after a few


def inspect(job: dict[str, Any]) -> dict[str, Any]:
    """Layers by TensorRT's inspector, and what each costs.

    Job: module, plan, host_code, layers (path that the inspector's JSON is written to), shapes
    (input -> shape that layers are timed at; empty: no times).
    """
    trt = import_library([job["module"]])
    device = CudaDevice()
    opened = OpenPlan(trt, device, logger(trt), job)
    if job["shapes"]:
        opened.reserve(job["shapes"])
    inspector = opened.engine.create_engine_inspector()
    inspector.execution_context = opened.context
    told = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    Path(job["layers"]).write_text(told)
    report = {
        "error": "",
        "tensors": opened.describe(),
        "device_bytes": opened.device_bytes(),
        "cuda_driver": device.cuda_version(),
        "layer_ms": {},
    }
    if job["shapes"]:
        report["layer_ms"] = _layer_times(trt, opened, job["shapes"])
    return report


def _layer_times(trt: Any, opened: OpenPlan, shapes: dict[str, list[int]]) -> dict[str, float]:
    """Mean milliseconds of each layer over a few runs on zeros."""
    spent: dict[str, float] = {}

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            spent[layer_name] = spent.get(layer_name, 0.0) + ms

    for _ in range(_WARM_RUNS):
        opened.execute(shapes)
    opened.stream.wait()
    profiler = Profiler()
    opened.context.profiler = profiler
    for _ in range(_TIMED_RUNS):
        opened.execute(shapes)
        opened.stream.wait()
    return {name: round(total / _TIMED_RUNS, 6) for name, total in spent.items()}


def layers_of(text: str) -> list[Any]:
    """The inspector's layers."""
    found = json.loads(text, strict=False).get("Layers", [])
    return found if isinstance(found, list) else []
