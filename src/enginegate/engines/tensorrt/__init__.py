"""TensorRT plans."""

from enginegate.engines.tensorrt.kind import KIND

__all__ = ["KIND"]
