"""Saying what is being waited for, when it takes longer than a moment."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("enginegate.waiting")


@contextmanager
def said_if_slow(sentence: str, *, after_s: float) -> Iterator[None]:
    """Log the sentence once if the block takes longer than ``after_s`` seconds."""
    timer = threading.Timer(after_s, _log.info, args=(sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
