"""Puts back what a killed recording left: trace settings, and files that hold what users sent.

A process that is killed runs no clean-up; the next recording, or `restore_traces`, does it then.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from enginegate.canonical import sha256_bytes
from enginegate.durable import file_lock
from enginegate.errors import InputError, ServerError
from enginegate.triton.client import TritonClient
from enginegate.triton.trace_note import Note
from enginegate.triton.trace_written import TraceFiles, count_of, end_traces

# A server that was started here names itself, and ends with the process that started it.
_EMBEDDED = "enginegate-"


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
            stack.enter_context(file_lock(path.with_suffix(".lock")))
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
        with suppress(TimeoutError), file_lock(path.with_suffix(".lock")):
            try:
                note = Note.read(path)
                sampled = _put_back(note)
            except (InputError, ServerError) as error:
                left.append(f"{path}: {str(error).splitlines()[0]}")
                continue
            files = TraceFiles(note)
            all_written = files.settle(sampled)
            files.discard()
            # Otherwise more may come, and the note is what the next start deletes it by.
            if all_written:
                path.unlink(missing_ok=True)
    return tuple(left)


def _put_back(note: Note) -> int:
    """Put the settings back if they are still ours; says how many requests had been sampled."""
    with TritonClient(note.address, timeout_s=2.0) as client:
        try:
            name = client.metadata().name
        except ServerError:
            if note.server.startswith(_EMBEDDED):
                return 0
            raise
        # Another server at this address, or one restarted since, has nothing of ours.
        if name == note.server and _still_set(client.trace_settings(note.model), note):
            return end_traces(client, note)
        return 0


def _still_set(now: Mapping[str, tuple[str, ...]], note: Note) -> bool:
    """Whether the settings are those we made; the count goes down and the level ends at OFF."""
    levels = set(now["trace_level"])
    return (
        now["trace_rate"] == note.set["trace_rate"]
        and 0 <= count_of(now) <= count_of(note.set)
        and levels in (set(note.set["trace_level"] or ()), {"OFF"})
    )
