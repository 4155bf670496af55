"""What a recording must put back, written down before it changes anything.

A process that is killed runs no clean-up; the next recording, or `restore_traces`, does it then.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from enginegate.canonical import Record, sha256_bytes
from enginegate.durable import file_lock, write_file
from enginegate.errors import InputError, ServerError
from enginegate.triton.client import TritonClient

Settings = dict[str, tuple[str, ...] | None]

# A server that was started here names itself, and ends with the process that started it.
_EMBEDDED = "enginegate-"


class Note(Record):
    """One recording's way back.

    Attributes:
        server: the name it gives itself.
        set: trace settings while recording; ``undo`` those to put back, None for the default.
        traces: how the names of the server's files begin.
        before: files that were there already.
        ours: nobody else was tracing, so new files may be deleted.
    """

    schema_version: Literal[1] = 1
    address: str
    server: str
    model: str
    set: Settings
    undo: Settings
    traces: Path
    before: tuple[str, ...]
    ours: bool

    def write(self, path: Path) -> None:
        """Keep it until it is undone."""
        write_file(path, self.pretty_json(), mode=0o600)

    def files(self) -> list[Path]:
        """What the server has written since, oldest first."""
        known = {Path(name) for name in self.before}
        found = set(self.traces.parent.glob(f"{self.traces.name}*")) - known
        return sorted(found, key=lambda file: file.stat().st_mtime_ns)

    def discard(self) -> None:
        """Delete that, if it is ours."""
        if self.ours:
            for file in self.files():
                file.unlink(missing_ok=True)


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
                _put_back(note)
            except (InputError, ServerError) as error:
                left.append(f"{path}: {str(error).splitlines()[0]}")
                continue
            note.discard()
            path.unlink(missing_ok=True)
    return tuple(left)


def _put_back(note: Note) -> None:
    with TritonClient(note.address, timeout_s=2.0) as client:
        try:
            name = client.metadata().name
        except ServerError:
            if note.server.startswith(_EMBEDDED):
                return
            raise
        # Another server at this address, or one restarted since, has nothing of ours.
        if name == note.server and _still_set(client.trace_settings(note.model), note):
            client.set_trace(note.undo, note.model)


def _still_set(now: Mapping[str, tuple[str, ...]], note: Note) -> bool:
    """Whether the settings are those we made, which only the count changes by itself."""
    levels = set(now["trace_level"])
    return now["trace_rate"] == note.set["trace_rate"] and levels in (
        set(note.set["trace_level"] or ()),
        {"OFF"},
    )
