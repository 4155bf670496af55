"""The one form an ONNX model is kept in: whole, checked, and free of where it was made.

Two exports of the same weights give the same bytes, because everything that names a machine, a path
or a moment is removed. External weights are read into the file, if it can hold them.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError
from enginegate.messages import counted
from enginegate.sources.external_data import (
    ONE_FILE_BYTES,
    bring_in,
    graphs,
    onnx_bytes,
    parse,
    tensors,
    whole,
)

__all__ = [
    "canonical",
    "check_sound",
    "dynamic_axes",
    "graphs",
    "input_specs",
    "onnx_bytes",
    "opset",
    "output_specs",
    "read_onnx",
    "tensors",
]

# The largest exports of encoders and detectors that we know have some twenty thousand.
MOST_NODES = 50_000
_STANDARD = {"", "ai.onnx", "ai.onnx.ml"}
_REDUCED: dict[int, str] = {
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
_QUANTISING = {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"}


def read_onnx(path: Path, *, origin: str, limit: int = ONE_FILE_BYTES) -> ModelProto:
    """Read a model with its external weights, unless those are more than ``limit`` bytes.

    Raises:
        ModelError: the file is missing, cut short or not ONNX, or keeps weights outside its folder.
    """
    model = parse(path, origin=origin)
    bring_in(model, path.parent, origin=origin, limit=limit)
    return model


def canonical(model: ModelProto) -> ModelProto:
    """The same computation without stack traces, notes, machine paths or derived shapes."""
    clean = ModelProto()
    clean.CopyFrom(model)
    del clean.metadata_props[:]
    clean.doc_string = ""
    for graph in graphs(clean.graph):
        _strip(graph)
    used = {node.domain for graph in graphs(clean.graph) for node in graph.node} | {""}
    kept = {entry.domain: entry.version for entry in clean.opset_import if entry.domain in used}
    del clean.opset_import[:]
    for domain, version in sorted(kept.items()):
        clean.opset_import.add(domain=domain, version=version)
    return clean


def check_sound(model: ModelProto, *, origin: str, path: Path | None = None) -> None:
    """Refuse a model that is malformed, not FP32, in training mode, or has a fixed batch.

    Args:
        path: the file that the model was written to; needed if its weights are in another one.

    Raises:
        ModelError: with what is wrong, the node or tensor it is wrong with, and the remedy.
    """
    _check_size(model, origin)
    _check_operators(model, origin)
    try:
        onnx.checker.check_model(model if path is None else str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"{origin} is not valid ONNX: {str(error).strip()}") from error
    for tensor in tensors(model.graph):
        _check_tensor(tensor, origin, path.parent if path else Path())
    for graph in graphs(model.graph):
        for node in graph.node:
            _check_node(node, graph, origin)
    for spec in (*input_specs(model), *output_specs(model)):
        if not spec.shape or spec.shape[0] != -1:
            raise ModelError(
                f"{origin}: {spec} has a fixed batch axis. Export it with a dynamic first axis: "
                "for mlflow.pytorch log an input_example of two or more samples."
            )


def input_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """The inputs a caller gives; initialisers listed as inputs are not among them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return tuple(_spec(value) for value in model.graph.input if value.name not in constants)


def output_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs, in order."""
    return tuple(_spec(value) for value in model.graph.output)


def dynamic_axes(model: ModelProto) -> dict[str, tuple[tuple[str, int], ...]]:
    """Inputs and axes of each dynamic size besides the batch, by the size's name.

    A size without a name of its own is called ``INPUT.AXIS``.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if axis and not size.HasField("dim_value"):
                name = size.dim_param or f"{value.name}.{axis}"
                found[name] = (*found.get(name, ()), (value.name, axis))
    return found


def opset(model: ModelProto) -> int:
    """The version of the standard operator set."""
    return next(int(e.version) for e in model.opset_import if e.domain in {"", "ai.onnx"})


def _strip(graph: GraphProto) -> None:
    del graph.value_info[:]
    del graph.quantization_annotation[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            attribute.doc_string = ""


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    axes = (axis.dim_value if axis.HasField("dim_value") else -1 for axis in kind.shape.dim)
    return TensorSpec(name=value.name, dtype=dtype, shape=tuple(axes))


def _check_size(model: ModelProto, origin: str) -> None:
    nodes = sum(len(graph.node) for graph in graphs(model.graph))
    if nodes > MOST_NODES:
        raise ModelError(
            f"{origin} has {nodes:,} nodes; {MOST_NODES:,} at most, because opening and converting "
            "it takes longer with the square of them. Export it without unrolled loops: with a "
            "dynamic axis, or as operators for whole layers."
        )


def _check_operators(model: ModelProto, origin: str) -> None:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    own = {(function.domain, function.name) for function in model.functions}
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain not in _STANDARD or (node.domain, node.op_type) in own:
                continue
            version = versions.get(node.domain, 0)
            try:
                onnx.defs.get_schema(node.op_type, version, node.domain)
            except onnx.defs.SchemaError as error:
                raise ModelError(
                    f"{origin}: node {node.name!r} uses the operator {node.op_type}, which "
                    f"{node.domain or 'ONNX'} opset {version} does not have. Export the model "
                    "at an opset that has it, or write that part of the model in standard "
                    "operators."
                ) from error


def _check_node(node: NodeProto, graph: GraphProto, origin: str) -> None:
    if node.op_type in _QUANTISING:
        raise ModelError(
            f"{origin} is quantised already: node {node.name!r} is {node.op_type}. Register the "
            "FP32 form; candidates at other precisions are made from it."
        )
    training = any(a.name == "training_mode" and a.i for a in node.attribute)
    if node.op_type == "Dropout":
        flags = [t for t in graph.initializer if t.name in node.input[2:]]
        training = any(onnx.numpy_helper.to_array(flag).any() for flag in flags)
    if training:
        raise ModelError(
            f"{origin} was exported in training mode (node {node.name!r}). Call model.eval() "
            "before logging or exporting it."
        )


def _check_tensor(tensor: TensorProto, origin: str, folder: Path) -> None:
    if tensor.data_type in _REDUCED:
        raise ModelError(
            f"{origin}: {tensor.name!r} is {_REDUCED[tensor.data_type]}. Register the FP32 form; "
            "candidates at other precisions are made from it."
        )
    if tensor.data_type not in {TensorProto.FLOAT, TensorProto.DOUBLE}:
        return
    try:
        values = onnx.numpy_helper.to_array(whole(tensor, folder))
    except (ValueError, TypeError, MemoryError) as error:
        raise ModelError(
            f"{origin}: weight {tensor.name!r} does not hold what its shape "
            f"{tuple(tensor.dims)} says: {error}. Export the model again."
        ) from error
    finite = np.isfinite(values)
    if not finite.all() and (np.isnan(values).any() or values[finite].any()):
        index = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(~finite)))
        raise ModelError(
            f"{origin}: weight {tensor.name!r} holds "
            f"{counted(int((~finite).sum()), 'NaN or Inf value')}, "
            f"first at {index}. Training diverged or the file is damaged; register a sound version."
        )
