"""PyTorch -> ONNX through torch.export; the only door to torch in this room.

The names of the data's inputs are the names of ``forward``'s arguments.
"""

import hashlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zipfile import ZipFile

import numpy as np

from enginegate.candidate import PROGRAM_FILE, Sha256
from enginegate.data import DataSet, Tensors
from enginegate.errors import DataError, ModelError
from enginegate.messages import first_line
from enginegate.sources.onnx_form import ONE_FILE_BYTES
from enginegate.sources.types import (
    OPSET,
    ExportedModel,
    Framework,
    SavedProgram,
    exporter_versions,
)

if TYPE_CHECKING:
    import torch

_EXAMPLE_ROWS = 3  # not 1, which tracing takes for a constant
_TRIVIAL = 2  # torch.export's own lower bound of a dynamic size
_FAULTS = (RuntimeError, AssertionError, TypeError, ValueError, IndexError, NotImplementedError)
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_VIOLATED = re.compile(r"Constraints violated \(([^)]*)\)")
_REASON = re.compile(r"^ *- (.*)$", re.MULTILINE)


class Axis(NamedTuple):
    """A dynamic axis besides the batch: its name, and the sizes it may have (None: any)."""

    name: str
    smallest: int | None = None
    largest: int | None = None


Axes: TypeAlias = Mapping[str, Mapping[int, Axis]]


@dataclass(frozen=True, slots=True)
class Program:
    """A module in evaluation mode, and what cannot be read off it.

    Attributes:
        origin: what it is called in messages.
        outputs: names for outputs that have none of their own.
        axes: dynamic axes besides the batch, by input.
        examples: tensors to trace with, of two or more rows; the others are made like the data.
        as_program: how it is set up while it is traced for compilers of PyTorch programs, e.g. with
            attention in one operator.
    """

    module: "torch.nn.Module"
    origin: str
    outputs: tuple[str, ...] = ()
    axes: Axes = field(default_factory=dict)
    examples: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    as_program: Callable[[], AbstractContextManager[object]] = nullcontext


def torch_exporter(*others: str) -> str:
    """Versions of torch, its exporter and ``others``, each of which has an extra of its name."""
    extras = {"torch": "torch", "onnxscript": "torch", **dict(zip(others, others, strict=True))}
    return exporter_versions("PyTorch", extras)


def onnx_from_program(program: Program, data: DataSet, scratch: Path) -> ExportedModel:
    """Export into ``scratch`` with a dynamic first axis for every input, and the named others.

    Raises:
        DataError: the data's inputs are not the arguments of ``forward``.
        ModelError: the program has a fixed batch, or cannot be exported.
    """
    import torch  # noqa: PLC0415

    names = _arguments(program, data)
    framework = _framework(program, names)
    outputs = list(framework({name: array[:1] for name, array in data.inputs.items()}))
    with _quiet():
        try:
            exported = torch.onnx.export(
                program.module,
                _examples(program, data, names),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=_dynamic_shapes(program.axes, names),
                input_names=names,
                output_names=outputs,
                external_data=False,
                verbose=False,
            )
        except _FAULTS as error:
            raise _explain(error, program.origin) from error
        assert exported is not None  # noqa: S101 - only the old exporter returns None
        for node in exported.model.graph:
            for value in node.outputs:  # the exporter may give an inner value an output's name
                if value.name in outputs and not value.is_graph_output():
                    value.name = f"{value.name}_inner"
        weights = (*program.module.parameters(), *program.module.buffers())
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        path = scratch / "exported.onnx"
        exported.save(path, external_data=size > ONE_FILE_BYTES)
        try:
            saved, why_not = _save_program(program, data, names, outputs, scratch), ""
        except _FAULTS as error:
            saved, why_not = None, first_line(error)
    return ExportedModel(path, framework, program=saved, no_program=why_not)


