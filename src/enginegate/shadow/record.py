"""Records a sample of a live server's requests through Triton's trace extension.

Tried on Triton 2.51: level, rate, count and log frequency can be set on a running server, for one
model; the file only when the server starts (triton/server.py names one). Rate N records every Nth
request, and the remaining count can be asked for. Triton has no limit on bytes: a thread here
watches it.

The settings to restore are written down first (`RecordingNote`), for a process that is killed.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from enginegate.errors import ModelError, ServerError
from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import batch_of_request
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import SampleInfo, SampleOrigin, SampleWriter
from enginegate.shadow.store import new_sample, new_sample_path, sample_info
from enginegate.shadow.trace_files import (
    RecordingNote,
    Settings,
    TraceFiles,
    end_traces,
    trace_files,
)
from enginegate.shadow.trace_reader import UNREADABLE, Damage, TracedRequest, read_traces
from enginegate.shadow.trace_recovery import exclusive_recording, recover_traces, write_late_note
from enginegate.triton.client import TritonClient
from enginegate.triton.server import Server

_log = logging.getLogger("enginegate.shadow")
_MIB = 1 << 20
_NOTES = ".tracing"
# Triton writes a file each time it has this many requests. Fewer cost more files; with more, the
# watch on bytes sees less, and more are lost when the server refuses a request (trace_files.py).
_FLUSH_EVERY = 4
_WATCH_S = 0.1
_UNWRITTEN = (
    "Triton sampled requests that it did not write: it refused them, held them back after it had "
    "refused another, or took longer than five seconds to answer"
)


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """One request in ``one_in`` is recorded, until one of the limits is reached.

    Attributes:
        max_bytes: of the text that Triton writes; checked ten times a second, so a little more may
            be on disk.
    """

    one_in: int
    max_requests: int
    max_bytes: int

    @classmethod
    def of(cls, wanted: Shadow) -> "TraceLimits":
        """The limits of the policy."""
        return cls(wanted.trace_rate, wanted.max_samples, wanted.max_mib * _MIB)


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """Where a recording goes.

    Attributes:
        text: where it comes from, for people.
    """

    path: Path
    model: str
    text: str


def recording_notes(home: Path) -> Path:
    """Where recordings note the settings to restore; see `enginegate.shadow.trace_recovery`."""
    return home / _NOTES


def recover_recordings(home: Path) -> tuple[str, ...]:
    """Restore the trace settings that killed recordings changed, and delete Triton's files of them.

    The next recording does so too; a scheduled flow should not wait for one.

    Returns:
        A sentence for each that cannot be recovered yet, e.g. since its server does not answer.
    """
    return recover_traces(recording_notes(home))


def record_live(
    server: Server, model: str, wanted: Shadow, *, home: Path, duration_s: float
) -> tuple[Path, SampleInfo]:
    """Record a model's live requests for a while, or until a limit of the policy is reached.

    Args:
        server: where it is served; it must write traces to a folder of this machine.
        model: name in the repository.
        wanted: sampling rate, limits, redaction and slices.
        home: where samples are kept.
        duration_s: how long to listen at most.

    Returns:
        The sample's folder and description.

    Raises:
        ServerError: it cannot be recorded there, or does not answer.
        ModelError: the model has a tensor that Triton's traces cannot hold.
        DataError: no request came, or the redaction does not fit the inputs.
    """
    notes = recording_notes(home)
    with record_traces(server, model, TraceLimits.of(wanted), notes=notes) as recorder:
        recorder.wait(duration_s)
        now = datetime.now(tz=UTC)
        path, text = new_sample_path(home, model, now), f"live traffic of {model} at {server.grpc}"
        origin = SampleOrigin(text, model, now, wanted.trace_rate)
        with new_sample(path, origin, Preparation.of(wanted)) as writer:
            _write(writer, recorder)
        return path, sample_info(path)


def _write(writer: SampleWriter, recorder: "Recorder") -> None:
    for item in recorder.stop():
        if isinstance(item, Damage):
            writer.add_loss(item.reason)
        else:
            writer.add(batch_of_request(item))
    if recorder.unwritten:
        writer.add_loss(_UNWRITTEN, requests=recorder.unwritten)
    writer.capped = recorder.full


@dataclass(slots=True)
class Recorder:
    """A recording under way.

    Attributes:
        full: whether the limit on bytes ended it.
        unwritten: how many requests Triton sampled and did not write; known after `stop`.
    """

    client: TritonClient
    note: RecordingNote
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
        """Change the settings, and watch the size of the files."""
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

    def stop(self) -> Iterator[TracedRequest | Damage]:
        """Restore the settings; returns the recorded requests, to be read inside the block.

        Raises:
            ServerError: the server does not answer any more.
        """
        self._restore()
        return read_traces(self._files.paths(), self.note.model)

    def close(self) -> None:
        """Restore the settings, if that was not done yet, and delete the server's files.

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
            # An interrupted wait leaves the files that come later to the note.
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
                # Files whose size cannot be read cannot be limited.
                _log.warning("the recording of %s ends early: %s", self.note.model, error)
            self.full = True
            # A dead server is noticed by the next call to it; it records no more.
            with suppress(ServerError):
                self.client.set_trace({"trace_level": ("OFF",)}, self.note.model)
            return


