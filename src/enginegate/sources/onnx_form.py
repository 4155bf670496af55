"""The one form an ONNX model is kept in: whole, checked, and free of where it was made.

Two exports of one model's weights give the same bytes, because everything that names a machine, a
path or a moment is removed. External weights are read into the file, if it can hold them: one ONNX
file cannot hold more than 2 GiB. A larger model keeps its weights in ``model.onnx.data``, each at
an offset that a memory map can start at, and ``model.onnx`` names that file's sha256: its own
digest stands for the whole model.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import (
    load_external_data_for_tensor,
    set_external_data,
    uses_external_data,
)

from enginegate.atomic_io import write_file
from enginegate.candidate import ONNX_FILE, FileDigest, TensorSpec
from enginegate.errors import ModelError
from enginegate.messages import counted

# Below the limit of 2 GiB - 1: converters add nodes and scales to what fits here.
ONE_FILE_BYTES = 2**31 - 2**26
# The largest exports of encoders and detectors that we know have some twenty thousand.
MOST_NODES = 50_000
_DATA_FILE = f"{ONNX_FILE}.data"
_DIGEST_KEY = f"sha256 of {_DATA_FILE}"
_ALIGNMENT = 4096  # a page, where a memory map can start
_SMALL_BYTES = 1024  # shapes and scales are smaller, weights worth a file of their own are not
_CHUNK_BYTES = 1 << 24
_STANDARD = {"", "ai.onnx", "ai.onnx.ml"}
_REDUCED: dict[int, str] = {
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
_QUANTISING = {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"}


def read_onnx(path: Path, *, origin: str, limit: int = ONE_FILE_BYTES) -> ModelProto:
    """Read a model with its external weights, unless those are more than ``limit`` bytes together.

    Small ones are always read: among them are shapes, which decide other shapes. Those that stay
    outside are checked to be there in full.

    Raises:
        ModelError: the file is missing, cut short or not ONNX; or its weights are missing, too
            short, or outside its folder.
    """
    model, folder = _parse(path, origin), path.parent
    total = sum(_place(tensor, folder, origin)[2] for tensor in _external(model))
    smallest = _SMALL_BYTES if total > limit else limit + 1
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            if uses_external_data(tensor) and _place(tensor, folder, origin)[2] < smallest:
                _read_in(tensor, folder, origin)
        for tensor in filter(uses_external_data, _attributes(graph)):
            _read_in(tensor, folder, origin)
    return model


def parse_onnx(content: bytes, *, origin: str) -> ModelProto:
    """A model from a file's bytes; weights that are in other files stay there.

    Raises:
        ModelError: it is cut short or not ONNX.
    """
    try:
        model = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ModelError(
            f"{origin} ({len(content)} bytes) is not an ONNX file, or was cut short: {error}. "
            "Export or upload it again."
        ) from error
    if not model.graph.node:
        raise ModelError(f"{origin} holds no graph. Export it again.")
    return model


def other_files(model: ModelProto) -> list[str]:
    """Files besides its own that a model's constants are in, by the names it has for them."""
    bodies = [model.graph, *(GraphProto(node=function.node) for function in model.functions)]
    sparse = (
        part
        for body in bodies
        for graph in graphs(body)
        for each in (*graph.sparse_initializer, *_sparse_attributes(graph))
        for part in (each.values, each.indices)
    )
    constants = (*sparse, *(tensor for body in bodies for tensor in tensors(body)))
    return sorted(
        {
            entry.value
            for tensor in constants
            if uses_external_data(tensor)
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )


def files_of(path: Path, *, origin: str) -> list[Path]:
    """An ONNX file and the weight files that it names, each inside its folder."""
    model, file = _parse(path, origin), path.resolve()
    beside = {_place(tensor, file.parent, origin)[0] for tensor in _external(model)}
    return [file, *sorted(beside)]


def write_model(
    model: ModelProto, folder: Path, *, weights: Path, origin: str, limit: int = ONE_FILE_BYTES
) -> dict[str, FileDigest]:
    """Write ``model.onnx``, and its weights into ``model.onnx.data`` if one file cannot hold them.

    Args:
        weights: the folder that the model's external weights are in now.
        limit: the size that one file may have, in bytes.

    Returns:
        Digests of the files besides ``model.onnx``.
    """
    inside = sum(len(tensor.raw_data) for tensor in tensors(model.graph))
    external: dict[str, FileDigest] = {}
    if inside > limit or any(_external(model)):
        _move_out(model, folder / _DATA_FILE, weights, origin)
        external[_DATA_FILE] = FileDigest.of(folder / _DATA_FILE)
        model.metadata_props.add(key=_DIGEST_KEY, value=external[_DATA_FILE].sha256)
    write_file(folder / ONNX_FILE, onnx_bytes(model, origin=origin))
    return external


def onnx_bytes(model: ModelProto, *, origin: str) -> bytes:
    """The one serialisation of a model.

    Raises:
        ModelError: it is larger than one ONNX file may be.
    """
    size = sum(len(tensor.raw_data) for tensor in tensors(model.graph))
    if size > ONE_FILE_BYTES:
        raise ModelError(
            f"{origin} is {size / 2**30:.1f} GiB as one ONNX file; the limit is 2 GiB. Models of "
            "that size exist here at fp32 and tf32, with their weights in a second file."
        )
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def canonical(model: ModelProto) -> ModelProto:
    """A copy that computes alike, without stack traces, notes, machine paths or derived shapes."""
    clean = ModelProto()
    clean.CopyFrom(model)
    del clean.metadata_props[:]
    clean.doc_string = ""
    for graph in graphs(clean.graph):
        del graph.value_info[:]
        del graph.quantization_annotation[:]
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
            part.doc_string = ""
            del part.metadata_props[:]
        for node in graph.node:
            for attribute in node.attribute:
                attribute.doc_string = ""
    used = {node.domain for graph in graphs(clean.graph) for node in graph.node} | {""}
    versions = {entry.domain: entry.version for entry in clean.opset_import if entry.domain in used}
    del clean.opset_import[:]
    for domain, version in sorted(versions.items()):
        clean.opset_import.add(domain=domain, version=version)
    return clean


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph inside its control-flow nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            alone = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
            for inner in (*alone, *attribute.graphs):
                yield from graphs(inner)


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every constant: initialisers, and tensors held by Constant and other nodes."""
    for each in graphs(graph):
        yield from each.initializer
        yield from _attributes(each)


def input_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """The inputs a caller gives; initialisers listed as inputs are not among them."""
    return tuple(map(_spec, _inputs(model)))


def output_specs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs, in order."""
    return tuple(map(_spec, model.graph.output))


def dynamic_axes(model: ModelProto) -> dict[str, tuple[tuple[str, int], ...]]:
    """Inputs and axes of each dynamic size besides the batch, by the size's name.

    A size without a name of its own is called ``INPUT.AXIS``.
    """
    places: dict[str, tuple[tuple[str, int], ...]] = {}
    for value in _inputs(model):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if axis and not size.HasField("dim_value"):
                name = size.dim_param or f"{value.name}.{axis}"
                places[name] = (*places.get(name, ()), (value.name, axis))
    return places


def opset(model: ModelProto) -> int:
    """The version of the standard operator set."""
    return next(int(e.version) for e in model.opset_import if e.domain in {"", "ai.onnx"})


def check_sound(model: ModelProto, *, origin: str, path: Path | None = None) -> None:
    """Refuse a model that is malformed, not FP32, in training mode, or has a fixed batch.

    Args:
        path: the file that the model was written to; needed if its weights are in another one.

    Raises:
        ModelError: with what is wrong, the node or tensor it is wrong with, and the remedy.
    """
    nodes = sum(len(graph.node) for graph in graphs(model.graph))
    if nodes > MOST_NODES:
        raise ModelError(
            f"{origin} has {nodes:,} nodes; {MOST_NODES:,} at most, because opening and converting "
            "it takes longer with the square of them. Export it without unrolled loops: with a "
            "dynamic axis, or as operators for whole layers."
        )
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


def _parse(path: Path, origin: str) -> ModelProto:
    """Read a model's graph; weights that are in other files stay there."""
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
    return model


def _attributes(graph: GraphProto) -> Iterator[TensorProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _sparse_attributes(graph: GraphProto) -> Iterator[onnx.SparseTensorProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.SPARSE_TENSOR:
                yield attribute.sparse_tensor
            yield from attribute.sparse_tensors


def _inputs(model: ModelProto) -> Iterator[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return (value for value in model.graph.input if value.name not in constants)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    axes = (axis.dim_value if axis.HasField("dim_value") else -1 for axis in kind.shape.dim)
    return TensorSpec(name=value.name, dtype=dtype, shape=tuple(axes))


def _external(model: ModelProto) -> Iterator[TensorProto]:
    return filter(uses_external_data, tensors(model.graph))


def _place(tensor: TensorProto, folder: Path, origin: str) -> tuple[Path, int, int]:
    """File, offset and length in bytes of an external tensor; the file holds that much."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    relative, root = PurePosixPath(location), folder.resolve()
    file = (root / location.replace("\0", "")).resolve()  # no path holds a null byte
    outside = relative.is_absolute() or ".." in relative.parts or root not in file.parents
    if outside or "\0" in location:
        raise ModelError(
            f"{origin}: the weight {tensor.name!r} is kept in {location!r}, outside the model's "
            "folder. Save the model with its data beside it."
        )
    try:
        there = file.stat().st_size
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", there - offset))
    except (OSError, ValueError) as error:
        raise _incomplete(tensor, location, error, origin) from error
    if offset < 0 or length < 0 or offset + length > there:
        raise _incomplete(tensor, location, f"{there} bytes", origin)
    return file, offset, length


def _read_in(tensor: TensorProto, folder: Path, origin: str) -> None:
    file, _, _ = _place(tensor, folder, origin)
    try:
        load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = TensorProto.DEFAULT
        onnx.numpy_helper.to_array(tensor)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise _incomplete(tensor, file.name, error, origin) from error
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")


def _incomplete(tensor: TensorProto, location: str, evidence: object, origin: str) -> ModelError:
    return ModelError(
        f"{origin}: the weight {tensor.name!r} is kept in {location!r}, which is missing or "
        f"too short ({evidence}). Upload the model with all its files."
    )


def _move_out(model: ModelProto, data: Path, weights: Path, origin: str) -> None:
    """Write every large initialiser into one file, in the model's order."""
    with data.open("wb") as file:
        for graph in graphs(model.graph):
            for tensor in graph.initializer:
                if not uses_external_data(tensor) and len(tensor.raw_data) < _SMALL_BYTES:
                    continue
                offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(offset)
                for chunk in _content(tensor, weights, origin):
                    file.write(chunk)
                tensor.raw_data = b""
                set_external_data(tensor, data.name, offset, file.tell() - offset)
                tensor.ClearField("raw_data")
        file.flush()
        os.fsync(file.fileno())


def _content(tensor: TensorProto, weights: Path, origin: str) -> Iterator[bytes]:
    if not uses_external_data(tensor):
        yield tensor.raw_data
        return
    path, offset, left = _place(tensor, weights, origin)
    with path.open("rb") as file:
        file.seek(offset)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


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
    copy = TensorProto()  # some versions of onnx leave external weights in the tensor they read
    copy.CopyFrom(tensor)
    try:
        values = onnx.numpy_helper.to_array(copy, str(folder))
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
