"""ONNX Runtime on a GPU: its libraries, its settings, and a few batch sizes with fixed buffers.

Every new shape costs the CUDA provider an algorithm search and allocations, so rows are padded to
the next bucket, and each bucket's graph is captured once. Triton's Python backend runs this same
file beside its model file; therefore it needs NumPy and ONNX Runtime only, and imports nothing of
this package.
"""

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

PROVIDER = "CUDAExecutionProvider"
_DEVICE = "cuda"
_UNCAPTURED = "-1"
_KEPT_SHAPES = 64  # least recently used ones give their buffers back
_SETTLING_RUNS = 3  # algorithm search, then capture, then a first replay
_PORTABLE = 1
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}


_LIBRARIES = ("cudart", "cublasLt", "cublas", "nvrtc", "curand", "cufft", "nvJitLink", "cudnn*")


@cache
def load_cuda_libraries() -> None:
    """Load the CUDA libraries of NVIDIA's wheels, wherever they are on Python's path.

    ONNX Runtime's own loader looks beside itself only; what is loaded already, it finds by name.
    Without them it falls back to the CPU, silently.
    """
    import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415 - slow, and optional

    for library in _cuda_libraries():
        with suppress(OSError):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if hasattr(onnxruntime, "preload_dlls"):
        # It prints what it cannot find; what that means shows in the provider that a session has.
        with redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()


def provider(
    *, tf32: bool, graphs: bool, device_id: int = 0, stream: int = 0
) -> tuple[str, dict[str, str]]:
    """The CUDA provider with its settings; it uses TF32 unless told not to.

    Args:
        stream: handle of the stream that all work is queued on; 0 lets the provider make its own.
    """
    settings = {
        "device_id": str(device_id),
        "use_tf32": "1" if tf32 else "0",
        "enable_cuda_graph": "1" if graphs else "0",
    }
    if stream:
        settings["user_compute_stream"] = str(stream)
    return (PROVIDER, settings)


def element_type(name: str) -> Any:
    """NumPy's type for ONNX Runtime's name of one, e.g. ``tensor(float)``."""
    return _TYPES[name]


