"""Running a plan on a GPU: one stream, pinned and device buffers made beforehand, one graph each.

Rows are padded to the next bucket, so that a graph captured once serves every size below. Two sets
of buffers take turns: while the device works on one batch, the host fills the next and reads the
last.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.candidate import Engine, TensorSpec
from enginegate.data import Array, Tensors
from enginegate.engines import cuda
from enginegate.engines.batching import check_batch, check_rows, timed_repeat
from enginegate.engines.onnxruntime.gpu import bucket_of, buckets_up_to, pad_rows
from enginegate.errors import EnginegateError, ModelError

_SLOTS = 2


@dataclass(frozen=True, slots=True)
class _Slot:
    """Buffers of one set of shapes, and how to run on them.

    Attributes:
        host: pinned arrays by tensor.
        device: device addresses by tensor.
        launch: queues copies in, the run and copies out.
        done: marked when they are over.
    """

    host: dict[str, Array]
    device: dict[str, int]
    launch: Callable[[], None]
    done: ctypes.c_void_p


class _Runner:
    def __init__(self, engine: Engine, context: Any, stream: cuda.Stream) -> None:
        self.device = str(cuda.gpu())
        self._engine, self._context, self._stream = engine, context, stream
        self._buckets = buckets_up_to(engine.max_batch_size)
        self._slots: dict[tuple[tuple[int, ...], ...], list[_Slot]] = {}

    def run(self, inputs: Tensors) -> Tensors:
        self._stream.bind()
        rows = check_rows(inputs, self._engine.inputs)
        running: list[tuple[_Slot, int]] = []
        parts: list[Tensors] = []
        turns = cycle(range(_SLOTS))
        for start in range(0, rows, self._engine.max_batch_size):
            if len(running) == _SLOTS:
                parts.append(self._answer(*running.pop(0)))
            end = start + self._engine.max_batch_size
            part = {name: array[start:end] for name, array in inputs.items()}
            running.append((self._started(part, next(turns)), len(next(iter(part.values())))))
        parts += [self._answer(slot, count) for slot, count in running]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @contextmanager
    def bound(self, inputs: Tensors) -> Iterator[Callable[[int], float]]:
        """Runs between device buffers, without the copies, as one graph where it can be captured.

        The buffers are given back when the runner closes.
        """
        self._stream.bind()
        rows = check_batch(inputs, self._engine.inputs, limit=self._engine.max_batch_size)
        size = bucket_of(rows, self._buckets)
        slot = self._slot({name: pad_rows(array, size) for name, array in inputs.items()})
        shapes = {spec.name: slot.host[spec.name].shape for spec in self._engine.inputs}
        compute = self._computing(slot.device, shapes)
        slot.launch()
        compute()
        self._stream.wait()
        yield timed_repeat(self._captured(compute), self._stream.wait)

    def _started(self, inputs: Tensors, turn: int) -> _Slot:
        size = bucket_of(len(next(iter(inputs.values()))), self._buckets)
        whole = {name: pad_rows(array, size) for name, array in inputs.items()}
        key = tuple(whole[spec.name].shape for spec in self._engine.inputs)
        if key not in self._slots:
            self._slots[key] = [self._slot(whole) for _ in range(_SLOTS)]
        slot = self._slots[key][turn]
        for name, array in whole.items():
            slot.host[name][...] = array
        slot.launch()
        self._stream.record(slot.done)
        return slot

    def _answer(self, slot: _Slot, rows: int) -> Tensors:
        self._stream.wait_for(slot.done)
        return {spec.name: slot.host[spec.name][:rows].copy() for spec in self._engine.outputs}

    def _slot(self, inputs: Tensors) -> _Slot:
        for name, array in inputs.items():
            self._context.set_input_shape(name, array.shape)
        specs = (*self._engine.inputs, *self._engine.outputs)
        host = {spec.name: self._stream.pinned(self._shape(spec), spec.dtype) for spec in specs}
        device = {name: self._stream.allocate(array.nbytes) for name, array in host.items()}
        for name, array in inputs.items():
            host[name][...] = array
        unknown = [*self._placed(device), *self._context.infer_shapes()]
        if unknown:
            raise ModelError(f"{self._engine.candidate} lacks the shapes of {', '.join(unknown)}.")
        shapes = {name: array.shape for name, array in inputs.items()}
        direct = self._direct(host, device, shapes)
        direct()  # once uncaptured: the library allocates and chooses on the first run of a shape
        self._stream.wait()
        return _Slot(host, device, self._captured(direct), self._stream.event())

    def _captured(self, queue: Callable[[], None]) -> Callable[[], None]:
        """One graph of what is queued, or the queueing itself where it cannot be captured."""
        try:
            return self._stream.capture(queue)
        except EnginegateError:
            return queue

    def _shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return tuple(int(axis) for axis in self._context.get_tensor_shape(spec.name))

    def _placed(self, device: dict[str, int]) -> list[str]:
        """Names of tensors that the context does not take an address for."""
        refused = (n for n, a in device.items() if self._context.set_tensor_address(n, a) is False)
        return list(refused)

    def _direct(
        self,
        host: dict[str, Array],
        device: dict[str, int],
        shapes: dict[str, tuple[int, ...]],
    ) -> Callable[[], None]:
        compute = self._computing(device, shapes)

        def queue() -> None:
            for name in shapes:
                self._stream.upload(device[name], host[name])
            compute()
            for spec in self._engine.outputs:
                self._stream.download(host[spec.name], device[spec.name])

        return queue

    def _computing(
        self, device: dict[str, int], shapes: dict[str, tuple[int, ...]]
    ) -> Callable[[], None]:
        def queue() -> None:
            for name, shape in shapes.items():
                self._context.set_input_shape(name, shape)
            self._placed(device)
            if not self._context.execute_async_v3(self._stream.address):
                raise ModelError(
                    f"{self._engine.candidate} did not run; its library's log says why."
                )

        return queue


@contextmanager
def plan_runner(library: Any, logger: Any, engine: Engine, path: Path) -> Iterator[_Runner]:
    """Deserialise a plan, and run every bucket once; the caller made sure that a device can."""
    runtime = library.Runtime(logger)
    runtime.engine_host_code_allowed = engine.flags.get("version_compatible") == "true"
    with cuda.stream() as stream:
        loaded = runtime.deserialize_cuda_engine(path.read_bytes())
        context = None if loaded is None else loaded.create_execution_context()
        if context is None:
            raise ModelError(
                f"{engine.builder} refuses to load {path} on {cuda.gpu()}. Build it again here."
            )
        yield _Runner(engine, context, stream)
        del context, loaded
