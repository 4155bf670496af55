"""Triton Python-backend model: one ONNX Runtime session an instance, one run a batch.

Copied into a model's version folder as ``model.py``, with the engine and its manifest as
``engine.json``, and for a GPU with ``onnxruntime_gpu.py``: then every batch is padded to a bucket,
and all of them are warm before the instance is ready. Needs numpy and onnxruntime in the Python
that Triton runs. The provider is the one that was proved when the engine was built. Parameters of
the model's configuration, both optional: provider, intra_op_threads.
"""

import ctypes
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import triton_python_backend_utils as triton  # type: ignore[import-not-found]
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]

# A Python backend built for NumPy 1 (Triton 2.51) reads arrays of NumPy 2 wrongly and sends empty
# ones, without an error; DLPack passes tensors rightly under both. It renames the capsule it took
# to a name that NumPy does not know as used, which NumPy would report on every call.
_USED_CAPSULE = b"used_dltensor"
_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_set_capsule_name.restype = ctypes.c_int


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the engine's bytes, then open it; an error here fails the load."""
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        device_id = int(args.get("model_instance_device_id", "0"))
        self._inputs = [_Input(entry) for entry in config["input"]]
        engine = _Engine(folder)
        self._session = _session(engine, parameters, device_id)
        if isinstance(self._session, _OnGpu):
            shapes = engine.manifest.get("profiles", {})
            self._session.warm_up(
                {each.name: each.example(shapes.get(each.name)) for each in self._inputs}
            )
        self._outputs = [entry["name"] for entry in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request: all of them in one run, each with its own error if it has one."""
        given = [self._read(request) for request in requests]
        good = [arrays for arrays in given if not isinstance(arrays, str)]
        try:
            answers = iter(self._run(good))
        except Exception as error:  # noqa: BLE001 - a request without an answer blocks its client
            refusal = f"{type(error).__name__}: {error}"
            return [_refused(each if isinstance(each, str) else refusal) for each in given]
        return [_refused(each) if isinstance(each, str) else next(answers) for each in given]

    def _read(self, request: Any) -> Arrays | str:
        """The request's arrays by input name, or what is wrong with it."""
        arrays: Arrays = {}
        for wanted in self._inputs:
            tensor = triton.get_input_tensor_by_name(request, wanted.name)
            if tensor is None:
                return f"input {wanted.name} is missing"
            arrays[wanted.name] = np.from_dlpack(tensor)
            problem = wanted.problem(arrays[wanted.name])
            if problem:
                return problem
        rows = sorted({len(array) for array in arrays.values()})
        return arrays if len(rows) == 1 and rows[0] else f"the inputs have {rows} rows"

    def _run(self, batch: list[Arrays]) -> list[Any]:
        if not batch:
            return []
        ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in batch])
        found = self._answers(batch, int(ends[-1]))
        split = [np.split(output, ends[:-1]) for output in found]
        return [self._response(parts) for parts in zip(*split, strict=True)]

    def _answers(self, batch: list[Arrays], rows: int) -> list[NDArray[Any]]:
        """Outputs of all requests' rows together, in the order of their names."""
        if isinstance(self._session, _OnGpu) and self._session.fits(batch, rows):
            return self._session.run_joined(self._outputs, batch)
        joined = {name: np.concatenate([arrays[name] for arrays in batch]) for name in batch[0]}
        answers: list[NDArray[Any]] = self._session.run(self._outputs, joined)
        return answers

    def _response(self, parts: tuple[NDArray[Any], ...]) -> Any:
        tensors = [_tensor(name, p) for name, p in zip(self._outputs, parts, strict=True)]
        return triton.InferenceResponse(output_tensors=tensors)


