"""One batch after the other, in the thread that asks for it: no thread waits for another.

Where several processes share a GPU, the others compute while this one reads requests and replies:
nothing has to overlap within one of them, and a request costs less than in a pipeline.

Triton's Python backend runs this same file beside its model file; therefore it needs NumPy only,
and imports nothing of this package but what is copied with it.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .bindings import Bindings
from .memory import Arrays, HostBuffers, Requests, bucket_for, request_rows

STAGES = ("read", "fill", "compute", "reply")


class Serial:
    """Runs batches of an engine, one at a time.

    Args:
        engine: opened by its kind (see the package); ``buckets`` and ``lane`` are used.
        device: allocates memory, and makes streams and events.
        example: one row of every input, at the sizes the engine is tuned for.

    Raises:
        Exception: whatever the engine raised.
    """

    def __init__(self, engine: Any, device: Any, example: Arrays) -> None:
        self.buckets: tuple[int, ...] = tuple(engine.buckets)
        self._stream, self._done = device.stream(), device.event()
        self._bindings = Bindings(engine, device, self._stream, example, self.buckets)
        self._host_in, self._host_out = HostBuffers(device), HostBuffers(device)
        self._totals = dict.fromkeys(("batches", "requests", *STAGES), 0.0)

    def run(self, parts: Sequence[Mapping[str, Any]]) -> Arrays:
        """Outputs of all rows; they are valid until the next run.

        Args:
            parts: inputs of each request by name: arrays, or tensors in device memory; alike in
                every axis but the first, and together no more rows than the largest bucket.

        Raises:
            Exception: whatever the engine or the device raised.
        """
        began_s = time.perf_counter()
        rows = sum(map(request_rows, parts))
        requests = Requests(parts, bucket_for(self.buckets, rows))
        binding = self._bindings.of(requests)

        def place(name: str, shape: Sequence[int], dtype: Any) -> int:
            del shape, dtype  # the binding has them
            return binding.inputs[name].address

        try:
            requests.gather_device(self._stream, place)
            requests.gather_host(self._stream, self._host_in, place)
            filled_s = time.perf_counter()
            binding.launch()
            found: Arrays = {}
            for name, output in binding.outputs.items():
                shape = (rows, *output.shape[1:])
                found[name] = self._host_out.array(name, shape, output.dtype)
                self._stream.download(found[name], output.address)
            self._stream.record(self._done)
            self._done.wait()
        except Exception:
            with suppress(Exception):  # what was queued reads memory that the next run writes
                self._stream.wait()
            raise
        self.count("fill", filled_s - began_s)
        self.count("compute", time.perf_counter() - filled_s)
        self.count("batches", 1.0)
        self.count("requests", float(len(parts)))
        return found

    def count(self, name: str, amount: float) -> None:
        """Add to a total."""
        self._totals[name] += amount

    def totals(self) -> dict[str, float]:
        """Batches and requests answered, and seconds summed over batches by stage.

        ``read``: requests became arrays; ``fill``: they were joined, and their upload queued;
        ``compute``: uploaded, run, copied back; ``reply``: outputs became answers.
        """
        return self._totals | {"pending": 0.0}

    def close(self) -> None:
        """Nothing is under way between two runs."""
