"""Arrays to and from Triton's inference messages, as raw little-endian bytes."""

from typing import Any

import numpy as np

from enginegate.data import Tensors
from enginegate.errors import ServerError
from enginegate.triton.config import numpy_type, triton_type
from enginegate.triton.types import Reply


def fill_request(message: Any, inputs: Tensors) -> None:
    """Write arrays into a ``ModelInferRequest``.

    Raises:
        ModelError: an array has a dtype that Triton cannot carry.
    """
    for name, array in inputs.items():
        tensor = message.inputs.add(name=name, datatype=triton_type(array.dtype.name))
        tensor.shape.extend(array.shape)
        message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())


def reply_of(message: Any) -> Reply:
    """Read a ``ModelInferResponse``. Arrays share its memory and must not be written to.

    Raises:
        ServerError: an output's bytes do not fit its shape and type.
        ModelError: an output has a type that cannot be read here.
    """
    outputs: Tensors = {}
    for tensor, content in zip(message.outputs, message.raw_output_contents, strict=True):
        dtype, shape = np.dtype(numpy_type(tensor.datatype)), tuple(tensor.shape)
        expected = dtype.itemsize * int(np.prod(shape))
        if len(content) != expected:
            raise ServerError(
                f"{message.model_name} version {message.model_version} answered output "
                f"{tensor.name!r} as {dtype.name}{list(shape)}, which is {expected} bytes, but "
                f"sent {len(content)}.\n"
                "A Python backend built for NumPy 1 sends empty outputs under NumPy 2: hand "
                "tensors over with DLPack there."
            )
        outputs[tensor.name] = np.frombuffer(content, dtype).reshape(shape)
    return Reply(outputs, str(message.model_version), str(message.id))
