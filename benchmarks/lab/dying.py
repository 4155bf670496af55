"""Where a process is killed. Armed in the process that is to die; the program has no such hooks."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from enginegate.repository.journal import Entry, Journal

# What changes a file system for good; everything durable goes through one of these.
ACTS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True, slots=True)
class Death:
    """One way to die.

    Attributes:
        at: ``step``: when the journal has taken in a step; ``act``: just before a durable act;
            ``torn``: in the middle of an append to the journal or audit log; ``instant``: whenever
            the parent kills; ``none``: not at all.
        step: which step.
        number: which act or append, from 1.
        after_s: seconds from the start of the operation.
    """

    at: Literal["step", "act", "torn", "instant", "none"] = "none"
    step: str = ""
    number: int = 0
    after_s: float = 0.0

    def __str__(self) -> str:
        if self.at == "step":
            return f"after step {self.step}"
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
        _after_step(death.step)
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


def _after_step(step: str) -> None:
    begin, add = Journal.open, Journal.add

    def begin_then_die(self: Journal, *given: Any, **detail: Any) -> Entry:
        entry = begin(self, *given, **detail)
        if step == "intent":
            die()
        return entry

    def add_then_die(self: Journal, entry: Entry, now: Any, **detail: str) -> Entry:
        added = add(self, entry, now, **detail)
        if now == step:
            die()
        return added

    Journal.open = begin_then_die  # type: ignore[method-assign]
    Journal.add = add_then_die  # type: ignore[method-assign, assignment]


def _inside_append(number: int) -> None:
    opened, seen = Path.open, Counter()

    def opened_to_tear(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        file = opened(self, mode, *given, **named)
        if mode != "ab":
            return file
        seen.acts += 1
        return _Torn(file) if seen.acts == number else file

    Path.open = opened_to_tear  # type: ignore[method-assign]


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
