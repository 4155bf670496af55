"""Figures as SVG: files for MLflow and the page with benchmarks, and parts of the decision page."""

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
