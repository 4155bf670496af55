"""FP32 ONNX -> ONNX at another precision, and what that costs."""

from enginegate.precision.calibration import CalibrationSample
from enginegate.precision.convert import Conversion, convert, converter_of, reads_data
from enginegate.precision.graph_stats import GraphStats, executed_layers, graph_stats
from enginegate.precision.mixed_precision_search import (
    PrecisionTrial,
    TradeoffCurve,
    search_mixed_precision,
    tradeoff_chart,
)
from enginegate.precision.modelopt import modelopt_for
from enginegate.precision.overflow_emulation import (
    EmulatedRunner,
    RangeReport,
    judge_range,
    open_emulated,
)
from enginegate.precision.sensitivity import Sensitivity, sensitivities

__all__ = [
    "CalibrationSample",
    "Conversion",
    "EmulatedRunner",
    "GraphStats",
    "PrecisionTrial",
    "RangeReport",
    "Sensitivity",
    "TradeoffCurve",
    "convert",
    "converter_of",
    "executed_layers",
    "graph_stats",
    "judge_range",
    "modelopt_for",
    "open_emulated",
    "reads_data",
    "search_mixed_precision",
    "sensitivities",
    "tradeoff_chart",
]
