"""A long-running command that ends with its owner (process_watchdog.py), and its processor time.

Processor time is that of a process and of every process below it, read from /proc.
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from enginegate.errors import ServerError
from enginegate.redact import environment_for_others

_START_S = 10.0
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """A running command, and the watchdog that ends it."""

    pid: int
    watchdog: "subprocess.Popen[bytes]"

    def status(self) -> int | None:
        """Its exit status, None while it runs; 128 + N when signal N ended it."""
        return self.watchdog.poll()


def watchdog_command(
    command: Sequence[str], *, log: Path, grace_s: float, private: str = ""
) -> list[str]:
    """The command line that runs a command under a watchdog, for callers that start it themselves.

    Started by this process, it ends with this process, on SIGTERM, and when its standard input has
    a byte or is closed. It prints the command's process id, or why the command could not be
    started, and ends with the command's exit status.
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

    The command gets its own session, so Ctrl-C reaches this process first and the command is ended
    in order: SIGTERM, then after ``grace_s`` SIGKILL, for everything it started too. Files it makes
    are private, and so is shared memory whose name begins with ``private``, a tenth of a second
    after it was made.

    Raises:
        ServerError: the command cannot be executed.
    """
    watchdog = subprocess.Popen(  # noqa: S603
        watchdog_command(command, log=log, grace_s=grace_s, private=private),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment_for_others(), **environment},
        start_new_session=True,
        umask=0o077,
    )
    try:
        yield SupervisedProcess(_pid(watchdog), watchdog)
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            # A forked child of this process may hold the pipe too, so closing it is not enough.
            watchdog.communicate(b"q", timeout=grace_s + _KILL_S)
        if watchdog.poll() is None:
            watchdog.kill()
            watchdog.wait()


def _pid(watchdog: "subprocess.Popen[bytes]") -> int:
    line = ""
    if watchdog.stdout is not None and select.select([watchdog.stdout], [], [], _START_S)[0]:
        line = watchdog.stdout.readline().decode().strip()
    if not line.isdigit():
        raise ServerError(
            f"A program could not be started: {line or 'no answer from its watchdog'}.\n"
            "Check that the file is there and executable."
        )
    return int(line)


_PROC = Path("/proc")
_UTIME, _STIME, _STARTED = 11, 12, 19  # fields of /proc/PID/stat after the command's name


class Process(NamedTuple):
    """A process: the system gives its number out again, so its start time belongs to it."""

    pid: int
    started: int


ProcessorTimes = dict[Process, float]


def processor_s(pid: int | None) -> ProcessorTimes:
    """Processor seconds so far of a process and all below it; empty when that is not known."""
    times: ProcessorTimes = {}
    waiting = [] if pid is None else [pid]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    while waiting:
        pid = waiting.pop()
        # A process may end between being listed and being read.
        with suppress(OSError, ValueError, IndexError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[_UTIME]) + int(fields[_STIME])
            times[Process(pid, int(fields[_STARTED]))] = ticks / ticks_per_s
            for task in (_PROC / str(pid) / "task").iterdir():
                with suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return times


def cores(before: ProcessorTimes, after: ProcessorTimes, lasted_s: float) -> float | None:
    """Processor time between two readings over wall time; None when either is not known.

    A process that ended in between is left out; a process that began counts from its start.
    """
    if not before or not after or lasted_s <= 0.0:
        return None
    return sum(used - before.get(process, 0.0) for process, used in after.items()) / lasted_s
