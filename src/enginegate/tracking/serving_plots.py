"""Where serving's time goes, what delay and load do to p99, and what each candidate costs."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginegate.evidence import Benchmark, Scorecard, Verdict
from enginegate.measurement import Measurement
from enginegate.tracking.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_P99 = 0.99
_SIZE_INCHES = (8.0, 5.0)
_STAGES = {
    "queueing": ("queue_ms", "#E69F00"),
    "preparing inputs": ("compute_input_ms", "#56B4E9"),
    "computing": ("compute_infer_ms", "#0072B2"),
    "returning outputs": ("compute_output_ms", "#009E73"),
    "client and network": ("client_ms", "#999999"),
}


def delay_load_plot(benchmark: Benchmark, *, slo_p99_ms: float) -> bytes:
    """PNG of p99 over queue delay and load; the colours meet at the SLO."""
    from matplotlib.colors import TwoSlopeNorm  # noqa: PLC0415

    figure = _figure()
    axes = figure.subplots()
    found = [(m, p) for m in benchmark.measurements if (p := m.percentile(_P99))]
    valid = [(m, p.value_ms) for m, p in found if not m.invalid]
    drawn = axes.scatter(
        [m.rate_per_s for m, _ in valid],
        [m.config.max_queue_delay_us for m, _ in valid],
        c=[min(p99_ms, 2.0 * slo_p99_ms) for _, p99_ms in valid],
        s=[40 + 25 * m.config.instances for m, _ in valid],
        cmap="RdYlGn_r",
        norm=TwoSlopeNorm(slo_p99_ms, 0.0, 2.0 * slo_p99_ms),
        edgecolors="#333333",
    )
    void = [m for m, _ in found if m.invalid]
    axes.scatter(
        [m.rate_per_s for m in void],
        [m.config.max_queue_delay_us for m in void],
        marker="x",
        color="#666666",
        label="not valid",
    )
    axes.set(
        title=f"{benchmark.candidate}: p99 by queue delay and load (larger: more instances)",
        xlabel="offered requests a second",
        ylabel="max_queue_delay, microseconds",
    )
    figure.colorbar(drawn, ax=axes, label=f"p99, ms (SLO {slo_p99_ms:g})", extend="max")
    return _png(figure)


def stage_plot(model: str, benchmarks: Sequence[Benchmark]) -> bytes:
    """PNG with one bar a candidate: mean milliseconds of a request at its result, by stage."""
    figure = _figure()
    axes = figure.subplots()
    shown = [(b, m.stages) for b in benchmarks if (m := _shown(b)) and m.stages]
    names = [benchmark.candidate.name for benchmark, _ in shown]
    left = [0.0] * len(shown)
    for name, (field, colour) in _STAGES.items():
        times = [float(getattr(stages, field) or 0.0) for _, stages in shown]
        axes.barh(names, times, left=left, color=colour, label=name)
        left = [start + time for start, time in zip(left, times, strict=True)]
    axes.invert_yaxis()
    axes.set(title=f"{model}: where the time of a request goes", xlabel="mean milliseconds")
    axes.legend(fontsize="small")
    return _png(figure)


def pareto_plot(scorecard: Scorecard, *, slo_p99_ms: float) -> bytes:
    """PNG of cost (or throughput) against p99; beside each result its change of accuracy."""
    figure = _figure()
    axes = figure.subplots()
    priced = any(b.cost_per_million is not None for b in scorecard.benchmarks)
    for number, b in enumerate(scorecard.benchmarks):
        colour = COLOURS[number % len(COLOURS)]
        points = [
            ((p.cost_per_million if priced else p.rate_per_s) or 0.0, p.p99.value_ms)
            for p in b.pareto
            if p.p99 is not None
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=colour, alpha=0.6)
        if b.p99_at_slo is not None:
            at = (b.cost_per_million if priced else b.throughput_at_slo_per_s) or 0.0
            label = f"{b.candidate} ({_accuracy(scorecard.verdict(b.candidate))})"
            axes.plot(at, b.p99_at_slo.value_ms, "*", color=colour, markersize=14, label=label)
    axes.axhline(slo_p99_ms, color="#666666", linestyle="--", label=f"SLO {slo_p99_ms:g} ms")
    currency = next((b.currency for b in scorecard.benchmarks if b.currency), "")
    axes.set(
        title=f"{scorecard.model}: cost, p99 and accuracy; stars are confirmed",
        xlabel=f"cost of a million requests, {currency}" if priced else "requests a second",
        ylabel="p99, ms (log)",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small")
    return _png(figure)


def _shown(benchmark: Benchmark) -> Measurement | None:
    """At the result; where nothing was chosen, the last valid measurement."""
    valid = [m for m in benchmark.measurements if not m.invalid]
    return benchmark.at_slo or (valid[-1] if valid else None)


def _accuracy(verdict: Verdict | None) -> str:
    found = verdict.finding("accuracy_loss", "evaluation") if verdict else None
    if found is None or found.value is None:
        return "accuracy not judged"
    return f"accuracy {100.0 * -found.value + 0.0:+.2f} pp"


def _figure() -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=_SIZE_INCHES, layout="constrained")


def _png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()