def _save_program(
    program: Program, data: DataSet, names: list[str], outputs: list[str], scratch: Path
) -> SavedProgram:
    """The program in a file that holds no pickle of code, read back from there."""
    import torch  # noqa: PLC0415

    path = scratch / PROGRAM_FILE
    with program.as_program():
        traced = torch.export.export(
            program.module,
            _examples(program, data, names),
            dynamic_shapes=_dynamic_shapes(program.axes, names),
            strict=False,
        )
    for node in traced.graph.nodes:  # where it came from differs from run to run, and names files
        for told in ("from_node", "stack_trace"):
            node.meta.pop(told, None)
    torch.export.save(traced, path)
    check_no_pickle(path)
    module = torch.export.load(path).module(check_guards=False)

    def run(inputs: Tensors) -> Tensors:
        arguments = [torch.from_numpy(np.array(inputs[name])) for name in names]
        with torch.no_grad():
            answers = torch.utils._pytree.tree_leaves(module(*arguments))  # noqa: SLF001
        return {name: value.numpy() for name, value in zip(outputs, answers, strict=True)}

    return SavedProgram(path, tuple(names), tuple(outputs), run)


def check_no_pickle(path: Path) -> None:
    """Refuse a program whose file holds objects that torch.export would unpickle freely.

    Raises:
        ValueError: it holds such an object.
    """
    with ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith("_config.json"):
                continue
            payloads = json.loads(archive.read(name)).get("config", {})
            loose = sorted(key for key, of in payloads.items() if of.get("use_pickle"))
            if loose:
                raise ValueError(f"{', '.join(loose[:3])} can be saved as a pickle only")


def traced_digest(program: Program, data: DataSet) -> Sha256:
    """Digest of everything a module computes with: its traced graph, weights and constants."""
    import torch  # noqa: PLC0415

    names = _arguments(program, data)
    with _quiet():
        try:
            traced = torch.export.export(
                program.module,
                _examples(program, data, names),
                dynamic_shapes=_dynamic_shapes(program.axes, names),
            )
        except _FAULTS as error:
            raise _explain(error, program.origin) from error
    digest = hashlib.sha256(f"{traced.graph}\n{traced.graph_signature}".encode())
    for name, value in sorted({**traced.state_dict, **traced.constants}.items()):
        digest.update(f"{name}|{getattr(value, 'dtype', '')}|".encode())
        if isinstance(value, torch.Tensor):
            flat = value.detach().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def traced_axes(module: "torch.nn.Module") -> Axes:
    """The dynamic axes that an exported program was traced with, besides the batch."""
    graph = getattr(module, "graph", None)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"] if graph else []
    named: dict[str, Axis] = {}
    axes: dict[str, dict[int, Axis]] = {}
    for node in placeholders:
        for at, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if at == 0 or isinstance(size, int):
                continue
            span = size.node.shape_env.bound_sympy(size.node.expr)
            name = f"{re.sub('[^a-zA-Z0-9]', '_', str(node.target))}_{at}"
            fresh = Axis(name, *bounds(span.lower, span.upper))
            axis = named.setdefault(str(size.node.expr), fresh)
            axes.setdefault(str(node.target), {})[at] = axis
    return axes


def bounds(smallest: Any, largest: Any) -> tuple[int | None, int | None]:
    """Sizes as torch.export keeps them: its own infinity and the trivial bounds are None."""
    low, high = (int(bound) if str(bound).isdigit() else None for bound in (smallest, largest))
    return (low if low and low > _TRIVIAL else None), (high if high and high < 2**31 else None)


def _dynamic_shapes(axes: Axes, names: list[str]) -> tuple[dict[int, "torch.export.Dim"], ...]:
    """The dynamic axes of each input for torch.export; equal names are equal sizes."""
    import torch  # noqa: PLC0415

    dims = {"batch": torch.export.Dim("batch")}
    for inputs in axes.values():
        for name, smallest, largest in inputs.values():
            dims.setdefault(name, torch.export.Dim(name, min=smallest, max=largest))
    return tuple(
        {0: dims["batch"], **{at: dims[axis.name] for at, axis in axes.get(name, {}).items()}}
        for name in names
    )


