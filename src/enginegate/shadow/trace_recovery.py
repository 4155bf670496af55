"""Puts back what a killed recording left: trace settings, and files that hold what users sent.

A process that is killed runs no clean-up; the next recording, or `restore_traces`, does it then.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.errors import InputError, ServerError
from enginegate.records import sha256_bytes
from enginegate.shadow.trace_files import TraceFiles, count_of, end_traces
from enginegate.shadow.trace_note import Note
from enginegate.triton.client import TritonClient

# A server that was started here names itself, and ends with the process that started it.
_EMBEDDED = "enginegate-"
_LATE, _LATEST = ".late.json", timedelta(hours=1)
_CONNECT_S = 5.0


@contextmanager
def alone_on(notes: Path, address: str, model: str) -> Iterator[Path]:
    """Nobody else records this model; gives the path where a note of it is kept.

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


def restore_traces(notes: Path) -> tuple[str, ...]:
    """Put back what killed recordings left; returns a sentence for each that could not be.

    Recordings that are still under way are left alone.
    """
    left = []
    for path in sorted(notes.glob("*.json")):
        with suppress(TimeoutError), file_lock(_lock_of(path)):
            try:
                note = Note.read(path)
                owed = _end_late(note) if note.ended_at else _end_killed(note)
            except (InputError, OSError, ServerError) as error:
                left.append(f"{path}: {str(error).splitlines()[0]}")
                continue
            if owed:
                keep_late(path, note, owed=owed)
            if not (owed and note.ended_at):
                path.unlink(missing_ok=True)
    return tuple(left)


def keep_late(path: Path, note: Note, *, owed: int) -> None:
    """Keep what is known of a recording whose settings are put back, and which Triton still owes.

    For an hour: no request takes longer, and those that the server refused never come.
    """
    since = note.ended_at or datetime.now(tz=UTC)
    if note.ours:
        late = note.model_copy(update={"ended_at": since, "owed": owed})
        late.write(path.with_name(f"{_stem_of(path)}{_LATE}"))


def _end_killed(note: Note) -> int:
    """Put the settings back and delete what was written; says how many requests may still come."""
    sampled = _put_back(note)
    files = TraceFiles(note)
    files.settle(sampled or 0)
    written = files.requests()
    files.discard()
    # Put back, but by whom and after how many is not known: killed in its last moments, it seems.
    return max(0, (count_of(note.set) if sampled is None else sampled) - written)


def _end_late(note: Note) -> int:
    """Delete what came since; says how many requests may still come."""
    files = TraceFiles(note)
    if note.ended_at is None or datetime.now(tz=UTC) - note.ended_at > _LATEST:
        files.discard()
        return 0
    try:
        with TritonClient(note.address) as client:
            if client.trace_settings(note.model)["trace_level"] != ("OFF",):
                return note.owed  # Somebody is tracing, and these may be their files.
    except ServerError:
        if not _refuses(note.address):
            return note.owed
    written = files.requests()
    files.discard()
    return max(0, note.owed - written)


def _put_back(note: Note) -> int | None:
    """Put the settings back if they are still ours; says how many requests had been sampled.

    None: somebody has put them back, after a number that is not known.
    """
    with TritonClient(note.address) as client:
        try:
            name = client.metadata().name
        except ServerError:
            if note.server.startswith(_EMBEDDED) and _refuses(note.address):
                return 0
            raise
        # Another server at this address, or one restarted since, has nothing of ours.
        if name != note.server:
            return 0
        if _still_set(client.trace_settings(note.model), note):
            return end_traces(client, note)
        return None


def _refuses(address: str) -> bool:
    """Whether nobody listens there; a server that is busy does."""
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


def _still_set(now: Mapping[str, tuple[str, ...]], note: Note) -> bool:
    """Whether the settings are those we made; the count goes down and the level ends at OFF."""
    levels = set(now["trace_level"])
    return (
        now["trace_rate"] == note.set["trace_rate"]
        and 0 <= count_of(now) <= count_of(note.set)
        and levels in (set(note.set["trace_level"] or ()), {"OFF"})
    )