def buckets_up_to(limit: int, wanted: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Batch sizes to run, ascending, the last one ``limit``: those wanted, or powers of two."""
    sizes = wanted or tuple(2**power for power in range(limit.bit_length()))
    return tuple(sorted({size for size in sizes if size < limit} | {limit}))


def bucket_of(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds the rows; more rows than the largest are a caller's error."""
    return next(size for size in buckets if size >= rows)


def pad_rows(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """The array with its last row repeated; a real row costs no Inf, NaN or index out of range."""
    if len(array) == rows:
        return np.ascontiguousarray(array)
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def pinned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A host array that the driver copies from without a detour; an ordinary one without a driver.

    The memory stays registered for as long as the process lives.
    """
    array = np.zeros(shape, dtype)
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        register = driver.cuMemHostRegister_v2
        register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        if array.nbytes:
            register(array.ctypes.data, array.nbytes, _PORTABLE)
            _REGISTERED.append(array)
    return array


# The driver must not be told of memory that Python has given back.
_REGISTERED: list[NDArray[Any]] = []


class Buffers:
    """Fixed device memory for one set of input shapes, and host memory to fill it from."""

    def __init__(self, session: Any, inputs: Arrays, graph: str, device_id: int = 0) -> None:
        import onnxruntime  # noqa: PLC0415 - slow, and optional

        self._session, self._options = session, onnxruntime.RunOptions()
        self._device_id = device_id
        self._host: Arrays = {}
        self.lasting = False
        self._options.add_run_config_entry("gpu_graph_id", graph)
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        self._inputs = {name: make(array, _DEVICE, device_id) for name, array in inputs.items()}
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._outputs = self._allocated(onnxruntime)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)
        for _ in range(_SETTLING_RUNS):
            self.execute()

    def load(self, inputs: Arrays) -> None:
        """Copy inputs to the device."""
        for name, array in inputs.items():
            self._inputs[name].update_inplace(array)

    def gather(self, parts: Sequence[Arrays]) -> None:
        """Copy the rows of several requests to the device, joined and padded on the way.

        Each row is copied once on the host, into memory that the device reads directly.
        """
        for name, value in self._inputs.items():
            if name not in self._host:
                make = pinned if self.lasting else np.zeros
                self._host[name] = make(tuple(value.shape()), parts[0][name].dtype)
            target, end = self._host[name], 0
            for part in parts:
                target[end : end + len(part[name])] = part[name]
                end += len(part[name])
            target[end:] = target[end - 1]
            value.update_inplace(target)

    def execute(self) -> None:
        """Run on what was loaded; returns when the device is done."""
        self._session.run_with_iobinding(self._binding, self._options)

    def read(self) -> Arrays:
        """Copy outputs from the device."""
        return {name: value.numpy() for name, value in self._outputs.items()}

    def _allocated(self, onnxruntime: Any) -> dict[str, Any]:
        """Memory for the outputs, whose shapes a first run tells."""
        first, uncaptured = self._session.io_binding(), onnxruntime.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", _UNCAPTURED)
        for name, value in self._inputs.items():
            first.bind_ortvalue_input(name, value)
        outputs = self._session.get_outputs()
        for output in outputs:
            first.bind_output(output.name, _DEVICE, self._device_id)
        self._session.run_with_iobinding(first, uncaptured)
        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        return {
            output.name: allocate(made.shape(), _TYPES[output.type], _DEVICE, self._device_id)
            for output, made in zip(outputs, first.get_outputs(), strict=True)
        }


class Bucketed:
    """An engine on the CUDA provider that is only ever run at its buckets' batch sizes.

    Every bucket has a session of its own. A convolution keeps one plan, for the shape it saw last:
    another shape is planned anew every time it comes, and a graph captured before still points at
    what the old plan used. The price is the weights once a bucket.

    Args:
        open_session: opens the engine; called once a bucket, and once more for other shapes.
        buckets: batch sizes, ascending.
        graphs: whether sessions are opened with ``enable_cuda_graph``.
    """

    def __init__(
        self,
        open_session: Callable[[], Any],
        buckets: tuple[int, ...],
        *,
        graphs: bool,
        device_id: int = 0,
    ) -> None:
        self.buckets, self._device_id = buckets, device_id
        self._open, self._graphs = open_session, graphs
        self._warm: dict[Shapes, Buffers] = {}
        self._kept: OrderedDict[Shapes, Buffers] = OrderedDict()
        self._spare: Any = None

    def warm_up(self, example: Arrays) -> None:
        """Settle every bucket with one row's shapes, and capture its graph if there are graphs.

        Args:
            example: at least one row of each input.
        """
        graph = "1" if self._graphs else _UNCAPTURED
        for size in self.buckets:
            inputs = {name: pad_rows(array[:1], size) for name, array in example.items()}
            made = Buffers(self._open(), inputs, graph, self._device_id)
            # Buffers of other shapes come and go, and pinned memory is never given back.
            made.lasting = True
            self._warm[_shapes(inputs)] = made

    def run(self, inputs: Arrays) -> Arrays:
        """Outputs of at most as many rows as the largest bucket."""
        rows = len(next(iter(inputs.values())))
        buffers = self.loaded(inputs)
        buffers.execute()
        return {name: array[:rows] for name, array in buffers.read().items()}

    def loaded(self, inputs: Arrays) -> Buffers:
        """The buffers of the smallest bucket that holds the rows, with these on the device."""
        size = bucket_of(len(next(iter(inputs.values()))), self.buckets)
        whole = {name: pad_rows(array, size) for name, array in inputs.items()}
        buffers = self.buffers(whole)
        buffers.load(whole)
        return buffers

    def run_joined(self, parts: Sequence[Arrays]) -> Arrays:
        """Outputs of several requests' rows together, at most as many as the largest bucket.

        Args:
            parts: inputs of each request, alike in every axis but the first.
        """
        rows = sum(len(next(iter(part.values()))) for part in parts)
        size = bucket_of(rows, self.buckets)
        key = tuple((name, (size, *array.shape[1:])) for name, array in sorted(parts[0].items()))
        buffers = self._warm.get(key)
        if buffers is None:
            buffers = self.buffers({n: pad_rows(a[:1], size) for n, a in parts[0].items()})
        buffers.gather(parts)
        buffers.execute()
        return {name: array[:rows] for name, array in buffers.read().items()}

    def buffers(self, inputs: Arrays) -> Buffers:
        """The buffers of these shapes; new shapes run uncaptured, and push the oldest out."""
        key = _shapes(inputs)
        if key in self._warm:
            return self._warm[key]
        found = self._kept.get(key)
        if found is None:
            self._spare = self._spare or self._open()
            found = Buffers(self._spare, inputs, _UNCAPTURED, self._device_id)
            self._kept[key] = found
            if len(self._kept) > _KEPT_SHAPES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _shapes(inputs: Arrays) -> Shapes:
    return tuple((name, array.shape) for name, array in sorted(inputs.items()))


def cuda_folders() -> tuple[Path, ...]:
    """Folders of the CUDA libraries in NVIDIA's wheels on Python's path; none without them."""
    wheels = [Path(entry) / "nvidia" for entry in sys.path if entry]
    folders = [folder for wheel in wheels for folder in sorted(wheel.glob("*/lib"))]
    return tuple(folder for folder in folders if any(folder.glob("lib*.so.*")))


def _cuda_libraries() -> list[Path]:
    return [
        library
        for name in _LIBRARIES
        for folder in cuda_folders()
        for library in sorted(folder.glob(f"lib{name}.so.*"))
    ]
