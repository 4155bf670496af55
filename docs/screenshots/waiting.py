# ruff: noqa: INP001
"""Waiting until something is so, rather than for a while."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 60.0
_LOOK_S = 0.3


def until(
    look: Callable[[], T | None],
    what: str,
    *,
    seconds: float = WAIT_S,
    passing: tuple[type[Exception], ...] = (OSError,),
) -> T:
    """The first true answer.

    Args:
        look: asked again and again.
        what: is waited for, in words.
        passing: what asking may raise until then.
    """
    end, why = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            if found := look():
                return found
        except passing as error:
            why = f": {error}"
        time.sleep(_LOOK_S)
    raise SystemExit(f"Not within {seconds:.0f} s: {what}{why}.")