@contextmanager
def record_traces(
    server: Server, model: str, limits: TraceLimits, *, notes: Path
) -> Iterator[Recorder]:
    """Record requests to one model during the block; read them in it with `Recorder.stop`.

    At the end, also when the block raises, the trace settings are as before and the server's files
    are deleted (unless another program was tracing: then they are not this program's to delete).

    Args:
        server: started here, or writing its traces where this process can read them.
        model: the model to record.
        limits: how much is recorded.
        notes: folder for the note by which a killed recording is recovered.

    Raises:
        ServerError: its traces cannot be read here, it does not answer, or another process is
            recording this model.
        ModelError: the model has a tensor that Triton's traces cannot hold.
    """
    for unrecovered in recover_traces(notes):
        _log.warning("trace settings of an earlier recording are still changed: %s", unrecovered)
    with server.client() as client:
        _check_types(client, model)
        with exclusive_recording(notes, client.address, model) as path:
            if path.exists():
                raise ServerError(
                    f"{model} at {client.address} cannot be recorded: an earlier recording was not "
                    f"put back ({path}).\nBring its server up, or delete that file if you have put "
                    "the trace settings right yourself."
                )
            note = _new_note(server, client, model, limits)
            note.write(path)
            recorder = Recorder(client, note, limits)
            try:
                recorder.start()
                yield recorder
            except BaseException:
                # If the settings cannot be restored either, the note stays for the next start.
                with suppress(ServerError):
                    _end(recorder, path)
                raise
            _end(recorder, path)


def _end(recorder: Recorder, note: Path) -> None:
    """Close it; if more traces may come, a late note stays, by which they are deleted."""
    recorder.close()
    if recorder.unwritten:
        write_late_note(note, recorder.note, owed=recorder.unwritten)
    note.unlink()


def _new_note(
    server: Server, client: TritonClient, model: str, limits: TraceLimits
) -> RecordingNote:
    before, default = client.trace_settings(model), client.trace_settings()
    wanted: Settings = {
        "trace_level": ("TIMESTAMPS", "TENSORS"),
        "trace_rate": (str(limits.one_in),),
        "trace_count": (str(limits.max_requests),),
        "log_frequency": (str(_FLUSH_EVERY),),
    }
    traces = _trace_prefix(server, default)
    return RecordingNote(
        address=client.address,
        server=client.metadata().name,
        model=model,
        set=wanted,
        undo={
            name: None if before.get(name) == default.get(name) else before.get(name)
            for name in wanted
        },
        traces=traces,
        modified={str(file): file.stat().st_mtime_ns for file in trace_files(traces)},
        ours=before["trace_level"] == default["trace_level"] == ("OFF",),
    )


def _trace_prefix(server: Server, settings: Mapping[str, tuple[str, ...]]) -> Path:
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
