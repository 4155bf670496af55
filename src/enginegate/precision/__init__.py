"""FP32 ONNX -> ONNX at another precision, and what that costs."""

from enginegate.precision.census import Census
from enginegate.precision.convert import Conversion, convert, converter_of, reads_data
from enginegate.precision.curve import curve_plot
from enginegate.precision.modelopt import modelopt_for
from enginegate.precision.repair import Curve, Trial, repair
from enginegate.precision.safety import (
    EMULATED,
    EmulatedRunner,
    RangeReport,
    emulated,
    judge_range,
)
from enginegate.precision.sample import Sample
from enginegate.precision.sensitivity import Sensitivity, sensitivities

__all__ = [
    "EMULATED",
    "Census",
    "Conversion",
    "Curve",
    "EmulatedRunner",
    "RangeReport",
    "Sample",
    "Sensitivity",
    "Trial",
    "convert",
    "converter_of",
    "curve_plot",
    "emulated",
    "judge_range",
    "modelopt_for",
    "reads_data",
    "repair",
    "sensitivities",
]
