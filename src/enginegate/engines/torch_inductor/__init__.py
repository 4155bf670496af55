"""Packages that PyTorch's AOTInductor compiles from the model's torch program."""

from enginegate.engines.torch_inductor.kind import KIND, open_eager

__all__ = ["KIND", "open_eager"]
