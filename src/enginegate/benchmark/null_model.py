"""Triton Python-backend model that does nothing: it answers each request with its input.

Copied into a model's version folder as ``model.py``. Needs no package but Triton's own.
"""

from typing import Any


class TritonPythonModel:
    """One instance."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request with the tensor that came, which is not looked at."""
        import triton_python_backend_utils as triton  # type: ignore[import-not-found] # noqa: PLC0415

        answers = []
        for request in requests:
            tensor = triton.get_input_tensor_by_name(request, "x")
            same = triton.Tensor.from_dlpack("y", tensor.to_dlpack())
            answers.append(triton.InferenceResponse([same]))
        return answers
