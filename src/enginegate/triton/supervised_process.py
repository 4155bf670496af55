"""One long-running command that ends when its owner lets go of it or dies (process_watchdog.py)."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.errors import ServerError

_START_S = 10.0
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """A running command."""

    pid: int
    guard: "subprocess.Popen[bytes]"

    def status(self) -> int | None:
        """Its exit status, None while it runs; 128 + N when signal N ended it."""
        return self.guard.poll()


def guarded(command: Sequence[str], *, log: Path, grace_s: float, private: str = "") -> list[str]:
    """The command line that runs a command under a guard, for whoever starts it in another way.

    Started by this process, it ends with this process, on SIGTERM, and when its standard input has
    a byte or is closed. It says its process id, or why it could not be started, and its exit status
    is the command's.
    """
    script = str(Path(__file__).with_name("process_watchdog.py"))
    return [
        *(sys.executable, "-I", "-S", script),
        *(str(os.getpid()), str(grace_s), str(log), private),
        *command,
    ]


@contextmanager
def supervise(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    grace_s: float,
    private: str = "",
) -> Iterator[SupervisedProcess]:
    """Run a command for as long as the block runs; its output is appended to ``log``.

    It gets its own session, so Ctrl-C reaches us first and it is ended in order: SIGTERM, then
    after ``grace_s`` SIGKILL, for everything it started too. Files it makes are private, and so is
    shared memory whose name begins with ``private``, a tenth of a second after it was made.

    Raises:
        ServerError: it cannot be executed.
    """
    guard = subprocess.Popen(  # noqa: S603
        guarded(command, log=log, grace_s=grace_s, private=private),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
        umask=0o077,
    )
    try:
        yield SupervisedProcess(_pid(guard), guard)
    finally:
        _end(guard, grace_s + _KILL_S)


def _pid(guard: "subprocess.Popen[bytes]") -> int:
    said = ""
    if guard.stdout is not None and select.select([guard.stdout], [], [], _START_S)[0]:
        said = guard.stdout.readline().decode().strip()
    if not said.isdigit():
        raise ServerError(
            f"A program could not be started: {said or 'no answer from its guard'}.\n"
            "Check that the file is there and executable."
        )
    return int(said)


def _end(guard: "subprocess.Popen[bytes]", limit_s: float) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        # A forked child of ours may hold the pipe too, so closing it is not enough.
        guard.communicate(b"q", timeout=limit_s)
    if guard.poll() is None:
        guard.kill()
        guard.wait()
