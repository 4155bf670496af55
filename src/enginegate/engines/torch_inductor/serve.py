"""AOTInductor's part of the runner in Triton's Python backend (see its package).

Copied beside ``model.py`` as ``engine_torch_inductor.py``, with ``torch_inductor_run.py``. Needs
NumPy and PyTorch in the Python that Triton runs: the very version that compiled the package.
"""

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SETTLING_RUNS = 3


def open_for_triton(
    folder: Path,
    content: bytes,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    device_id: int,
) -> Any:
    """The package on its device.

    Raises:
        RuntimeError: another PyTorch compiled it, or this one cannot load it.
    """
    del content, parameters
    built_by = str(manifest["builder"]).partition(",")[0]
    if built_by != f"torch {torch.__version__}":
        raise RuntimeError(
            f"{manifest['filename']} was compiled by {built_by}, and Triton's Python has torch "
            f"{torch.__version__}. Install that version there, or build the engine again."
        )
    flags: dict[str, str] = manifest["flags"]
    on_gpu = str(manifest["target"]).startswith("cuda")
    run = _run_module(folder)
    tf32 = manifest["candidate"]["precision"] == "tf32"
    buckets = tuple(int(size) for size in flags["batch_buckets"].split())
    calls = run.open_calls(
        folder / manifest["filename"],
        buckets,
        own=flags["packages"] == "per_bucket",
        device_id=device_id if on_gpu else -1,
    )
    if on_gpu:
        found = f"cuda sm{''.join(map(str, torch.cuda.get_device_capability(device_id)))}"
        if found != manifest["target"]:
            raise RuntimeError(
                f"{manifest['filename']} is machine code for {manifest['target']}, and this GPU is "
                f"{found}. Build it for this GPU."
            )
        # This process runs one engine, so its switches are the process's.
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        return _OnGpu(calls, flags, device_id)
    bucketed = run.BucketedPackage(
        calls, inputs=flags["inputs"].split(), outputs=flags["outputs"].split()
    )
    return _OnProcessor(bucketed)


class _OnProcessor:
    """One package, one thread."""

    def __init__(self, bucketed: Any) -> None:
        self._bucketed = bucketed

    def run(self, names: list[str], inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Outputs of those names, of all rows."""
        rows, limit = len(next(iter(inputs.values()))), self._bucketed.buckets[-1]
        parts = [
            self._bucketed.run({name: array[at : at + limit] for name, array in inputs.items()})
            for at in range(0, rows, limit)
        ]
        return [np.concatenate([part[name] for part in parts]) for name in names]


class _OnGpu:
    """One package for all streams: its weights are on the GPU once."""

    def __init__(
        self, calls: Mapping[int, Callable[..., Any]], flags: Mapping[str, str], device_id: int
    ) -> None:
        self.buckets, self.calls, self.device_id = tuple(calls), calls, device_id
        self.inputs, self.outputs = flags["inputs"].split(), flags["outputs"].split()
        self.graphs = flags["cuda_graphs"] == "on"
        # The package was opened for one run at a time; a captured graph needs it no more.
        self.one_at_a_time = threading.Lock()

    def lane(self, stream: Any) -> "_Lane":
        """Runs on one stream."""
        return _Lane(self, stream)


class _Lane:
    """Runs of one stream, queued by the thread that made this."""

    def __init__(self, engine: _OnGpu, stream: Any) -> None:
        self._engine = engine
        torch.cuda.set_device(engine.device_id)
        outer: Any = torch.cuda
        self._stream = outer.ExternalStream(stream.address, device=engine.device_id)
        torch.cuda.set_stream(self._stream)  # of this thread
        torch.set_grad_enabled(False)

    def bind(
        self, inputs: Mapping[str, Any], memory: Callable[..., Any], *, warm: bool
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Outputs' memory, and a run on fixed addresses: a captured graph where there is one."""
        given = [self._tensor(inputs[name]) for name in self._engine.inputs]
        call = self._engine.calls[len(given[0])]
        with self._engine.one_at_a_time:
            first = call(*given)
        outputs = {
            name: memory(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in zip(self._engine.outputs, first, strict=True)
        }
        targets = [self._tensor(each) for each in outputs.values()]

        def direct() -> None:
            with self._engine.one_at_a_time:
                for target, result in zip(targets, call(*given), strict=True):
                    target.copy_(result)

        for _ in range(_SETTLING_RUNS):
            direct()
        self._stream.synchronize()
        if not (warm and self._engine.graphs):
            return outputs, direct
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process go on allocating and copying meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            direct()
        return outputs, graph.replay

    def _tensor(self, memory: Any) -> torch.Tensor:
        """The memory as a tensor; nothing is copied."""
        return torch.as_tensor(_Memory(memory), device=f"cuda:{self._engine.device_id}")


class _Memory:
    """Device memory as PyTorch takes it from other libraries."""

    def __init__(self, memory: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": np.dtype(memory.dtype).str,
            "data": (memory.address, False),
            "version": 3,
            "strides": None,
        }


def _run_module(folder: Path) -> Any:
    """This version's own copy, under a name that no other version's has."""
    path = folder / "torch_inductor_run.py"
    spec = importlib.util.spec_from_file_location(f"torch_inductor_run_{folder.name}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is missing. Promote the model again.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