class _Input:
    """What the configuration says about one input."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.name: str = entry["name"]
        self._dims = [int(axis) for axis in entry["dims"]]
        self._dtype = np.dtype(triton.triton_string_to_numpy(entry["data_type"]))

    def example(self, shape: dict[str, list[int]] | None) -> NDArray[Any]:
        """One row of ones, at the sizes that the engine is tuned for."""
        best = shape["best"][1:] if shape else [max(axis, 1) for axis in self._dims]
        return np.ones([1, *best], self._dtype)

    def problem(self, array: NDArray[Any]) -> str:
        """Why this array does not fit, or nothing."""
        axes = array.shape[1:]
        fits = len(axes) == len(self._dims) and all(
            wanted in {-1, axis} for wanted, axis in zip(self._dims, axes, strict=True)
        )
        if fits and array.dtype == self._dtype:
            return ""
        wanted = f"{self._dtype} with {self._dims} after the batch axis"
        return f"input {self.name} is {array.dtype} of shape {array.shape}; it must be {wanted}"


def _tensor(name: str, array: NDArray[Any]) -> Any:
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = triton.Tensor.from_dlpack(name, capsule)
    _set_capsule_name(capsule, _USED_CAPSULE)
    return tensor


class _Engine:
    """The engine of a version folder; its bytes are those of its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "engine.json").read_bytes())
        self.flags: dict[str, str] = self.manifest.get("flags", {})
        path = folder / self.manifest["filename"]
        content = _checked(path, self.manifest["file"]["sha256"])
        external = self.manifest.get("external", {})
        for name, digest in external.items():
            _checked(folder / name, digest["sha256"])
        self.model: bytes | str = str(path) if external else content


def _checked(path: Path, recorded: str) -> bytes:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != recorded:
        raise triton.TritonModelException(
            f"{path} is not the engine that was recorded: sha256 {found}, recorded {recorded}"
        )
    return content


class _OnGpu:
    """A session on a GPU, run as ONNX Runtime's own are."""

    def __init__(self, bucketed: Any) -> None:
        self._bucketed = bucketed
        self.warm_up = bucketed.warm_up

    def fits(self, batch: list[Arrays], rows: int) -> bool:
        """Whether all requests go in one run: few enough rows, and alike in every other axis."""
        first = {name: array.shape[1:] for name, array in batch[0].items()}
        alike = all(
            array.shape[1:] == first[name] for arrays in batch for name, array in arrays.items()
        )
        return alike and rows <= int(self._bucketed.buckets[-1])

    def run_joined(self, names: list[str], batch: list[Arrays]) -> list[NDArray[Any]]:
        """Outputs in the order of their names, from one run; each row is copied once."""
        found = self._bucketed.run_joined(batch)
        return [found[name] for name in names]

    def run(self, names: list[str], inputs: Arrays) -> list[NDArray[Any]]:
        """Outputs in the order of their names, from runs of at most the largest bucket."""
        rows, limit = len(next(iter(inputs.values()))), self._bucketed.buckets[-1]
        parts = [
            self._bucketed.run({name: array[at : at + limit] for name, array in inputs.items()})
            for at in range(0, rows, limit)
        ]
        return [np.concatenate([part[name] for part in parts]) for name in names]


def _session(engine: _Engine, parameters: dict[str, str], device_id: int) -> Any:
    known = engine.flags.get("provider", "CPUExecutionProvider")
    wanted = parameters.get("provider", known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(parameters.get("intra_op_threads", "1"))
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    levels = onnxruntime.GraphOptimizationLevel
    level = engine.flags.get("optimisation", "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(levels, level)
    gpu = _gpu_module(engine.folder) if wanted == "CUDAExecutionProvider" else None
    graphs = engine.flags.get("cuda_graphs") == "on"
    provider: Any = wanted
    if gpu is not None:
        gpu.load_cuda_libraries()
        tf32 = engine.flags.get("use_tf32") == "1"
        provider = gpu.provider(tf32=tf32, graphs=graphs, device_id=device_id)

    def opened() -> Any:
        session = onnxruntime.InferenceSession(engine.model, options, providers=[provider])
        used = session.get_providers()[0]
        if used != wanted:
            raise triton.TritonModelException(f"asked for {wanted}, ONNX Runtime chose {used}")
        return session

    if gpu is None:
        return opened()
    told = tuple(int(size) for size in engine.flags.get("batch_buckets", "").split())
    buckets = gpu.buckets_up_to(int(engine.manifest["max_batch_size"]), told)
    return _OnGpu(gpu.Bucketed(opened, buckets, graphs=graphs, device_id=device_id))


def _gpu_module(folder: Path) -> Any:
    """This version's own copy, under a name that no other version's has; None if it has none."""
    path = folder / "onnxruntime_gpu.py"
    spec = importlib.util.spec_from_file_location(f"onnxruntime_gpu_{folder.name}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refused(reason: str) -> Any:
    error = triton.TritonError(f"enginegate: {reason}")
    return triton.InferenceResponse(output_tensors=[], error=error)
