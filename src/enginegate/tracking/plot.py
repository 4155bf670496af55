"""Latency against throughput, with the SLO and the intervals it was judged by."""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from enginegate.evidence import Benchmark
from enginegate.measurement import Measurement, Percentile
from enginegate.serving import ServingConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_P99 = 0.99
_SIZE_INCHES = (8.0, 5.0)
# Okabe and Ito's colours, which people with colour-blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def plots_available() -> bool:
    """Whether matplotlib is here (the extra ``plots``)."""
    return importlib.util.find_spec("matplotlib") is not None


def candidate_plot(benchmark: Benchmark, *, slo_p99_ms: float) -> bytes:
    """PNG with one line a configuration; the chosen one is drawn thick."""
    series: dict[str, list[Measurement]] = {}
    for measured in benchmark.measurements:
        series.setdefault(str(measured.config), []).append(measured)
    return _draw(
        benchmark.candidate.name, series, slo_p99_ms=slo_p99_ms, thick=str(benchmark.chosen)
    )


def overview_plot(model: str, benchmarks: Sequence[Benchmark], *, slo_p99_ms: float) -> bytes:
    """PNG with one line a candidate, each in the configuration chosen for it."""
    series = {
        b.candidate.name: [m for m in b.measurements if m.config == _best_config(b)]
        for b in benchmarks
    }
    return _draw(f"{model}: candidates", series, slo_p99_ms=slo_p99_ms, thick="")


def _best_config(benchmark: Benchmark) -> ServingConfig | None:
    """The chosen configuration; when none holds the SLO, the one of the smallest p99."""
    points = [(p.value_ms, m.config) for m in benchmark.measurements if (p := m.percentile(_P99))]
    nearest = min(points, key=lambda point: point[0], default=None)
    return benchmark.chosen or (nearest[1] if nearest else None)


def _draw(
    title: str, series: Mapping[str, Sequence[Measurement]], *, slo_p99_ms: float, thick: str
) -> bytes:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for number, (name, measured) in enumerate(series.items()):
        _line(axes, name, measured, number, thick=name == thick)
    axes.axhline(slo_p99_ms, color="#666666", linestyle="--", label=f"SLO {slo_p99_ms:g} ms")
    axes.set(title=title, xlabel="completed requests a second", ylabel="p99 latency, ms (log)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()


def _line(
    axes: "Axes", name: str, measured: Sequence[Measurement], number: int, *, thick: bool
) -> None:
    """A measurement that must not be used is a grey cross: shown, but joined to nothing."""
    points = [(m, p) for m in measured if (p := m.percentile(_P99))]
    points.sort(key=lambda point: point[0].rate_per_s)
    valid = [(m.throughput_per_s, p) for m, p in points if not m.invalid]
    axes.errorbar(
        [x for x, _ in valid],
        [p.value_ms for _, p in valid],
        yerr=([_below(p) for _, p in valid], [_above(p) for _, p in valid]),
        color=COLOURS[number % len(COLOURS)],
        linewidth=2.5 if thick else 1.0,
        marker="o",
        capsize=3,
        label=f"{name} (chosen)" if thick else name,
    )
    for m, p in points:
        if m.invalid:
            axes.annotate("invalid", (m.throughput_per_s, p.value_ms), color="#666666", ha="right")
            axes.plot(m.throughput_per_s, p.value_ms, "x", color="#666666")


def _below(p: Percentile) -> float:
    return 0.0 if p.low_ms is None else p.value_ms - p.low_ms


def _above(p: Percentile) -> float:
    return 0.0 if p.high_ms is None else p.high_ms - p.value_ms
