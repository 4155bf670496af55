"""What a recording must put back, written down before it changes anything."""

from pathlib import Path
from typing import Literal

from enginegate.canonical import Record
from enginegate.durable import write_file

Settings = dict[str, tuple[str, ...] | None]


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
