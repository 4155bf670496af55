"""The trade-off curve of a repair as a picture."""

import io
from typing import TYPE_CHECKING

from enginegate.precision.mixed_precision_search import PrecisionTrial, TradeoffCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (8.0, 5.0)
# Okabe and Ito's colours, which people with colour-blindness can tell apart.
_PASSED, _FAILED, _COST = "#009E73", "#D55E00", "#0072B2"
_KIB = 1024.0


def curve_plot(curve: TradeoffCurve) -> bytes:
    """PNG: nodes kept against divergence from FP32, and against latency or else size.

    Needs matplotlib (the extra ``plots``).
    """
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    trials = sorted(curve.trials, key=lambda trial: (len(trial.kept), trial.passed))
    measure = trials[0].measure
    for passed, colour, marker in ((True, _PASSED, "o"), (False, _FAILED, "x")):
        shown = [(len(t.kept), t.divergence) for t in trials if t.passed is passed]
        known = [(kept, value) for kept, value in shown if value is not None]
        axes.plot(
            [kept for kept, _ in known],
            [value for _, value in known],
            color=colour,
            marker=marker,
            linestyle="none",
            label=f"{measure}, {'passed' if passed else 'failed'}",
        )
    if any(trial.divergence for trial in trials):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title=f"{curve.candidate}: {curve.reason}",
        xlabel=f"nodes kept at fp32, of {curve.nodes}",
        ylabel=f"{measure} (log)",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    _draw_cost(axes, trials)
    axes.legend(fontsize="small", loc="upper right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()


def _draw_cost(axes: "Axes", trials: list[PrecisionTrial]) -> None:
    """Latency where it was measured for all, else size; nothing if neither is known for all."""
    latencies = [t.latency_ms for t in trials if t.latency_ms is not None]
    sizes = [t.size_bytes / _KIB for t in trials if t.size_bytes is not None]
    chosen = next((c for c in (latencies, sizes) if len(c) == len(trials)), None)
    if chosen is None:
        return
    second = axes.twinx()
    second.plot([len(t.kept) for t in trials], chosen, color=_COST, linewidth=1.0, marker=".")
    second.set_ylabel("ms a batch" if chosen is latencies else "KiB", color=_COST)
    second.set_ylim(bottom=0.0)
