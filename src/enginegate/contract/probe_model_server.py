"""Triton Python-backend model that says who it is: each answer names its version and its load.

Copied into a model's version folder as ``model.py``. Needs no package but NumPy.
"""

import ctypes
import os
from typing import Any

import numpy as np

_BYTES = 3  # exact in a float32
# Triton renames the capsule it took to a name that NumPy does not know as used, and would report.
_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TritonPythonModel:
    """One instance; ``load`` is another number after every load."""

    def initialize(self, args: dict[str, str]) -> None:
        """Note which version this is."""
        self.version = float(args["model_version"])
        self.load = float(int.from_bytes(os.urandom(_BYTES), "little"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer ``x`` of shape (N, 1) with ``y`` of shape (N, 3): x, version, load."""
        import triton_python_backend_utils as triton  # type: ignore[import-not-found] # noqa: PLC0415

        answers = []
        for request in requests:
            x = np.from_dlpack(triton.get_input_tensor_by_name(request, "x"))
            y = np.empty((len(x), 3), np.float32)
            y[:, :1], y[:, 1], y[:, 2] = x, self.version, self.load
            capsule = y.__dlpack__()
            tensor = triton.Tensor.from_dlpack("y", capsule)
            _set_capsule_name(capsule, b"used_dltensor")
            answers.append(triton.InferenceResponse([tensor]))
        return answers
