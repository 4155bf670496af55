"""ONNX Runtime engines."""

from enginegate.engines.onnxruntime.kind import KIND

__all__ = ["KIND"]
