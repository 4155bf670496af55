"""Inference over HTTP: requests in Triton's binary form, and answers.

The protocol is KServe's v2 with Triton's binary tensor data extension. Inference only: control
calls go through gRPC, since over HTTP a load stalls every inference (triton/client.py).
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginegate.data import Tensors
from enginegate.loadgen.grpc_message import parse_request
from enginegate.triton.codec import numpy_type
from enginegate.triton.types import Reply

# The inverse of Triton's own mapping.
_STATUS = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ALREADY_EXISTS",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def http_request(address: str, request: bytes) -> bytes:
    """A request as one HTTP message; tensors in shared memory stay there.

    Args:
        address: the server's HTTP ``HOST:PORT``.
        request: a ``ModelInferRequest`` in wire form.
    """
    message = parse_request(request)
    contents = [bytes(content) for content in message.raw_input_contents]
    # A request holds contents only for those inputs that are not in shared memory.
    remaining = iter(contents)
    inputs = [_input(tensor, remaining) for tensor in message.inputs]
    head = {"id": message.id, "inputs": inputs, "parameters": {"binary_data_output": True}}
    if message.outputs:
        # What has a place goes there; the others are asked for as they are without a list.
        head["outputs"] = [_output(tensor) for tensor in message.outputs]
    header = json.dumps(head, separators=(",", ":")).encode()
    version = f"/versions/{message.model_version}" if message.model_version else ""
    lines = (
        f"POST /v2/models/{message.model_name}{version}/infer HTTP/1.1",
        f"Host: {address}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(header)}",
        f"Content-Length: {len(header) + sum(map(len, contents))}",
    )
    return b"".join(["\r\n".join(lines).encode(), b"\r\n\r\n", header, *contents])


def _input(tensor: Any, contents: Any) -> dict[str, Any]:
    parameters = _parameters(tensor)
    if "shared_memory_region" not in parameters:
        parameters["binary_data_size"] = len(next(contents))
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
        "parameters": parameters,
    }


def _output(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "parameters": _parameters(tensor) or {"binary_data": True}}


def _parameters(tensor: Any) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in tensor.parameters.items()
    }


def http_reply(body: "Body") -> Reply:
    """Decode an answer. Arrays share its memory and must not be written to."""
    outputs: Tensors = {}
    at = 0
    for tensor in body.head.get("outputs", []):
        dtype = np.dtype(numpy_type(tensor["datatype"]))
        size = int(tensor["parameters"]["binary_data_size"])
        array = np.frombuffer(body.content[at : at + size], dtype)
        outputs[tensor["name"]] = array.reshape(tensor["shape"])
        at += size
    return Reply(outputs, str(body.head["model_version"]), str(body.head.get("id", "")))


@dataclass(frozen=True, slots=True)
class Body:
    """An HTTP answer: its JSON, and the bytes after it."""

    head: dict[str, Any]
    content: bytes


def grpc_status(status: int) -> str:
    """The gRPC name of an HTTP status, e.g. ``UNAVAILABLE`` of 503."""
    return _STATUS.get(status, f"HTTP_{status}")
