"""Figures of a run: what counts support, percentiles of a window, and where results go."""

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.loadgen.background_load import BackgroundLoad

RESULTS = Path(__file__).resolve().parents[1] / "results"
_CONFIDENCE = 0.95


def at_most(trials: int) -> float:
    """The largest probability of an event that was seen in none of so many trials, 95 % sure.

    ``1 - 0.05 ** (1 / n)``, which is about 3 / n (the rule of three); 1 for no trial.
    """
    return 1.0 - float((1.0 - _CONFIDENCE) ** (1.0 / trials)) if trials else 1.0


def counted(seen: int, trials: int, noun: str) -> str:
    """``0 of 300 kills (with 95 % confidence below 0.0099)``; the bound only beside a 0."""
    said = f"{seen} of {trials:,} {noun}"
    return said if seen else f"{said} (with 95 % confidence below {at_most(trials):.2g})"


def percentile_ms(latency_s: NDArray[np.float64], quantile: float) -> float:
    """In milliseconds, failures as infinite; NaN of nothing."""
    if len(latency_s) == 0:
        return float("nan")
    return float(np.quantile(latency_s, quantile, method="higher")) * 1e3


def clients_row(clients: BackgroundLoad) -> dict[str, Any]:
    """Requests of a load, failed and wrong answers."""
    report = clients.report()
    return {
        "requests": report.sent,
        "failed": report.failed,
        "errors": report.errors,
        "wrong": len(clients.wrong),
        "first_wrong": clients.wrong[:3],
        "failed_at_most": at_most(report.sent) if not report.failed else None,
    }


def machine() -> dict[str, str]:
    """Where it ran."""
    return {"python": platform.python_version(), "system": platform.platform()}


def keep(name: str, figures: dict[str, Any]) -> Path:
    """Write figures as JSON beside the others."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return path
