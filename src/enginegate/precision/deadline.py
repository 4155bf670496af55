"""Time limits on what ONNX Runtime does with a stranger's model: opening it, and one run of it.

A `Loop` may never end, and ONNX Runtime has no limit of its own. It looks between two operators
whether it should stop; an operator that is under way is not interrupted. So the clock is read at
the end as well: what came to its end by itself, and too late, is refused too.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginegate.data import Array, Tensors
from enginegate.errors import InputError, TookTooLongError

if TYPE_CHECKING:
    from onnxruntime import (  # type: ignore[import-untyped]
        InferenceSession,
        RunOptions,
        SessionOptions,
    )

OPEN_VARIABLE = "ENGINEGATE_OPEN_TIMEOUT_S"
RUN_VARIABLE = "ENGINEGATE_RUN_TIMEOUT_S"
# An honest model of two gigabytes opens in a minute, and a batch of it runs in less.
_OPEN_S, _RUN_S = 900.0, 300.0
# How late a stop may be: little beside the limits above, and seldom enough to cost nothing.
_POLL_S = 0.2


@dataclass(slots=True)
class _Limit:
    limit_s: float
    due_s: float
    stop: Callable[[], None]
    stopped: bool = False

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() > self.due_s


@dataclass(slots=True)
class _Watch:
    """One thread for all limits: a run of microseconds cannot pay for a thread of its own."""

    limits: dict[int, _Limit] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sooner: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def add(self, limit: _Limit) -> None:
        self.limits[id(limit)] = limit
        if limit.limit_s < _POLL_S:
            self.sooner.set()
        if self.thread is None or not self.thread.is_alive():
            with self.lock:
                if self.thread is None or not self.thread.is_alive():
                    self.thread = threading.Thread(target=self._run, daemon=True)
                    self.thread.start()

    def _run(self) -> None:
        while True:
            next_s = min((limit.due_s for limit in self._running()), default=math.inf)
            if self.sooner.wait(min(max(next_s - time.monotonic(), 0.0), _POLL_S)):
                self.sooner.clear()
            for limit in self._running():
                if limit.over:
                    limit.stopped = True
                    limit.stop()

    def _running(self) -> list[_Limit]:
        # A copy of a dict is made in one go; an iteration fails where another thread adds a limit.
        return [limit for limit in self.limits.copy().values() if not limit.stopped]


_watch = _Watch()


@contextmanager
def _limited(limit_s: float, stop: Callable[[], None]) -> Iterator[_Limit]:
    limit = _Limit(limit_s, time.monotonic() + limit_s, stop)
    _watch.add(limit)
    try:
        yield limit
    finally:
        del _watch.limits[id(limit)]


@contextmanager
def limit_opening(options: "SessionOptions", *, what: str) -> Iterator[None]:
    """Give up a session that is being made with these options when its time is up.

    Raises:
        TookTooLongError: it took longer, also where it came to its end by itself.
    """
    limit_s = _seconds(OPEN_VARIABLE, _OPEN_S)

    def stop() -> None:
        options.set_load_cancellation_flag(True)

    with _limited(limit_s, stop) as limit:
        try:
            yield
        except Exception as error:
            if limit.stopped:
                raise _opened_too_late(what, limit_s) from error
            raise
        if limit.over:
            raise _opened_too_late(what, limit_s)


def _opened_too_late(what: str, limit_s: float) -> TookTooLongError:
    return TookTooLongError(
        f"ONNX Runtime did not open {what} within {limit_s:g} s. Export a smaller graph; or, if it "
        f"is meant to be that large, raise {OPEN_VARIABLE}."
    )


def run_in_time(
    session: "InferenceSession", names: Sequence[str] | None, inputs: Tensors
) -> list[Array]:
    """The session's outputs; a run that takes too long is given up.

    Raises:
        TookTooLongError: it took longer, also where it came to its end by itself.
    """
    import onnxruntime as ort  # noqa: PLC0415

    options: RunOptions = ort.RunOptions()
    limit_s = _seconds(RUN_VARIABLE, _RUN_S)

    def stop() -> None:
        options.terminate = True

    with _limited(limit_s, stop) as limit:
        try:
            found: list[Any] = session.run(names, inputs, options)
        except Exception as error:
            if limit.stopped:
                raise _ran_too_long(inputs, limit_s) from error
            raise
        if limit.over:
            raise _ran_too_long(inputs, limit_s)
        return found


def _ran_too_long(inputs: Tensors, limit_s: float) -> TookTooLongError:
    rows = max((len(array) for array in inputs.values() if array.ndim), default=0)
    return TookTooLongError(
        f"One run of the model, on {rows} samples, took longer than {limit_s:g} s and was given "
        "up: a Loop in it may never end. Bound the loop; or, if a run is meant to take that long, "
        f"raise {RUN_VARIABLE}."
    )


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InputError(f"{variable} is {text!r}; it must be a number of seconds above 0.")
    return seconds
