"""Processor time of a server: of its process and of every process below it, from /proc."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_UTIME, _STIME, _STARTED = 11, 12, 19  # fields of /proc/PID/stat after the command's name


class Process(NamedTuple):
    """One process; numbers are given out again, so its start belongs to it."""

    pid: int
    started: int


Spent = dict[Process, float]


def processor_s(pid: int | None) -> Spent:
    """Processor seconds so far of a process and all below it; empty when that is not known."""
    found: Spent = {}
    waiting = [] if pid is None else [pid]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    while waiting:
        one = waiting.pop()
        # A process may end between being listed and being read.
        with suppress(OSError, ValueError, IndexError):
            fields = (_PROC / str(one) / "stat").read_text().rpartition(")")[2].split()
            used = int(fields[_UTIME]) + int(fields[_STIME])
            found[Process(one, int(fields[_STARTED]))] = used / ticks_per_s
            waiting += _children(one)
    return found


def cores(before: Spent, after: Spent, lasted_s: float) -> float | None:
    """Processor time between two readings over wall time; None when either is not known.

    A process that ended in between is left out; one that began counts from its start.
    """
    if not before or not after or lasted_s <= 0.0:
        return None
    return sum(used - before.get(process, 0.0) for process, used in after.items()) / lasted_s


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in (_PROC / str(pid) / "task").iterdir():
        with suppress(OSError):
            children += map(int, (task / "children").read_text().split())
    return children
