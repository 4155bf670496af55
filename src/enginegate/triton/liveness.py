"""Notices that a server hangs while something waits for it, and ends the wait.

A server that is stopped or deadlocked accepts requests and never answers: each wait for it would
last until its own limit, and the limits are for models that take minutes to load. A server that is
only busy uses its processor, or answers the liveness call.
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
# A short limit ends waits early, a long one spares a server that is only slow: nothing measured on
# machines of two cores kept a server started here from answering for more than a second.
_LOCAL_LIMIT_S = 6.0
# A remote server may be behind a network that recovers, and its processor cannot be seen.
_REMOTE_LIMIT_S = 15.0


@dataclass(slots=True)
class Liveness:
    """Whether a server hangs, as far as is known.

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
        """Says for how long the server was silent, and what to do."""
        ended = (
            "" if self.server.pid is None else "; it used no processor time meanwhile and was ended"
        )
        return ServerError(
            f"The Triton server at {self.server.grpc} stopped answering: for {self.silent_s:.0f} s "
            f"it did not say that it lives{ended}. Its log says what it did last"
            f"{'' if self.server.log is None else f': {self.server.log}'}. Start again; if it "
            "happens again, find what stops or blocks it."
        )


@contextmanager
def monitor_liveness(server: Server) -> Iterator[Liveness]:
    """Watch over a server for as long as the block runs.

    A server started here that hangs is killed, so that every wait for it ends at once.

    Raises:
        ServerError: the server hung; instead of what the block raised for that reason.
    """
    liveness, done = Liveness(server), threading.Event()
    thread = threading.Thread(target=_watch, args=(liveness, done), daemon=True)
    thread.start()
    try:
        yield liveness
    except ServerError as error:
        if liveness.gone:
            raise liveness.error() from error
        raise
    finally:
        done.set()
        thread.join()
    if liveness.gone:
        raise liveness.error()


def _watch(liveness: Liveness, done: threading.Event) -> None:
    server = liveness.server
    limit_s = _REMOTE_LIMIT_S if server.pid is None else _LOCAL_LIMIT_S
    used, alive_at_s = processor_s(server.pid), time.monotonic()
    while not done.wait(_EVERY_S):
        before, used = used, processor_s(server.pid)
        if used and used != before:
            alive_at_s = time.monotonic()
            continue
        with server.client(timeout_s=_ANSWER_S) as client:
            if client.live():
                alive_at_s = time.monotonic()
        silent_s = time.monotonic() - alive_at_s
        if silent_s >= limit_s and not done.is_set():
            liveness.silent_s = silent_s
            if server.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGKILL)
            return
