"""A server that measurements are made on, started again when it dies under one.

What is running is made and taken down by a context that the caller gives, so that the same rule
holds for one model or several, and can be tried without a server.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from enginegate.errors import EnginegateError, ServerError
from enginegate.measurement import LatencySample, Load
from enginegate.measuring.p99 import SequentialTest
from enginegate.search.trial_runner import Measure
from enginegate.serving import ServingConfig

# A server that dies this often dies of what it serves; each restart costs seconds of the budget.
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What is up now.

    Attributes:
        measures: name -> measures one model on the server.
        check_alive: returns if the server answers, else raises ServerError with its last words.
    """

    measures: Mapping[str, Measure]
    check_alive: Callable[[], None]


@dataclass(slots=True)
class RestartingServer:
    """Measures on a server; when that dies, starts another and measures again.

    Attributes:
        start: starts the server, deploys what is measured, and takes both down at its end.
        restarts: how many servers may die before the error is passed on.
        warn: called at each restart.
        restarted: how often it was.
    """

    start: Callable[[], AbstractContextManager[RunningServer]]
    restarts: int = _RESTARTS
    warn: Callable[[str], None] = lambda _: None
    restarted: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _running: RunningServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running = None
        self._stack.close()

    def measure(self, name: str) -> Measure:
        """Measures the model of that name, on whichever server is up by then."""

        def measure(
            config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
        ) -> LatencySample:
            while True:
                if self._running is None:
                    self._stack = ExitStack()
                    self._running = self._stack.enter_context(self.start())
                try:
                    return self._running.measures[name](config, load, ends=ends)
                except ServerError as error:
                    self._recover(self._running, f"{config} at {load}", error)

        return measure

    def _recover(self, running: RunningServer, during: str, error: ServerError) -> None:
        """Take a dead server down, so that the next measurement starts another.

        Raises:
            ServerError: the server lives, so the error is about what was asked of it; or too many
                died.
        """
        try:
            running.check_alive()
        except ServerError as death:
            self._running = None
            with suppress(EnginegateError):
                self._stack.close()
            if self.restarted >= self.restarts:
                raise ServerError(
                    f"{self.restarted + 1} servers died while measuring, the last one under "
                    f"{during}.\n{death}"
                ) from error
            self.restarted += 1
            self.warn(
                f"the server died under {during}; starting another (restart {self.restarted} of "
                f"{self.restarts}) and measuring again"
            )
            return
        raise error
