"""Reads the files of Triton's trace extension piece by piece, and loses only damaged requests.

Triton 2.51 writes JSON arrays of objects; several objects with one ``id``, one after the other,
make one request: its model and id, its timestamps, and each tensor as comma-separated text with six
digits. It escapes nothing, so a request id with a quote in it damages that request's objects.

No value that users sent gets into a message: a damage names places and tensors.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from enginegate.data import Array, Tensors
from enginegate.errors import ModelError
from enginegate.triton.codec import numpy_type

# Bytes are printed as characters and half floats not at all.
UNREADABLE = frozenset({"uint8", "int8", "float16"})

_START = '{"id":'
_OBJECT = re.compile(re.escape(_START))
_INPUT, _OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
_ARRIVED, _ENDED = "REQUEST_START", "REQUEST_END"
_CHUNK_CHARACTERS = 1 << 20
_LARGEST_CHARACTERS = 1 << 28
# A token that the end of what was read cuts in two, e.g. a number or an escape.
_CUT_CHARACTERS = 16
# Requests of one model that runs inside another are written between that one's objects.
_OPEN_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request as the server saw it.

    Attributes:
        trace_id: unique on one server.
        request_id: the client's own, or empty.
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
class Damage:
    """Something that could not be read, and where; holds no value that users sent."""

    reason: str


def read_traces(files: Iterable[Path], model: str) -> Iterator[TracedRequest | Damage]:
    """Requests of one model in the order they were written, which is that of their ends.

    Holds one piece of a file and a few requests at a time, however large the files are.
    """
    waiting: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()
    for file in files:
        for item in _objects(file):
            if isinstance(item, Damage):
                yield item
                continue
            waiting.setdefault(item["id"], []).append(item)
            if len(waiting) > _OPEN_REQUESTS:
                yield from _of_model(*waiting.popitem(last=False), model)
    for trace_id, items in waiting.items():
        yield from _of_model(trace_id, items, model)


def _of_model(
    trace_id: int, items: list[dict[str, Any]], model: str
) -> Iterator[TracedRequest | Damage]:
    named = {item["model_name"] for item in items if isinstance(item.get("model_name"), str)}
    if named and model not in named:
        return
    try:
        yield _request(trace_id, items)
    except _UnreadableError as error:
        yield Damage(f"request {trace_id}: {error}")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        # Their messages repeat the value that did not fit, and that is a user's.
        yield Damage(f"request {trace_id}: an object has not the form that Triton writes")


def _objects(path: Path) -> Iterator[dict[str, Any] | Damage]:
    """Every object of a file; after a damaged one reading goes on."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        pieces = _Pieces(file)
        while (item := pieces.next_object()) is not None:
            if isinstance(item, Damage):
                yield Damage(f"{path.name}: {item.reason}")
            else:
                yield item


@dataclass(slots=True)
class _Pieces:
    """The text of a file that was read and not yet used, beginning at ``place``."""

    file: IO[str]
    text: str = ""
    place: int = 0
    used: int = 0
    ended: bool = False

    def next_object(self) -> dict[str, Any] | Damage | None:
        """The next object or damage; None at the end of the file."""
        decoder = json.JSONDecoder(strict=False)
        while self._find():
            try:
                item, end = decoder.raw_decode(self.text, self.place)
            except (json.JSONDecodeError, RecursionError) as error:
                if self._may_go_on(error):
                    self._read_on()
                    continue
                return self._damaged(getattr(error, "msg", "nested too deeply"))
            if not isinstance(item.get("id"), int):
                return self._damaged("its id is no number")
            self.place = end
            return dict(item)
        return None

    def _find(self) -> bool:
        """Move to where an object may begin."""
        while (match := _OBJECT.search(self.text, self.place)) is None:
            if self.ended:
                return False
            self.place = max(self.place, len(self.text) - len(_START) + 1)
            self._read_on()
        self.place = match.start()
        return True

    def _may_go_on(self, error: json.JSONDecodeError | RecursionError) -> bool:
        """Whether the object may only look damaged because not all of it was read."""
        if self.ended or isinstance(error, RecursionError):
            return False
        cut = error.msg.startswith("Unterminated") or (
            error.pos >= len(self.text) - _CUT_CHARACTERS
        )
        return cut and len(self.text) - self.place < _LARGEST_CHARACTERS

    def _read_on(self) -> None:
        """Drop the used text and double the rest: an object is scanned a few times at most."""
        rest = self.text[self.place :]
        self.used += self.place
        fresh = self.file.read(max(_CHUNK_CHARACTERS, len(rest)))
        self.text, self.place, self.ended = rest + fresh, 0, not fresh

    def _damaged(self, why: str) -> Damage:
        damage = Damage(f"damaged at character {self.used + self.place}: {why}")
        self.place += len(_START)
        return damage


class _UnreadableError(Exception):
    """Why one request cannot be used, in words that hold nothing of it."""


@dataclass(slots=True)
class _Parts:
    who: dict[str, Any] = field(default_factory=dict)
    stages_ns: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensors] = field(default_factory=lambda: {_INPUT: {}, _OUTPUT: {}})

    def missing(self) -> list[str]:
        parts = {
            "its model": self.who,
            "its inputs": self.tensors[_INPUT],
            "its outputs": self.tensors[_OUTPUT],
            "its start": _ARRIVED in self.stages_ns,
            "its end": _ENDED in self.stages_ns,
        }
        return [name for name, present in parts.items() if not present]


def _request(trace_id: int, items: list[dict[str, Any]]) -> TracedRequest:
    parts = _Parts()
    for item in items:
        if "model_name" in item:
            parts.who = item
        for stamp in item.get("timestamps", ()):
            parts.stages_ns[stamp["name"]] = int(stamp["ns"])
        if item.get("activity") in parts.tensors:
            parts.tensors[item["activity"]][item["tensor"]["name"]] = _tensor(item["tensor"])
    if missing := parts.missing():
        raise _UnreadableError(f"{', '.join(missing)} missing")
    if len({len(tensor) for side in parts.tensors.values() for tensor in side.values()}) != 1:
        raise _UnreadableError("its tensors differ in rows")
    return TracedRequest(
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
    try:
        dtype = np.dtype(numpy_type(item["dtype"]))
        shape = tuple(int(axis) for axis in item["shape"].split(","))
        values = item["data"].split(",") if item["data"] else []
        if len(values) != math.prod(shape):
            count = f"{item['name']} has {len(values)} values for shape {shape}"
            raise _UnreadableError(count)
        # Booleans are written as 0 and 1, which NumPy reads as text that is "not empty".
        numbers = np.array(values, np.int64 if dtype.kind == "b" else dtype)
        return numbers.astype(dtype).reshape(shape)
    except ModelError:
        raise _UnreadableError("a tensor has a type that cannot be read here") from None
    except ValueError:
        raise _UnreadableError(f"{item['name']} holds what is no number") from None
