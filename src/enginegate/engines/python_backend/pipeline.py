"""Several batches at once in one process: copies to and from a GPU while it computes others.

A **slot** carries one batch from its requests to their answers: pinned host memory, device memory
beside the engine's, a stream and a thread. A **lane** is one place where the engine computes, with
a thread of its own: it takes the next batch that is being uploaded, copies it into the engine's
fixed inputs (device to device), runs, and copies the outputs out. There are as many lanes as the
model has streams, and two slots more: while each lane computes one batch, another is copied in and
one more is copied out. Threads of their own send the answers.

Triton's Python backend runs this same file beside its model file; therefore it needs NumPy only,
and imports nothing of this package but what is copied with it. The device and the engine are given:
`enginegate.engines.python_backend` says how a kind of engine fulfils its part.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeAlias

from .bindings import Bindings
from .memory import (
    Arrays,
    DeviceBuffers,
    HostBuffers,
    Requests,
    bucket_for,
    request_rows,
    row_bytes,
)

Answer: TypeAlias = Callable[["Arrays | Exception", range], None]

# One batch on its way in and one on its way out beside those that compute; more only wait longer,
# and take requests that would have made fuller batches.
_SLOTS_BESIDE_LANES = 2
# Each answer is a message to Triton and back, most of it waiting; so several threads send, each a
# share of a batch. Fewer than so many requests are sent by one.
_ANSWERING, _FEWEST_ANSWERS = 4, 4
# Batches that may wait for these threads before slots wait too, and batches grow fuller instead.
_UNANSWERED = 4
_OPEN_FOR_S = 3600.0  # a hang while opening is ended by whoever loads the model
STAGES = ("slot", "fill", "compute", "answer")
# An answer of its own costs a request a message to Triton, a thread of Triton's, and the way back.
# Engines that take less than this a request serve more where `execute` returns the answers. On an
# H200 host a sent answer cost 207 us and a returned one 94 besides the engine's time
# (benchmarks/runner_profile.py, 16 cores); on two cores they met between 60 and 110 us.
_SENDING_S = 110e-6


class _Batch:
    """Requests that run together; without ``answer``, somebody waits for their outcome."""

    def __init__(self, requests: Requests, answer: Answer | None) -> None:
        self.requests, self.answer = requests, answer
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
        size = bucket_for(self.buckets, rows)
        return requests * _SENDING_S > self._takes_s.get(size, float("inf"))

    def _take(self, parts: Sequence[Mapping[str, Any]], answer: Answer | None) -> _Batch:
        size = bucket_for(self.buckets, sum(map(request_rows, parts)))
        batch = _Batch(Requests(parts, size), answer)
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
        count = len(batch.requests.parts)
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
            self._totals_s["requests"] += len(batch.requests.parts)
            for stage, start_s, end_s in zip(STAGES, batch.at_s, batch.at_s[1:], strict=False):
                self._totals_s[stage] += end_s - start_s
            if batch.answer is not None:
                self._pending_s += len(batch.requests.parts) * (batch.at_s[-1] - batch.at_s[1])


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
        self._host_in, self._host_out = HostBuffers(device), HostBuffers(device)
        self.inputs, self.outputs = DeviceBuffers(device), DeviceBuffers(device)
        self.thread = threading.Thread(target=self._run, name=f"slot {number}", daemon=True)
        self.thread.start()
        free.put(self)

    def take(self, batch: _Batch) -> None:
        """Carry a batch; in the caller's thread, which may free device memory afterwards."""
        try:
            batch.requests.gather_device(self._stream, self.inputs.place)
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
            batch.requests.gather_host(self._stream, self._host_in, self.inputs.place)
            self._stream.record(self.uploaded)
            batch.mark()
            self._ready.put((self, batch))
            batch.computed.wait()
        if batch.error is not None:
            raise batch.error
        self._stream.wait_for(self.computed)
        found: Arrays = {}
        for name, output in batch.outputs.items():
            target = self._host_out.array(
                name, (batch.requests.rows, *output.shape[1:]), output.dtype
            )
            self._stream.download(target, self.outputs.address(name))
            found[name] = target
        self._stream.record(self._done)
        self._done.wait()
        # The slot's memory is for the next batch, while this one is still being answered.
        found = {name: array.copy() for name, array in found.items()}
        batch.mark()
        return found


class _Lane:
    """Computes one batch after the other; its thread alone calls the engine's library.

    ONNX Runtime keeps a captured graph for the thread that captured it. A lane that is alone queues
    its next batch while it computes one; of several, none takes a batch that another could begin.
    """

    def __init__(
        self, engine: Any, device: Any, ready: "SimpleQueue[Any]", number: int, *, alone: bool
    ) -> None:
        self._engine, self._device, self._ready, self._alone = engine, device, ready, alone
        self.takes_s: dict[int, float] = {}
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
            self._bindings = Bindings(
                self._engine, self._device, self._stream, self._example, self._buckets
            )
            self.takes_s = self._bindings.takes_s
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
        binding = self._bindings.of(batch.requests)
        self._stream.wait_for(slot.uploaded)
        for name, memory in binding.inputs.items():
            self._stream.copy(memory.address, slot.inputs.address(name), memory.size_bytes)
        binding.launch()
        for name, memory in binding.outputs.items():
            target = slot.outputs.place(name, memory.shape, memory.dtype)
            rows_bytes = batch.requests.rows * row_bytes(memory.shape, memory.dtype)
            self._stream.copy(target, memory.address, rows_bytes)
        self._stream.record(slot.computed)
        batch.outputs = dict(binding.outputs)
