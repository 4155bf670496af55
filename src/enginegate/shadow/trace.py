"""Records a sample of live requests through Triton's trace extension, then puts its settings back.

Tried on Triton 2.51: level, rate, count and log frequency can be set on a running server, for one
model; the file only when the server starts (server.py names one). Rate N records every Nth request,
and the count that is left can be asked for. Triton has no limit on bytes: that one is watched here.

What must be put back is written down first (trace_note.py), for a process that is killed.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.errors import ModelError, ServerError
from enginegate.shadow.trace_file import UNREADABLE, Damage, Traced, read_requests
from enginegate.shadow.trace_files import TraceFiles, end_traces, trace_files
from enginegate.shadow.trace_note import Note, Settings
from enginegate.shadow.trace_recovery import alone_on, keep_late, restore_traces
from enginegate.triton.client import TritonClient
from enginegate.triton.server import Server

_log = logging.getLogger("enginegate.shadow")
# Triton writes a file each time it has this many requests; until then the watch sees nothing, and
# so many less one are lost if the server refuses a request meanwhile (trace_written.py).
_FLUSH_EVERY = 4
_WATCH_S = 0.1


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """What is recorded: one request in ``one_in``, until one of the limits is reached.

    Attributes:
        max_bytes: of the text that Triton writes; looked at ten times a second, so a little more
            may be on disk.
    """

    one_in: int
    max_requests: int
    max_bytes: int


@dataclass(slots=True)
class Recorder:
    """A recording under way.

    Attributes:
        full: whether the limit on bytes ended it.
        unwritten: how many requests Triton sampled and did not write; known after `stop`.
    """

    client: TritonClient
    note: Note
    limits: TraceLimits
    full: bool = False
    unwritten: int = 0
    _files: TraceFiles = field(init=False)
    _changed: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._files = TraceFiles(self.note)

    @property
    def traces(self) -> Path:
        """How the names of the server's files begin; they hold what users sent."""
        return self.note.traces

    def start(self) -> None:
        """Change the settings, and watch the size of what is written."""
        self._changed = True
        self.client.set_trace(self.note.set, self.note.model)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def wait(self, duration_s: float) -> None:
        """Return after this long, or as soon as a limit is reached.

        Raises:
            ServerError: the server does not answer any more.
        """
        deadline = time.monotonic() + duration_s
        while time.monotonic() < deadline and not self.full:
            if self.client.trace_settings(self.note.model)["trace_count"] == ("0",):
                return
            time.sleep(min(_WATCH_S, max(0.0, deadline - time.monotonic())))

    def stop(self) -> Iterator[Traced | Damage]:
        """Put the settings back; gives what was recorded, to be read inside the block.

        Raises:
            ServerError: the server does not answer any more.
        """
        self._restore()
        return read_requests(self._files.paths(), self.note.model)

    def close(self) -> None:
        """Put the settings back, if that was not done yet, and delete the server's files.

        Raises:
            ServerError: the server does not answer any more.
        """
        try:
            self._restore()
        finally:
            self._files.discard()

    def _restore(self) -> None:
        self._done.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._changed:
            # Who interrupts the wait leaves files that come later to the note.
            self.unwritten = sampled = end_traces(self.client, self.note)
            self._changed = False
            self._files.settle(sampled)
            self.unwritten = max(0, sampled - self._files.requests())

    def _watch(self) -> None:
        """Switch tracing off when the files are large enough."""
        while not self._done.wait(_WATCH_S):
            try:
                if self._files.size() < self.limits.max_bytes:
                    continue
            except OSError as error:
                # What cannot be looked at cannot be limited.
                _log.warning("the recording of %s ends early: %s", self.note.model, error)
            self.full = True
            # A server that died is noticed by whoever sends or stops; it records no more.
            with suppress(ServerError):
                self.client.set_trace({"trace_level": ("OFF",)}, self.note.model)
            return


@contextmanager
def recorded(server: Server, model: str, limits: TraceLimits, *, notes: Path) -> Iterator[Recorder]:
    """Record requests to one model during the block; read them in it with `Recorder.stop`.

    At the end, also when the block raises, the trace settings are as before and the server's files
    are deleted (unless somebody else was tracing: then they are not ours to delete).

    Args:
        server: started here, or one that writes its traces where this process can read them.
        model: what is recorded.
        limits: how much.
        notes: folder for what a killed process leaves to be put back.

    Raises:
        ServerError: its traces cannot be read here, it does not answer, or another process is
            recording this model.
        ModelError: the model has a tensor that Triton's traces cannot hold.
    """
    for left in restore_traces(notes):
        _log.warning("trace settings of an earlier recording are still changed: %s", left)
    with server.client() as client:
        _check_types(client, model)
        with alone_on(notes, client.address, model) as path:
            if path.exists():
                raise ServerError(
                    f"{model} at {client.address} cannot be recorded: an earlier recording was not "
                    f"put back ({path}).\nBring its server up, or delete that file if you have put "
                    "the trace settings right yourself."
                )
            note = _note(server, client, model, limits)
            note.write(path)
            recorder = Recorder(client, note, limits)
            try:
                recorder.start()
                yield recorder
            except BaseException:
                # If the settings cannot be put back either, the note stays for the next start.
                with suppress(ServerError):
                    _end(recorder, path)
                raise
            _end(recorder, path)


def _end(recorder: Recorder, note: Path) -> None:
    """Close it; if more may come, a note of that stays, for the next start to delete it by."""
    recorder.close()
    if recorder.unwritten:
        keep_late(note, recorder.note, owed=recorder.unwritten)
    note.unlink()


def _note(server: Server, client: TritonClient, model: str, limits: TraceLimits) -> Note:
    before, default = client.trace_settings(model), client.trace_settings()
    wanted: Settings = {
        "trace_level": ("TIMESTAMPS", "TENSORS"),
        "trace_rate": (str(limits.one_in),),
        "trace_count": (str(limits.max_requests),),
        "log_frequency": (str(_FLUSH_EVERY),),
    }
    traces = trace_prefix(server, default)
    before_now = {str(file): file.stat().st_mtime_ns for file in trace_files(traces)}
    return Note(
        address=client.address,
        server=client.metadata().name,
        model=model,
        set=wanted,
        undo={
            name: None if before.get(name) == default.get(name) else before.get(name)
            for name in wanted
        },
        traces=traces,
        before=tuple(before_now),
        modified=before_now,
        ours=before["trace_level"] == default["trace_level"] == ("OFF",),
    )


def trace_prefix(server: Server, settings: Mapping[str, tuple[str, ...]]) -> Path:
    """How the names of a server's trace files begin.

    Raises:
        ServerError: it has none, or they are not on this machine.
    """
    named = Path("".join(settings.get("trace_file", ())))
    traces = server.trace_file or named
    if traces.is_absolute() and traces.parent.is_dir():
        return traces
    raise ServerError(
        f"Requests to {server.grpc} cannot be recorded: it writes traces to "
        f"{str(named) if named.name else 'no file'}, which is not a folder of this machine.\n"
        "Start it with --trace-config=triton,file=/ABSOLUTE/PATH in a folder that both can reach, "
        "or record there and name the sample in the policy: [data] shadow."
    )


def _check_types(client: TritonClient, model: str) -> None:
    config = client.config(model)
    bad = [str(spec) for spec in (*config.inputs, *config.outputs) if spec.dtype in UNREADABLE]
    if bad:
        raise ModelError(
            f"Requests to {model} cannot be recorded: Triton's traces cannot hold "
            f"{', '.join(bad)}.\nRecord a sample in front of the server and name it in the policy: "
            "[data] shadow."
        )
