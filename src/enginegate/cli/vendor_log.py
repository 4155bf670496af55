"""Other libraries' own messages, which go to a file: the terminal shows lines of ours only.

ONNX Runtime, gRPC and CUDA write to the error output from C++, also about attempts that this
program handles; exporters and MLflow warn from Python. So for as long as a command runs, the
process's error output (file descriptor 2, which its child processes inherit) is that file, and
what this program says goes to a copy of the terminal that nobody else knows.
"""

import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from enginegate.redact import masked
from enginegate.workspace import Workspace

_STDERR = 2
_MAX_BYTES = 10_000_000
# Their warnings hold the address of the server that is asked again, with its query.
_TELLING = ("urllib3.connectionpool", "urllib3.util.retry")


def open_missing() -> None:
    """Open the null device as whatever of input, output and error output the caller has closed.

    A database or a socket would get that number else, and what is printed would go into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (_STDERR, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, errors="replace", closefd=False)
            setattr(sys, name, stream)


class ErrorOutput(io.TextIOBase):
    """The error output of this program itself: what `sys.stderr` is, unless that is redirected.

    A reader that has gone or a disk that is full is no failure of the command.
    """

    redirected: TextIO | None = None

    @property
    def _stream(self) -> TextIO:
        return self.redirected or sys.stderr

    def write(self, text: str) -> int:
        """Write to the terminal, pipe or file that the command was started with."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush it."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Its file descriptor."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Its encoding."""
        return self._stream.encoding


ours = ErrorOutput()


@dataclass
class VendorLog:
    """The file, and whether anything was written to it."""

    path: Path
    used: bool = False


@contextmanager
def vendors_logged(workspace: Workspace) -> Iterator[VendorLog]:
    """Send whatever other libraries say in the block to ``logs/vendors.log`` of the workspace.

    A workspace that does not exist is not made for it: then the file is written at the end if the
    block has made one. Where it cannot be written, nothing is redirected.
    """
    log = VendorLog(workspace.logs / "vendors.log")
    with ExitStack() as stack:
        handle = stack.enter_context(_opened(workspace, log.path))
        if handle is None:
            yield log
            return
        start = os.fstat(handle).st_size
        stack.enter_context(_addresses_masked())
        stack.enter_context(_redirected(handle))
        try:
            yield log
        finally:
            with suppress(OSError, ValueError):
                sys.stderr.flush()
            log.used = os.fstat(handle).st_size > start


@contextmanager
def _opened(workspace: Workspace, path: Path) -> Iterator[int | None]:
    """A descriptor to append to; None where there is none."""
    if not workspace.root.is_dir():
        with tempfile.TemporaryFile() as held:
            yield held.fileno()
            held.seek(0)
            text = held.read()
            if text and workspace.root.is_dir():
                with suppress(OSError), os.fdopen(_append(path), "wb") as file:
                    file.write(text)
        return
    try:
        handle = _append(path)
    except OSError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.stat().st_size > _MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o600)
    if os.fstat(handle).st_size == 0:
        os.write(
            handle, b"What other libraries said while `enginegate` ran; its own is not here.\n"
        )
    return handle


@contextmanager
def _redirected(handle: int) -> Iterator[None]:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    kept = os.dup(_STDERR)
    os.dup2(handle, _STDERR)
    before = ours.redirected
    stream = os.fdopen(os.dup(kept), "w", buffering=1, errors="replace")
    try:
        ours.redirected = stream if _is_process_stderr() else before
        yield
    finally:
        ours.redirected = before
        with suppress(OSError):  # what could not be written is flushed once more
            stream.close()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)


def _is_process_stderr() -> bool:
    """Whether Python's error output is the process's; a test may have put another in its place."""
    with suppress(OSError, ValueError):
        return sys.stderr.fileno() == _STDERR
    return False


@contextmanager
def _addresses_masked() -> Iterator[None]:
    def mask(record: logging.LogRecord) -> bool:
        record.msg, record.args = masked(record.getMessage()), ()
        return True

    loggers = [logging.getLogger(name) for name in _TELLING]
    for logger in loggers:
        logger.addFilter(mask)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(mask)
