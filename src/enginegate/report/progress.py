"""How far a qualification is, told to whoever listens in this process: the table on the terminal.

Steps run as Prefect's tasks, some in threads of their own. Each tells when it begins and how it
ended; where nobody listens, as in a worker, that costs nothing.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar

from enginegate.candidate import Candidate, Engine, Unbuilt
from enginegate.content_store import ContentFolder

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageProgress:
    """One stage of one candidate, or a step that is for all of them.

    Attributes:
        candidate: as KIND-PRECISION; empty: a step for all.
        stage: build, judge, alone, benchmark, or the step's name.
        state: running; or how it ended: done, skipped, stopped, or an outcome's word.
        words: what it shows so far, or found, in a few words.
        share: of the stage that is done, 0 to 1; None: not known.
    """

    candidate: str
    stage: str
    state: str
    words: str = ""
    share: float | None = None


Listener: TypeAlias = Callable[[StageProgress], None]
_listeners: list[Listener] = []
_lock = threading.Lock()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with all progress in this process, from whichever thread, in the block."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def tell(progress: StageProgress) -> None:
    """Tell whoever listens."""
    with _lock:
        heard = tuple(_listeners)
    for listener in heard:
        listener(progress)


def told_as(
    stage: str, ends: Callable[[Any], tuple[str, str]] = lambda _: ("done", "")
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Tell when a function begins and how it ended; what it does stays as it is.

    Args:
        stage: its name.
        ends: state and words of what it returns. Its candidate is its first argument's, if that is
            a candidate or an attempt at one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def told(*args: P.args, **kwargs: P.kwargs) -> R:
            first = next(iter((*args, *kwargs.values())), None)
            candidate = _candidate_of(first)
            tell(StageProgress(candidate, stage, "running"))
            try:
                made = function(*args, **kwargs)
            except BaseException as error:
                broke = isinstance(error, Exception)  # else Ctrl-C, or a signal to end
                tell(StageProgress(candidate, stage, "errored" if broke else "stopped"))
                raise
            tell(StageProgress(candidate, stage, *ends(made)))
            return made

        return told

    return decorate


def _candidate_of(value: Any) -> str:
    if isinstance(value, ContentFolder) and isinstance(value.value, Engine):
        value = value.value
    if isinstance(value, Engine | Unbuilt):
        value = value.candidate
    return value.name if isinstance(value, Candidate) else ""
