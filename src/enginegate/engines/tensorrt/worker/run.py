"""Running one plan: buffers made beforehand, one CUDA graph for each set of shapes.

A graph holds state of the execution context that it was captured from, and is undefined once that
is changed (NVIDIA's developer guide, "CUDA Graphs"). So each has a context of its own; they share
the memory of activations, since they run one after the other on one stream.

Two sets of device buffers take turns: while the device computes on one batch, the next is copied in
and the last is copied out, each on a stream of its own. Host memory is the caller's, shared with
this process and pinned, so that nothing is copied but by the device.
"""

import ctypes
import json
import mmap
import os
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from .contexts import ContextMaker
from .driver import CudaDevice, CudaError, CudaGraph, DeviceEvent, DeviceStream
from .library import import_library, logger

_SLOTS = 2
# New shapes push out the oldest. Each has a context too, which holds a few MiB besides activations;
# eight batch sizes at four lengths, in two slots, are as many as a tuned engine comes to.
_KEPT_GRAPHS = 64
_BYTES = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT8": 1, "INT32": 4, "INT64": 8, "BOOL": 1}
_BYTES |= {"UINT8": 1, "FP8": 1}
_NUMPY = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "FP8": "float8",
}
_NUMPY |= {"INT32": "int32", "INT64": "int64", "BOOL": "bool", "UINT8": "uint8"}

Shapes = dict[str, list[int]]
Key = tuple[tuple[str, tuple[int, ...]], ...]


class PlanError(Exception):
    """The library refuses to load or run the plan; the message says why."""


@dataclass
class Tensor:
    """One input or output of a plan.

    Attributes:
        dtype: NumPy's name of its type.
        itemsize: bytes of one number.
        shape: -1 marks a dynamic axis.
        largest: shape of an input at its largest; empty where nothing is dynamic.
    """

    name: str
    is_input: bool
    dtype: str
    itemsize: int
    shape: list[int]
    largest: list[int] = field(default_factory=list)

    def size(self, shape: list[int]) -> int:
        """Bytes of a shape."""
        return prod(shape) * self.itemsize


@dataclass
class _Captured:
    """A graph, and the context that nobody else may use while the graph lives."""

    graph: CudaGraph
    context: Any


