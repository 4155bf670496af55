"""Notices that a server has stopped for good while something waits for it, and ends the wait.

A server that is stopped or deadlocked accepts what is sent and never answers: each wait for it
would last until its own limit, and the limits are for models that take minutes to load. What is
only busy uses its processor, or answers when it is asked whether it lives.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from enginegate.errors import ServerError
from enginegate.triton.server import Server
from enginegate.triton.supervised_process import processor_s

_EVERY_S = 1.0
_ANSWER_S = 2.0
# A stopped server is told apart from a slow one within this; nothing that was measured on machines
# of two cores kept one of ours from answering for a second.
_OURS_S = 6.0
# Somebody else's may be behind a network that recovers, and its processor cannot be seen.
_THEIRS_S = 15.0


@dataclass(slots=True)
class Liveness:
    """Whether the server has stopped for good, as far as is known.

    Attributes:
        silent_s: for how long it had not answered when it was given up; 0.0: it was not.
    """

    server: Server
    silent_s: float = 0.0

    @property
    def gone(self) -> bool:
        """Whether it was given up."""
        return self.silent_s > 0.0

    def error(self) -> ServerError:
        """What is said then."""
        used = (
            "" if self.server.pid is None else "; it used no processor time meanwhile and was ended"
        )
        return ServerError(
            f"The Triton server at {self.server.grpc} stopped answering: for {self.silent_s:.0f} s "
            f"it did not say that it lives{used}. Its log says what it did last"
            f"{'' if self.server.log is None else f': {self.server.log}'}. Start again; if it "
            "happens again, look for what stops or blocks it."
        )


@contextmanager
def attended(server: Server) -> Iterator[Liveness]:
    """Watch over a server for as long as the block runs.

    A server of our own that stopped is killed, so that whoever waits for it hears so at once.

    Raises:
        ServerError: it stopped; instead of what the block raised for that reason.
    """
    found, done = Liveness(server), threading.Event()
    thread = threading.Thread(target=_watch, args=(found, done), daemon=True)
    thread.start()
    try:
        yield found
    except ServerError as error:
        if found.gone:
            raise found.error() from error
        raise
    finally:
        done.set()
        thread.join()
    if found.gone:
        raise found.error()


def _watch(found: Liveness, done: threading.Event) -> None:
    server = found.server
    limit_s = _THEIRS_S if server.pid is None else _OURS_S
    used, heard_s = processor_s(server.pid), time.monotonic()
    while not done.wait(_EVERY_S):
        before, used = used, processor_s(server.pid)
        if used and used != before:
            heard_s = time.monotonic()
            continue
        with server.client(timeout_s=_ANSWER_S) as client:
            if client.live():
                heard_s = time.monotonic()
        silent_s = time.monotonic() - heard_s
        if silent_s >= limit_s and not done.is_set():
            found.silent_s = silent_s
            if server.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGKILL)
            return
