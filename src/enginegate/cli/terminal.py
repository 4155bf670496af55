"""The terminal: its two consoles, what is logged to it, and Ctrl-C."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO, cast

from rich.console import Console
from rich.logging import RichHandler

from enginegate.cli.vendor_log import ours
from enginegate.errors import ExitCode

# What is not down by then is ended by its own guard.
_UNWIND_S = 4.0
INTERRUPTED = "\nInterrupted. What was finished is kept; run it again to continue."
# A pipe has no width of its own; the tables need this much.
_PIPE_COLUMNS = 120
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
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


def log_to_terminal() -> None:
    """Progress of this program, and of others what is worth knowing."""
    handler: logging.Handler = logging.StreamHandler(ours)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if err.is_terminal:
        handler = RichHandler(
            console=err, show_path=False, show_level=False, log_time_format="%H:%M:%S"
        )
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    logger = logging.getLogger("enginegate")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