class OpenPlan:
    """A plan on the device, with buffers for two batches."""

    def __init__(self, trt: Any, device: CudaDevice, log: Any, job: dict[str, Any]) -> None:
        self._free_before = device.free_bytes()
        self.device, self.graphs = device, bool(job.get("graphs", True))
        self.no_graph_because = "" if self.graphs else "switched off"
        try:
            runtime = trt.Runtime(log)
        except TypeError as error:  # how the bindings say that the library made none
            raise PlanError("The library makes no runtime; its log says why.") from error
        if job["host_code"]:
            runtime.engine_host_code_allowed = True
        self._runtime = runtime
        engine = runtime.deserialize_cuda_engine(Path(job["plan"]).read_bytes())
        if engine is None:
            raise PlanError("The library refuses to load it on this device.")
        self.engine = engine
        self.stream, self._into, self._out = (DeviceStream(device) for _ in range(3))
        self._contexts = ContextMaker(trt, engine, device, shared=job.get("shares_profile", True))
        self.context = self._contexts.make(self.stream)
        if self.context is None:
            raise PlanError("There is not enough device memory to run it.")
        self.tensors = [self._tensor(trt, index) for index in range(engine.num_io_tensors)]
        self.inputs = [tensor for tensor in self.tensors if tensor.is_input]
        self.outputs = [tensor for tensor in self.tensors if not tensor.is_input]
        self._slots: list[dict[str, int]] = [{} for _ in range(_SLOTS)]
        self._room: dict[str, int] = {}
        self._loaded, self._computed, self._done = (
            [DeviceEvent(device) for _ in range(_SLOTS)] for _ in range(3)
        )
        self._graphs: OrderedDict[tuple[Key, int], _Captured] = OrderedDict()
        self._current: tuple[Key, int] | None = None
        self._output_shapes: dict[Key, Shapes] = {}
        largest = {t.name: t.largest or t.shape for t in self.inputs}
        if all(size > 0 for shape in largest.values() for size in shape):
            self.reserve(largest)

    def _tensor(self, trt: Any, index: int) -> Tensor:
        engine = self.engine
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        shape = [int(size) for size in engine.get_tensor_shape(name)]
        largest = []
        if is_input and -1 in shape:
            largest = [int(size) for size in engine.get_tensor_profile_shape(name, 0)[2]]
        return Tensor(name, is_input, _NUMPY.get(kind, kind), _BYTES.get(kind, 4), shape, largest)

    def describe(self) -> list[dict[str, Any]]:
        """Inputs and outputs as the plan has them."""
        return [
            {"name": t.name, "is_input": t.is_input, "dtype": t.dtype, "shape": t.shape}
            for t in self.tensors
        ]

    def device_bytes(self) -> int:
        """CudaDevice memory that is used since before the plan was loaded."""
        return max(self._free_before - self.device.free_bytes(), 0)

    def shapes_of_outputs(self, shapes: Shapes) -> Shapes:
        """Shapes that inputs of these shapes give."""
        key = _key(shapes)
        if key not in self._output_shapes:
            self._current = None
            for name, shape in shapes.items():
                if not self.context.set_input_shape(name, tuple(shape)):
                    raise PlanError(f"It takes no input {name!r} of shape {tuple(shape)}.")
            unknown = list(self.context.infer_shapes())
            if unknown:
                raise PlanError(f"It lacks the shapes of {', '.join(unknown)}.")
            found = {
                t.name: [int(n) for n in self.context.get_tensor_shape(t.name)]
                for t in self.outputs
            }
            if any(size < 0 for shape in found.values() for size in shape):
                raise PlanError("Shapes of its outputs depend on values, which is not supported.")
            self._output_shapes[key] = found
        return self._output_shapes[key]

    def reserve(self, shapes: Shapes) -> None:
        """Make buffers that hold inputs of these shapes and their outputs."""
        wanted = {**shapes, **self.shapes_of_outputs(shapes)}
        sizes = {t.name: t.size(wanted[t.name]) for t in self.tensors}
        if all(self._room.get(name, 0) >= size for name, size in sizes.items()):
            return
        for stream in (self._into, self.stream, self._out):
            stream.wait()
        for captured in self._graphs.values():
            captured.graph.destroy()  # it holds the addresses of the buffers that go
        self._graphs.clear()
        self._current = None
        for name, size in sizes.items():
            if self._room.get(name, 0) >= size:
                continue
            for slot in self._slots:
                if name in slot:
                    self.device.free(slot[name])
                slot[name] = self.device.allocate(size)
            self._room[name] = size

    def execute(self, shapes: Shapes, slot: int = 0) -> None:
        """Queue one run on a slot's buffers, uncaptured."""
        key = _key(shapes)
        if self._current != (key, slot):
            self._settle(self.context, shapes, slot)
            self._current = (key, slot)
        self._enqueue(self.context)

    def _settle(self, context: Any, shapes: Shapes, slot: int) -> None:
        for name, shape in shapes.items():
            context.set_input_shape(name, tuple(shape))
        for name, address in self._slots[slot].items():
            if not context.set_tensor_address(name, address):
                raise PlanError(f"It takes no address for {name!r}.")

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream.address):
            raise PlanError("It did not run; the library's log says why.")

    def launch(self, shapes: Shapes, slot: int) -> None:
        """Queue one run: a graph where one can be captured."""
        key = (_key(shapes), slot)
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
            captured.graph.launch()
        elif self.graphs:
            self._capture(shapes, slot, key)
        else:
            self.execute(shapes, slot)

    def _capture(self, shapes: Shapes, slot: int, key: tuple[Key, int]) -> None:
        """Queue one run, and capture a graph for the next ones.

        The run is uncaptured: the library allocates on the first one. Where a plan lets one context
        use its profile, that one is captured for all shapes, as Triton's own backend does.
        """
        context = self._contexts.make(self.stream)
        if context is None:
            context, self._current = self.context, None
        self._settle(context, shapes, slot)
        self._enqueue(context)
        self.stream.wait()
        try:
            graph = self.stream.capture(lambda: self._enqueue(context))
        except (CudaError, PlanError) as error:
            self.graphs, self.no_graph_because = False, str(error)
            return
        self._graphs[key] = _Captured(graph, context)
        if len(self._graphs) > _KEPT_GRAPHS:
            self._graphs.popitem(last=False)[1].graph.destroy()

    def run(self, parts: list[dict[str, Any]], base: int) -> None:
        """Run batches one behind the other; copies overlap computing.

        Args:
            parts: of each batch ``shapes``, and ``inputs`` and ``outputs``: name -> offset.
            base: address that offsets count from.
        """
        alone = len(parts) == 1
        into, out = (self.stream, self.stream) if alone else (self._into, self._out)
        for index, part in enumerate(parts):
            slot, shapes = index % _SLOTS, part["shapes"]
            self.reserve(shapes)
            if index >= _SLOTS:
                self._done[slot].wait()
            buffers, sizes = self._slots[slot], {**shapes, **self.shapes_of_outputs(shapes)}
            for tensor in self.inputs:
                name = tensor.name
                into.upload(buffers[name], base + part["inputs"][name], tensor.size(sizes[name]))
            if not alone:
                into.record(self._loaded[slot])
                self.stream.wait_for(self._loaded[slot])
            self.launch(shapes, slot)
            if not alone:
                self.stream.record(self._computed[slot])
                out.wait_for(self._computed[slot])
            for tensor in self.outputs:
                name = tensor.name
                out.download(base + part["outputs"][name], buffers[name], tensor.size(sizes[name]))
            out.record(self._done[slot])
        out.wait()

    def repeat(self, shapes: Shapes, count: int) -> float:
        """Seconds for ``count`` runs back to back on what a slot's buffers hold."""
        self.stream.wait()
        started = time.perf_counter()
        for _ in range(count):
            self.launch(shapes, 0)
        self.stream.wait()
        return time.perf_counter() - started

    def load(self, part: dict[str, Any], base: int) -> None:
        """Copy inputs to the device, and settle their shapes."""
        shapes = part["shapes"]
        self.reserve(shapes)
        for tensor in self.inputs:
            name = tensor.name
            size = tensor.size(shapes[name])
            self.stream.upload(self._slots[0][name], base + part["inputs"][name], size)
        for _ in range(2):  # uncaptured and capture, then a first replay
            self.launch(shapes, 0)
        self.stream.wait()


