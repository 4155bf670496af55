"""FP32 ONNX -> ONNX at another precision."""

from enginegate.precision.census import Census
from enginegate.precision.convert import Conversion, convert, converter_of

__all__ = ["Census", "Conversion", "convert", "converter_of"]
