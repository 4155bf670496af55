"""Golden samples: inputs and the validated engine's own answers, kept with its release.

Every load is proved by replaying them through the live endpoint.
"""

import io
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from enginegate.atomic_io import open_regular, write_file
from enginegate.data import Tensors
from enginegate.errors import RepositoryError, TamperedError
from enginegate.triton.types import Reply

# Few enough to replay at every load, enough that a wrong engine cannot answer all of them.
GOLDEN_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Golden:
    """S samples: ``inputs`` and ``outputs`` by name, first axis S."""

    inputs: Tensors
    outputs: Tensors

    @property
    def largest(self) -> float:
        """The largest absolute value of any output."""
        return max(float(np.abs(array).max(initial=0.0)) for array in self.outputs.values())

    @property
    def samples(self) -> tuple[Tensors, ...]:
        """Inputs one by one, each with its batch axis in front."""
        rows = range(len(next(iter(self.inputs.values()))))
        return tuple(
            {name: array[row : row + 1] for name, array in self.inputs.items()} for row in rows
        )

    def write(self, path: Path) -> None:
        """Write both as one ``.npz``."""
        named = {f"input.{name}": array for name, array in self.inputs.items()}
        named |= {f"output.{name}": array for name, array in self.outputs.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **named)
        write_file(path, buffer.getvalue(), mode=0o600)

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """Read what `write` wrote.

        Raises:
            TamperedError: the file is missing or damaged.
            PermissionError: it may not be read by this user.
        """
        try:
            with (
                os.fdopen(open_regular(path), "rb") as file,
                np.load(file, allow_pickle=False) as archive,
            ):
                arrays = {name: archive[name] for name in archive.files}
        except PermissionError:
            raise  # whoever may not read it knows nothing about it
        except (OSError, ValueError, BadZipFile, zlib.error) as error:
            raise TamperedError(f"The golden samples {path} cannot be read: {error}.") from error
        return cls(_named(arrays, "input."), _named(arrays, "output."))

    def replay(
        self, ask: Callable[[Tensors], Reply], *, version: int, max_abs_error: float
    ) -> float:
        """Ask for every sample, one at a time.

        Returns:
            The largest difference of any output value.

        Raises:
            RepositoryError: another version answered, an output is missing or of another shape, or
                a value differs by more than ``max_abs_error`` (a NaN counts as different).
        """
        worst = 0.0
        for index, sample in enumerate(self.samples):
            reply = ask(sample)
            if reply.model_version != str(version):
                raise RepositoryError(
                    f"golden sample {index} was answered by version {reply.model_version}, not "
                    f"{version}"
                )
            worst = max(worst, self._difference(index, reply.outputs, max_abs_error))
        return worst

    def _difference(self, index: int, outputs: Tensors, max_abs_error: float) -> float:
        worst = 0.0
        for name, expected in self.outputs.items():
            found = outputs.get(name)
            if found is None or found.shape != expected[index : index + 1].shape:
                shape = "missing" if found is None else f"of shape {found.shape}"
                raise RepositoryError(f"golden sample {index}: output {name!r} is {shape}")
            difference = float(np.abs(found[0].astype(np.float64) - expected[index]).max())
            if not difference <= max_abs_error:
                raise RepositoryError(
                    f"golden sample {index}: output {name!r} differs from the validated answer by "
                    f"{difference:.3g}; {max_abs_error:.3g} is allowed"
                )
            worst = max(worst, difference)
        return worst


def _named(arrays: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
