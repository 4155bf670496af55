"""Reads what Triton's trace extension writes, and loses no more than what is damaged.

Triton 2.51 writes JSON arrays of objects; several objects with one ``id`` make one request: who it
was, its timestamps, and each tensor as comma-separated text with six digits. It escapes nothing, so
a request id with a quote in it damages that request's objects.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import DataError, ModelError
from enginegate.triton.config import numpy_type

# Bytes are printed as characters and half floats not at all.
UNREADABLE = frozenset({"uint8", "int8", "float16"})

_OBJECT = re.compile(r'\{"id":')
_INPUT, _OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
_ARRIVED, _ENDED = "REQUEST_START", "REQUEST_END"


@dataclass(frozen=True, slots=True)
class Traced:
    """One request as the server saw it.

    Attributes:
        trace_id: unique on one server.
        request_id: what the client called it, or empty.
        arrival_ns: on the server's monotonic clock; only differences mean anything.
        inputs: with the batch axis in front; values to six digits.
        stages_ns: name of each timestamp -> nanoseconds on the same clock.
    """

    trace_id: int
    request_id: str
    model: str
    model_version: int
    arrival_ns: int
    inputs: Tensors
    outputs: Tensors
    stages_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """N recorded samples in the order they arrived, and what was answered then.

    Attributes:
        data: the inputs; ids are ``REQUEST_ID.TRACE_ID``, with ``#ROW`` for a row of a batch.
        outputs: by name, shape ``(N, ...)``.
        arrival_ns: shape ``(N,)``; rows of one request share it.
        model_versions: shape ``(N,)``.
    """

    data: DataSet
    outputs: Tensors
    arrival_ns: NDArray[np.int64]
    model_versions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests that could be read, in order of arrival, and why others could not."""

    requests: tuple[Traced, ...]
    lost: tuple[str, ...]

    def sample(self, origin: str, max_samples: int) -> ShadowSample:
        """The first ``max_samples`` rows whose shapes are the most common ones.

        Raises:
            DataError: nothing was recorded.
        """
        alike = _alike(self.requests)
        if not alike:
            lost = f" {len(self.lost)} were damaged, first: {self.lost[0]}" if self.lost else ""
            raise DataError(
                f"{origin}: no request was recorded.{lost}\n"
                "Send more traffic while recording, or record a larger share of it."
            )
        rows = [_rows(request) for request in alike]
        inputs = _stack([request.inputs for request in alike], max_samples)
        count = len(next(iter(inputs.values())))
        ids = [
            name for request, size in zip(alike, rows, strict=True) for name in _ids(request, size)
        ]
        return ShadowSample(
            DataSet(origin, inputs, None, np.array(ids[:count], np.str_), {}),
            _stack([request.outputs for request in alike], max_samples),
            np.repeat([request.arrival_ns for request in alike], rows)[:count],
            np.repeat([request.model_version for request in alike], rows)[:count],
        )


def read_traces(files: Iterable[Path], model: str) -> Recording:
    """Read trace files of one server; requests of other models are left out."""
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    lost: list[str] = []
    for file in files:
        for item in _objects(file.read_bytes().decode(errors="replace")):
            if isinstance(item, str):
                lost.append(f"{file.name}: {item}")
            else:
                found[int(item["id"])].append(item)
    requests: list[Traced] = []
    for trace_id, items in found.items():
        try:
            requests.append(_request(trace_id, items))
        except (KeyError, ValueError, ModelError) as error:
            lost.append(f"request {trace_id}: {error}")
    kept = (request for request in requests if request.model == model)
    return Recording(tuple(sorted(kept, key=lambda request: request.arrival_ns)), tuple(lost))


def _objects(text: str) -> Iterator[dict[str, Any] | str]:
    """Every object of a file; a damaged one comes as a sentence, and reading goes on after it."""
    decoder, place = json.JSONDecoder(strict=False), 0
    while (match := _OBJECT.search(text, place)) is not None:
        try:
            item, place = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            place = match.end()
            yield f"damaged at character {match.start()}: {error.msg}"
        else:
            yield item


@dataclass(slots=True)
class _Parts:
    who: dict[str, Any] = field(default_factory=dict)
    stages_ns: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensors] = field(default_factory=lambda: {_INPUT: {}, _OUTPUT: {}})


def _request(trace_id: int, items: list[dict[str, Any]]) -> Traced:
    parts = _Parts()
    for item in items:
        if "model_name" in item:
            parts.who = item
        for stamp in item.get("timestamps", ()):
            parts.stages_ns[stamp["name"]] = int(stamp["ns"])
        if item.get("activity") in parts.tensors:
            parts.tensors[item["activity"]][item["tensor"]["name"]] = _tensor(item["tensor"])
    missing = [
        name
        for name, there in (
            ("its model", parts.who),
            ("its inputs", parts.tensors[_INPUT]),
            ("its outputs", parts.tensors[_OUTPUT]),
            ("its start", _ARRIVED in parts.stages_ns),
            ("its end", _ENDED in parts.stages_ns),
        )
        if not there
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return Traced(
        trace_id=trace_id,
        request_id=str(parts.who.get("request_id", "")),
        model=str(parts.who["model_name"]),
        model_version=int(parts.who["model_version"]),
        arrival_ns=parts.stages_ns[_ARRIVED],
        inputs=parts.tensors[_INPUT],
        outputs=parts.tensors[_OUTPUT],
        stages_ns=parts.stages_ns,
    )


def _tensor(item: dict[str, Any]) -> Array:
    dtype = np.dtype(numpy_type(item["dtype"]))
    shape = tuple(int(axis) for axis in item["shape"].split(","))
    values = item["data"].split(",") if item["data"] else []
    if len(values) != int(np.prod(shape)):
        raise ValueError(f"{item['name']} has {len(values)} values for shape {shape}")
    numbers = np.array(values, np.str_)
    # Booleans are written as 0 and 1, which NumPy reads as text that is "not empty".
    plain = numbers.astype(np.int64).astype(dtype) if dtype.kind == "b" else numbers.astype(dtype)
    return plain.reshape(shape)


def _alike(requests: tuple[Traced, ...]) -> list[Traced]:
    """Those whose tensors have the most common shapes, the batch axis aside."""
    shapes = [
        tuple(sorted((name, a.dtype.str, a.shape[1:]) for name, a in request.inputs.items()))
        for request in requests
    ]
    if not shapes:
        return []
    common = Counter(shapes).most_common(1)[0][0]
    return [request for request, shape in zip(requests, shapes, strict=True) if shape == common]


def _rows(request: Traced) -> int:
    return len(next(iter(request.inputs.values())))


def _ids(request: Traced, rows: int) -> list[str]:
    name = f"{request.request_id or 'request'}.{request.trace_id}"
    return [name] if rows == 1 else [f"{name}#{row}" for row in range(rows)]


def _stack(tensors: list[Tensors], limit: int) -> Tensors:
    names = tensors[0].keys()
    return {name: np.concatenate([item[name] for item in tensors])[:limit] for name in names}
