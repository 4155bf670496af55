"""Steady callers: requests leave on schedule while somebody changes the server beside them.

Every answer is looked at as it arrives, and every failure is kept. Not in scope: what is changed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from enginegate.errors import ServerError
from enginegate.loadgen.traffic import EarlyEnd, LoadResult, Traffic, Transport, run_load
from enginegate.measurement import Load
from enginegate.triton.types import Reply

_LONGEST_S = 24 * 3600.0
_FIRST_ANSWER_S = 20.0
_SEED = 0


@dataclass(slots=True)
class Callers:
    """An open loop in a thread of its own, from entering the block to leaving it.

    Attributes:
        address: gRPC ``HOST:PORT``.
        traffic: what is sent.
        rate_per_s: Poisson arrivals.
        wrong_in: what is wrong with the answer to a sample, in words; empty if nothing is.
        wrong: what was wrong, one sentence for each such answer.
        result: every request; there once the block has ended.
        start_s: what ``time.perf_counter`` showed when the load's time was 0; likewise.
    """

    address: str
    traffic: Traffic
    rate_per_s: float
    wrong_in: Callable[[int, Reply], str]
    wrong: list[str] = field(default_factory=list)
    result: LoadResult | None = None
    start_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _answered: threading.Event = field(default_factory=threading.Event)
    _first_s: float = 0.0
    _broke: BaseException | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin; returns when the first answer is there.

        Raises:
            ServerError: there is none, or no connection.
        """
        self._thread = threading.Thread(target=self._send, name="callers", daemon=True)
        self._thread.start()
        if not self._answered.wait(_FIRST_ANSWER_S):
            self._end()
            raise self._broke or ServerError(
                f"No request to {self.address} was answered within {_FIRST_ANSWER_S:g} s: "
                f"{self.errors or 'nothing came back'}. Load the model first."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if self._broke is not None and error is None:
            raise self._broke

    @property
    def sent(self) -> int:
        """Requests sent; known once the block has ended."""
        return len(self.result.due_s) if self.result else 0

    @property
    def failed(self) -> int:
        """Requests without a good answer; known once the block has ended."""
        return self.result.failed if self.result else 0

    @property
    def errors(self) -> dict[str, int]:
        """Status -> failures; known once the block has ended."""
        return self.result.errors if self.result else {}

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _send(self) -> None:
        load = Load(rate_per_s=self.rate_per_s, duration_s=_LONGEST_S, seed=_SEED)
        until = EarlyEnd(limit_s=1.0, skip_s=0.0, decided=lambda *_: self._stop.is_set())
        try:
            self.result = run_load(
                self.address,
                self.traffic,
                load,
                on_reply=self._look,
                ends=until,
                sending=Transport(processes=1),
            )
            answered = self.result.due_s + self.result.latency_s
            self.start_s = self._first_s - float(np.min(answered, initial=np.inf))
        except BaseException as error:  # noqa: BLE001 - raised again where the block ends
            self._broke = error
        finally:
            self._answered.set()

    def _look(self, sample: int, reply: Reply) -> None:
        if not self._answered.is_set():
            self._first_s = time.perf_counter()
            self._answered.set()
        problem = self.wrong_in(sample, reply)
        if problem:
            self.wrong.append(problem)
