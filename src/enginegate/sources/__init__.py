"""Models of every form -> ONNX."""

from enginegate.content_store import ContentFolder
from enginegate.sources.export import onnx_from_source, read_onnx_model

__all__ = ["ContentFolder", "onnx_from_source", "read_onnx_model"]
