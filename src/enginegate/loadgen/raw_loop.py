"""One process's part of a load from raw sockets: an epoll loop that keeps to the schedule.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Every time is read from one monotonic clock.

The loop sleeps until the next request is due or an answer is there, and never spins: `select` on
the epoll's own file number wakes within 0.1 ms, where epoll rounds up to whole milliseconds, and a
loop that spins would take a core from a server on this machine.
"""

import gc
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from enginegate.loadgen.grpc_message import Response
from enginegate.loadgen.schedule import Times
from enginegate.loadgen.transcript import Transcript

Answered: TypeAlias = Callable[[int, Response], None]
Watched: TypeAlias = dict[int, Callable[[int], None]]

# Requests sent before answers are read again, when many are due at once: answers wait for these.
_BURST = 64
# How soon a run that was decided ends, against processor time spent on asking.
_TICK_S = 0.1
# A server that refuses at once must not be asked without end.
_PAUSE_S = 0.01
_MOST_EVENTS = 256
_RETRY_S = 0.05
# select() takes file numbers below this; beyond, epoll's whole milliseconds must do.
_SELECT_FILES = 1024


class Wire(Protocol):
    """Sends requests and reads answers; calls back with each one's row."""

    def connect(self, timeout_s: float) -> bool: ...

    def send(self, row: int, request: bytes) -> None: ...

    def flush(self) -> None: ...

    def give_up(self, row: int) -> None: ...

    def close(self) -> None: ...


class Run(Protocol):
    """When a run starts and stops, on the monotonic clock."""

    start_s: float
    stop_s: float

    def tick(self, transcript: Transcript) -> None: ...


