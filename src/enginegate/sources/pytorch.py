"""PyTorch -> ONNX through torch.export; the only door to torch in this room.

The names of the data's inputs are the names of ``forward``'s arguments. Opset 22 is the first in
which every common operator takes bfloat16, and it has FP8 Quantize/Dequantize.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from onnx import ModelProto

from enginegate.data import DataSet, Tensors
from enginegate.errors import DataError, ModelError

if TYPE_CHECKING:
    import torch

OPSET = 22
_EXAMPLE_ROWS = 3

Framework: TypeAlias = Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class Export:
    """A fresh ONNX model and the framework's own answer to compare it with."""

    model: ModelProto
    framework: Framework


def exporter() -> str:
    """Library versions and options that decide the exported bytes.

    Raises:
        ModelError: PyTorch is not installed. It is not imported: that takes seconds.
    """
    try:
        versions = {name: metadata.version(name) for name in ("torch", "onnxscript")}
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"A PyTorch model needs {error.name}, which is not installed here. "
            "Run: pip install 'enginegate[torch]'"
        ) from error
    return f"torch {versions['torch']}, onnxscript {versions['onnxscript']}, opset {OPSET}"


def onnx_from_module(module: "torch.nn.Module", data: DataSet, *, origin: str) -> Export:
    """Export with a dynamic first axis for every input.

    Raises:
        DataError: the data's inputs are not the arguments of ``forward``.
        ModelError: the program has a fixed batch, or cannot be exported.
    """
    import torch  # noqa: PLC0415

    names = _arguments(module, data, origin)
    examples = tuple(
        torch.from_numpy(np.zeros((_EXAMPLE_ROWS, *array.shape[1:]), array.dtype))
        for array in (data.inputs[name] for name in names)
    )
    framework = _framework(module, names, origin)
    batch = torch.export.Dim("batch")
    with _quiet():
        outputs = list(framework({name: array[:1] for name, array in data.inputs.items()}))
        try:
            program = torch.onnx.export(
                module,
                examples,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=({0: batch},) * len(names),
                input_names=names,
                output_names=outputs,
                external_data=False,
                verbose=False,
            )
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            raise _refusal(error, origin) from error
    assert program is not None  # noqa: S101 - only the old exporter returns None
    return Export(program.model_proto, framework)


def _arguments(module: "torch.nn.Module", data: DataSet, origin: str) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if set(wanted) != set(data.inputs):
        raise DataError(
            f"{data.origin} holds inputs {sorted(data.inputs)}, but forward() of {origin} takes "
            f"{wanted}. Name the arrays input.NAME after its arguments."
        )
    return wanted


def _framework(module: "torch.nn.Module", names: list[str], origin: str) -> Framework:
    import torch  # noqa: PLC0415

    def run(inputs: Tensors) -> Tensors:
        arguments = [torch.from_numpy(np.array(inputs[name])) for name in names]
        with torch.no_grad():
            try:
                answer = module(*arguments)
            except (RuntimeError, AssertionError, TypeError, ValueError) as error:
                raise _refusal(error, origin) from error
        return {name: tensor.numpy() for name, tensor in _named(answer, origin).items()}

    return run


def _named(answer: Any, origin: str) -> Mapping[str, "torch.Tensor"]:
    """Outputs by name: a dictionary's keys, else ``output``, or ``output_0``, ``output_1``, ..."""
    import torch  # noqa: PLC0415

    if isinstance(answer, torch.Tensor):
        return {"output": answer}
    if isinstance(answer, (tuple, list)):
        answer = {f"output_{index}": tensor for index, tensor in enumerate(answer)}
    if isinstance(answer, Mapping) and all(isinstance(v, torch.Tensor) for v in answer.values()):
        return answer
    raise ModelError(
        f"forward() of {origin} returns {type(answer).__name__}; return a tensor, or a tuple or "
        "dictionary of tensors."
    )


def _refusal(error: Exception, origin: str) -> ModelError | DataError:
    cause = error.__cause__ or error
    first_line = str(cause).strip().partition("\n")[0]
    if "Guard failed" in first_line and "size()[0]" not in first_line:
        return DataError(
            f"The data does not have the shape that {origin} was traced with: {first_line}. Give "
            "the samples that shape, or log the model again with such an input_example."
        )
    if "Guard failed" in first_line or "onstraint" in first_line:
        return ModelError(
            f"{origin} was logged for one batch size ({first_line}). Log it again with an "
            "input_example of two or more samples, so that its batch axis is dynamic."
        )
    return ModelError(
        f"{origin} cannot become ONNX: {type(cause).__name__}: {first_line}\n"
        "Every operation of forward() must be one that torch.export can trace."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about absent libraries and its own deprecations; neither helps a user."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
