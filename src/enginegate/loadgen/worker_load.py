"""Sends requests and keeps every outcome: one process's part of a load, in one loop.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Every time is read from one monotonic clock, so a step of
the wall clock changes nothing. Not in scope: several processes (workers.py), the schedule
(schedule.py), and judging the numbers (measuring/measure.py).
"""

import itertools
import math
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass

from enginegate.errors import ServerError
from enginegate.loadgen.raw_grpc import RawGrpc, grpc_message
from enginegate.loadgen.raw_http import RawHttp
from enginegate.loadgen.raw_loop import RawLoop, no_collection
from enginegate.loadgen.schedule import LoadPattern, Times, due_times, shuffled
from enginegate.loadgen.transcript import SentRequests, Transcript
from enginegate.measurement import ClosedLoad, Load, WireProtocol

_CONNECT_S = 10.0
# From the connection to the run's time 0, so that its first request is not late already.
_LEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The requests that one process sends; can be handed to another process.

    Attributes:
        address: ``HOST:PORT`` of the protocol.
        requests: ready to be written to a connection of that protocol.
        order_seed: of the order in which they are drawn.
        timeout_s: a request without an answer by then has failed.
        pattern: of an open loop; another process may not know it by name.
        recorded_s: recorded arrival times, for a replay.
        part: this process's number; it sends requests ``part``, ``part + parts``, ...
    """

    address: str
    protocol: WireProtocol
    requests: tuple[bytes, ...]
    order_seed: int
    timeout_s: float
    load: Load | ClosedLoad
    pattern: LoadPattern | None = None
    recorded_s: tuple[float, ...] | None = None
    part: int = 0
    parts: int = 1

    def due(self) -> Times:
        """When this part's requests are due."""
        if isinstance(self.load, ClosedLoad):
            return iter(())
        times = due_times(self.load, self.recorded_s, self.pattern)
        return itertools.islice(times, self.part, None, self.parts)

    def order(self) -> Iterator[int]:
        """Which requests are sent: the whole load's order, of which this part takes its own."""
        every = shuffled(len(self.requests), self.order_seed)
        return itertools.islice(every, self.part, None, self.parts)

    @property
    def clients(self) -> int:
        """How many of a closed loop's clients are this part's."""
        if not isinstance(self.load, ClosedLoad):
            return 0
        return len(range(self.part, self.load.clients, self.parts))


@dataclass(slots=True)
class RunClock:
    """When a run starts and stops, on the monotonic clock, which all processes share.

    Attributes:
        start_s: the clock's reading when the run's time is 0.
        stop_s: no request that is due from then on is sent; may be moved while the run goes on.
        cpu_s: this process's processor time when the run began, after connecting.
    """

    start_s: float = 0.0
    stop_s: float = math.inf
    cpu_s: float = 0.0

    def begin(self) -> None:
        """Set the start; called once the connection stands."""
        self.start_s = time.perf_counter() + _LEAD_S

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_s

    def tick(self, transcript: Transcript) -> None:
        """Called about every 0.1 s while requests are sent; may move the stop."""


def send_load(work: WorkerLoad, transcript: Transcript, clock: RunClock) -> SentRequests:
    """Send a load from this process; returns once the last request is answered.

    Raises:
        ServerError: no connection could be made.
    """
    with no_collection():
        send_here(work, transcript, clock)
    # A run without a request is over before its start, which lies a moment ahead.
    cpu_share = (time.process_time() - clock.cpu_s) / max(clock.now_s(), _LEAD_S)
    return transcript.sent(stop_s=clock.stop_s, cpu_share=cpu_share)


def send_here(work: WorkerLoad, transcript: Transcript, clock: RunClock) -> None:
    """Send a load from this thread; returns once the last request is answered.

    Raises:
        ServerError: no connection could be made.
    """
    is_http, decodes = work.protocol == "http", transcript.on_reply is not None
    requests = work.requests if is_http else tuple(map(grpc_message, work.requests))
    with select.epoll() as poll:
        loop = RawLoop(requests, work.order(), work.timeout_s, transcript, poll)
        wire: RawHttp | RawGrpc
        if is_http:
            wire = RawHttp(work.address, poll, loop.watched, loop.answered, decodes, work.parts)
        else:
            wire = RawGrpc(work.address, poll, loop.watched, loop.answered, decodes)
        loop.wire = wire
        try:
            if not wire.connect(_CONNECT_S):
                raise _no_connection(work)
            due = work.due()
            clock.begin()
            clock.cpu_s = time.process_time()
            if isinstance(work.load, ClosedLoad):
                loop.keep_in_flight(work.clients, work.load.duration_s, clock)
            else:
                loop.send_at(due, clock)
        finally:
            wire.close()


def _no_connection(work: WorkerLoad) -> ServerError:
    return ServerError(
        f"No connection to Triton at {work.address} within {_CONNECT_S:g} s, so no load "
        f"was sent. Check that the server runs and that this is its "
        f"{'HTTP' if work.protocol == 'http' else 'gRPC'} address."
    )
