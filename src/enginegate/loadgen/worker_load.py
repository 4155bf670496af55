"""Sends requests and keeps every outcome: one process's part of a load, in one event loop.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Every time is read from one monotonic clock, so a step of
the wall clock changes nothing. Not in scope: several processes (workers.py), the schedule
(arrivals.py), and what the numbers mean (measure.py).
"""

import asyncio
import itertools
import math
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol as Port

from enginegate.errors import ServerError
from enginegate.loadgen.grpc_sender import GrpcSender, Response, hold_queue
from enginegate.loadgen.http_sender import HttpSender
from enginegate.loadgen.sample_order import shuffled
from enginegate.loadgen.schedule import Times, arrivals
from enginegate.loadgen.transcript import Sent, Transcript
from enginegate.measurement import ClosedLoad, Load, Protocol

_CONNECT_S = 10.0
_LEAD_S = 0.02
_LOOK_S = 0.1
_PAUSE_S = 0.01
# select() takes file numbers below 1024, and HTTP may open a few hundred connections.
_SELECT_FILES = 700


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one process sends; can be handed to another process.

    Attributes:
        address: ``HOST:PORT`` of the protocol.
        requests: ready to be written to a connection of that protocol.
        order_seed: of the order in which they are drawn.
        timeout_s: a request without an answer by then has failed.
        recorded_s: recorded arrival times, for a replay.
        part: this process's number; it sends requests ``part``, ``part + parts``, ...
    """

    address: str
    protocol: Protocol
    requests: tuple[bytes, ...]
    order_seed: int
    timeout_s: float
    load: Load | ClosedLoad
    recorded_s: tuple[float, ...] | None = None
    part: int = 0
    parts: int = 1

    def due(self) -> Times:
        """When this part's requests are due."""
        if isinstance(self.load, ClosedLoad):
            return iter(())
        return itertools.islice(arrivals(self.load, self.recorded_s), self.part, None, self.parts)

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
        start_s: what the clock shows when the run's time is 0.
        stop_s: nothing that is due from then on is sent; may be moved while the run goes on.
        cpu_s: this process's processor time when the run began; connecting is no part of it.
    """

    start_s: float = 0.0
    stop_s: float = math.inf
    cpu_s: float = 0.0

    def begin(self) -> None:
        """Called once the connection stands; sets the start."""
        self.start_s = time.perf_counter() + _LEAD_S

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_s

    def look(self, transcript: Transcript) -> None:
        """Called about every 0.1 s while requests are sent; may move the stop."""


def send(errand: WorkerLoad, transcript: Transcript, course: RunClock) -> Sent:
    """Send an errand's requests in this process; returns once the last is answered.

    Raises:
        ServerError: no connection could be made.
    """
    with own_loop(errand.protocol) as runner:
        runner.run(drive(errand, errand.due(), transcript, course))
    # A run without a request is over before its start, which lies a moment ahead.
    cpu_share = (time.process_time() - course.cpu_s) / max(course.now_s(), _LEAD_S)
    return transcript.sent(stop_s=course.stop_s, cpu_share=cpu_share)


async def drive(errand: WorkerLoad, due: Times, transcript: Transcript, course: RunClock) -> None:
    """Send at the given times (or with so many clients), then wait for every answer.

    Raises:
        ServerError: no connection could be made.
    """
    asker = _asker(errand)
    try:
        if not await asker.connect(_CONNECT_S):
            raise ServerError(
                f"No connection to Triton at {errand.address} within {_CONNECT_S:g} s, so no load "
                f"was sent. Check that the server runs and that this is its "
                f"{'HTTP' if errand.protocol == 'http' else 'gRPC'} address."
            )
        course.begin()
        course.cpu_s = time.process_time()
        run = _Run(errand, asker, transcript, course, errand.order())
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(_look(transcript, course))
            await run.send_all(group, due)
            looking.cancel()
    except ExceptionGroup as problems:
        raise _first(problems) from None
    finally:
        await asker.close()


def _first(problem: Exception) -> Exception:
    """What went wrong first, out of the groups that tasks of tasks wrap it in."""
    while isinstance(problem, ExceptionGroup):
        problem = problem.exceptions[0]
    return problem


@contextmanager
def own_loop(protocol: Protocol) -> Iterator[asyncio.Runner]:
    """An event loop for this thread to send from.

    gRPC has one queue for all loops of a process, and closes it with the last channel: under the
    loop of another thread, if that has closed its channel and not yet itself. So each loop holds
    the queue until it is closed.
    """
    with ExitStack() as afterwards, asyncio.Runner(loop_factory=precise_loop) as runner:
        if protocol == "grpc":
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


class _Asker(Port):
    async def connect(self, timeout_s: float) -> bool: ...

    async def ask(self, request: bytes, timeout_s: float) -> Response: ...

    async def close(self) -> None: ...


def _asker(errand: WorkerLoad) -> _Asker:
    return HttpSender(errand.address) if errand.protocol == "http" else GrpcSender(errand.address)


async def _look(transcript: Transcript, course: RunClock) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        course.look(transcript)


@dataclass(frozen=True, slots=True)
class _Run:
    errand: WorkerLoad
    asker: _Asker
    transcript: Transcript
    course: RunClock
    order: Iterator[int]

    async def send_all(self, group: asyncio.TaskGroup, due: Times) -> None:
        if isinstance(self.errand.load, ClosedLoad):
            end_s = self.errand.load.duration_s
            async with asyncio.TaskGroup() as clients:
                for _ in range(self.errand.clients):
                    clients.create_task(self._client(end_s))
            return
        for due_s in due:
            if not await self._wait(due_s):
                return
            group.create_task(self._send(*self._open(due_s)))

    async def _wait(self, due_s: float) -> bool:
        """Wait until a request is due; false if the run is to stop before."""
        while due_s < self.course.stop_s:
            wait_s = due_s - self.course.now_s()
            # Even a late request lets answers in first.
            await asyncio.sleep(min(max(wait_s, 0.0), _LOOK_S))
            if wait_s <= _LOOK_S:
                return due_s < self.course.stop_s
        return False

    async def _client(self, end_s: float) -> None:
        # The start lies a moment ahead, so that the processes of one load begin together.
        await asyncio.sleep(max(0.0, -self.course.now_s()))
        while (now_s := self.course.now_s()) < min(end_s, self.course.stop_s):
            row, request = self._open(now_s)
            await self._send(row, request)
            if math.isinf(self.transcript.latency_s[row]):
                # A server that refuses at once must not be asked without end.
                await asyncio.sleep(_PAUSE_S)

    def _open(self, due_s: float) -> tuple[int, bytes]:
        sample = next(self.order)
        return self.transcript.open(due_s, sample), self.errand.requests[sample]

    async def _send(self, row: int, request: bytes) -> None:
        self.transcript.sent_s[row] = self.course.now_s()
        answer = await self.asker.ask(request, self.errand.timeout_s)
        self.transcript.close(row, answer, self.course.now_s())
