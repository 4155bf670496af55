"""The terminal: its two consoles, what is logged to it, Ctrl-C, and signals that end it."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from enginegate.cli.vendor_log import open_missing, ours
from enginegate.errors import ExitCode
from enginegate.report.tables import as_text, print_hanging

# What is not down by then is ended by its own guard.
_UNWIND_S = 4.0
# Less than the ten seconds after which `docker stop` kills.
_TERMINATE_S = 8.0
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL = 128
INTERRUPTED = "\nInterrupted. What was finished is kept; run it again to continue."
open_missing()
# A pipe has no width of its own; the tables need this much.
_PIPE_COLUMNS = 120
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
# For sentences of the program's own, which may hold brackets.
plain = Console(highlight=False, markup=False, emoji=False)
err = Console(
    file=cast("TextIO", ours),
    highlight=False,
    emoji=False,
    width=None if sys.stderr.isatty() else _PIPE_COLUMNS,
)


@contextmanager
def interruptible(console: Console) -> Iterator[None]:
    """Let Ctrl-C take down what is running, and then end, whatever Prefect is waiting for.

    Ctrl-C ends Prefect's own server too, and its client would ask that for more than a minute.
    """

    def end() -> None:
        console.print(INTERRUPTED)
        show_cursor()
        os._exit(int(ExitCode.INTERRUPTED))

    def stop(_number: int, _frame: FrameType | None) -> None:
        timer = threading.Timer(_UNWIND_S, end)
        timer.daemon = True
        timer.start()
        console.print("\nStopping.")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP take down what is running, then end with status 128 + the signal.

    The handler raises, but that may be lost: Prefect has its own handler while a flow runs, Python
    drops what is raised in a finaliser, and a thread in a vendor's library may hold the exit up. A
    thread of ours hears of the signal whoever handles it, and ends the process in time.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(_BY_SIGNAL + number)

    # SIGHUP is ignored under nohup, and that is kept.
    wanted = [n for n in _ENDINGS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in wanted}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # noqa: FBT003 - the standard library takes no keyword
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(receiver, frozenset(wanted)), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        sender.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_in_time(receiver: socket.socket, wanted: frozenset[int]) -> None:
    with receiver:
        while number := receiver.recv(1):
            if number[0] in wanted:
                time.sleep(_TERMINATE_S)
                show_cursor()
                os._exit(_BY_SIGNAL + number[0])


def show_cursor() -> None:
    """Undo what a table that was being drawn did to the terminal; for ends that unwind nothing."""
    if err.is_terminal and not err.is_dumb_terminal:
        err.show_cursor(True)  # noqa: FBT003 - Rich takes no keyword worth having


def ended_by(status: object) -> str:
    """The last words of a process that a signal ended; empty for others."""
    for number in _ENDINGS:
        if status == _BY_SIGNAL + number:
            return f"\nEnded by {number.name}. What was finished is kept; run it again to continue."
    return INTERRUPTED if status == ExitCode.INTERRUPTED else ""


class TerminalHandler(logging.Handler):
    """Lines on a terminal: time, then words that stay whole, above a table that is drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        try:
            at = time.strftime("%H:%M:%S", time.localtime(record.created))
            print_hanging(err, record.getMessage(), Text(f"{at} ", style="dim"))
        except Exception:  # noqa: BLE001 - logging must not end what it tells of
            self.handleError(record)


class _LineFormatter(logging.Formatter):
    """Lines for a file or a pipe, where others' words must not steer whatever shows it later."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging
        return as_text(super().formatMessage(record)).plain


def log_to_terminal() -> None:
    """Progress of this program, and of others what is worth knowing."""
    handler: logging.Handler = logging.StreamHandler(ours)
    handler.setFormatter(_LineFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if err.is_terminal:
        handler = TerminalHandler()
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    logger = logging.getLogger("enginegate")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
