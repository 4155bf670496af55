"""An interpreter with a TensorRT and a GPU that are not there: ``foreign_tensorrt.py WORKER JOB``.

The stand-alone program itself is the real one, and so are its processes, sockets and shared memory.
"Device" memory is this process's, and the one "engine" adds its input ``k`` (int32, one number a
row) to its input ``x`` (float32, three numbers a row). FAULT in the environment makes it fail.
"""

import ctypes
import importlib
import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

FAULT = os.environ.get("FAULT", "")
SHARED = os.environ.get("PROFILE") == "shared"
MOST = 4


class FakeDevice:
    """The driver's calls, on this process's own memory."""

    def __init__(self):
        self.memory, self.graphs, self.capturing = {}, {}, None
        self.handles = itertools.count(1)
        self.driver = SimpleNamespace(cuGraphDestroy=lambda *_: 0, cuStreamEndCapture=lambda *_: 0)
        CURRENT.append(self)

    def free_bytes(self):
        return 10 * 2**30 - sum(len(each) for each in self.memory.values())

    def allocate(self, size):
        made = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def free(self, address):
        del self.memory[address]

    def pin(self, _address, _size):
        if FAULT == "unpinned":
            raise importlib.import_module("worker.driver").CudaError("no pinned memory")

    def unpin(self, _address):
        pass

    def call(self, name, *arguments):
        return getattr(self, name, lambda *_: None)(*arguments)

    def cuStreamCreate(self, handle, _flags):  # noqa: N802
        handle._obj.value = next(self.handles)

    cuEventCreate = cuStreamCreate  # noqa: N815

    def cuMemcpyHtoDAsync_v2(self, to, at, count, _stream):  # noqa: N802
        assert to.value in self.memory
        assert count.value <= len(self.memory[to.value])
        ctypes.memmove(to.value, at.value, count.value)

    def cuMemcpyDtoHAsync_v2(self, to, at, count, _stream):  # noqa: N802
        ctypes.memmove(to.value, at.value, count.value)

    def cuStreamBeginCapture_v2(self, _stream, _mode):  # noqa: N802
        if FAULT == "no-graph":
            raise importlib.import_module("worker.driver").CudaError("no capture here")
        self.capturing = []

    def cuStreamEndCapture(self, _stream, graph):  # noqa: N802
        graph._obj.value = next(self.handles)
        self.graphs[graph._obj.value], self.capturing = self.capturing, None

    def cuGraphInstantiateWithFlags(self, ready, graph, _flags):  # noqa: N802
        ready._obj.value = graph.value

    def cuGraphLaunch(self, ready, _stream):  # noqa: N802
        for work in self.graphs[ready.value]:
            work()


CURRENT = []


def device_array(address, shape, dtype):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_byte * count).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class FakePlan:
    """Runtime and engine in one.

    Its profile is for one context, unless PROFILE is "shared". Then a graph computes on what its
    context has when it is launched: one that was changed after the capture gives wrong answers.
    """

    num_io_tensors = 3
    device_memory_size = 64

    def __init__(self, *_):
        self.contexts = 0

    def deserialize_cuda_engine(self, _content):
        if FAULT == "dies-on-load":
            os.abort()
        return None if FAULT == "refused" else self

    def create_execution_context_without_device_memory(self):
        self.contexts += 1
        return FakeContext(0 if self.contexts == 1 else -1)

    def get_tensor_name(self, index):
        return ("x", "k", "y")[index]

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name="INT32" if name == "k" else "FLOAT")

    def get_tensor_mode(self, name):
        return "OUTPUT" if name == "y" else "INPUT"

    def get_tensor_shape(self, name):
        return (-1, 1 if name == "k" else 3)

    def get_tensor_profile_shape(self, name, _index):
        return [(rows, 1 if name == "k" else 3) for rows in (1, MOST, MOST)]


class FakeContext:
    def __init__(self, profile):
        self.active_optimization_profile, self.device_memory = profile, 0
        self.shapes, self.addresses = {}, {}

    def set_optimization_profile_async(self, index, _stream):
        if not SHARED:
            raise RuntimeError("Error in set optimization profile async.")
        self.active_optimization_profile = index
        return True

    def get_tensor_shape(self, name):
        rows = self.shapes.get("x", (-1,))[0]
        return (rows, 1 if name == "k" else 3)

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return 1 <= shape[0] <= MOST

    def infer_shapes(self):
        return []

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, _stream):
        assert self.active_optimization_profile == 0
        assert self.device_memory in CURRENT[-1].memory
        context = self
        if not SHARED:
            context = FakeContext(0)
            context.shapes, context.addresses = dict(self.shapes), dict(self.addresses)

        def work():
            x, k, y = (
                device_array(context.addresses[n], context.get_tensor_shape(n), t)
                for n, t in (("x", np.float32), ("k", np.int32), ("y", np.float32))
            )
            if FAULT == "dies-on-run" and x[0, 0] == -1:
                os.abort()
            if FAULT == "hangs-on-run" and x[0, 0] == -1:
                time.sleep(600)
            y[...] = x + k

        waiting = CURRENT[-1].capturing
        (work() if waiting is None else waiting.append(work))
        return True


def library():
    made = ModuleType("tensorrt")
    made.__version__ = "8.6.0"
    made.ILogger = type("ILogger", (), {"__init__": lambda _self: None})
    made.Builder, made.Runtime = object, FakePlan
    made.TensorIOMode = SimpleNamespace(INPUT="INPUT")
    made.TacticSource = SimpleNamespace(__members__={"CUDNN": 2})
    return made


def build(job):
    """A builder that never ends above level 1, or wants more memory than it may have."""
    held = []
    while FAULT == "hungry-build":
        held.append(b"x" * 2**20)
    if FAULT == "slow-build" and job["optimization_level"] != 1:
        time.sleep(600)
    Path(job["plan"]).write_bytes(b"ftrt" + bytes(20) + bytes([8, 6, 0, 12]))
    Path(job["report"]).write_text('{"error": ""}')


def main(worker, job):
    described = json.loads(Path(job).read_text())
    if described["command"] == "build":
        build(described)
        return
    if FAULT == "garbage" and described["command"] == "run":
        os.write(described["socket"], b"Hello from another program\n")
        return
    sys.path.append(str(Path(worker).parent))
    importlib.import_module("worker.driver").CudaDevice = FakeDevice
    sys.modules["tensorrt"] = library()
    sys.argv = [worker, job]
    runpy.run_path(worker, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
