"""`--json`: one document on the standard output, and nothing else there.

What a verb says in sentences goes to the error output then, as does whatever a library or the
code of a policy prints. Exit codes are the same with and without it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, TextIO

import typer
from rich.console import Console

from enginegate.cli.terminal import err, out
from enginegate.records import Record

_STDOUT, _STDERR = 1, 2

JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json", help="one JSON document on stdout, all else on stderr; its fields: docs/json.md"
    ),
]


@dataclass(frozen=True, slots=True)
class Printer:
    """Where a verb prints.

    Attributes:
        console: for sentences and tables; beside JSON it is the error output.
        stream: for the JSON document; None: none was asked for.
    """

    console: Console
    stream: TextIO | None = None

    @property
    def as_json(self) -> bool:
        """Whether a document was asked for."""
        return self.stream is not None

    def document(self, record: Record) -> None:
        """Print the document, if one was asked for."""
        if self.stream is not None:
            self.stream.write(record.pretty_json().decode())
            self.stream.flush()


@contextmanager
def printing(*, as_json: bool) -> Iterator[Printer]:
    """What a verb prints to, until it ends."""
    if not as_json:
        yield Printer(out)
        return
    with _reserved_stdout() as stream:
        yield Printer(err, stream)


@contextmanager
def _reserved_stdout() -> Iterator[TextIO]:
    """The standard output for the caller alone: what others print goes to the error output."""
    if not _is_process_stdout():  # a test has put a buffer in its place
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


def _is_process_stdout() -> bool:
    with suppress(OSError, ValueError):
        return sys.stdout.fileno() == _STDOUT
    return False
