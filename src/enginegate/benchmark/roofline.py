"""What limits an engine that was measured: its roofline at the batch that it was served with."""

from collections.abc import Mapping
from pathlib import Path

from enginegate.candidate import Engine, Precision
from enginegate.engines.cuda import Device
from enginegate.engines.roofline import PeakThroughput, peak_throughput, roofline
from enginegate.evidence import Benchmark, Roofline
from enginegate.precision import graph_stats
from enginegate.records import canonical_json, sha256_bytes
from enginegate.workspace import remembered


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
    stats = graph_stats(graph, batch_size=batch, shapes=shapes, precision=precision)
    device: Device = "cpu" if engine.target == "cpu" else "cuda"
    executions_per_s = sum(measured.stages.batches.values()) / (measured.lasted_s or 1.0)
    return roofline(
        stats,
        _peak(device, precision, machine, cache),
        samples_per_s=executions_per_s * measured.stages.mean_batch_size or None,
        instances=measured.config.instances,
    )


def _peak(device: Device, precision: Precision, machine: str, cache: Path) -> PeakThroughput:
    """A device's peak throughput, remembered: measuring them takes a second."""
    key = sha256_bytes(canonical_json([device, precision.value, machine]))
    return remembered(
        cache / f"{key}.json",
        PeakThroughput,
        lambda: peak_throughput(device, precision),
        worth_keeping=lambda made: made.bytes_per_s is not None,
    )
