"""Which trace files belong to one recording, and whether Triton has written all of them.

Tried on Triton 2.51, and read in its tracer: traces go to `PREFIX.0`, `PREFIX.1`, ... whatever the
model, but each file holds those of one model. What is left over is written when the settings are
replaced *and* the last request sampled under them has ended, so after its answer. A request that
the server refuses never ends in this sense: it is sampled, never written, and holds back what was
left over. Hence the number of sampled requests is compared with the number written.
"""

import glob
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.shadow.trace_note import Note
from enginegate.triton.client import TritonClient

# Each request's objects begin with who it is; a model inside another one names its parent.
_REQUEST = re.compile(
    rb'\{"id":\d+,"model_name":"([^"]*)","model_version":-?\d+'
    rb'(?:,"request_id":".{0,2048}?")?(,"parent_id":\d+)?\}',
    re.DOTALL,
)
_PIECE_BYTES = 1 << 20
# Longer than any such beginning, so that one cut in two by a piece's end is still found.
_CUT_BYTES = 4096
_SETTLE_S = 5.0
_LOOK_S = 0.02
# A file that says nothing yet may be another recording's, just being written.
_YOUNG_S = 5.0


@dataclass(frozen=True, slots=True)
class _Content:
    """What one file holds so far."""

    size: int
    model: str | None
    requests: int
    whole: bool


@dataclass(slots=True)
class TraceFiles:
    """The files that Triton has written for one recording."""

    note: Note
    _seen: dict[Path, _Content] = field(default_factory=dict)

    def paths(self) -> list[Path]:
        """Oldest first; those of another model's recording are left out."""
        found = [
            (modified_ns, path)
            for path, (modified_ns, content) in self._contents().items()
            if content.model == self.note.model
            or (content.model is None and (content.whole or _is_old(modified_ns)))
        ]
        return [path for _, path in sorted(found)]

    def size(self) -> int:
        """Bytes written so far."""
        return sum(self._seen[path].size for path in self.paths())

    def requests(self) -> int:
        """Requests written so far."""
        return sum(self._seen[path].requests for path in self.paths())

    def settle(self, sampled: int) -> bool:
        """Wait until so many requests were written, and say whether they were.

        Gives up once nothing has changed for five seconds: a request that takes longer is still
        on its way, or one was refused.
        """
        before, deadline = (-1, -1), 0.0
        while not self._holds(sampled):
            now, at = (self.requests(), self.size()), time.monotonic()
            if now != before:
                before, deadline = now, at + _SETTLE_S
            if at > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def discard(self) -> None:
        """Delete them, if they are ours."""
        if self.note.ours:
            for path in self.paths():
                path.unlink(missing_ok=True)

    def _holds(self, sampled: int) -> bool:
        return self.requests() >= sampled and all(self._seen[path].whole for path in self.paths())

    def _contents(self) -> dict[Path, tuple[int, _Content]]:
        """Every file that was not there before -> when it was modified, and what it holds."""
        known = dict.fromkeys(self.note.before) | self.note.modified
        found = {}
        for path in trace_files(self.note.traces):
            # Another recording's end may delete its own meanwhile.
            with suppress(FileNotFoundError):
                status = path.stat()
                if str(path) in known and known[str(path)] in {None, status.st_mtime_ns}:
                    continue
                content = self._seen.get(path)
                if content is None or content.size != status.st_size:
                    content = self._seen[path] = _content(path)
                found[path] = (status.st_mtime_ns, content)
        return found


def trace_files(traces: Path) -> list[Path]:
    """What Triton has written under a name: it puts a number behind it, or nothing."""
    named = re.compile(rf"{re.escape(traces.name)}(\.\d+)?")
    found = traces.parent.glob(f"{glob.escape(traces.name)}*")
    return [path for path in found if named.fullmatch(path.name) and path.is_file()]


def end_traces(client: TritonClient, note: Note) -> int:
    """Sample no more requests, put the settings back, and say how many were sampled.

    Raises:
        ServerError: the server does not answer.
    """
    # The number left is lost with the settings, so sampling ends first.
    client.set_trace({"trace_level": ("OFF",)}, note.model)
    left = count_of(client.trace_settings(note.model))
    client.set_trace(note.undo, note.model)
    # A server that was restarted meanwhile knows nothing of ours.
    return count_of(note.set) - left if 0 <= left <= count_of(note.set) else 0


def count_of(settings: Mapping[str, tuple[str, ...] | None]) -> int:
    """How many requests may still be sampled; -1 without a limit, which is the default."""
    return int("".join(settings.get("trace_count") or ()) or -1)


def _is_old(modified_ns: int) -> bool:
    return time.time() - modified_ns / 1e9 > _YOUNG_S


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
