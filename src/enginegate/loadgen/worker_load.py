"""Sends requests and keeps every outcome: one process's part of a load, in one event loop.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Every time is read from one monotonic clock, so a step of
the wall clock changes nothing. Not in scope: several processes (workers.py), the schedule
(schedule.py), and judging the numbers (measuring/measure.py).
"""

import asyncio
import itertools
import math
import select
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from enginegate.errors import ServerError
from enginegate.loadgen.grpc_sender import GrpcSender, hold_queue
from enginegate.loadgen.raw_http import RawHttp
from enginegate.loadgen.raw_loop import RawLoop, no_collection
from enginegate.loadgen.schedule import LoadPattern, Times, due_times, shuffled
from enginegate.loadgen.transcript import SentRequests, Transcript
from enginegate.measurement import ClosedLoad, Load, WireProtocol

_CONNECT_S = 10.0
# From the connection to the run's time 0, so that its first request is not late already.
_LEAD_S = 0.02
# How soon a run that was decided ends, against processor time spent on asking.
_TICK_S = 0.1
# A server that refuses at once must not be asked without end.
_PAUSE_S = 0.01
# select() takes file numbers below 1024, and HTTP may open a few hundred connections.
_SELECT_FILES = 700


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
    if work.protocol == "http":
        _send_raw(work, transcript, clock)
    else:
        with own_loop() as runner:
            runner.run(drive(work, work.due(), transcript, clock))
    # A run without a request is over before its start, which lies a moment ahead.
    cpu_share = (time.process_time() - clock.cpu_s) / max(clock.now_s(), _LEAD_S)
    return transcript.sent(stop_s=clock.stop_s, cpu_share=cpu_share)


def _send_raw(work: WorkerLoad, transcript: Transcript, clock: RunClock) -> None:
    with select.epoll() as poll:
        loop = RawLoop(work.requests, work.order(), work.timeout_s, transcript, poll)
        decodes = transcript.on_reply is not None
        loop.wire = RawHttp(work.address, poll, loop.watched, loop.answered, decodes, work.parts)
        try:
            if not loop.wire.connect(_CONNECT_S):
                raise _no_connection(work)
            with no_collection():
                due = work.due()
                clock.begin()
                clock.cpu_s = time.process_time()
                if isinstance(work.load, ClosedLoad):
                    loop.keep_in_flight(work.clients, work.load.duration_s, clock)
                else:
                    loop.send_at(due, clock)
        finally:
            loop.wire.close()


def _no_connection(work: WorkerLoad) -> ServerError:
    return ServerError(
        f"No connection to Triton at {work.address} within {_CONNECT_S:g} s, so no load "
        f"was sent. Check that the server runs and that this is its "
        f"{'HTTP' if work.protocol == 'http' else 'gRPC'} address."
    )


async def drive(work: WorkerLoad, due: Times, transcript: Transcript, clock: RunClock) -> None:
    """Send at the given times (or with a closed loop's clients), then wait for every answer.

    Raises:
        ServerError: no connection could be made.
    """
    sender = GrpcSender(work.address)
    try:
        if not await sender.connect(_CONNECT_S):
            raise _no_connection(work)
        clock.begin()
        clock.cpu_s = time.process_time()
        run = _Run(work, sender, transcript, clock, work.order())
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(_tick(transcript, clock))
            await run.send_all(group, due)
            ticking.cancel()
    except ExceptionGroup as problems:
        first: Exception = problems
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        await sender.close()


@contextmanager
def own_loop() -> Iterator[asyncio.Runner]:
    """An event loop for this thread to send from.

    gRPC has one queue for all loops of a process, and closes it with the last channel: under the
    loop of another thread, if that has closed its channel and not yet itself. So each loop holds
    the queue until it is closed.
    """
    with ExitStack() as afterwards, asyncio.Runner(loop_factory=precise_loop) as runner:
        afterwards.callback(runner.run(hold_queue()))
        yield runner


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that wakes up in time: epoll and poll round up to whole milliseconds.

    ``select`` does not, but takes only low file numbers; without them the rounding must do.
    """
    with socket.socket() as probe:
        fits = probe.fileno() < _SELECT_FILES
    selector = selectors.SelectSelector() if fits else selectors.DefaultSelector()
    return asyncio.SelectorEventLoop(selector)


async def _tick(transcript: Transcript, clock: RunClock) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        clock.tick(transcript)


@dataclass(frozen=True, slots=True)
class _Run:
    work: WorkerLoad
    sender: GrpcSender
    transcript: Transcript
    clock: RunClock
    order: Iterator[int]

    async def send_all(self, group: asyncio.TaskGroup, due: Times) -> None:
        if isinstance(self.work.load, ClosedLoad):
            end_s = self.work.load.duration_s
            async with asyncio.TaskGroup() as clients:
                for _ in range(self.work.clients):
                    clients.create_task(self._client(end_s))
            return
        for due_s in due:
            if not await self._wait(due_s):
                return
            group.create_task(self._send(*self._next_request(due_s)))

    async def _wait(self, due_s: float) -> bool:
        """Wait until a request is due; false if the run is to stop before."""
        while due_s < self.clock.stop_s:
            wait_s = due_s - self.clock.now_s()
            # Even a late request lets answers in first.
            await asyncio.sleep(min(max(wait_s, 0.0), _TICK_S))
            if wait_s <= _TICK_S:
                return due_s < self.clock.stop_s
        return False

    async def _client(self, end_s: float) -> None:
        # The start lies a moment ahead, so that the processes of one load begin together.
        await asyncio.sleep(max(0.0, -self.clock.now_s()))
        while (now_s := self.clock.now_s()) < min(end_s, self.clock.stop_s):
            row, request = self._next_request(now_s)
            await self._send(row, request)
            if math.isinf(self.transcript.latency_s[row]):
                await asyncio.sleep(_PAUSE_S)

    def _next_request(self, due_s: float) -> tuple[int, bytes]:
        sample = next(self.order)
        return self.transcript.add_request(due_s, sample, due_s), self.work.requests[sample]

    async def _send(self, row: int, request: bytes) -> None:
        self.transcript.sent_s[row] = self.clock.now_s()
        answer = await self.sender.send(request, self.work.timeout_s)
        self.transcript.add_answer(row, answer, self.clock.now_s())
