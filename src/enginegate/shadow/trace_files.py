"""Which trace files belong to one recording, and whether Triton has written all of them.

Tried on Triton 2.51, and read in its tracer: traces go to `PREFIX.0`, `PREFIX.1`, ... whatever the
model, but each file holds those of one model. The rest is written when the settings are replaced
*and* the last request sampled under them has ended, so after its answer. A request that the server
refuses never ends in this sense: it is sampled, never written, and holds back the rest. Hence the
number of sampled requests is compared with the number written.
"""

import glob
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt

from enginegate.atomic_io import write_file
from enginegate.records import Record
from enginegate.triton.client import TritonClient

Settings = dict[str, tuple[str, ...] | None]


class RecordingNote(Record):
    """How to recover from one recording, written down before it changes anything.

    Attributes:
        server: the name it gives itself.
        set: trace settings while recording; ``undo`` the earlier ones, None for the default.
        traces: how the names of the server's files begin.
        modified: files that were there already, with the time of their last change in ns. A
            restarted Triton counts from 0 again, and then writes over them.
        ours: no other program was tracing, so new files may be deleted.
        ended_at: when the settings were restored although Triton had not written everything;
            ``owed`` requests at most may still come.
    """

    schema_version: Literal[1] = 1
    address: str
    server: str
    model: str
    set: Settings
    undo: Settings
    traces: Path
    modified: dict[str, int]
    ours: bool
    ended_at: datetime | None = None
    owed: NonNegativeInt = 0

    def write(self, path: Path) -> None:
        """Write it to a file that only its owner can read."""
        write_file(path, self.pretty_json(), mode=0o600)


# Each request's objects begin with who it is; a model inside another one names its parent.
_REQUEST = re.compile(
    rb'\{"id":\d+,"model_name":"([^"]*)","model_version":-?\d+'
    rb'(?:,"request_id":".{0,2048}?")?(,"parent_id":\d+)?\}',
    re.DOTALL,
)
_PIECE_BYTES = 1 << 20
# Longer than any such beginning, so that one cut in two by a piece's end is still found.
_CUT_BYTES = 4096
# A request that takes longer is still on its way, or was refused.
_SETTLE_S = 5.0
_POLL_S = 0.02
# An empty file may be another recording's, just being written.
_YOUNG_S = 5.0


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of one file so far."""

    size: int
    model: str | None
    requests: int
    whole: bool


@dataclass(slots=True)
class TraceFiles:
    """The files that Triton has written for one recording."""

    note: RecordingNote
    _seen: dict[Path, _Content] = field(default_factory=dict)

    def paths(self) -> list[Path]:
        """Oldest first; those of another model's recording are left out."""
        young_ns = (time.time() - _YOUNG_S) * 1e9
        own = [
            (modified_ns, path)
            for path, (modified_ns, content) in self._contents().items()
            if content.model == self.note.model
            or (content.model is None and (content.whole or modified_ns < young_ns))
        ]
        return [path for _, path in sorted(own)]

    def size(self) -> int:
        """Bytes written so far."""
        return sum(self._seen[path].size for path in self.paths())

    def requests(self) -> int:
        """Requests written so far."""
        return sum(self._seen[path].requests for path in self.paths())

    def settle(self, sampled: int) -> bool:
        """Wait until so many requests are written; false if nothing changed for five seconds."""
        before, deadline = (-1, -1), 0.0
        while not self._has_written(sampled):
            now, at = (self.requests(), self.size()), time.monotonic()
            if now != before:
                before, deadline = now, at + _SETTLE_S
            if at > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def discard(self) -> None:
        """Delete them, unless another program was tracing too."""
        if self.note.ours:
            for path in self.paths():
                path.unlink(missing_ok=True)

    def _has_written(self, sampled: int) -> bool:
        return self.requests() >= sampled and all(self._seen[path].whole for path in self.paths())

    def _contents(self) -> dict[Path, tuple[int, _Content]]:
        """Every file that is new or was written over -> when it was modified, and its content."""
        contents = {}
        for path in trace_files(self.note.traces):
            # Another recording's end may delete its own meanwhile.
            with suppress(FileNotFoundError):
                status = path.stat()
                if self.note.modified.get(str(path)) == status.st_mtime_ns:
                    continue
                content = self._seen.get(path)
                if content is None or content.size != status.st_size:
                    content = self._seen[path] = _content(path)
                contents[path] = (status.st_mtime_ns, content)
        return contents


def trace_files(traces: Path) -> list[Path]:
    """The files that Triton has written under a name: it puts a number behind it, or nothing."""
    name = re.compile(rf"{re.escape(traces.name)}(\.\d+)?")
    paths = traces.parent.glob(f"{glob.escape(traces.name)}*")
    return [path for path in paths if name.fullmatch(path.name) and path.is_file()]


def end_traces(client: TritonClient, note: RecordingNote) -> int:
    """End the sampling, restore the settings, and return how many requests were sampled.

    Raises:
        ServerError: the server does not answer.
    """
    # The remaining count is lost with the settings, so sampling ends first.
    client.set_trace({"trace_level": ("OFF",)}, note.model)
    remaining, limit = trace_count(client.trace_settings(note.model)), trace_count(note.set)
    client.set_trace(note.undo, note.model)
    # A server that was restarted meanwhile has none of these settings.
    return limit - remaining if 0 <= remaining <= limit else 0


def trace_count(settings: Mapping[str, tuple[str, ...] | None]) -> int:
    """How many requests may still be sampled; -1 without a limit, which is the default."""
    return int("".join(settings.get("trace_count") or ()) or -1)


def _content(path: Path) -> _Content:
    model, requests, size, rest = None, 0, 0, b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            text, end = rest + piece, 0
            for match in _REQUEST.finditer(text):
                end = match.end()
                if match[2] is None:
                    model = model or match[1].decode(errors="replace")
                    requests += 1
            rest = text[max(end, len(text) - _CUT_BYTES) :]
    return _Content(size, model, requests, whole=rest.endswith(b"]"))
