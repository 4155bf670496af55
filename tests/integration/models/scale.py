"""A Triton model for tests: ``y = x @ w`` with ``w`` the parameter ``factor`` on the diagonal.

Parameters: ``sleep_ms`` for each batch, ``sleep_item_ms`` for each sample in it, ``stall_every``
requests it sleeps for ``stall_ms``, ``fail`` raises while loading.
"""

import ctypes
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

# The stub of Triton 2.51 reads NumPy 2's arrays wrongly, so tensors pass as DLPack; it then renames
# the capsule to a name that NumPy does not know as used.
_USED = b"used_dltensor"
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_set_name.restype = ctypes.c_int


def _tensor(name, array):
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    _set_name(capsule, _USED)
    return tensor


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.options = {key: value["string_value"] for key, value in parameters.items()}
        if "fail" in self.options:
            raise RuntimeError(self.options["fail"])
        self.w = np.eye(4, dtype=np.float32) * np.float32(self._number("factor", 2.0))
        self.seen = 0

    def _number(self, name, default=0.0):
        return float(self.options.get(name, default))

    def execute(self, requests):
        xs = [
            np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests
        ]
        rows = sum(len(x) for x in xs)
        time.sleep((self._number("sleep_ms") + self._number("sleep_item_ms") * rows) / 1e3)
        every = self._number("stall_every")
        if every and self.seen // every != (self.seen + len(xs)) // every:
            time.sleep(self._number("stall_ms") / 1e3)
        self.seen += len(xs)
        return [pb_utils.InferenceResponse([_tensor("y", x @ self.w)]) for x in xs]
