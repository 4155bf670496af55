"""Requests whose input tensors lie in memory shared with the server, instead of travelling.

The server only reads it, so any number of requests may use it at once. Outputs still travel.
"""

import base64
import logging
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory as Region
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.errors import InputError, ServerError
from enginegate.loadgen.grpc_message import parse_request
from enginegate.measurement import SharedMemory
from enginegate.triton.client import SharedRegion, TritonClient

_log = logging.getLogger("enginegate.loadgen")
_ALIGNMENT = 64
_PREFIX = "enginegate-load-"
_SYSTEM = Path("/dev/shm")  # noqa: S108 - the system's shared memory, not a temporary file
_DEVICE = 0
_LAST_ANSWER_S = 10.0
_POLL_S = 0.01


@contextmanager
def in_shared_memory(
    control: str, requests: tuple[bytes, ...], kind: SharedMemory
) -> Iterator[tuple[bytes, ...]]:
    """Requests whose input tensors lie in shared memory for as long as the block runs.

    Args:
        control: the server's gRPC ``HOST:PORT``.
        requests: ``ModelInferRequest`` in wire form.
        kind: ``none`` leaves them as they are.

    Raises:
        InputError: the server is on another machine.
        ServerError: the memory cannot be had, or the server cannot open it.
    """
    if kind == "none":
        yield requests
        return
    _check_local(control)
    name = f"{_PREFIX}{uuid.uuid4().hex[:16]}"
    moved, tensors = _move_tensors(requests, name)
    memory = _system_memory(name, tensors) if kind == "system" else _cuda_memory(name, tensors)
    with memory as region, TritonClient(control) as client:
        _unregister_leftovers(client)
        try:
            client.share_memory(region)
            yield moved
        finally:
            _unregister(client, region)


def _unregister(client: TritonClient, region: SharedRegion) -> None:
    """Unregister the memory once the server has answered every request that reads it.

    Until then Triton 2.51 refuses (tried); later versions promise to unregister it at that moment.
    Requests that timed out at the client still read it.
    """
    deadline, why = time.monotonic() + _LAST_ANSWER_S, "requests still use it"
    while time.monotonic() < deadline:
        try:
            client.forget_memory(region)
            if region.name not in client.shared_memory(region.kind):
                return
        except ServerError as error:
            why = str(error)
            if not client.live():
                break
        time.sleep(_POLL_S)
    _log.warning("shared memory %s stays registered: %s", region.name, why)


def _unregister_leftovers(client: TritonClient) -> None:
    """Unregister memory that a killed run shared: it is gone, but the server still lists it."""
    for name in client.shared_memory():
        if name.startswith(_PREFIX) and not (_SYSTEM / name).exists():
            with suppress(ServerError):
                client.forget_memory(SharedRegion(name, 0))


def _move_tensors(
    requests: Sequence[bytes], region: str
) -> tuple[tuple[bytes, ...], list[tuple[int, bytes]]]:
    """Requests that name offsets in the region, and the tensors to put there: (offset, bytes)."""
    moved: list[bytes] = []
    tensors: list[tuple[int, bytes]] = []
    at = 0
    for request in requests:
        message = parse_request(request)
        for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
            tensors.append((at, content))
            tensor.parameters["shared_memory_region"].string_param = region
            tensor.parameters["shared_memory_offset"].int64_param = at
            tensor.parameters["shared_memory_byte_size"].int64_param = len(content)
            at += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        del message.raw_input_contents[:]
        moved.append(message.SerializeToString())
    return tuple(moved), tensors


def _size(tensors: Sequence[tuple[int, bytes]]) -> int:
    return max((at + len(content) for at, content in tensors), default=0) or 1


@contextmanager
def _system_memory(name: str, tensors: Sequence[tuple[int, bytes]]) -> Iterator[SharedRegion]:
    size = _size(tensors)
    free = shutil.disk_usage(_SYSTEM).free
    if size > free:
        # Writing past the end of the file system would kill this process.
        raise ServerError(
            f"The inputs need {size:,} bytes of shared memory, and {_SYSTEM} has {free:,} free. "
            "Enlarge it (docker: --shm-size), send fewer samples, or do not share memory."
        )
    region = Region(name, create=True, size=size)
    try:
        memory = memoryview(region.buf or b"")
        for at, content in tensors:
            memory[at : at + len(content)] = content
        memory.release()
        yield SharedRegion(name, size)
    finally:
        region.close()
        region.unlink()


@contextmanager
def _cuda_memory(name: str, tensors: Sequence[tuple[int, bytes]]) -> Iterator[SharedRegion]:
    size = _size(tensors)
    content = np.zeros(size, np.uint8)
    for at, part in tensors:
        content[at : at + len(part)] = np.frombuffer(part, np.uint8)
    try:
        cuda: Any = _cuda_module()
        handle = cuda.create_shared_memory_region(name, size, _DEVICE)
    except Exception as error:
        raise ServerError(
            f"No memory on GPU {_DEVICE} can be shared: {type(error).__name__}: {error}.\nIt needs "
            "an NVIDIA GPU and the package cuda-python (python -m pip install "
            "'tritonclient[cuda]'). Share system memory instead, or none."
        ) from error
    try:
        cuda.set_shared_memory_region(handle, [content])
        # The library gives it encoded for JSON; gRPC takes it as it is.
        raw = base64.b64decode(cuda.get_raw_handle(handle))
        yield SharedRegion(name, size, raw, _DEVICE)
    finally:
        cuda.destroy_shared_memory_region(handle)


def _cuda_module() -> Any:
    import tritonclient.utils.cuda_shared_memory as cuda  # type: ignore[import-untyped] # noqa: PLC0415

    return cuda


def _check_local(control: str) -> None:
    """Refuse a server that cannot see this machine's memory."""
    if not control:
        raise InputError(
            "Sharing memory needs the server's gRPC address also when requests travel over HTTP: "
            "control calls go through gRPC only. Name it as control."
        )
    if not is_here(control):
        host = control.rpartition(":")[0].strip("[]")
        raise InputError(
            f"Memory cannot be shared with Triton at {control}: {host} is not this machine. Run "
            "the load where the server is, or do not share memory."
        )


def is_here(address: str) -> bool:
    """Whether ``HOST:PORT`` is on this machine: only then can one listen on an address of it."""
    host = address.rpartition(":")[0].strip("[]")
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return True
    return False
