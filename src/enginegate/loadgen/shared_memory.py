"""Requests whose tensors lie in memory shared with the server, instead of travelling.

The server only reads inputs, so any number of requests may use them at once. Outputs of a known
size are written there too where nobody reads them: each request has its own place, and the same
request under way twice writes the same answer.
"""

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory as Region
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.candidate import TensorSpec
from enginegate.engines.cuda import shared_gpu_memory
from enginegate.errors import EnginegateError, InputError, ModelError, ServerError
from enginegate.loadgen.grpc_message import parse_request
from enginegate.measurement import SharedMemory
from enginegate.triton.client import SharedRegion, TritonClient

_log = logging.getLogger("enginegate.loadgen")
_ALIGNMENT = 64
_PREFIX = "enginegate-load-"
_SYSTEM = Path("/dev/shm")  # noqa: S108 - the system's shared memory, not a temporary file
_DEVICE = 0
_LAST_ANSWER_S = 10.0
_STARTED = 19  # field of /proc/PID/stat after the command's name
_POLL_S = 0.01


@contextmanager
def in_shared_memory(
    control: str, requests: tuple[bytes, ...], kind: SharedMemory, *, outputs: bool = False
) -> Iterator[tuple[bytes, ...]]:
    """Requests whose input tensors lie in shared memory for as long as the block runs.

    Args:
        control: the server's gRPC ``HOST:PORT``.
        requests: ``ModelInferRequest`` in wire form, all for one model.
        kind: ``none`` leaves them as they are.
        outputs: whether outputs of a known size are written there too; nobody reads them.

    Raises:
        InputError: the server is on another machine.
        ServerError: the memory cannot be had, or the server cannot open it.
    """
    if kind == "none":
        yield requests
        return
    _check_local(control)
    name = f"{_PREFIX}{_owner(os.getpid())}-{uuid.uuid4().hex[:8]}"
    layout, memory = _Layout(name), _system_memory if kind == "system" else _cuda_memory
    with TritonClient(control) as client, ExitStack() as stack:
        wanted = _outputs(client, requests[0]) if outputs and requests else ()
        moved = tuple(layout.move(request, wanted) for request in requests)
        region = stack.enter_context(memory(name, max(layout.size, 1), layout.tensors))
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
    """Unregister memory that a killed run on this machine shared; the server still lists it."""
    for region in (SharedRegion("", 0), SharedRegion("", 0, handle=b"")):
        with suppress(ServerError):
            for name in client.shared_memory(region.kind):
                if name.startswith(_PREFIX) and _is_left_over(name):
                    client.forget_memory(region._replace(name=name))
                    (_SYSTEM / name).unlink(missing_ok=True)


def _owner(pid: int) -> str:
    """A process: its name space, its number, and when it started, as numbers are given out again.

    Empty where there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}-{pid}-{fields[_STARTED]}"
    except (OSError, IndexError):
        return ""


def _is_left_over(name: str) -> bool:
    """Whether the process that a region is named after is gone; those of other hosts are not."""
    owner, _, _ = name.removeprefix(_PREFIX).rpartition("-")
    space, _, number = owner.partition("-")
    pid = number.partition("-")[0]
    ours = _owner(os.getpid()).partition("-")[0]
    return space == ours and pid.isdecimal() and _owner(int(pid)) != owner


@dataclass(slots=True)
class _Layout:
    """Where tensors lie in a region: inputs with their bytes, and places for outputs."""

    region: str
    tensors: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0

    def move(self, request: bytes, outputs: Sequence[TensorSpec]) -> bytes:
        """A request that names places in the region instead of carrying its inputs.

        Args:
            request: ``ModelInferRequest`` in wire form.
            outputs: of the model; those of a known size get a place, the others travel.
        """
        message = parse_request(request)
        for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
            self.tensors.append((self.size, content))
            self._place(tensor, len(content))
        for spec in outputs:
            size = _output_bytes(spec, int(message.inputs[0].shape[0]))
            tensor = message.outputs.add(name=spec.name)
            if size:
                self._place(tensor, size)
        del message.raw_input_contents[:]
        return bytes(message.SerializeToString())

    def _place(self, tensor: Any, size: int) -> None:
        tensor.parameters["shared_memory_region"].string_param = self.region
        tensor.parameters["shared_memory_offset"].int64_param = self.size
        tensor.parameters["shared_memory_byte_size"].int64_param = size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT


def _output_bytes(spec: TensorSpec, rows: int) -> int:
    """Bytes of an output; 0 where only the answer says how many."""
    dimensions = (rows if spec.shape[0] == -1 else spec.shape[0], *spec.shape[1:])
    known = all(size > 0 for size in dimensions)
    return int(np.prod(dimensions)) * np.dtype(spec.dtype).itemsize if known else 0


def _outputs(client: TritonClient, request: bytes) -> tuple[TensorSpec, ...]:
    """The model's outputs; none where the server does not say."""
    message = parse_request(request)
    with suppress(ServerError, ModelError):
        return client.config(message.model_name, message.model_version).outputs
    return ()


@contextmanager
def _system_memory(
    name: str, size: int, tensors: Sequence[tuple[int, bytes]]
) -> Iterator[SharedRegion]:
    free = shutil.disk_usage(_SYSTEM).free
    if size > free:
        # Writing past the end of the file system would kill this process.
        raise ServerError(
            f"The tensors need {size:,} bytes of shared memory, and {_SYSTEM} has {free:,} free. "
            "Enlarge it (docker: --shm-size), send fewer samples, or do not share memory."
        )
    region = Region(name, create=True, size=size)
    try:
        # A view that is not released keeps the region from being closed.
        with memoryview(region.buf or b"") as memory:
            for at, content in tensors:
                memory[at : at + len(content)] = content
        yield SharedRegion(name, size)
    finally:
        region.close()
        region.unlink()


@contextmanager
def _cuda_memory(
    name: str, size: int, tensors: Sequence[tuple[int, bytes]]
) -> Iterator[SharedRegion]:
    with ExitStack() as stack:
        try:
            memory = stack.enter_context(shared_gpu_memory(size))
        except EnginegateError as error:
            raise ServerError(
                f"No memory on GPU {_DEVICE} can be shared: {error}\n"
                "It needs an NVIDIA GPU with so much free memory. Share system memory instead, or "
                "none."
            ) from error
        for at, content in tensors:
            memory.write(at, content)
        yield SharedRegion(name, size, memory.handle, _DEVICE)


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
