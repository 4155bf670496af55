"""One load from several processes: each sends every n-th request of one schedule, on one clock.

The processes are fresh interpreters, never forks, so threads and connections of this process stay
its own. Each ends with its connection to this process. After a load they wait for the next one.
"""

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

import numpy as np

from enginegate.errors import EnginegateError, ServerError
from enginegate.loadgen.transcript import MaturedCounts, SentRequests, Transcript
from enginegate.loadgen.worker_load import RunClock, WorkerLoad, send_load

# Ahead of the run's time 0, and of its stop: long enough for a message to reach every process.
_LEAD_S = 0.05
_STOP_IN_S = 0.25
_START_S = 60.0
# A search's loads follow each other closely, and starting a process takes longer than some of them.
# It waits longer than it is used, so that none ends while it is being given a load.
_REUSED_WITHIN_S, _IDLE_S = 30.0, 60.0
_idle_lock = threading.Lock()
_WORKER = "from enginegate.loadgen.workers import run_worker; run_worker()"


@dataclass(frozen=True, slots=True)
class _Task:
    load: WorkerLoad
    counts: MaturedCounts | None


@dataclass(frozen=True, slots=True)
class _Counts:
    count: int
    over: int


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


_Message: TypeAlias = "_Ready | _Counts | SentRequests | Exception"


def send_from_processes(
    load: WorkerLoad,
    processes: int,
    *,
    counts: MaturedCounts | None = None,
    decided: Callable[[int, int], bool] | None = None,
) -> SentRequests:
    """Send a load from several processes; results are in the order requests were due.

    Args:
        load: the whole load.
        processes: how many.
        counts: of matured requests, if the run may end early.
        decided: from matured requests and those of them over the limit, whether to end now.

    Raises:
        ServerError: no connection could be made, or a process died.
    """
    with _workers(processes) as workers:
        for part, worker in enumerate(workers):
            worker.send(_Task(replace(load, part=part, parts=processes), counts))
        for worker in workers:
            worker.wait_until_ready()
        start_s = time.perf_counter() + _LEAD_S
        for worker in workers:
            worker.send(start_s)
        return _merge(_Collection(workers, start_s, decided).results())


@dataclass(frozen=True, slots=True)
class _Worker:
    process: "subprocess.Popen[bytes]"
    connection: Connection
    started_as: tuple[str, ...]
    owner: int
    idle_since_s: float = 0.0

    def send(self, message: _Task | float) -> None:
        with suppress(ConnectionError):
            self.connection.send(message)

    def receive(self) -> _Message:
        """The worker's next message.

        Raises:
            ServerError: the worker died.
        """
        try:
            message: _Message = self.connection.recv()
        except (EOFError, ConnectionError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            raise ServerError(
                f"A process that sent requests ended with status {self.process.poll()}, so this "
                "load is incomplete. Measure again; if it happens again, find what kills it "
                "(memory?), or set processes to 1."
            ) from error
        if isinstance(message, Exception):
            raise message
        return message

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_START_S):
            raise ServerError(
                f"A process that is to send requests was not ready after {_START_S:g} s. Stop "
                "other programs on this machine, or set processes to 1."
            )
        self.receive()


# Those that wait for a next load, the last used at the end.
_idle: list[_Worker] = []


@dataclass(slots=True)
class _Collection:
    """Listens to every worker until all have sent their results; may end them early, together."""

    workers: Sequence[_Worker]
    start_s: float
    decided: Callable[[int, int], bool] | None

    def results(self) -> list[SentRequests]:
        sent: dict[int, SentRequests] = {}
        counts = [_Counts(0, 0)] * len(self.workers)
        numbers = {id(worker.connection): number for number, worker in enumerate(self.workers)}
        while len(sent) < len(self.workers):
            waiting = [w.connection for n, w in enumerate(self.workers) if n not in sent]
            for connection in wait(waiting):
                number = numbers[id(connection)]
                message = self.workers[number].receive()
                if isinstance(message, SentRequests):
                    sent[number] = message
                elif isinstance(message, _Counts):
                    counts[number] = message
                    self._decide(counts)
        return [sent[number] for number in range(len(self.workers))]

    def _decide(self, counts: Sequence[_Counts]) -> None:
        """Have all workers stop at one moment a little ahead, so that none sends more."""
        total, over = sum(c.count for c in counts), sum(c.over for c in counts)
        if self.decided is None or not self.decided(total, over):
            return
        self.decided = None
        stop_s = time.perf_counter() - self.start_s + _STOP_IN_S
        for worker in self.workers:
            worker.send(stop_s)


