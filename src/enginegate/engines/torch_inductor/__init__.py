"""Packages that PyTorch's AOTInductor compiles from the model's torch program."""

from enginegate.engines.torch_inductor.kind import KIND

__all__ = ["KIND"]
