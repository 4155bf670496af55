"""Several batches at once in one process: copies to and from a GPU while it computes others.

A **slot** carries one batch from its requests to their answers: pinned host memory, device memory
beside the engine's, a stream and a thread. A **lane** is one place where the engine computes, with
a thread of its own: it takes the next batch that is being uploaded, copies it into the engine's
fixed inputs (device to device), runs, and copies the outputs out. There are as many lanes as the
model has streams, and two slots more: while each lane computes one batch, another is copied in and
one more is copied out. Threads of their own send the answers.

Triton's Python backend runs this same file beside its model file; therefore it needs NumPy only,
and imports nothing of this package. The device and the engine are given:
`enginegate.engines.python_backend` says how a kind of engine fulfils its part.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
Answer: TypeAlias = Callable[["Arrays | Exception", range], None]

# One batch on its way in and one on its way out beside those that compute; more only wait longer,
# and take requests that would have made fuller batches.
_SLOTS_BESIDE_LANES = 2
# Each answer is a message to Triton and back, most of it waiting; so several threads send, each a
# share of a batch. Fewer than so many requests are sent by one.
_ANSWERING, _FEWEST_ANSWERS = 4, 4
# Batches that may wait for these threads before slots wait too, and batches grow fuller instead.
_UNANSWERED = 4
_SETTLING_RUNS = 3  # algorithm search, then capture, then a first replay
_KEPT_SHAPES = 64  # least recently used ones give their buffers back
_OPEN_FOR_S = 3600.0  # a hang while opening is ended by whoever loads the model
STAGES = ("slot", "fill", "compute", "answer")
# An answer of its own costs a request a message to Triton, a thread of Triton's, and the way back.
# Engines that take less than this a request serve more where `execute` returns the answers: at
# 60 us always, at 110 us no more (benchmarks/runner_profile.py --row-us, two cores).
_SENDING_S = 80e-6


class Memory(NamedTuple):
    """A tensor in device memory, rows first and without gaps.

    Attributes:
        address: where it begins.
        shape: with the batch axis in front.
        dtype: NumPy's name of its type.
        owner: kept for as long as the memory must be.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class _Binding(NamedTuple):
    """One set of shapes in a lane: fixed device memory, and how to run on it."""

    inputs: Mapping[str, Memory]
    outputs: Mapping[str, Memory]
    launch: Callable[[], None]
    takes_s: float


class _Batch:
    """Requests that run together; without ``answer``, somebody waits for their outcome."""

    def __init__(
        self, parts: Sequence[Mapping[str, Any]], size: int, answer: Answer | None
    ) -> None:
        self.parts, self.answer = parts, answer
        self.ends = np.cumsum([part[next(iter(part))].shape[0] for part in parts]).tolist()
        self.rows = int(self.ends[-1])
        self.shapes: Shapes = tuple(
            (name, (size, *part.shape[1:])) for name, part in sorted(parts[0].items())
        )
        self.outputs: dict[str, Any] = {}
        self.error: Exception | None = None
        self.computed = threading.Event()
        self.outcome: SimpleQueue[Arrays | Exception] = SimpleQueue()
        self.at_s = [time.perf_counter()]

    def mark(self) -> None:
        """Note the time at which a stage ended."""
        self.at_s.append(time.perf_counter())


