"""Figures as SVG: each is drawn once, for MLflow's artifacts and for the page with benchmarks."""

from enginegate.charts.drawing import COLOURS, Drawing, drawing
from enginegate.charts.serving import (
    STAGE_COLOURS,
    delay_chart,
    latency_chart,
    mark_of,
    pareto_chart,
    stage_chart,
)

__all__ = [
    "COLOURS",
    "STAGE_COLOURS",
    "Drawing",
    "delay_chart",
    "drawing",
    "latency_chart",
    "mark_of",
    "pareto_chart",
    "stage_chart",
]
