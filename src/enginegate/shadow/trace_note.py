"""What a recording must put back, written down before it changes anything."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt

from enginegate.atomic_io import write_file
from enginegate.records import Record

Settings = dict[str, tuple[str, ...] | None]


class Note(Record):
    """One recording's way back.

    Attributes:
        server: the name it gives itself.
        set: trace settings while recording; ``undo`` those to put back, None for the default.
        traces: how the names of the server's files begin.
        before: files that were there already; ``modified`` when each was, in ns. Triton counts
            from 0 again when it is restarted, and then writes over them.
        ours: nobody else was tracing, so new files may be deleted.
        ended_at: when the settings were put back although Triton had not written everything;
            ``owed`` requests at most may still come.
    """

    schema_version: Literal[1] = 1
    address: str
    server: str
    model: str
    set: Settings
    undo: Settings
    traces: Path
    before: tuple[str, ...]
    modified: dict[str, int] = Field(default_factory=dict)
    ours: bool
    ended_at: datetime | None = None
    owed: NonNegativeInt = 0

    def write(self, path: Path) -> None:
        """Keep it until it is undone."""
        write_file(path, self.pretty_json(), mode=0o600)
