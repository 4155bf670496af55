"""Inference over HTTP: requests in Triton's binary form, made once, on connections kept open.

The protocol is KServe's v2 with Triton's binary tensor data extension. Written on asyncio's streams
for its price: of a do-nothing model on two cores, 64-byte requests cost this sender 49 us of
processor time each, aiohttp 123 us and httpx 912 us; at 150 kB 183, 248 and 1,092 us. The
generator's own time is the floor of every latency. Inference only: control calls go through gRPC,
since over HTTP a load stalls every inference (triton/client.py).
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

import numpy as np

from enginegate.data import Tensors
from enginegate.loadgen.grpc_sender import Response, parse_request
from enginegate.triton.codec import numpy_type
from enginegate.triton.types import Reply

# Opened before the first request, so that a quiet load never waits for one.
_OPEN_FIRST = 8
# More would exhaust file numbers; a request that waits for one is charged for the wait.
_MOST = 256
_LENGTH = b"content-length"
_HEADER_LENGTH = b"inference-header-content-length"
_CONNECTION = b"connection"
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

_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in tensor.parameters.items()
    }
    if "shared_memory_region" not in parameters:
        parameters["binary_data_size"] = len(next(contents))
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
        "parameters": parameters,
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


@dataclass(slots=True)
class HttpSender:
    """Connections that send requests made beforehand, for one event loop.

    At most 256 at a time: a request that finds none free waits, and its latency counts that.
    """

    address: str
    _idle: list[_Connection] = field(default_factory=list)
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST))

    async def send(self, request: bytes, timeout_s: float) -> Response:
        """Send one request; a failure is an answer too, never an exception."""
        try:
            async with asyncio.timeout(timeout_s), self._free:
                return await self._exchange(request)
        except TimeoutError:
            return Response("DEADLINE_EXCEEDED", "", None)
        except (OSError, EOFError, ValueError, KeyError):
            return Response("UNAVAILABLE", "", None)

    async def connect(self, timeout_s: float) -> bool:
        """Open the first connections, so that the first requests do not pay for them."""
        end_s = time.monotonic() + timeout_s
        while len(self._idle) < _OPEN_FIRST:
            try:
                async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                    self._idle.append(await self._open())
            except TimeoutError:
                return False
            except OSError:
                await asyncio.sleep(0.05)
        return True

    async def close(self) -> None:
        """Close the connections; requests under way fail."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
        # Transports close in the loop's next round.
        await asyncio.sleep(0)

    async def _open(self) -> _Connection:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    def _reusable(self) -> _Connection | None:
        """The connection that was used last, unless the server has closed it."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    async def _exchange(self, request: bytes) -> Response:
        reader, writer = self._reusable() or await self._open()
        try:
            writer.write(request)
            status, body, stays_open = await _read(reader)
        except BaseException:
            # Half an answer may still come: this connection is of no more use.
            writer.close()
            raise
        if stays_open:
            self._idle.append((reader, writer))
        else:
            writer.close()
        if status != HTTPStatus.OK:
            return Response(_STATUS.get(status, f"HTTP_{status}"), "", None)
        return Response("", str(body.head["model_version"]), body, http_reply)


async def _read(reader: asyncio.StreamReader) -> tuple[int, Body, bool]:
    """An answer's status and body, and whether the server keeps the connection open."""
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    fields = dict(line.lower().split(b":", 1) for line in lines[1:] if line)
    length = int(fields[_LENGTH])
    content = await reader.readexactly(length)
    # A server that says so closes after this answer, maybe a moment from now.
    stays_open = fields.get(_CONNECTION, b"").strip() != b"close"
    status = int(lines[0].split(b" ", 2)[1])
    if status != HTTPStatus.OK:
        return status, Body({}, content), stays_open
    end = int(fields.get(_HEADER_LENGTH, length))
    return status, Body(json.loads(content[:end]), content[end:]), stays_open