def _merge(parts: Sequence[SentRequests]) -> SentRequests:
    order = np.argsort(np.concatenate([part.due_s for part in parts]), kind="stable")
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    return SentRequests(
        due_s=np.concatenate([part.due_s for part in parts])[order],
        sent_s=np.concatenate([part.sent_s for part in parts])[order],
        latency_s=np.concatenate([part.latency_s for part in parts])[order],
        samples=np.concatenate([part.samples for part in parts])[order],
        versions=np.concatenate([part.versions for part in parts])[order],
        errors=dict(errors),
        stop_s=min(part.stop_s for part in parts),
        cpu_share=max(part.cpu_share for part in parts),
    )


@contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    """So many processes; after a load that ended well they wait for the next one."""
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_take_idle() or _start())  # noqa: PERF401 - those there must be ended
        yield workers
    except BaseException:
        _end(workers)
        raise
    now_s = time.monotonic()
    with _idle_lock:
        _idle.extend(replace(worker, idle_since_s=now_s) for worker in workers)


def end_idle_workers() -> None:
    """End the processes that wait for a next load; they also end by themselves."""
    with _idle_lock:
        # After a fork they are the other process's.
        mine = [worker for worker in _idle if worker.owner == os.getpid()]
        _idle.clear()
    _end(mine)


atexit.register(end_idle_workers)


def _take_idle() -> _Worker | None:
    """A process that was used a moment ago, started as one would be started now."""
    with _idle_lock:
        fresh_s = time.monotonic() - _REUSED_WITHIN_S
        usable = [
            worker
            for worker in _idle
            if worker.idle_since_s >= fresh_s
            and worker.started_as == _start_command()
            and worker.owner == os.getpid()
            and worker.process.poll() is None
        ]
        stale = [w for w in _idle if w.owner == os.getpid() and w.idle_since_s < fresh_s]
        taken = usable[-1] if usable else None
        gone = {id(worker) for worker in (*stale, taken) if worker is not None}
        _idle[:] = [worker for worker in _idle if id(worker) not in gone]
    _end(stale)
    return taken


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()


def _start_command() -> tuple[str, ...]:
    """What a process runs, and where it finds its modules."""
    return (sys.executable, _WORKER, *sys.path)


def _start() -> _Worker:
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _WORKER, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for this process to handle.
            start_new_session=True,
        )
    return _Worker(process, Connection(parent_end.detach()), _start_command(), os.getpid())


def run_worker() -> None:
    """Main function of a worker: takes tasks from the connection that it was started with."""
    connection = Connection(int(sys.argv[1]))
    try:
        while connection.poll(_IDLE_S):
            task = connection.recv()
            # The last run's end may have crossed its results on the way.
            if isinstance(task, _Task):
                clock = _WorkerClock(connection=connection, counts=task.counts)
                connection.send(send_load(task.load, Transcript(), clock))
    except (EOFError, ConnectionError):
        # The first process is gone, and with it all that this one works for.
        os._exit(1)
    except EnginegateError as error:
        connection.send(error)


@dataclass(slots=True)
class _WorkerClock(RunClock):
    """A worker's run: the first process starts and stops it."""

    connection: Connection | None = None
    counts: MaturedCounts | None = None

    def begin(self) -> None:
        if self.connection is not None:
            self.connection.send(_Ready())
            self.start_s = self.connection.recv()

    def tick(self, transcript: Transcript) -> None:
        if self.connection is None:
            return
        if self.counts is not None:
            self.counts.update(transcript, self.now_s())
            self.connection.send(_Counts(self.counts.count, self.counts.over))
        if self.connection.poll():
            self.stop_s = self.connection.recv()
