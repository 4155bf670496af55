"""A request to a live model as lines to copy: Python with tritonclient, and curl."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.atomic_io import write_file
from enginegate.data import Array, Tensors
from enginegate.errors import InputError
from enginegate.triton.codec import triton_type

# What still fits a screen; larger requests go into files beside one another.
_MOST_NUMBERS = 32
_MOST_CHARACTERS = 400
_NOT_IN_JSON = frozenset({"float16"})  # Triton's JSON refuses it, binary data has it


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request.

    Attributes:
        model: its name in Triton.
        inputs: by name, the first axis the batch.
        folder: where what is too large for a line is written.
        name: of the files there, without an ending.
    """

    model: str
    inputs: Tensors
    folder: Path
    name: str

    def python(self, address: str) -> str:
        """A program that sends it over gRPC and prints each output.

        Raises:
            InputError: the file for its inputs cannot be written.
            ModelError: Triton has no type for an input.
        """
        lines = ["import numpy as np", "import tritonclient.grpc as triton", ""]
        small = sum(array.size for array in self.inputs.values()) <= _MOST_NUMBERS
        if small:
            given = {name: _literal(array) for name, array in self.inputs.items()}
        else:
            lines.append(f"sample = np.load({str(self._numpy_file())!r})")
            given = {name: f"sample[{name!r}]" for name in self.inputs}
        lines.append(f"client = triton.InferenceServerClient({address!r})")
        lines.append("inputs = []")
        for name, array in self.inputs.items():
            dtype = triton_type(array.dtype.name)
            lines.append(f"inputs.append(triton.InferInput({name!r}, {[*array.shape]}, {dtype!r}))")
            lines.append(f"inputs[-1].set_data_from_numpy({given[name]})")
        lines.append(f"answer = client.infer({self.model!r}, inputs)")
        lines.append("for output in answer.get_response().outputs:")
        lines.append("    print(output.name, answer.as_numpy(output.name))")
        return "\n".join(lines)

    def curl(self, url: str) -> str:
        """The shell's line that sends it over HTTP; empty: Triton's JSON has no such type.

        Args:
            url: of the server, e.g. ``http://127.0.0.1:8000``.

        Raises:
            InputError: the file for its body cannot be written.
        """
        if any(array.dtype.name in _NOT_IN_JSON for array in self.inputs.values()):
            return ""
        body = json.dumps({"inputs": [_in_json(name, a) for name, a in self.inputs.items()]})
        given = body
        if len(body) > _MOST_CHARACTERS:
            path = self.folder / f"{self.name}.json"
            _write(path, body.encode())
            given = f"@{path}"
        where = shlex.quote(f"{url}/v2/models/{self.model}/infer")
        return f"curl -s {where} -H 'Content-Type: application/json' -d {shlex.quote(given)}"

    def _numpy_file(self) -> Path:
        path = self.folder / f"{self.name}.npz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **self.inputs)  # type: ignore[arg-type]
        except OSError as error:
            raise _unwritable(path, error) from error
        return path


def _literal(array: Array) -> str:
    values = np.array(_shortest(array), object).reshape(array.shape).tolist()
    return f"np.array({values!r}, {array.dtype.name!r})"


def _shortest(array: Array) -> list[Any]:
    """The numbers in order, each with the fewest digits that mean it in its type."""
    flat = array.reshape(-1)
    return [float(str(v)) for v in flat] if array.dtype.kind == "f" else list(flat.tolist())


def _in_json(name: str, array: Array) -> dict[str, object]:
    dtype = triton_type(array.dtype.name)
    return {
        "name": name,
        "shape": [*array.shape],
        "datatype": dtype,
        "data": _shortest(array),
    }


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path} cannot be written: {error.strerror}. Make room, or set ENGINEGATE_HOME to another "
        "folder."
    )
