"""One load from several processes: each sends every n-th request of one schedule, on one clock.

They are fresh interpreters, never forks, so threads and connections of this process stay its own.
Each ends when this process lets go of it, and by itself when this process dies.
"""

import os
import pickle
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

import numpy as np

from enginegate.errors import EnginegateError, ServerError
from enginegate.loadgen.transcript import MaturedCounts, Sent, Transcript
from enginegate.loadgen.worker_load import RunClock, WorkerLoad, send

_LEAD_S = 0.05
_STOP_IN_S = 0.25
_START_S = 60.0
_WORKER = "from enginegate.loadgen.workers import work; work()"


@dataclass(frozen=True, slots=True)
class _Task:
    errand: WorkerLoad
    settled: MaturedCounts | None


@dataclass(frozen=True, slots=True)
class _Counts:
    count: int
    over: int


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


_Said: TypeAlias = "_Ready | _Counts | Sent | Exception"


def spread(
    errand: WorkerLoad,
    processes: int,
    *,
    settled: MaturedCounts | None = None,
    decided: Callable[[int, int], bool] | None = None,
) -> Sent:
    """Send a load from several processes; results are in the order requests were due.

    Args:
        errand: the whole load.
        processes: how many.
        settled: what to count, if the run may end early.
        decided: from settled requests and those of them over the limit, whether to end now.

    Raises:
        ServerError: no connection could be made, or a process died.
    """
    with _workers(processes) as workers:
        for part, worker in enumerate(workers):
            worker.say(_Task(replace(errand, part=part, parts=processes), settled))
        for worker in workers:
            worker.expect_ready()
        start_s = time.perf_counter() + _LEAD_S
        for worker in workers:
            worker.say(start_s)
        return _merged(_Collection(workers, start_s, decided).results())


@dataclass(frozen=True, slots=True)
class _Worker:
    process: "subprocess.Popen[bytes]"
    line: Connection

    def say(self, what: _Task | float) -> None:
        with suppress(ConnectionError):
            self.line.send(what)

    def hear(self) -> _Said:
        """What it said next.

        Raises:
            ServerError: it died.
        """
        try:
            said: _Said = self.line.recv()
        except (EOFError, ConnectionError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            raise ServerError(
                f"A process that sent requests ended with status {self.process.poll()}, so this "
                "load is incomplete. Measure again; if it happens again, look for what kills it "
                "(memory?), or set processes to 1."
            ) from error
        if isinstance(said, Exception):
            raise said
        return said

    def expect_ready(self) -> None:
        if not self.line.poll(_START_S):
            raise ServerError(
                f"A process that is to send requests was not ready after {_START_S:g} s. Stop what "
                "else runs on this machine, or set processes to 1."
            )
        self.hear()


@dataclass(slots=True)
class _Collection:
    """Listens to every worker until all have sent their results; may end them early, together."""

    workers: Sequence[_Worker]
    start_s: float
    decided: Callable[[int, int], bool] | None

    def results(self) -> list[Sent]:
        found: dict[int, Sent] = {}
        counts = [_Counts(0, 0)] * len(self.workers)
        lines = {id(worker.line): number for number, worker in enumerate(self.workers)}
        while len(found) < len(self.workers):
            waiting = [w.line for n, w in enumerate(self.workers) if n not in found]
            for line in wait(waiting):
                number = lines[id(line)]
                said = self.workers[number].hear()
                if isinstance(said, Sent):
                    found[number] = said
                elif isinstance(said, _Counts):
                    counts[number] = said
                    self._decide(counts)
        return [found[number] for number in range(len(self.workers))]

    def _decide(self, counts: Sequence[_Counts]) -> None:
        """Tell all workers one moment to stop at, a little ahead, so that none sends more."""
        total, over = sum(c.count for c in counts), sum(c.over for c in counts)
        if self.decided is None or not self.decided(total, over):
            return
        self.decided = None
        stop_s = time.perf_counter() - self.start_s + _STOP_IN_S
        for worker in self.workers:
            worker.say(stop_s)


def _merged(parts: Sequence[Sent]) -> Sent:
    order = np.argsort(np.concatenate([part.due_s for part in parts]), kind="stable")
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    return Sent(
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
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_start())  # noqa: PERF401 - those that started must be ended
        yield workers
    finally:
        for worker in workers:
            worker.line.close()
            worker.process.kill()
        for worker in workers:
            worker.process.wait()


def _start() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _WORKER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            # Ctrl-C is ours to handle.
            start_new_session=True,
        )
    return _Worker(process, Connection(ours.detach()))


def work() -> None:
    """What a worker runs: takes its task from the connection that it was started with."""
    line = Connection(int(sys.argv[1]))
    try:
        task: _Task = line.recv()
        line.send(_share(task, line))
    except (EOFError, ConnectionError):
        # Nobody is left to tell.
        os._exit(1)
    except EnginegateError as error:
        line.send(error)


def _share(task: _Task, line: Connection) -> Sent:
    return send(task.errand, Transcript(), _Told(line=line, settled=task.settled))


@dataclass(slots=True)
class _Told(RunClock):
    """A worker's run: starts and stops when the first process says so."""

    line: Connection | None = None
    settled: MaturedCounts | None = None

    def begin(self) -> None:
        if self.line is not None:
            self.line.send(_Ready())
            self.start_s = self.line.recv()

    def look(self, transcript: Transcript) -> None:
        if self.line is None:
            return
        if self.settled is not None:
            self.settled.look(transcript, self.now_s())
            self.line.send(_Counts(self.settled.count, self.settled.over))
        if self.line.poll():
            self.stop_s = self.line.recv()
