"""Registered models -> ONNX."""

from enginegate.sources.export import onnx_from_registry, read_onnx_model
from enginegate.sources.once import Kept

__all__ = ["Kept", "onnx_from_registry", "read_onnx_model"]
