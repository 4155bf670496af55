"""Recovers from a killed recording: restores trace settings, deletes files with users' requests.

A killed process runs no clean-up; the next recording, or `recover_traces`, does it.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.errors import InputError, ServerError
from enginegate.records import sha256_bytes
from enginegate.shadow.trace_files import RecordingNote, TraceFiles, end_traces, trace_count
from enginegate.triton.client import TritonClient

# The name of a server that was started here, which ends with the process that started it.
_EMBEDDED = "enginegate-"
# No request takes longer, and a request that the server refused never comes.
_LATE, _LATEST = ".late.json", timedelta(hours=1)
_CONNECT_S = 5.0


@contextmanager
def exclusive_recording(notes: Path, address: str, model: str) -> Iterator[Path]:
    """Keep other processes from recording this model; gives the path for the note of it.

    Raises:
        ServerError: another process is recording this model.
    """
    notes.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = notes / f"{sha256_bytes(f'{address}|{model}'.encode())[:16]}.json"
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(_lock_of(path)))
        except TimeoutError as error:
            raise ServerError(
                f"{model} at {address} is being recorded already ({error}).\n"
                "Wait for it to end, or end that process."
            ) from None
        yield path


def recover_traces(notes: Path) -> tuple[str, ...]:
    """Recover from killed recordings; returns a sentence for each that cannot be recovered yet.

    Recordings that are still under way are left alone.
    """
    unrecovered = []
    for path in sorted(notes.glob("*.json")):
        with suppress(TimeoutError), file_lock(_lock_of(path)):
            try:
                note = RecordingNote.read(path)
                owed = _end_late(note) if note.ended_at else _end_killed(note)
            except (InputError, OSError, ServerError) as error:
                unrecovered.append(f"{path}: {str(error).splitlines()[0]}")
                continue
            if owed:
                write_late_note(path, note, owed=owed)
            if not (owed and note.ended_at):
                path.unlink(missing_ok=True)
    return tuple(unrecovered)


def write_late_note(path: Path, note: RecordingNote, *, owed: int) -> None:
    """Note for an hour that Triton may still write requests of a recording that has ended."""
    since = note.ended_at or datetime.now(tz=UTC)
    if note.ours:
        late = note.model_copy(update={"ended_at": since, "owed": owed})
        late.write(path.with_name(f"{_stem_of(path)}{_LATE}"))


def _end_killed(note: RecordingNote) -> int:
    """Restore the settings and delete the files; returns how many requests may still come."""
    sampled = _restore(note)
    files = TraceFiles(note)
    files.settle(sampled or 0)
    written = files.requests()
    files.discard()
    # Restored after a number that is not known: the recording was killed in its last moments.
    return max(0, (trace_count(note.set) if sampled is None else sampled) - written)


def _end_late(note: RecordingNote) -> int:
    """Delete the files that came since; returns how many requests may still come."""
    files = TraceFiles(note)
    if note.ended_at is None or datetime.now(tz=UTC) - note.ended_at > _LATEST:
        files.discard()
        return 0
    try:
        with TritonClient(note.address) as client:
            if client.trace_settings(note.model)["trace_level"] != ("OFF",):
                return note.owed  # Another program is tracing, and these may be its files.
    except ServerError:
        if not _refuses(note.address):
            return note.owed
    written = files.requests()
    files.discard()
    return max(0, note.owed - written)


def _restore(note: RecordingNote) -> int | None:
    """Restore the settings if they are still the recording's; returns how many were sampled.

    None: they were restored before, after a number that is not known.
    """
    with TritonClient(note.address) as client:
        try:
            name = client.metadata().name
        except ServerError:
            if note.server.startswith(_EMBEDDED) and _refuses(note.address):
                return 0
            raise
        # Another server at this address, or a restarted one, has none of these settings.
        if name != note.server:
            return 0
        if _still_set(client.trace_settings(note.model), note):
            return end_traces(client, note)
        return None


def _refuses(address: str) -> bool:
    """Whether no program listens there; a busy server does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{_stem_of(path)}.lock")


def _stem_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _still_set(now: Mapping[str, tuple[str, ...]], note: RecordingNote) -> bool:
    """Whether the settings are the recording's; the count goes down and the level ends at OFF."""
    levels = set(now["trace_level"])
    return (
        now["trace_rate"] == note.set["trace_rate"]
        and 0 <= trace_count(now) <= trace_count(note.set)
        and levels in (set(note.set["trace_level"] or ()), {"OFF"})
    )
