"""Runs one command and ends it when its owner asks to or dies. Run as a script, never imported.

Usage: ``python process_watchdog.py OWNER_PID GRACE_S LOG PRIVATE COMMAND...``

The owner holds the other end of standard input: a byte or end of file means "stop". The kernel's
own parent-death signal fires when the *thread* that started a child ends, so it cannot be used by
the owner, whose threads come and go; this process has one thread, and uses it for its child.
The command's process group is killed last: Triton's Python backend leaves processes behind when
the server crashes. SIGTERM to the watchdog means "stop" too. Nothing that it starts holds its
owner's standard output or standard error: a reader of those would wait for it.

Shared memory whose name begins with PRIVATE (empty: none) is made readable by its owner only.
Triton's Python backend gives everybody the right to read the tensors in it, whatever the umask is
(it calls ``fchmod``), so this process removes that right a tenth of a second later.
"""

import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from types import FrameType

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_USAGE = 2
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the system's shared memory, not a temporary file
_asked_to_stop = False


def _stop_soon(_number: int, _frame: FrameType | None) -> None:
    global _asked_to_stop  # noqa: PLW0603 - a signal handler has nowhere else to write to
    _asked_to_stop = True


def _die_with_watchdog() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(log: str, command: list[str]) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:  # noqa: PTH123 - pathlib would double the start time
        os.dup2(out.fileno(), sys.stderr.fileno())
        return subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with_watchdog,  # noqa: PLW1509 - this process has one thread
        )


def _make_private(prefix: str) -> None:
    for entry in os.scandir(_SHARED_MEMORY) if prefix else ():
        if not entry.name.startswith(prefix):
            continue
        # Others may write into that folder too: none of their links is followed.
        with suppress(OSError):
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(handle)
                if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                    os.fchmod(handle, 0o600)
            finally:
                os.close(handle)


def _must_stop(owner: int) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) or _asked_to_stop or os.getppid() != owner


def main(arguments: list[str]) -> int:
    """Start the command, print its process id, watch, and return its exit status."""
    owner, grace_s, log, private, *command = arguments
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_soon)
    try:
        child = _start(log, command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)  # noqa: T201
        return _USAGE
    print(child.pid, flush=True)  # noqa: T201
    try:
        while child.poll() is None and not _must_stop(int(owner)):
            _make_private(private)
        with suppress(ProcessLookupError):
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(float(grace_s))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
