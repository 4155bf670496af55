"""Rows of recorded traffic, in columns: recorded or imported, redacted, then written."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, Tensors
from enginegate.shadow.trace_reader import TracedRequest

Text = NDArray[np.str_]

# Stage -> the timestamps it lies between, as Triton names them.
_STAGES = {
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}
STAGES = tuple(_STAGES)
NO_LABEL = -1
NO_VERSION = 0
NO_ARRIVAL = -1


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """N rows whose tensors are alike. Every array has shape ``(N, ...)``.

    Attributes:
        requests: number of the request a row belongs to, from 0.
        request_ids: the clients' own, or empty; rows of one request share it.
        arrival_ns: on the recorder's clock; only differences mean anything. -1: not known.
        model_versions: 0 where it is not known.
        stages_us: time in each of `STAGES`, microseconds; NaN where it is not known.
        labels: class index, -1 where there is none.
        parameters: text by name, sent with a request; never written down as such.
        slices: text by column.
        hashes: digests in place of redacted values, by name.
    """

    inputs: Tensors
    outputs: Tensors
    requests: NDArray[np.int64]
    request_ids: Text
    arrival_ns: NDArray[np.int64]
    model_versions: NDArray[np.int64]
    stages_us: dict[str, NDArray[np.float64]]
    labels: NDArray[np.int64]
    parameters: dict[str, Text] = field(default_factory=dict)
    slices: dict[str, Text] = field(default_factory=dict)
    hashes: dict[str, Text] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def columns(self) -> dict[str, Array]:
        """Everything that is written down, by its name in the file."""
        columns: dict[str, Array] = {
            "request": self.requests,
            "request_id": self.request_ids,
            "arrival_ns": self.arrival_ns,
            "model_version": self.model_versions,
            "label": self.labels,
        }
        columns |= {f"stage.{name}_us": self.stages_us[name] for name in STAGES}
        columns |= {f"slice.{name}": column for name, column in self.slices.items()}
        columns |= {f"hash.{name}": column for name, column in self.hashes.items()}
        columns |= {f"input.{name}": column for name, column in self.inputs.items()}
        return columns | {f"output.{name}": column for name, column in self.outputs.items()}

    def with_parameters_of_ids(self) -> "RecordBatch":
        """With parameters that clients put behind a request id, as in ``ID?tier=gold&day=monday``.

        Triton's traces hold no request parameters, but they do hold the id.
        """
        split = [str(name).partition("?") for name in self.request_ids]
        given = [dict(parse_qsl(query)) for _, _, query in split]
        names = {name for parameters in given for name in parameters}
        return replace(
            self,
            request_ids=np.array([name for name, _, _ in split], np.str_),
            parameters=self.parameters
            | {
                name: np.array([parameters.get(name, "") for parameters in given], np.str_)
                for name in names
            },
        )


def batch_of_request(request: TracedRequest) -> RecordBatch:
    """The rows of one traced request."""
    rows = len(next(iter(request.inputs.values())))
    at = request.stages_ns
    spent = {
        name: (at[end] - at[start]) / 1000.0 if start in at and end in at else np.nan
        for name, (start, end) in _STAGES.items()
    }
    return RecordBatch(
        inputs=request.inputs,
        outputs=request.outputs,
        requests=np.zeros(rows, np.int64),
        request_ids=np.full(rows, request.request_id),
        arrival_ns=np.full(rows, request.arrival_ns, np.int64),
        model_versions=np.full(rows, request.model_version, np.int64),
        stages_us={name: np.full(rows, value) for name, value in spent.items()},
        labels=np.full(rows, NO_LABEL, np.int64),
    )


def stack_rows(columns: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Rows of several batches with equal columns, one below the other."""
    return {name: np.concatenate([batch[name] for batch in columns]) for name in columns[0]}
