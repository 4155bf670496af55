"""Where a process is killed. Armed in the process that is to die; the program has no such hooks."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from enginegate.repository.history.journal import Entry, Journal

# What changes a file system for good; everything durable goes through one of these.
ACTS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True, slots=True)
class Death:
    """One way to die.

    Attributes:
        at: ``step``: when the journal has taken in a step; ``act``: just before a durable act;
            ``torn``: in the middle of an append to the journal or audit log; ``window``: while a
            canary is watched; ``instant``: whenever the parent kills; ``none``: not at all.
        step: which step.
        number: which act or append, from 1. Of a step: which time that any journal of the operation
            takes it in; a fleet has several journals.
        after_s: seconds from the start of the operation, or of the window.
    """

    at: Literal["step", "act", "torn", "window", "instant", "none"] = "none"
    step: str = ""
    number: int = 0
    after_s: float = 0.0

    def __str__(self) -> str:
        if self.at == "step":
            again = f", time {self.number}" if self.number > 1 else ""
            return f"after step {self.step}{again}"
        if self.at == "window":
            return f"{self.after_s * 1e3:.0f} ms into the canary's window"
        if self.at == "instant":
            return f"after {self.after_s * 1e3:.0f} ms"
        return f"{'before act' if self.at == 'act' else 'inside append'} {self.number}"


class Counter:
    """How many durable acts there were."""

    def __init__(self) -> None:
        """Begin at none."""
        self.acts = 0


def arm(death: Death) -> Counter:
    """Let this process die there; counts its durable acts in any case."""
    counter = Counter()
    _count_acts(counter, death)
    if death.at == "step":
        _after_step(death.step, max(1, death.number))
    if death.at == "torn":
        _inside_append(death.number)
    return counter


def die() -> None:
    """As the kernel's out-of-memory killer does it: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def _count_acts(counter: Counter, death: Death) -> None:
    for name in ACTS:
        setattr(os, name, _counted(getattr(os, name), counter, death))


def _counted(act: Callable[..., Any], counter: Counter, death: Death) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        counter.acts += 1
        if death.at == "act" and counter.acts == death.number:
            die()
        return act(*given, **named)

    return counted


def sleep_or_die(death: Death, seconds: float) -> None:
    """How a canary's window passes in a process that may have to die in it."""
    if death.at == "window":
        time.sleep(min(seconds, death.after_s))
        die()
    time.sleep(seconds)


def _after_step(step: str, nth: int) -> None:
    begin, add, seen = Journal.open, Journal.add, Counter()

    def taken_in(now: str) -> None:
        seen.acts += now == step
        if now == step and seen.acts == nth:
            die()

    def begin_then_die(self: Journal, *given: Any, **detail: Any) -> Entry:
        entry = begin(self, *given, **detail)
        taken_in("intent")
        return entry

    def add_then_die(self: Journal, entry: Entry, now: Any, **detail: str) -> Entry:
        added = add(self, entry, now, **detail)
        taken_in(now)
        return added

    Journal.open = begin_then_die  # type: ignore[method-assign]
    Journal.add = add_then_die  # type: ignore[method-assign, assignment]


def _inside_append(number: int) -> None:
    opened, seen = os.fdopen, Counter()

    def opened_to_tear(handle: int, mode: str = "r", *given: Any, **named: Any) -> Any:
        file = opened(handle, mode, *given, **named)
        if mode != "ab":
            return file
        seen.acts += 1
        return _Torn(file) if seen.acts == number else file

    os.fdopen = opened_to_tear  # type: ignore[assignment]


class _Torn:
    """Takes half of what is written, then the process is gone."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def truncate(self, size: int) -> int:
        return int(self._file.truncate(size))

    def write(self, content: bytes) -> int:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        die()
        return 0
