"""ONNX Runtime's part of the runner in Triton's Python backend (see its package).

Copied beside ``model.py`` as ``engine_onnxruntime.py``, for a GPU with ``onnxruntime_gpu.py``.
Needs NumPy and onnxruntime in the Python that Triton runs. The provider is the one that was proved
when the engine was built. Parameters, both optional: provider, intra_op_threads.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]

_GRAPH, _UNCAPTURED = "1", "-1"


def open_for_triton(
    folder: Path,
    content: bytes,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    device_id: int,
) -> Any:
    """The engine on its provider.

    Raises:
        RuntimeError: ONNX Runtime chose another provider.
    """
    flags: dict[str, str] = manifest.get("flags", {})
    wanted = parameters.get("provider", flags.get("provider", "CPUExecutionProvider"))
    model = str(folder / manifest["filename"]) if manifest.get("external") else content
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(parameters.get("intra_op_threads", "1"))
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    levels = onnxruntime.GraphOptimizationLevel
    level = flags.get("optimisation", "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(levels, level)

    def opened(provider: Any) -> Any:
        session = onnxruntime.InferenceSession(model, options, providers=[provider])
        used = session.get_providers()[0]
        if used != wanted:
            raise RuntimeError(f"asked for {wanted}, ONNX Runtime chose {used}")
        return session

    if wanted != "CUDAExecutionProvider":
        return _OnProcessor(opened(wanted))
    gpu = _gpu_module(folder)
    gpu.load_cuda_libraries()
    tf32, graphs = flags.get("use_tf32") == "1", flags.get("cuda_graphs") == "on"

    def on_stream(stream: int, *, graph: bool) -> Any:
        return opened(gpu.provider(tf32=tf32, graphs=graph, device_id=device_id, stream=stream))

    told = tuple(int(size) for size in flags.get("batch_buckets", "").split())
    buckets = gpu.buckets_up_to(int(manifest["max_batch_size"]), told)
    return _OnGpu(on_stream, buckets, gpu.element_type, graphs=graphs, device_id=device_id)


class _OnProcessor:
    """One session."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, names: list[str], inputs: Arrays) -> list[NDArray[Any]]:
        """Outputs of those names, of all rows."""
        found: list[NDArray[Any]] = self._session.run(names, inputs)
        return found


class _OnGpu:
    """Sessions on streams."""

    def __init__(
        self,
        open_session: Callable[..., Any],
        buckets: tuple[int, ...],
        element_type: Callable[[str], Any],
        *,
        graphs: bool,
        device_id: int,
    ) -> None:
        self.buckets, self.graphs, self.device_id = buckets, graphs, device_id
        self.open_session, self.element_type = open_session, element_type

    def lane(self, stream: Any) -> "_Lane":
        """Sessions of one stream."""
        return _Lane(self, stream.address)


class _Lane:
    """One session a bucket, and one for all other shapes.

    A convolution keeps one plan, for the shape it saw last: another shape is planned anew every
    time it comes, and a graph captured before still points at what the old plan used.
    """

    def __init__(self, engine: _OnGpu, stream: int) -> None:
        self._engine, self._stream = engine, stream
        self._spare: Any = None

    def bind(
        self, inputs: Mapping[str, Any], memory: Callable[..., Any], *, warm: bool
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Outputs' memory, and a run on fixed addresses; the first runs capture its graph."""
        graph = warm and self._engine.graphs
        if warm:
            session = self._engine.open_session(self._stream, graph=graph)
        else:
            self._spare = self._spare or self._engine.open_session(self._stream, graph=False)
            session = self._spare
        outputs = {
            output.name: memory(output.name, shape, self._engine.element_type(output.type))
            for output, shape in zip(
                session.get_outputs(), self._shapes(session, inputs), strict=True
            )
        }
        bound, options = session.io_binding(), _options(_GRAPH if graph else _UNCAPTURED)
        # The stream orders what follows; the host has no reason to wait here.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._bind_inputs(bound, inputs)
        for name, tensor in outputs.items():
            bound.bind_output(name, *self._place(tensor))
        return outputs, lambda: session.run_with_iobinding(bound, options)

    def _shapes(self, session: Any, inputs: Mapping[str, Any]) -> list[list[int]]:
        """Of the outputs; a first run tells them."""
        first = session.io_binding()
        self._bind_inputs(first, inputs)
        for output in session.get_outputs():
            first.bind_output(output.name, "cuda", self._engine.device_id)
        session.run_with_iobinding(first, _options(_UNCAPTURED))
        return [made.shape() for made in first.get_outputs()]

    def _bind_inputs(self, bound: Any, inputs: Mapping[str, Any]) -> None:
        for name, tensor in inputs.items():
            bound.bind_input(name, *self._place(tensor))

    def _place(self, tensor: Any) -> tuple[str, int, Any, list[int], int]:
        dtype = np.dtype(tensor.dtype).type
        return ("cuda", self._engine.device_id, dtype, list(tensor.shape), tensor.address)


def _options(graph: str) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def _gpu_module(folder: Path) -> Any:
    """This version's own copy, under a name that no other version's has."""
    path = folder / "onnxruntime_gpu.py"
    spec = importlib.util.spec_from_file_location(f"onnxruntime_gpu_{folder.name}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is missing. Promote the model again.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
