"""Triton Python-backend model: one ONNX Runtime session an instance, one run a batch.

Copied into a model's version folder as ``model.py``, with the engine and its manifest as
``engine.json``. Needs numpy and onnxruntime in the Python that Triton runs. Parameters of the
model's configuration, both optional: provider, intra_op_threads.
"""

import ctypes
import hashlib
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
        self._session = _session(_checked_engine(folder), parameters)
        self._inputs = [_Input(entry) for entry in config["input"]]
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
        joined = {name: np.concatenate([arrays[name] for arrays in batch]) for name in batch[0]}
        ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in batch])[:-1]
        split = [np.split(output, ends) for output in self._session.run(self._outputs, joined)]
        return [self._response(parts) for parts in zip(*split, strict=True)]

    def _response(self, parts: tuple[NDArray[Any], ...]) -> Any:
        tensors = [_tensor(name, p) for name, p in zip(self._outputs, parts, strict=True)]
        return triton.InferenceResponse(output_tensors=tensors)


class _Input:
    """What the configuration says about one input."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.name: str = entry["name"]
        self._dims = [int(axis) for axis in entry["dims"]]
        self._dtype = np.dtype(triton.triton_string_to_numpy(entry["data_type"]))

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


def _checked_engine(folder: Path) -> bytes:
    manifest = json.loads((folder / "engine.json").read_bytes())
    engine = folder / manifest["filename"]
    content: bytes = engine.read_bytes()
    found, recorded = hashlib.sha256(content).hexdigest(), manifest["file"]["sha256"]
    if found != recorded:
        raise triton.TritonModelException(
            f"{engine} is not the engine that was recorded: sha256 {found}, recorded {recorded}"
        )
    return content


def _session(engine: bytes, parameters: dict[str, str]) -> onnxruntime.InferenceSession:
    provider = parameters.get("provider", "CPUExecutionProvider")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(parameters.get("intra_op_threads", "1"))
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(engine, options, providers=[provider])
    used = session.get_providers()[0]
    if used != provider:
        raise triton.TritonModelException(f"asked for {provider}, ONNX Runtime chose {used}")
    return session


def _refused(reason: str) -> Any:
    error = triton.TritonError(f"enginegate: {reason}")
    return triton.InferenceResponse(output_tensors=[], error=error)
