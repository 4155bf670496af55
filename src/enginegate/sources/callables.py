"""``python:MODULE:CALLABLE``: a module made by a function of yours.

The function takes nothing and returns an ``nn.Module``, or ``(module, examples)``, or
``(module, examples, axes)``. Examples are tensors by argument name, with two or more rows.
Axes name the dynamic ones besides the batch, such as ``{"input_ids": {1: "sequence"}}``; a
``torch.export.Dim`` instead of a name has bounds.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.sources import pytorch
from enginegate.sources.pytorch import Axis, Program
from enginegate.sources.types import OpenedSource

if TYPE_CHECKING:
    import torch

_PARTS = 3


def open_callable(source: ModelSource, data: DataSet) -> OpenedSource:
    """Call the function, and trace what it returns to know it again.

    Raises:
        ModelError: that is not allowed, there is no such function, it fails, or what it returns
            cannot be traced.
    """
    if not source.allow_code:
        raise ModelError(
            f"{source.uri} was not opened: it imports and runs Python code of yours, with all "
            "that this program may do.\n"
            "If you trust that code, set allow_code = true under [model] in the policy."
        )
    exporter = pytorch.exporter()
    program = _program(source.uri, _called(source))
    return OpenedSource(
        source.uri,
        pytorch.traced_digest(program, data),
        exporter,
        functools.partial(pytorch.onnx_from_program, program),
    )


def _called(source: ModelSource) -> Any:
    name, _, function = source.location.partition(":")
    try:
        found = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{source.uri} cannot be imported: {error}. Run from the folder that the module "
            f"{name!r} is in, or install it."
        ) from error
    try:
        return found()
    except Exception as error:
        raise ModelError(
            f"{source.uri} failed: {type(error).__name__}: {error}\n"
            "It is called without arguments and must return a module."
        ) from error


def _program(uri: str, made: Any) -> Program:
    import torch  # noqa: PLC0415

    parts = made if isinstance(made, tuple) else (made,)
    module, examples, axes = (*parts, {}, {})[:_PARTS]
    right = (
        len(parts) <= _PARTS
        and isinstance(module, torch.nn.Module)
        and _is_table(examples, torch.Tensor)
        and _is_table(axes, Mapping)
    )
    if not right:
        found = ", ".join(type(part).__name__ for part in parts)
        raise ModelError(
            f"{uri} returned ({found}); return an nn.Module, or (module, examples), or (module, "
            "examples, axes) with examples = {ARGUMENT: tensor} and axes = "
            '{ARGUMENT: {1: "sequence"}}.'
        )
    named = {name: {at: _axis(axis) for at, axis in of.items()} for name, of in axes.items()}
    return Program(module.eval(), uri, axes=named, examples=_detached(examples))


def _axis(given: Any) -> Axis:
    """A name, or a ``torch.export.Dim`` with its bounds."""
    if isinstance(given, str):
        return Axis(given)
    return Axis(given.__name__, *pytorch.bounds(given.min, given.max))


def _is_table(value: Any, kind: type) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, kind) for item in value.values())


def _detached(examples: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {name: tensor.detach() for name, tensor in examples.items()}
