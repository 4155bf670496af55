"""What limits an engine that was measured: its roofline at the batch that it was served with."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import NonNegativeFloat

from enginegate.candidate import Engine, Precision
from enginegate.engines.cuda import Device
from enginegate.engines.peak_throughput import PeakThroughput, peak_throughput
from enginegate.engines.roofline import roofline
from enginegate.engines.work import work_of
from enginegate.evidence import Benchmark, Roofline
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.workspace import remembered


class _MeasuredPeak(Record):
    """A device's peak throughput, kept: measuring it takes a second."""

    flops_per_s: NonNegativeFloat | None
    bytes_per_s: NonNegativeFloat | None
    one_thread_flops_per_s: NonNegativeFloat | None


def roofline_of(
    found: Benchmark,
    engine: Engine,
    graph: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    machine: str,
    cache: Path,
) -> Roofline | None:
    """At the chosen configuration's mean batch; None when nothing was chosen.

    Args:
        found: what was measured.
        engine: whose arithmetic it is.
        graph: the ONNX file whose work is counted.
        shapes: of the inputs as the traffic has them.
        machine: where it was measured.
        cache: folder of the devices' peak throughput.
    """
    measured = found.at_slo
    if measured is None or measured.stages is None:
        return None
    batch = max(1, round(measured.stages.mean_batch_size))
    precision = engine.candidate.precision
    work = work_of(graph, precision, batch_size=batch, shapes=shapes)
    device: Device = "cpu" if engine.target == "cpu" else "cuda"
    executions_per_s = sum(measured.stages.batches.values()) / (measured.lasted_s or 1.0)
    return roofline(
        work,
        _peak(device, precision, machine, cache),
        samples_per_s=executions_per_s * measured.stages.mean_batch_size or None,
        instances=measured.config.instances,
    )


def _peak(device: Device, precision: Precision, machine: str, cache: Path) -> PeakThroughput:
    key = sha256_bytes(canonical_json([device, precision.value, machine]))
    known = remembered(
        cache / f"{key}.json",
        _MeasuredPeak,
        lambda: _MeasuredPeak(**asdict(peak_throughput(device, precision))),
        worth_keeping=lambda made: made.bytes_per_s is not None,
    )
    return PeakThroughput(**known.model_dump())