@dataclass(slots=True)
class RawLoop:
    """Requests due at given times, or of so many clients, and their answers.

    Attributes:
        requests: in wire form.
        order: indices of requests, without end.
        timeout_s: a request without an answer by then has failed.
        transcript: where requests and answers go.
        poll: where the wire's sockets are watched, and ``watched`` has what each calls.
        wire: sends and reads; set before anything is sent.
    """

    requests: tuple[bytes, ...]
    order: Iterator[int]
    timeout_s: float
    transcript: Transcript
    poll: select.epoll
    watched: Watched = field(default_factory=dict)
    wire: Wire = field(init=False)
    start_s: float = 0.0
    _under_way: set[int] = field(default_factory=set)
    _deadlines: deque[tuple[float, int]] = field(default_factory=deque)
    _free: int = 0
    _pauses: deque[float] = field(default_factory=deque)
    _raised: Exception | None = None

    def answered(self, row: int, answer: Response) -> None:
        """Note an answer; the client that waited for it is free, after a failure with a pause."""
        if row not in self._under_way:
            return
        now_s = time.perf_counter() - self.start_s
        self._under_way.discard(row)
        if answer.error:
            self._pauses.append(now_s + _PAUSE_S)
        else:
            self._free += 1
        try:
            self.transcript.add_answer(row, answer, now_s)
        except Exception as error:  # noqa: BLE001 - raised again where no wire takes it for its own
            self._raised = self._raised or error

    def send_at(self, due: Times, run: Run) -> None:
        """Send at the given times, then wait for every answer."""
        self.start_s = run.start_s
        next_s = next(due, None)
        now_s, tick_s = self._now_s(), 0.0
        while next_s is not None or self._under_way:
            if now_s >= tick_s:
                run.tick(self.transcript)
                tick_s = now_s + _TICK_S
            burst = 0
            while next_s is not None and next_s <= now_s and burst < _BURST:
                if next_s >= run.stop_s:
                    next_s = None
                    break
                self._send(next_s, now_s)
                burst += 1
                next_s = next(due, None)
                now_s = self._now_s()
            if next_s is not None and now_s >= run.stop_s <= next_s:
                next_s = None
            self._expire(now_s)
            self.wire.flush()
            self._wait(min(tick_s, next_s) if next_s is not None else tick_s)
            now_s = self._now_s()

    def keep_in_flight(self, clients: int, duration_s: float, run: Run) -> None:
        """Keep so many requests in flight for a time, then wait for every answer."""
        self.start_s = run.start_s
        while (now_s := self._now_s()) < 0.0:
            time.sleep(-now_s)
        self._free, tick_s = clients, 0.0
        while (ends_s := min(duration_s, run.stop_s)) > now_s or self._under_way:
            if now_s >= tick_s:
                run.tick(self.transcript)
                tick_s = now_s + _TICK_S
            while self._pauses and self._pauses[0] <= now_s:
                self._pauses.popleft()
                self._free += 1
            burst = min(self._free, _BURST) if now_s < ends_s else 0
            self._free -= burst
            for _ in range(burst):
                now_s = self._now_s()
                self._send(now_s, now_s)
            self._expire(now_s)
            self.wire.flush()
            more = self._free and now_s < ends_s
            self._wait(
                0.0 if more else min(tick_s, *self._pauses, ends_s if now_s < ends_s else tick_s)
            )
            now_s = self._now_s()

    def _send(self, due_s: float, now_s: float) -> None:
        sample = next(self.order)
        row = self.transcript.add_request(due_s, sample, now_s)
        self._under_way.add(row)
        self._deadlines.append((now_s + self.timeout_s, row))
        self.wire.send(row, self.requests[sample])

    def _expire(self, now_s: float) -> None:
        deadlines, under_way = self._deadlines, self._under_way
        while deadlines and (deadlines[0][1] not in under_way or deadlines[0][0] <= now_s):
            _, row = deadlines.popleft()
            if row in under_way:
                self.wire.give_up(row)
                self.answered(row, Response("DEADLINE_EXCEEDED", "", None))

    def _wait(self, until_s: float) -> None:
        """Wait for an answer or a time, and take what has come.

        Raises:
            Exception: what checking a reply raised.
        """
        if self._deadlines:
            until_s = min(until_s, self._deadlines[0][0])
        wait_s = until_s - self._now_s()
        if wait_s > 0.0:
            if self.poll.fileno() < _SELECT_FILES:
                if not select.select((self.poll,), (), (), wait_s)[0]:
                    return
                wait_s = 0.0
            events = self.poll.poll(wait_s, _MOST_EVENTS)
        else:
            events = self.poll.poll(0.0, _MOST_EVENTS)
        watched = self.watched
        for number, event in events:
            ready = watched.get(number)
            if ready is not None:
                ready(event)
            if self._raised is not None:
                raise self._raised

    def _now_s(self) -> float:
        return time.perf_counter() - self.start_s


@dataclass(frozen=True, slots=True)
class Destination:
    """A server's address, resolved once: looking a name up would stall the loop."""

    family: int
    address: object

    def open(self) -> socket.socket:
        """A non-blocking socket that is being connected.

        Raises:
            OSError: the server refuses, or there are no more file numbers.
        """
        made = socket.socket(self.family, socket.SOCK_STREAM)
        made.setblocking(False)  # noqa: FBT003 - the library's own signature
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            made.connect(self.address)  # type: ignore[arg-type]
        except BlockingIOError:
            pass
        except BaseException:
            made.close()
            raise
        return made


def drop_waiting(waiting: deque[tuple[int, bytes]], row: int) -> None:
    """Take a request that has timed out from those that wait: nearly always the first of them.

    Looking through thousands for each one that times out would make the loop the slowest part.
    """
    for place, (waits, _) in enumerate(waiting):
        if waits == row:
            del waiting[place]
            return


def connected_socket(address: str, timeout_s: float) -> socket.socket | None:
    """A connected non-blocking socket; None if there was no connection in time."""
    host, _, port = address.rpartition(":")
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0.0:
        with suppress(OSError):
            made = socket.create_connection((host.strip("[]"), int(port)), left_s)
            made.setblocking(False)  # noqa: FBT003 - the library's own signature
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        time.sleep(min(_RETRY_S, max(left_s, 0.0)))
    return None


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the collector of cycles, which stops everything for longer than a request takes."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
