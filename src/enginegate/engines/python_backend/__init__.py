"""Our runner in Triton's Python backend: one model file for every kind of engine.

The files of this package run in the Python of a Triton server, without this package: each is copied
into a version's folder. A kind adds one module, ``engine_KIND.py``, that needs NumPy and the kind's
library only, and has one function::

    def open_for_triton(
        folder: Path, content: bytes, manifest: dict, parameters: dict[str, str], device_id: int
    ) -> engine

``content`` are the engine's bytes, whose digest was checked; ``manifest`` is the engine's record,
and ``parameters`` are the string parameters of the model's configuration. It raises what fails the
load.

An engine for a **processor** has ``run(names, inputs) -> list of arrays``: the outputs of those
names, of all rows.

An engine for a **GPU** has ``buckets``, the batch sizes it runs, ascending, and ``lane(stream)``,
called once a stream, in the thread that will use it, with the GPU's context set. ``stream``
(`device.GpuStream`) has the handle (``address``), ``wait()``, and ``capture(queue)``, which makes
a graph of what ``queue`` puts on it. A lane has::

    def bind(self, inputs, memory, *, warm) -> tuple[dict[str, Memory], Callable[[], None]]

``inputs`` are `memory.Memory` by name: fixed device memory of these shapes, whose batch axis is a
bucket, and which holds valid rows. ``memory(name, shape, dtype)`` gives device memory for an
output. ``warm`` is true for what is served from the start, so that a graph pays; otherwise shapes
come and go. It returns the outputs' memory and a function that queues one run on the stream; it may
return before the run is over, and is called from the lane's thread alone. Weights belong to the
engine, once for all of its lanes where the library can share them.
"""

from pathlib import Path

_HERE = Path(__file__).parent
_ON_GPU = ("pipeline.py", "serial.py", "bindings.py", "memory.py", "device.py")


def runner_files(kind: str, module: Path, *, gpu: bool) -> dict[str, Path]:
    """What the runner needs in a version's folder, besides the engine and its manifest.

    Args:
        kind: the engine kind's name.
        module: the kind's part of the runner.
        gpu: whether batches run in a pipeline on a GPU.
    """
    names = ("model.py", *(_ON_GPU if gpu else ()))
    return {**{name: _HERE / name for name in names}, f"engine_{kind}.py": module}