def _key(shapes: Shapes) -> Key:
    return tuple((name, tuple(shape)) for name, shape in sorted(shapes.items()))


class CallerMemory:
    """The caller's memory, mapped here and pinned where the driver allows it."""

    def __init__(self, descriptor: int, device: CudaDevice) -> None:
        self._descriptor, self._device = descriptor, device
        self._mapped: mmap.mmap | None = None
        self.address, self.why_not_pinned = 0, ""

    def map(self) -> None:
        """Map all of it anew; its size has changed."""
        self.close()
        size = os.fstat(self._descriptor).st_size
        self._mapped = mmap.mmap(self._descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self.why_not_pinned = ""
        try:
            self._device.pin(self.address, size)
        except CudaError as error:
            self.why_not_pinned = str(error)

    def close(self) -> None:
        """Unpin and unmap."""
        if self._mapped is None:
            return
        if not self.why_not_pinned:
            self._device.unpin(self.address)
        with suppress(BufferError):
            self._mapped.close()
        self._mapped = None


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run a plan for whoever holds the other end of a socket, until it is closed.

    One JSON object a line in each direction. Job: module, plan, host_code, graphs, socket and
    memory (file descriptors). The first line says what was loaded; then ``{"do": …}``: ``map``,
    ``shapes``, ``run``, ``load``, ``repeat``.
    """
    with socket.socket(fileno=job["socket"]) as channel:
        reader = channel.makefile("r", encoding="utf-8")
        try:
            trt = import_library([job["module"]])
            device = CudaDevice()
            opened = OpenPlan(trt, device, logger(trt), job)
            memory = CallerMemory(job["memory"], device)
            _send(channel, {"tensors": opened.describe(), "device_bytes": opened.device_bytes()})
            for line in reader:
                _send(channel, _answer(opened, memory, json.loads(line)))
            memory.close()
        except (PlanError, CudaError, ImportError) as error:
            _send(channel, {"error": str(error)})
    os._exit(
        0
    )  # destructors of a library at the interpreter's end may crash; nothing is left to do


def _answer(opened: OpenPlan, memory: CallerMemory, asked: dict[str, Any]) -> dict[str, Any]:
    kind = asked["do"]
    if kind == "map":
        memory.map()
        return {"why_not_pinned": memory.why_not_pinned}
    if kind == "shapes":
        return {"shapes": opened.shapes_of_outputs(asked["shapes"])}
    if kind == "run":
        opened.run(asked["parts"], memory.address)
    elif kind == "load":
        opened.load(asked["part"], memory.address)
    elif kind == "repeat":
        seconds = opened.repeat(asked["shapes"], asked["count"])
        return {"seconds": seconds, "why_no_graph": opened.no_graph_because}
    else:
        raise PlanError(f"Nobody here knows how to {kind!r}.")
    return {"why_no_graph": opened.no_graph_because, "device_bytes": opened.device_bytes()}


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