def _examples(program: Program, data: DataSet, names: list[str]) -> tuple["torch.Tensor", ...]:
    """The program's own, else zeros like the data.

    No dynamic axis has the size 1, which tracing would take for a constant.
    """
    import torch  # noqa: PLC0415

    made = dict(program.examples)
    for name in set(names) - set(made):
        array, dynamic = data.inputs[name], program.axes.get(name, {})
        shape = [max(2, size) if at in dynamic else size for at, size in enumerate(array.shape)]
        made[name] = torch.from_numpy(np.zeros((_EXAMPLE_ROWS, *shape[1:]), array.dtype))
    return tuple(made[name] for name in names)


def _arguments(program: Program, data: DataSet) -> list[str]:
    """The data's inputs in the order of ``forward``; arguments with a default may be left out."""
    parameters = [
        parameter
        for parameter in inspect.signature(program.module.forward).parameters.values()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    wanted = [p.name for p in parameters if p.default is p.empty]
    arguments = [parameter.name for parameter in parameters]
    names = arguments[: len(data.inputs)]
    if set(names) != set(data.inputs) or len(names) < len(wanted):
        optional = arguments[len(wanted) :]
        then = f", then optionally {optional}" if optional else ""
        raise DataError(
            f"{data.origin} holds inputs {sorted(data.inputs)}, but forward() of {program.origin} "
            f"takes {wanted}{then}. Name the arrays input.NAME after its arguments."
        )
    return names


def _framework(program: Program, names: list[str]) -> Framework:
    import torch  # noqa: PLC0415

    def run(inputs: Tensors) -> Tensors:
        arguments = [torch.from_numpy(np.array(inputs[name])) for name in names]
        with torch.no_grad():
            try:
                answer = program.module(*arguments)
            except _FAULTS as error:
                raise _explain(error, program.origin) from error
        return {name: tensor.numpy() for name, tensor in _name_outputs(answer, program).items()}

    return run


def _name_outputs(answer: Any, program: Program) -> Mapping[str, "torch.Tensor"]:
    """Outputs by name: a dictionary's keys, else the program's names, else ``output``.

    Several without names are ``output_0``, ``output_1``, ...
    """
    import torch  # noqa: PLC0415

    if isinstance(answer, Mapping) and all(isinstance(v, torch.Tensor) for v in answer.values()):
        return answer
    parts = [answer] if isinstance(answer, torch.Tensor) else answer
    if not isinstance(parts, (tuple, list)) or not all(isinstance(p, torch.Tensor) for p in parts):
        raise ModelError(
            f"forward() of {program.origin} returns {type(answer).__name__}; return a tensor, or a "
            "tuple or dictionary of tensors."
        )
    default = ("output",) if parts is not answer else [f"output_{n}" for n in range(len(parts))]
    names = program.outputs or default
    if len(names) != len(parts):
        raise ModelError(
            f"The signature of {program.origin} names the outputs {list(names)}, but forward() "
            f"returns {len(parts)}. Log the model with a signature that fits it."
        )
    return dict(zip(names, parts, strict=True))


def _explain(error: Exception, origin: str) -> ModelError | DataError:
    """The error to raise instead of torch's; names the operator, axis or shape in the way."""
    cause = error.__cause__ or error
    text = str(cause).strip()
    first_line = text.partition("\n")[0]
    chain = ""
    link: BaseException | None = error
    while link is not None:
        chain, link = f"{chain}\n{link}", link.__cause__
    operator = _OPERATOR.search(chain)
    if operator:
        return ModelError(
            f"{origin} uses the operator {operator[1]}, which torch.onnx cannot write at opset "
            f"{OPSET}. Write that part of forward() with other operators."
        )
    if "Guard failed" in first_line and "size()[0]" not in first_line:
        return DataError(
            f"The data does not have the shape that {origin} was traced with: {first_line}. Give "
            "the samples that shape, or log the model again with such an input_example."
        )
    violated = _VIOLATED.search(text)
    if violated and "batch" not in violated[1].split(", "):
        plainest = [first_line, *_REASON.findall(text)][-1]  # the last of torch's reasons
        return ModelError(
            f"{origin} does not take every size of {violated[1]}: {plainest}\n"
            "Export the program with bounds, torch.export.Dim(NAME, min=.., max=..), or with "
            "that axis fixed."
        )
    if violated or "Guard failed" in first_line or "onstraint" in first_line:
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
