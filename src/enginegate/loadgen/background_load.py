"""Keeps sending in the background while something else happens, e.g. a promotion."""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from enginegate.errors import ServerError
from enginegate.loadgen.schedule import poisson
from enginegate.loadgen.traffic import LoadResult, Traffic
from enginegate.loadgen.transcript import OnReply, Transcript
from enginegate.loadgen.worker_load import RunClock, WorkerLoad, drive, own_loop
from enginegate.measurement import Load

_START_S = 15.0
_CHUNK_S = 3600.0


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """What became of background traffic.

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


class SteadyTraffic:
    """Poisson traffic from entering the block to leaving it, sent by a thread of its own.

    Example::

        with SteadyTraffic(server.grpc, traffic, rate_per_s=50) as steady:
            promote()
        assert steady.report().failed == 0
    """

    def __init__(
        self,
        address: str,
        traffic: Traffic,
        *,
        rate_per_s: float,
        seed: int = 0,
        on_reply: OnReply | None = None,
    ) -> None:
        """Prepare; nothing is sent yet. ``on_reply`` runs in the sending thread."""
        self._address, self._traffic = address, traffic
        self._rate_per_s, self._seed = rate_per_s, seed
        self._transcript = Transcript(on_reply)
        self._thread = threading.Thread(target=self._run, name="steady-traffic", daemon=True)
        self._sending = threading.Event()
        self._course = RunClock()
        self._error: BaseException | None = None
        self._started_s = 0.0
        self._ended_s = 0.0

    def __enter__(self) -> Self:
        """Start sending; returns once the connection stands.

        Raises:
            ServerError: no connection could be made.
        """
        self._started_s = time.perf_counter()
        self._thread.start()
        if not self._sending.wait(_START_S) or self._error is not None:
            self._stop()
            raise self._error or ServerError(
                f"No traffic could be sent to Triton at {self._address} within {_START_S:g} s. "
                "Check that the server runs."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sending and wait for the answers still due; what ``on_reply`` raised comes out."""
        self._stop()
        if self._error is not None and error is None:
            raise self._error

    def result(self) -> LoadResult:
        """Every request so far; complete once the block has ended."""
        end_s = self._ended_s or time.perf_counter()
        load = Load(
            rate_per_s=self._rate_per_s, duration_s=end_s - self._started_s, seed=self._seed
        )
        return LoadResult.of(load, self._transcript.sent())

    def report(self) -> TrafficReport:
        """Counts, versions and tail so far; complete once the block has ended."""
        found = self.result()
        answered = np.isfinite(found.latency_s)
        done_s = np.sort((found.due_s + found.latency_s)[answered])
        return TrafficReport(
            sent=len(found.latency_s),
            failed=found.failed,
            versions=dict(Counter(found.versions[answered].tolist())),
            errors=found.errors,
            longest_gap_ms=float(np.diff(done_s).max()) * 1e3 if len(done_s) > 1 else math.nan,
        )

    def _stop(self) -> None:
        self._course.stop_s = 0.0
        self._thread.join()
        self._ended_s = time.perf_counter()

    def _run(self) -> None:
        try:
            with own_loop("grpc") as runner:
                runner.run(self._send())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self._sending.set()

    async def _send(self) -> None:
        errand = WorkerLoad(
            address=self._address,
            protocol="grpc",
            requests=self._traffic.requests,
            order_seed=self._traffic.order_seed,
            timeout_s=self._traffic.timeout_s,
            load=Load(rate_per_s=self._rate_per_s, duration_s=_CHUNK_S, seed=self._seed),
        )
        await drive(errand, self._arrivals(), self._transcript, self._course)

    def _arrivals(self) -> Iterator[float]:
        self._sending.set()
        for chunk in itertools.count():
            load = Load(rate_per_s=self._rate_per_s, duration_s=_CHUNK_S, seed=self._seed + chunk)
            for due_s in poisson(load):
                yield chunk * _CHUNK_S + due_s
