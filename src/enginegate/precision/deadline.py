"""Time limits on what ONNX Runtime does with a stranger's model: opening it, and one run of it.

A `Loop` may never end, and ONNX Runtime has no limit of its own. It looks between two operators
whether it should stop; an operator that is under way is not interrupted.
"""

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
_POLL_S = 0.2


@dataclass(slots=True)
class _Limit:
    due_s: float
    stop: Callable[[], None]
    passed: bool = False


@dataclass(slots=True)
class _Watch:
    """One thread for all limits: a run of microseconds cannot pay for a thread of its own."""

    limits: dict[int, _Limit] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None

    def add(self, limit: _Limit) -> None:
        self.limits[id(limit)] = limit
        if self.thread is None or not self.thread.is_alive():
            with self.lock:
                if self.thread is None or not self.thread.is_alive():
                    self.thread = threading.Thread(target=self._run, daemon=True)
                    self.thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            for limit in tuple(self.limits.values()):
                if now > limit.due_s and not limit.passed:
                    limit.passed = True
                    limit.stop()


_watch = _Watch()


@contextmanager
def _limited(limit_s: float, stop: Callable[[], None]) -> Iterator[_Limit]:
    limit = _Limit(time.monotonic() + limit_s, stop)
    _watch.add(limit)
    try:
        yield limit
    finally:
        del _watch.limits[id(limit)]


@contextmanager
def limit_opening(options: "SessionOptions", *, what: str) -> Iterator[None]:
    """Give up a session that is being made with these options when its time is up.

    Raises:
        TookTooLongError: it did.
    """
    limit_s = _seconds(OPEN_VARIABLE, _OPEN_S)

    def stop() -> None:
        options.set_load_cancellation_flag(True)

    with _limited(limit_s, stop) as limit:
        try:
            yield
        except Exception as error:
            if limit.passed:
                raise TookTooLongError(
                    f"ONNX Runtime did not open {what} within {limit_s:g} s. Export a smaller "
                    f"graph; or, if it is meant to be that large, raise {OPEN_VARIABLE}."
                ) from error
            raise


def run_in_time(
    session: "InferenceSession", names: Sequence[str] | None, inputs: Tensors
) -> list[Array]:
    """The session's outputs; a run that takes too long is given up.

    Raises:
        TookTooLongError: it did.
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
            if limit.passed:
                rows = max((len(array) for array in inputs.values() if array.ndim), default=0)
                raise TookTooLongError(
                    f"One run of the model, on {rows} samples, took longer than {limit_s:g} s and "
                    "was given up: a Loop in it may never end. Bound the loop; or, if a run is "
                    f"meant to take that long, raise {RUN_VARIABLE}."
                ) from error
            raise
        return found


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
