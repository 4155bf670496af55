"""The trade-off curve of a mixed-precision search as a picture."""

from enginegate.charts import COLOURS, drawing
from enginegate.precision.mixed_precision_search import TradeoffCurve

_COST, _FAILED, _PASSED = COLOURS[:3]
_KIB = 1024.0


def tradeoff_chart(curve: TradeoffCurve) -> bytes:
    """SVG: nodes kept at FP32 against divergence, and against latency or else size.

    Latency is drawn where it was measured for all trials, else size; nothing if neither is known
    for all of them.
    """
    trials = sorted(curve.trials, key=lambda trial: (len(trial.kept), trial.passed))
    measure = trials[0].measure
    xlabel = f"nodes kept at fp32, of {curve.nodes}"
    with drawing(f"{curve.candidate}: {curve.reason}", xlabel, f"{measure} (log)") as chart:
        for passed, colour, marker in ((True, _PASSED, "o"), (False, _FAILED, "x")):
            shown = [t for t in trials if t.passed is passed and t.divergence is not None]
            chart.axes.plot(
                [len(trial.kept) for trial in shown],
                [trial.divergence or 0.0 for trial in shown],
                marker,
                color=colour,
                label="passed" if passed else "failed",
            )
        if any(trial.divergence for trial in trials):
            chart.axes.set_yscale("log")
        chart.whole_numbers()
        latencies = [t.latency_ms for t in trials if t.latency_ms is not None]
        sizes = [t.size_bytes / _KIB for t in trials if t.size_bytes is not None]
        costs = next((c for c in (latencies, sizes) if len(c) == len(trials)), None)
        if costs is not None:
            second = chart.axes.twinx()
            second.plot([len(t.kept) for t in trials], costs, ".-", color=_COST, linewidth=1.0)
            second.set_ylabel("ms a batch" if costs is latencies else "KiB", color=_COST)
            second.set_ylim(bottom=0.0)
        return chart.svg()