class Pipeline:
    """Runs batches of an engine, several at once.

    Args:
        engine: opened by its kind (see the package); ``buckets`` and ``lane`` are used.
        device: allocates memory, and makes streams and events.
        example: one row of every input, at the sizes the engine is tuned for.
        lanes: how many batches compute at once.

    Raises:
        Exception: whatever opening a lane raised.
    """

    def __init__(self, engine: Any, device: Any, example: Arrays, *, lanes: int = 1) -> None:
        self.buckets: tuple[int, ...] = tuple(engine.buckets)
        self._device, self._ready = device, SimpleQueue[Any]()
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._totals_s = dict.fromkeys(("batches", "requests", *STAGES), 0.0)
        self._lock = threading.Lock()
        self._pending_s = 0.0
        self._lanes = []
        for number in range(lanes):  # one after the other: a graph is captured alone
            lane = _Lane(engine, device, self._ready, number, alone=lanes == 1)
            self._lanes.append(lane)
            lane.open(example, self.buckets)
        self._takes_s = self._lanes[0].takes_s
        self._answers: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._unanswered = threading.Semaphore(_UNANSWERED)
        self._answering = [
            threading.Thread(target=self._send, name=f"answers {number}", daemon=True)
            for number in range(_ANSWERING)
        ]
        for thread in self._answering:
            thread.start()
        self._slots = [
            _Slot(device, self._ready, self._free, self._answer, number)
            for number in range(lanes + _SLOTS_BESIDE_LANES)
        ]

    def submit(self, parts: Sequence[Mapping[str, Any]], answer: Answer) -> None:
        """Begin to run requests; returns when a slot has taken them.

        What is in device memory was read by then; arrays in host memory are read later.

        Args:
            parts: inputs of each request by name: arrays, or tensors in device memory; alike in
                every axis but the first, and together no more rows than the largest bucket.
            answer: called in other threads, once for each range of requests, with the outputs of
                all rows or with what went wrong.
        """
        self._take(parts, answer)

    def begin(self, parts: Sequence[Mapping[str, Any]]) -> Callable[[], Arrays | Exception]:
        """As `submit`, for a caller that waits: returns what gives the outputs of all rows."""
        return self._take(parts, None).outcome.get

    def is_worth_waiting(self, requests: int, rows: int) -> bool:
        """Whether so many answers of their own cost more than a batch that nothing overlaps."""
        size = self._bucket(rows)
        return requests * _SENDING_S > self._takes_s.get(size, float("inf"))

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= rows)

    def _take(self, parts: Sequence[Mapping[str, Any]], answer: Answer | None) -> _Batch:
        batch = _Batch(parts, self._bucket(sum(_rows(part) for part in parts)), answer)
        slot = self._free.get()
        batch.mark()
        slot.take(batch)
        return batch

    def totals(self) -> dict[str, float]:
        """Batches and requests answered, and seconds summed over batches by stage.

        ``slot``: until a slot was free; ``fill``: copied on the host; ``compute``: copied to the
        device, run, copied back, with the waits between; ``answer``: sent. ``pending``: seconds
        summed over requests from when a slot had their batch to when it was answered, where nobody
        waited for it.
        """
        with self._lock:
            return self._totals_s | {"pending": self._pending_s}

    def close(self) -> None:
        """Wait for what is under way, then end the threads."""
        for _ in self._slots:
            self._free.get().stop()
        for slot in self._slots:
            slot.thread.join()
        for _ in self._lanes:
            self._ready.put(None)
        for lane in self._lanes:
            lane.thread.join()
        for _ in self._answering:
            self._answers.put(None)
        for thread in self._answering:
            thread.join()

    def _answer(self, batch: _Batch, outcome: Arrays | Exception) -> None:
        """Have a batch answered; the outputs are the threads' that send them."""
        answer = batch.answer
        if answer is None:
            batch.mark()
            if not isinstance(outcome, Exception):
                self._count(batch)
            batch.outcome.put(outcome)
            return
        self._unanswered.acquire()
        count = len(batch.parts)
        shares = min(_ANSWERING, -(-count // _FEWEST_ANSWERS))
        bounds = [count * number // shares for number in range(shares + 1)]
        left = shares

        def send(numbers: range) -> None:
            nonlocal left
            try:
                answer(outcome, numbers)
            finally:
                with self._lock:
                    left -= 1
                    is_last = not left
                if is_last:
                    self._unanswered.release()
                    batch.mark()
                    if not isinstance(outcome, Exception):
                        self._count(batch)

        for start, end in pairwise(bounds):
            self._answers.put(partial(send, range(start, end)))

    def _send(self) -> None:
        while True:
            send = self._answers.get()
            if send is None:
                return
            with suppress(Exception):  # whoever answers says what is wrong; others want answers too
                send()
            del send

    def _count(self, batch: _Batch) -> None:
        with self._lock:
            self._totals_s["batches"] += 1
            self._totals_s["requests"] += len(batch.parts)
            for stage, start_s, end_s in zip(STAGES, batch.at_s, batch.at_s[1:], strict=False):
                self._totals_s[stage] += end_s - start_s
            if batch.answer is not None:
                self._pending_s += len(batch.parts) * (batch.at_s[-1] - batch.at_s[1])


class _Slot:
    """Carries one batch at a time; its thread fills and waits."""

    def __init__(
        self,
        device: Any,
        ready: "SimpleQueue[Any]",
        free: "SimpleQueue[_Slot]",
        answer: Callable[[_Batch, "Arrays | Exception"], None],
        number: int,
    ) -> None:
        self._device, self._ready, self._free, self._answer = device, ready, free, answer
        self._work: SimpleQueue[_Batch | None] = SimpleQueue()
        self._stream = device.stream()
        self.uploaded, self.computed, self._done = (device.event() for _ in range(3))
        self._host_in, self._host_out = _HostBuffers(device), _HostBuffers(device)
        self.inputs, self.outputs = DeviceBuffers(device), DeviceBuffers(device)
        self.thread = threading.Thread(target=self._run, name=f"slot {number}", daemon=True)
        self.thread.start()
        free.put(self)

    def take(self, batch: _Batch) -> None:
        """Carry a batch; in the caller's thread, which may free device memory afterwards."""
        try:
            self._gather_device(batch)
        except Exception as error:  # noqa: BLE001 - each request gets it as its answer
            batch.error = error
        self._work.put(batch)

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        self._device.bind()
        while True:
            batch = self._work.get()
            if batch is None:
                return
            outcome: Arrays | Exception
            try:
                outcome = self._outputs_of(batch)
            except Exception as error:  # noqa: BLE001 - each request gets it as its answer
                outcome = error
            self._answer(batch, outcome)
            del batch, outcome
            self._free.put(self)

    def _outputs_of(self, batch: _Batch) -> Arrays:
        if batch.error is None:
            self._gather_host(batch)
            self._stream.record(self.uploaded)
            batch.mark()
            self._ready.put((self, batch))
            batch.computed.wait()
        if batch.error is not None:
            raise batch.error
        self._stream.wait_for(self.computed)
        found: Arrays = {}
        for name, output in batch.outputs.items():
            target = self._host_out.array(name, (batch.rows, *output.shape[1:]), output.dtype)
            self._stream.download(target, self.outputs.address(name))
            found[name] = target
        self._stream.record(self._done)
        self._done.wait()
        # The slot's memory is for the next batch, while this one is still being answered.
        found = {name: array.copy() for name, array in found.items()}
        batch.mark()
        return found

    def _gather_device(self, batch: _Batch) -> None:
        """Copy what requests have in device memory; Triton takes it back when they are taken."""
        copied = False
        for name, shape in batch.shapes:
            start = 0
            for part, end in zip(batch.parts, batch.ends, strict=True):
                tensor = part[name]
                if not isinstance(tensor, np.ndarray):
                    row_bytes = _row_bytes(shape, tensor.dtype)
                    target = self.inputs.place(name, shape, tensor.dtype)
                    self._stream.copy(
                        target + start * row_bytes, tensor.address, (end - start) * row_bytes
                    )
                    copied = True
                start = end
        if copied:
            self._stream.wait()

    def _gather_host(self, batch: _Batch) -> None:
        """Join and pad what is in host memory in pinned memory, and queue its upload."""
        for name, shape in batch.shapes:
            dtype = batch.parts[0][name].dtype
            address = self.inputs.place(name, shape, dtype)
            on_host = [isinstance(part[name], np.ndarray) for part in batch.parts]
            if not any(on_host):
                self._pad_on_device(address, batch.rows, shape, dtype)
                continue
            joined, start = self._host_in.array(name, shape, dtype), 0
            for part, end, here in zip(batch.parts, batch.ends, on_host, strict=True):
                if here:
                    joined[start:end] = part[name]
                if here and not all(on_host):
                    self._stream.upload(
                        address + start * _row_bytes(shape, dtype), joined[start:end]
                    )
                start = end
            if all(on_host):
                joined[start:] = joined[start - 1]
                self._stream.upload(address, joined)
            else:
                self._pad_on_device(address, batch.rows, shape, dtype)

    def _pad_on_device(self, address: int, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        """Repeat the last row: a real row costs no Inf, NaN or index out of range."""
        row_bytes, start = _row_bytes(shape, dtype), rows - 1
        filled = rows
        while filled < shape[0]:
            more = min(filled - start, shape[0] - filled)
            source, target = address + start * row_bytes, address + filled * row_bytes
            self._stream.copy(target, source, more * row_bytes)
            filled += more


class _Lane:
    """Computes one batch after the other; its thread alone calls the engine's library.

    ONNX Runtime keeps a captured graph for the thread that captured it. A lane that is alone queues
    its next batch while it computes one; of several, none takes a batch that another could begin.
    """

    def __init__(
        self, engine: Any, device: Any, ready: "SimpleQueue[Any]", number: int, *, alone: bool
    ) -> None:
        self._engine, self._device, self._ready, self._alone = engine, device, ready, alone
        self._bindings: dict[Shapes, _Binding] = {}
        self.takes_s: dict[int, float] = {}
        self._kept: OrderedDict[Shapes, tuple[_Binding, DeviceBuffers]] = OrderedDict()
        self._opened: SimpleQueue[Exception | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"lane {number}", daemon=True)

    def open(self, example: Arrays, buckets: tuple[int, ...]) -> None:
        """Open the engine here, with every bucket warm; returns when that is done."""
        self._example, self._buckets = example, buckets
        self.thread.start()
        failed = self._opened.get(timeout=_OPEN_FOR_S)
        if failed is not None:
            raise failed

    def _run(self) -> None:
        try:
            self._device.bind()
            self._stream = self._device.stream()
            self._lane = self._engine.lane(self._stream)
            self._shared = DeviceBuffers(self._device)
            # The largest first, so that all buckets find their buffers large enough.
            for size in sorted(self._buckets, reverse=True):
                inputs = {
                    name: np.repeat(array[:1], size, axis=0)
                    for name, array in self._example.items()
                }
                key = tuple((name, array.shape) for name, array in sorted(inputs.items()))
                self._bindings[key] = self._bound(inputs, self._shared, warm=True)
                self.takes_s[size] = self._bindings[key].takes_s
        except Exception as error:  # noqa: BLE001 - raised again where the lane is opened
            self._opened.put(error)
            return
        self._opened.put(None)
        while True:
            work = self._ready.get()
            if work is None:
                return
            slot, batch = work
            try:
                self._compute(slot, batch)
            except Exception as error:  # noqa: BLE001 - each request gets it as its answer
                batch.error = error
            batch.computed.set()
            if not self._alone and batch.error is None:
                with suppress(RuntimeError):  # the slot waits for it too, and says so
                    slot.computed.wait()
            del slot, batch, work

    def _compute(self, slot: _Slot, batch: _Batch) -> None:
        binding = self._bindings.get(batch.shapes) or self._unusual(batch)
        self._stream.wait_for(slot.uploaded)
        for name, memory in binding.inputs.items():
            self._stream.copy(memory.address, slot.inputs.address(name), memory.size_bytes)
        binding.launch()
        for name, memory in binding.outputs.items():
            target = slot.outputs.place(name, memory.shape, memory.dtype)
            row_bytes = _row_bytes(memory.shape, memory.dtype)
            self._stream.copy(target, memory.address, batch.rows * row_bytes)
        self._stream.record(slot.computed)
        batch.outputs = dict(binding.outputs)

    def _unusual(self, batch: _Batch) -> _Binding:
        """Buffers of shapes that were not made warm; the oldest give theirs back."""
        if batch.shapes not in self._kept:
            dtypes = {name: tensor.dtype for name, tensor in batch.parts[0].items()}
            ones = {name: np.ones(shape, dtypes[name]) for name, shape in batch.shapes}
            buffers = DeviceBuffers(self._device)
            try:
                self._kept[batch.shapes] = (self._bound(ones, buffers, warm=False), buffers)
            except Exception:
                buffers.free()
                raise
            if len(self._kept) > _KEPT_SHAPES:
                self._stream.wait()
                _, (_, oldest) = self._kept.popitem(last=False)
                oldest.free()
        self._kept.move_to_end(batch.shapes)
        return self._kept[batch.shapes][0]

    def _bound(self, example: Arrays, buffers: "DeviceBuffers", *, warm: bool) -> _Binding:
        """Fixed memory of these shapes, with the engine settled on it."""
        inputs = {}
        for name, array in example.items():
            address = buffers.place(name, array.shape, array.dtype)
            self._stream.upload(address, np.ascontiguousarray(array))
            inputs[name] = buffers.memory(name, array.shape, array.dtype)
        self._stream.wait()
        outputs, launch = self._lane.bind(inputs, buffers.memory, warm=warm)
        started_s = 0.0
        for _ in range(_SETTLING_RUNS):
            started_s = time.perf_counter()
            launch()
            self._stream.wait()
        return _Binding(inputs, outputs, launch, time.perf_counter() - started_s)


class DeviceBuffers:
    """Device memory by tensor, as large as the largest shape it was asked for."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}

    def place(self, name: str, shape: Sequence[int], dtype: Any) -> int:
        """Address of memory for a tensor; what is there is lost when it must be larger."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address, has = self._places.get(name, (0, -1))
        if size > has:
            if has >= 0:
                del self._places[name]  # there may be no memory for a larger one
                self._device.free(address)
            address = self._device.allocate(size)
            self._places[name] = (address, size)
        return address

    def memory(self, name: str, shape: Sequence[int], dtype: Any) -> Memory:
        """A tensor at the place of its name."""
        named = np.dtype(dtype).name
        return Memory(self.place(name, shape, dtype), tuple(int(axis) for axis in shape), named)

    def address(self, name: str) -> int:
        """Where a tensor is that was placed before."""
        return self._places[name][0]

    def free(self) -> None:
        """Give everything back."""
        for address, _ in self._places.values():
            self._device.free(address)
        self._places.clear()


class _HostBuffers:
    """Pinned memory by tensor, as large as the largest shape it was asked for."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory: Arrays = {}

    def array(self, name: str, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._memory or len(self._memory[name]) < size:
            if name in self._memory:  # there may be no memory for a larger one
                self._device.free_pinned(self._memory.pop(name))
            self._memory[name] = self._device.pinned(size)
        found: NDArray[Any] = self._memory[name][:size].view(dtype).reshape(shape)
        return found


def _rows(part: Mapping[str, Any]) -> int:
    return int(part[next(iter(part))].shape[0])


def _row_bytes(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape[1:])) * int(np.dtype(dtype).itemsize)
