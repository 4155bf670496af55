"""Models of every form -> ONNX."""

from enginegate.kept import Kept
from enginegate.sources.export import onnx_from_source, read_onnx_model

__all__ = ["Kept", "onnx_from_source", "read_onnx_model"]
