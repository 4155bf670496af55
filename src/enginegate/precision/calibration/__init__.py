"""Calibration: which samples are read, and which range of an activation gets the levels."""

from enginegate.precision.calibration.methods import ActivationRange
from enginegate.precision.calibration.sample import CalibrationSample
from enginegate.precision.calibration.select import HELD_OUT, Prepared, least_error, ranges_for

__all__ = [
    "HELD_OUT",
    "ActivationRange",
    "CalibrationSample",
    "Prepared",
    "least_error",
    "ranges_for",
]
