"""Running a plan on a GPU: buffers for the largest batch, one stream, ``execute_async_v3``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.candidate import Engine
from enginegate.data import Tensors
from enginegate.engines import cuda
from enginegate.engines.rows import run_rows
from enginegate.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Runner:
    device: str
    engine: Engine
    context: Any
    stream: cuda.Stream
    addresses: dict[str, int]

    def run(self, inputs: Tensors) -> Tensors:
        self.stream.bind()
        return run_rows(
            inputs, self.engine.inputs, limit=self.engine.max_batch_size, run_once=self._once
        )

    def _once(self, inputs: Tensors) -> Tensors:
        for name, array in inputs.items():
            self.context.set_input_shape(name, array.shape)
            self.stream.upload(self.addresses[name], array)
        unknown = self.context.infer_shapes()
        if unknown:
            raise ModelError(f"{self.engine.candidate} lacks the shapes of {', '.join(unknown)}.")
        outputs = {
            spec.name: np.empty(tuple(self.context.get_tensor_shape(spec.name)), spec.dtype)
            for spec in self.engine.outputs
        }
        if not self.context.execute_async_v3(self.stream.address):
            raise ModelError(f"{self.engine.candidate} did not run; TensorRT's log says why.")
        for name, array in outputs.items():
            self.stream.download(array, self.addresses[name])
        self.stream.wait()
        return outputs


@contextmanager
def plan_runner(library: Any, logger: Any, engine: Engine, path: Path) -> Iterator[_Runner]:
    """Deserialise a plan and keep its buffers; the caller made sure that a device can run it."""
    runtime = library.Runtime(logger)
    with cuda.stream() as stream:
        loaded = runtime.deserialize_cuda_engine(path.read_bytes())
        context = None if loaded is None else loaded.create_execution_context()
        if context is None:
            raise ModelError(
                f"{engine.builder} refuses to load {path} on {cuda.gpu()}. Build it again here."
            )
        addresses = {}
        for spec in (*engine.inputs, *engine.outputs):
            shape = (engine.max_batch_size, *spec.shape[1:])
            size = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
            addresses[spec.name] = stream.allocate(size)
            context.set_tensor_address(spec.name, addresses[spec.name])
        yield _Runner(str(cuda.gpu()), engine, context, stream, addresses)
        del context, loaded
