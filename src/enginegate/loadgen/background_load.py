"""Keeps sending in the background while something else happens, e.g. a promotion."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from enginegate.errors import ServerError
from enginegate.loadgen.traffic import LoadResult, Traffic, whole_load
from enginegate.loadgen.transcript import Transcript
from enginegate.loadgen.worker_load import RunClock, send_here
from enginegate.measurement import Load
from enginegate.triton.types import Reply

_FIRST_ANSWER_S = 20.0
_LONGEST_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Summary of a background load.

    Attributes:
        versions: model version -> requests it answered.
        errors: gRPC status -> failures.
        longest_gap_ms: longest time without an answer between the first and the last.
    """

    sent: int
    failed: int
    versions: dict[str, int]
    errors: dict[str, int]
    longest_gap_ms: float


class BackgroundLoad:
    """Poisson arrivals from entering the block to leaving it, sent by a thread of its own.

    Example::

        with BackgroundLoad(server.grpc, traffic, rate_per_s=50) as load:
            promote()
        assert load.report().failed == 0

    Attributes:
        wrong: one sentence for each wrong answer.
    """

    def __init__(
        self,
        address: str,
        traffic: Traffic,
        *,
        rate_per_s: float,
        seed: int = 0,
        wrong_in: Callable[[int, Reply], str] | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            address: gRPC ``HOST:PORT``.
            traffic: the requests.
            rate_per_s: of the arrivals.
            seed: of the arrivals.
            wrong_in: says in words why the answer to a sample is wrong, nothing if it is right;
                runs in the sending thread, and ends the load by raising.
        """
        self._address, self._traffic, self._wrong_in = address, traffic, wrong_in
        self._load = Load(rate_per_s=rate_per_s, duration_s=_LONGEST_S, seed=seed)
        self._transcript = Transcript(self._check)
        self._thread = threading.Thread(target=self._run, name="background-load", daemon=True)
        self._started = threading.Event()
        self._clock = RunClock()
        self._error: BaseException | None = None
        self._ended_s = math.nan
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        """Start sending; returns when the first answer is there.

        Raises:
            ServerError: no connection could be made, or no request was answered.
        """
        self._thread.start()
        if not self._started.wait(_FIRST_ANSWER_S) or self._error is not None:
            self._stop()
            raise self._error or ServerError(
                f"No request to Triton at {self._address} was answered within "
                f"{_FIRST_ANSWER_S:g} s: {self.result.errors or 'nothing came back'}. Check that "
                "the server runs and that the model is loaded."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sending and wait for the answers still due; raises what ended the load."""
        self._stop()
        if self._error is not None and error is None:
            raise self._error

    @property
    def start_s(self) -> float:
        """The reading of ``time.perf_counter`` when the load's time was 0."""
        return self._clock.start_s

    @property
    def result(self) -> LoadResult:
        """Every request so far; complete once the block has ended."""
        end_s = time.perf_counter() if math.isnan(self._ended_s) else self._ended_s
        load = self._load.model_copy(update={"duration_s": max(end_s - self.start_s, 0.0)})
        return LoadResult.of(load, self._transcript.sent())

    def report(self) -> TrafficReport:
        """Counts, versions and tail so far; complete once the block has ended."""
        result = self.result
        answered = np.isfinite(result.latency_s)
        answered_s = np.sort((result.due_s + result.latency_s)[answered])
        return TrafficReport(
            sent=len(result.latency_s),
            failed=result.failed,
            versions=dict(Counter(result.versions[answered].tolist())),
            errors=result.errors,
            longest_gap_ms=float(np.diff(answered_s).max()) * 1e3
            if len(answered_s) > 1
            else math.nan,
        )

    def _stop(self) -> None:
        self._clock.stop_s = 0.0
        self._thread.join()
        self._ended_s = time.perf_counter()

    def _run(self) -> None:
        work = whole_load(self._address, self._traffic, self._load)
        try:
            send_here(work, self._transcript, self._clock)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self._started.set()

    def _check(self, sample: int, reply: Reply) -> None:
        self._started.set()
        if self._wrong_in is not None and (problem := self._wrong_in(sample, reply)):
            self.wrong.append(problem)
