"""Triton's client library, and arrays to and from its messages as raw little-endian bytes.

The library is imported when it is first needed, so that everything else works without it.
"""

from typing import Any, NamedTuple

import numpy as np

from enginegate.data import Tensors
from enginegate.errors import ModelError, ServerError
from enginegate.triton.types import Reply

_TRITON_TYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_NUMPY_TYPES = {triton: numpy for numpy, triton in _TRITON_TYPES.items()}


class Vendor(NamedTuple):
    """gRPC, and what Triton's client generated for it."""

    grpc: Any
    messages: Any
    stubs: Any
    configs: Any


def vendor() -> Vendor:
    """The library.

    Raises:
        ServerError: it is not installed.
    """
    try:
        import grpc  # type: ignore[import-untyped]  # noqa: PLC0415
        from tritonclient.grpc import (  # type: ignore[import-untyped]  # noqa: PLC0415
            model_config_pb2,
            service_pb2,
            service_pb2_grpc,
        )
    except ImportError as error:
        raise ServerError(
            f"Triton's client cannot be imported: {error}.\n"
            "Install it: python -m pip install 'enginegate[triton]'"
        ) from error
    return Vendor(grpc, service_pb2, service_pb2_grpc, model_config_pb2)


def channel_options(address: str) -> list[tuple[str, int]]:
    """Of a connection: messages of any size, quick reconnection, no proxy to this machine."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # This one also limits the connection attempt itself, and a busy server takes its time.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if address.startswith(("127.", "localhost:", "[::1]")):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def triton_type(dtype: str) -> str:
    """Triton's name of a NumPy dtype, e.g. ``FP32`` for ``float32``.

    Raises:
        ModelError: Triton has no such type, or this program does not carry it.
    """
    if dtype not in _TRITON_TYPES:
        raise ModelError(
            f"Tensors of dtype {dtype!r} cannot be sent to Triton.\n"
            f"Supported: {', '.join(_TRITON_TYPES)}. Cast the tensor inside the model."
        )
    return _TRITON_TYPES[dtype]


def numpy_type(triton: str) -> str:
    """NumPy's name of a Triton type, with or without ``TYPE_``, e.g. ``float32`` for ``FP32``.

    Raises:
        ModelError: NumPy has no such type, or this program does not carry it.
    """
    name = triton.removeprefix("TYPE_")
    if name not in _NUMPY_TYPES:
        raise ModelError(
            f"Triton's type {triton} cannot be read here.\n"
            f"Supported: {', '.join(_NUMPY_TYPES)}. Cast the tensor inside the model."
        )
    return _NUMPY_TYPES[name]


def fill_request(message: Any, inputs: Tensors) -> None:
    """Write arrays into a ``ModelInferRequest``.

    Raises:
        ModelError: an array has a dtype that Triton cannot carry.
    """
    for name, array in inputs.items():
        tensor = message.inputs.add(name=name, datatype=triton_type(array.dtype.name))
        tensor.shape.extend(array.shape)
        message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())


def reply_of(message: Any) -> Reply:
    """Read a ``ModelInferResponse``. Arrays share its memory and must not be written to.

    Raises:
        ServerError: an output's bytes do not fit its shape and type.
        ModelError: an output has a type that cannot be read here.
    """
    outputs: Tensors = {}
    for tensor, content in zip(message.outputs, message.raw_output_contents, strict=True):
        dtype, shape = np.dtype(numpy_type(tensor.datatype)), tuple(tensor.shape)
        expected = dtype.itemsize * int(np.prod(shape))
        if len(content) != expected:
            raise ServerError(
                f"{message.model_name} version {message.model_version} answered output "
                f"{tensor.name!r} as {dtype.name}{list(shape)}, which is {expected} bytes, but "
                f"sent {len(content)}.\n"
                "A Python backend built for NumPy 1 sends empty outputs under NumPy 2: hand "
                "tensors over with DLPack there."
            )
        outputs[tensor.name] = np.frombuffer(content, dtype).reshape(shape)
    return Reply(outputs, str(message.model_version), str(message.id))
