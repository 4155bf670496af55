"""The one form an ONNX model is kept in: whole, checked, and free of where it was made.

Two exports of the same weights give the same bytes, because everything that names a machine, a path
or a moment is removed. External weights are read into the file.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import load_external_data_for_tensor

from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError

_MAX_BYTES = 2**31 - 1
_REDUCED: dict[int, str] = {
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
_QUANTISING = {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"}


def read_onnx(path: Path, *, origin: str) -> ModelProto:
    """Read a model with its external weights.

    Raises:
        ModelError: the file is missing, cut short or not ONNX, or keeps weights outside its folder.
    """
    try:
        model = onnx.load_model(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{origin}: cannot read {path.name}: {error.strerror}.") from error
    except DecodeError as error:
        raise ModelError(
            f"{origin}: {path.name} ({path.stat().st_size} bytes) is not an ONNX file, or was cut "
            f"short: {error}. Export or upload it again."
        ) from error
    if not model.graph.node:
        raise ModelError(f"{origin}: {path.name} holds no graph. Export it again.")
    for tensor in tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            _read_external(tensor, path, origin)
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


def onnx_bytes(model: ModelProto, *, origin: str) -> bytes:
    """The one serialisation of a model.

    Raises:
        ModelError: it is larger than one ONNX file may be.
    """
    if model.ByteSize() > _MAX_BYTES:
        raise ModelError(
            f"{origin} is {model.ByteSize() / 2**30:.1f} GiB as one ONNX file; the limit is 2 GiB."
        )
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def check_sound(model: ModelProto, *, origin: str) -> None:
    """Refuse a model that is malformed, not FP32, in training mode, or has a fixed batch.

    Raises:
        ModelError: with what is wrong, the node or tensor it is wrong with, and the remedy.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"{origin} is not valid ONNX: {str(error).strip()}") from error
    for tensor in tensors(model.graph):
        _check_tensor(tensor, origin)
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


def opset(model: ModelProto) -> int:
    """The version of the standard operator set."""
    return next(int(e.version) for e in model.opset_import if e.domain in {"", "ai.onnx"})


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph inside its control-flow nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in _inner(attribute):
                yield from graphs(inner)


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every constant: initialisers, and tensors held by Constant and other nodes."""
    for each in graphs(graph):
        yield from each.initializer
        for node in each.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    yield attribute.t
                yield from attribute.tensors


def _inner(attribute: AttributeProto) -> list[GraphProto]:
    alone = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
    return [*alone, *attribute.graphs]


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


def _check_tensor(tensor: TensorProto, origin: str) -> None:
    if tensor.data_type in _REDUCED:
        raise ModelError(
            f"{origin}: {tensor.name!r} is {_REDUCED[tensor.data_type]}. Register the FP32 form; "
            "candidates at other precisions are made from it."
        )
    if tensor.data_type not in {TensorProto.FLOAT, TensorProto.DOUBLE}:
        return
    values = onnx.numpy_helper.to_array(tensor)
    finite = np.isfinite(values)
    if not finite.all() and (np.isnan(values).any() or values[finite].any()):
        index = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(~finite)))
        raise ModelError(
            f"{origin}: weight {tensor.name!r} holds {int((~finite).sum())} NaN or Inf value(s), "
            f"first at {index}. Training diverged or the file is damaged; register a sound version."
        )


def _read_external(tensor: TensorProto, path: Path, origin: str) -> None:
    location = next((e.value for e in tensor.external_data if e.key == "location"), "")
    parts = PurePosixPath(location)
    file = (path.parent / location).resolve()
    if parts.is_absolute() or ".." in parts.parts or path.parent.resolve() not in file.parents:
        raise ModelError(
            f"{origin}: the weight {tensor.name!r} is kept in {location!r}, outside the model's "
            "folder. Save the model with its data beside it."
        )
    try:
        load_external_data_for_tensor(tensor, str(path.parent))
        tensor.data_location = TensorProto.DEFAULT
        onnx.numpy_helper.to_array(tensor)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"{origin}: the weight {tensor.name!r} is kept in {location!r}, which is missing or "
            f"too short ({error}). Upload the model with all its files."
        ) from error
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")
