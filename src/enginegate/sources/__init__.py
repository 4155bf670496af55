"""Models of every form -> ONNX."""

from enginegate.sources.export import onnx_from_source

__all__ = ["onnx_from_source"]
