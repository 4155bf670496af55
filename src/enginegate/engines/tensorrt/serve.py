"""TensorRT's part of the runner in Triton's Python backend (see its package).

Copied beside ``model.py`` as ``engine_tensorrt.py``, with ``tensorrt_contexts.py``. Needs the
bindings that the plan was built with in the Python that Triton runs; loading a plan of another
version fails.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# What the plugin library of TensorRT 8 is linked to; NVIDIA's wheels put it where no loader looks.
_KERNEL_LIBRARIES = ("libcublasLt.so.12", "libcublas.so.12", "libcudnn.so.8")
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}


def open_for_triton(
    folder: Path,
    content: bytes,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    device_id: int,
) -> Any:
    """The plan on its GPU; its weights are there once.

    Raises:
        RuntimeError: there is no GPU, no library, or the library refuses the plan.
    """
    del parameters
    _use_gpu(device_id)
    library = _library(str(manifest["builder"]).split(" ", maxsplit=1)[0])
    return _Plan(library, content, manifest, _context_maker(folder))


class _Plan:
    """A plan that several lanes run, each in execution contexts of its own."""

    def __init__(
        self, trt: Any, content: bytes, manifest: Mapping[str, Any], context_maker: Any
    ) -> None:
        self._context_maker = context_maker
        limit = int(manifest["max_batch_size"])
        self.buckets = tuple(sorted({2**power for power in range(limit.bit_length())} | {limit}))
        self.trt, self._content, self._builder = trt, content, manifest["builder"]
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        flags = manifest.get("flags", {})
        self._shared = flags.get("shares_profile") == "true"
        if flags.get("version_compatible") == "true":
            self._runtime.engine_host_code_allowed = True
        self._engine = self._deserialised()

    def lane(self, stream: Any) -> "_Lane":
        """A place where the plan runs.

        A plan without profile sharing lets one context use a profile: another lane then loads the
        plan once more.
        """
        contexts = self._context_maker(self.trt, self._engine, stream, shared=self._shared)
        context = contexts.make(stream)
        if context is None:
            contexts.use(self._deserialised())
            context = contexts.make(stream)
        if context is None:
            raise RuntimeError("TensorRT has no memory for another execution context.")
        return _Lane(contexts, context, stream)

    def _deserialised(self) -> Any:
        engine = self._runtime.deserialize_cuda_engine(self._content)
        if engine is None:
            raise RuntimeError(
                f"TensorRT {self.trt.__version__} refuses to load a plan of {self._builder} on "
                "this GPU; Triton's log says why. Install that version in the Python that Triton "
                "runs, or build the engine again on this machine."
            )
        return engine


class _Lane:
    """A graph for each warm set of shapes, and one context for shapes that come and go.

    A graph holds state of the context that it was captured from, and is undefined once that is
    changed (NVIDIA's developer guide, "CUDA Graphs"), so each has a context of its own. Where a
    plan lets one context use its profile, that one is captured for all shapes, as Triton's own
    backend does.
    """

    def __init__(self, contexts: Any, context: Any, stream: Any) -> None:
        self._contexts, self._context, self._stream = contexts, context, stream
        self._engine = contexts.engine

    def bind(
        self, inputs: Mapping[str, Any], memory: Callable[..., Any], *, warm: bool
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Outputs' memory, and a run on fixed addresses.

        Raises:
            RuntimeError: the plan does not take these shapes, or did not run.
        """
        own = self._contexts.make(self._stream) if warm else None
        context = own or self._context
        outputs = self._outputs(context, inputs, memory)
        places = {name: tensor.address for name, tensor in {**inputs, **outputs}.items()}

        def settle() -> None:
            for name, tensor in inputs.items():
                context.set_input_shape(name, tensor.shape)
            for name, address in places.items():
                context.set_tensor_address(name, address)

        def queue() -> None:
            if own is None:  # other shapes were run in between
                settle()
            if not context.execute_async_v3(self._stream.address):
                raise RuntimeError("the plan did not run; Triton's log says why")

        settle()
        queue()  # once uncaptured: the library allocates and chooses on the first run of a shape
        self._stream.wait()
        if not warm:
            return outputs, queue
        try:
            return outputs, self._stream.capture(queue)
        except RuntimeError as error:
            print(f"enginegate: served without a CUDA graph: {error}", file=sys.stderr)  # noqa: T201
            return outputs, queue

    def _outputs(
        self, context: Any, inputs: Mapping[str, Any], memory: Callable[..., Any]
    ) -> dict[str, Any]:
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tensor.shape):
                raise RuntimeError(f"the plan takes no {name} of shape {tensor.shape}")
        unknown = list(context.infer_shapes())
        if unknown:
            raise RuntimeError(f"the plan lacks the shapes of {', '.join(unknown)}")
        names = [self._engine.get_tensor_name(at) for at in range(self._engine.num_io_tensors)]
        return {
            name: memory(name, tuple(context.get_tensor_shape(name)), self._dtype(name))
            for name in names
            if name not in inputs
        }

    def _dtype(self, name: str) -> str:
        told = self._engine.get_tensor_dtype(name).name
        if told not in _DTYPES:
            raise RuntimeError(f"output {name} is {told}, which no array can hold")
        return _DTYPES[told]


def _library(name: str) -> Any:
    """The bindings, also of a package that has the bindings alone.

    Symbols are bound when they are called, so that libraries may lack those that nobody calls.
    """
    for filename in _KERNEL_LIBRARIES:
        wheels = (Path(entry) / "nvidia" for entry in sys.path if entry)
        for place in (found for folder in wheels for found in folder.glob(f"*/lib/{filename}")):
            with suppress(OSError):
                ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_LOCAL)
    reasons = []
    for candidate in (name, f"{name}_bindings"):
        try:
            found = importlib.import_module(candidate)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{candidate}: {error}")
            continue
        if hasattr(found, "Runtime"):
            return found
        reasons.append(f"{candidate} has no Runtime")
    raise RuntimeError(f"the Python that Triton runs has no {name}: {'; '.join(reasons)}")


def _use_gpu(device_id: int) -> None:
    """Make the GPU's primary context this thread's: without one, TensorRT 8.6 crashes."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError("there is no NVIDIA driver here, so no plan can be loaded") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), device_id)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxSetCurrent(context)
    )
    if failed:
        raise RuntimeError(f"GPU {device_id} cannot be used (CUDA driver error {failed})")


def _context_maker(folder: Path) -> Any:
    """Of this version's own copy, under a name that no other version's has."""
    path = folder / "tensorrt_contexts.py"
    spec = importlib.util.spec_from_file_location(f"tensorrt_contexts_{folder.name}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is missing. Promote the model again.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ContextMaker
