"""Weights that are kept in files beside an ONNX model: where they may be, in and out.

One ONNX file cannot hold more than 2 GiB. A larger model keeps its weights in ``model.onnx.data``,
each at an offset that a memory map can start at, and ``model.onnx`` names that file's sha256: its
own digest stands for the whole model.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto
from onnx.external_data_helper import load_external_data_for_tensor

from enginegate.atomic_io import write_file
from enginegate.candidate import ONNX_FILE, FileDigest
from enginegate.errors import ModelError

# Below the limit of 2 GiB - 1: converters add nodes and scales to what fits here.
ONE_FILE_BYTES = 2**31 - 2**26
DATA_FILE = f"{ONNX_FILE}.data"
_DIGEST_KEY = "sha256 of "
_ALIGNMENT = 4096
_SMALL_BYTES = 1024
_CHUNK_BYTES = 1 << 24


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
        yield from _attributes(each)


def whole(tensor: TensorProto, folder: Path) -> TensorProto:
    """The tensor with its values, read from ``folder`` for this one use if they are outside."""
    if not _is_external(tensor):
        return tensor
    copy = TensorProto()
    copy.CopyFrom(tensor)
    load_external_data_for_tensor(copy, str(folder))
    return copy


def parse(path: Path, *, origin: str) -> ModelProto:
    """Read a model's graph; weights that are in other files stay there.

    Raises:
        ModelError: the file is missing, cut short or not ONNX.
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
    return model


def files_of(path: Path, *, origin: str) -> list[Path]:
    """An ONNX file and the weight files that it names, each inside its folder.

    Raises:
        ModelError: a file is missing, too short or outside the folder, or it is not ONNX.
    """
    model, folder = parse(path, origin=origin), path.resolve().parent
    beside = {_place(tensor, folder, origin)[0] for tensor in _external(model)}
    return [folder / path.name, *sorted(beside)]


def bring_in(model: ModelProto, folder: Path, *, origin: str, limit: int) -> None:
    """Read external weights into the model, unless they are more than ``limit`` bytes together.

    Small ones are always read in: among them are shapes, which decide other shapes.
    Those that stay outside are checked to be there in full.

    Raises:
        ModelError: weights are missing, too short, or outside the model's folder.
    """
    total = sum(_place(tensor, folder, origin)[2] for tensor in _external(model))
    smallest = _SMALL_BYTES if total > limit else limit + 1
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            if _is_external(tensor) and _place(tensor, folder, origin)[2] < smallest:
                _read_in(tensor, folder, origin)
        for tensor in _attributes(graph):
            if _is_external(tensor):
                _read_in(tensor, folder, origin)


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
    if inside > limit or next(_external(model), None) is not None:
        _move_out(model, folder / DATA_FILE, weights, origin)
        external[DATA_FILE] = FileDigest.of(folder / DATA_FILE)
        model.metadata_props.add(key=_DIGEST_KEY + DATA_FILE, value=external[DATA_FILE].sha256)
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


def _inner(attribute: AttributeProto) -> list[GraphProto]:
    alone = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
    return [*alone, *attribute.graphs]


def _attributes(graph: GraphProto) -> Iterator[TensorProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _external(model: ModelProto) -> Iterator[TensorProto]:
    return (tensor for tensor in tensors(model.graph) if _is_external(tensor))


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _place(tensor: TensorProto, folder: Path, origin: str) -> tuple[Path, int, int]:
    """File, offset and length in bytes of an external tensor; the file holds that much."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    parts, file = PurePosixPath(location), (folder / location).resolve()
    if parts.is_absolute() or ".." in parts.parts or folder.resolve() not in file.parents:
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


def _incomplete(tensor: TensorProto, location: str, found: object, origin: str) -> ModelError:
    return ModelError(
        f"{origin}: the weight {tensor.name!r} is kept in {location!r}, which is missing or "
        f"too short ({found}). Upload the model with all its files."
    )


def _move_out(model: ModelProto, data: Path, weights: Path, origin: str) -> None:
    """Write every large initialiser into one file, in the model's order."""
    with data.open("wb") as file:
        for graph in graphs(model.graph):
            for tensor in graph.initializer:
                if not _is_external(tensor) and len(tensor.raw_data) < _SMALL_BYTES:
                    continue
                offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(offset)
                for chunk in _content(tensor, weights, origin):
                    file.write(chunk)
                _refer(tensor, data.name, offset, file.tell() - offset)
        file.flush()
        os.fsync(file.fileno())


def _content(tensor: TensorProto, weights: Path, origin: str) -> Iterator[bytes]:
    if not _is_external(tensor):
        yield tensor.raw_data
        return
    path, offset, left = _place(tensor, weights, origin)
    with path.open("rb") as file:
        file.seek(offset)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def _refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
