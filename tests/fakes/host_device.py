"""A GPU made of host memory and threads: every stream is a thread that works off its queue.

It has what `enginegate.engines.python_backend.device` has, so the same file can be put in its
place. Work on a stream happens after the call returned, as on a GPU, and later still where
``LATE_S`` says so: what relies on an order that no event enforces goes wrong here.
"""

import ctypes
import threading
import time
from queue import SimpleQueue

import numpy as np

LATE_S = 0.0


class GpuDevice:
    def __init__(self, number=0):
        self.number, self.memory, self.freed, self.streams = number, {}, [], []

    def bind(self):
        pass

    def allocate(self, size_bytes):
        array = np.full(max(size_bytes, 1), 0xAB, np.uint8)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address):
        for stream in self.streams:
            stream.wait()
        self.freed.append(self.memory.pop(address))

    def pinned(self, size_bytes):
        return np.full(max(size_bytes, 1), 0xAB, np.uint8)

    def free_pinned(self, memory):
        pass

    def stream(self):
        made = GpuStream(self)
        self.streams.append(made)
        return made

    def event(self):
        return GpuEvent()


class GpuEvent:
    """Marked by numbers: a wait is for the last mark that was asked for before it."""

    def __init__(self):
        self.asked, self.reached, self.changed = 0, 0, threading.Condition()

    def wait(self, mark=None):
        with self.changed:
            wanted = self.asked if mark is None else mark
            self.changed.wait_for(lambda: self.reached >= wanted)

    def reach(self, mark):
        with self.changed:
            self.reached = max(self.reached, mark)
            self.changed.notify_all()


class GpuStream:
    def __init__(self, device):
        self.allocate = device.allocate
        self._queue = SimpleQueue()
        self.address = id(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            work = self._queue.get()
            if LATE_S:
                time.sleep(LATE_S)
            work()

    def queue(self, work):
        """Do something in this stream's order."""
        self._queue.put(work)

    def upload(self, address, array):
        assert array.flags.c_contiguous
        self.queue(lambda: ctypes.memmove(address, array.ctypes.data, array.nbytes))

    def download(self, array, address):
        assert array.flags.c_contiguous
        self.queue(lambda: ctypes.memmove(array.ctypes.data, address, array.nbytes))

    def copy(self, target, source, size_bytes):
        self.queue(lambda: ctypes.memmove(target, source, size_bytes))

    def record(self, event):
        with event.changed:
            event.asked += 1
            mark = event.asked
        self.queue(lambda: event.reach(mark))

    def wait_for(self, event):
        mark = event.asked
        self.queue(lambda: event.wait(mark))

    def wait(self):
        done = threading.Event()
        self.queue(done.set)
        done.wait()

    def capture(self, queue):
        return queue


def host_array(memory):
    """The array at an address of the fake's memory."""
    count = int(np.prod(memory.shape))
    raw = (ctypes.c_uint8 * (count * np.dtype(memory.dtype).itemsize)).from_address(memory.address)
    return np.frombuffer(raw, memory.dtype).reshape(memory.shape)
