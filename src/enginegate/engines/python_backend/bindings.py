"""Fixed device memory of each shape that an engine runs, with the engine settled on it.

Triton's Python backend runs this same file beside its model file; therefore it needs NumPy only,
and imports nothing of this package but what is copied with it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .memory import Arrays, DeviceBuffers, Memory, Requests, Shapes

_SETTLING_RUNS = 3  # algorithm search, then capture, then a first replay
_KEPT_SHAPES = 64  # least recently used ones give their buffers back


class Binding(NamedTuple):
    """One set of shapes on one stream: fixed device memory, and how to run on it."""

    inputs: Mapping[str, Memory]
    outputs: Mapping[str, Memory]
    launch: Callable[[], None]
    takes_s: float


class Bindings:
    """An engine on one stream, for every bucket and for shapes that come and go.

    Made and used by one thread: ONNX Runtime keeps a captured graph for the thread that captured
    it.

    Args:
        engine: opened by its kind (see the package); ``lane`` is used.
        device: allocates memory.
        stream: what runs and copies are queued on.
        example: one row of every input, at the sizes the engine is tuned for.
        buckets: batch sizes that are made warm.

    Raises:
        Exception: whatever the engine raised.

    Attributes:
        takes_s: seconds that a batch takes, by bucket.
    """

    def __init__(
        self, engine: Any, device: Any, stream: Any, example: Arrays, buckets: Sequence[int]
    ) -> None:
        self._device, self._stream = device, stream
        self._lane = engine.lane(stream)
        self._shared = DeviceBuffers(device)
        self._warm: dict[Shapes, Binding] = {}
        self._kept: OrderedDict[Shapes, tuple[Binding, DeviceBuffers]] = OrderedDict()
        self.takes_s: dict[int, float] = {}
        # The largest first, so that all buckets find their buffers large enough.
        for size in sorted(buckets, reverse=True):
            inputs = {name: np.repeat(array[:1], size, axis=0) for name, array in example.items()}
            shapes = tuple((name, array.shape) for name, array in sorted(inputs.items()))
            self._warm[shapes] = self._bound(inputs, self._shared, warm=True)
            self.takes_s[size] = self._warm[shapes].takes_s

    def of(self, requests: Requests) -> Binding:
        """The binding of a batch's shapes; made now where they were not made warm."""
        return self._warm.get(requests.shapes) or self._unusual(requests)

    def _unusual(self, requests: Requests) -> Binding:
        """Buffers of shapes that were not made warm; the oldest give theirs back."""
        shapes = requests.shapes
        if shapes not in self._kept:
            dtypes = {name: tensor.dtype for name, tensor in requests.parts[0].items()}
            ones = {name: np.ones(shape, dtypes[name]) for name, shape in shapes}
            buffers = DeviceBuffers(self._device)
            try:
                self._kept[shapes] = (self._bound(ones, buffers, warm=False), buffers)
            except Exception:
                buffers.free()
                raise
            if len(self._kept) > _KEPT_SHAPES:
                self._stream.wait()
                _, (_, oldest) = self._kept.popitem(last=False)
                oldest.free()
        self._kept.move_to_end(shapes)
        return self._kept[shapes][0]

    def _bound(self, example: Arrays, buffers: DeviceBuffers, *, warm: bool) -> Binding:
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
        return Binding(inputs, outputs, launch, time.perf_counter() - started_s)
