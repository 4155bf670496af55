"""A Triton model whose cost is known: it sleeps, so instances do not compete for processors.

A batch of ``b`` samples takes ``base_ms + item_ms * b``, times a lognormal jitter of ``jitter``,
and ``outlier_ms`` more in a share ``outliers`` of the calls. Answers with its input.
"""

import ctypes
import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# The stub of Triton 2.51 reads NumPy 2's arrays wrongly, so tensors pass as DLPack; it then renames
# the capsule to a name that NumPy does not know as used.
_USED = b"used_dltensor"
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_set_name.restype = ctypes.c_int


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters."""
        parameters = json.loads(args["model_config"])["parameters"]
        options = {name: value["string_value"] for name, value in parameters.items()}
        self.base_ms, self.item_ms = float(options["base_ms"]), float(options["item_ms"])
        self.jitter, self.outliers = float(options["jitter"]), float(options["outliers"])
        self.outlier_ms = float(options["outlier_ms"])
        self.source = np.random.default_rng()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch."""
        started = time.perf_counter()
        inputs = [
            np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests
        ]
        samples = sum(len(x) for x in inputs)
        took_ms = self.base_ms + self.item_ms * samples
        took_ms *= self.source.lognormal(0.0, self.jitter)
        if self.source.random() < self.outliers:
            took_ms += self.outlier_ms
        answers = [pb_utils.InferenceResponse([_tensor("y", x)]) for x in inputs]
        time.sleep(max(0.0, took_ms / 1e3 - (time.perf_counter() - started)))
        return answers


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Any:
    capsule = np.array(array).__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    _set_name(capsule, _USED)
    return tensor
