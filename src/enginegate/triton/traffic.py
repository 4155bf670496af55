"""Sends requests on a schedule, whether or not the server keeps up, and keeps every outcome.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Not in scope: what the numbers mean (measure.py).
"""

import asyncio
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginegate.data import DataSet, Tensors
from enginegate.errors import ServerError
from enginegate.evidence import Load
from enginegate.triton.answers import Reply
from enginegate.triton.client import Answer, AsyncAsker, prepare

OnReply = Callable[[int, Reply], None]

_CONNECT_S = 10.0
_LEAD_S = 0.02
_SELECT_FILES = 1000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent: requests in wire form, and the order they are drawn in.

    Attributes:
        requests: made once; sample ``i`` of whatever they were made from.
        order_seed: seed of the order, apart from the seed of the arrivals.
        timeout_s: a request without an answer by then has failed.
    """

    requests: tuple[bytes, ...]
    order_seed: int = 0
    timeout_s: float = 5.0

    @classmethod
    def of(
        cls, model: str, samples: Sequence[Tensors], *, order_seed: int = 0, timeout_s: float = 5.0
    ) -> "Traffic":
        """Requests from samples, each with its batch axis in front (size 1 for single requests)."""
        requests = tuple(
            prepare(model, sample, request_id=str(index)) for index, sample in enumerate(samples)
        )
        return cls(requests, order_seed, timeout_s)

    @classmethod
    def from_data(
        cls, model: str, data: DataSet, *, order_seed: int = 0, timeout_s: float = 5.0
    ) -> "Traffic":
        """One request for each sample of a data set, under the sample's own id."""
        requests = tuple(
            prepare(model, sample, request_id=str(name))
            for name, sample in zip(data.ids, data.batches(1), strict=True)
        )
        return cls(requests, order_seed, timeout_s)

    def order(self) -> Iterator[int]:
        """Sample indices without end: every sample once in each round, shuffled anew."""
        source = np.random.default_rng(self.order_seed)
        while True:
            yield from source.permutation(len(self.requests)).tolist()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every request of one run, in the order it was due. R requests.

    Attributes:
        load: what was asked for.
        due_s: when each should have left, seconds from the start, shape ``(R,)``.
        sent_s: when it left.
        latency_s: from due to answered; infinite for a failure.
        samples: which sample was sent.
        versions: model version that answered; empty for a failure.
        errors: gRPC status -> failures.
        cpu_share: processor time of this process over wall time; near 1 the numbers are ours.
    """

    load: Load
    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    samples: NDArray[np.int64]
    versions: NDArray[np.str_]
    errors: dict[str, int]
    cpu_share: float

    @property
    def failed(self) -> int:
        """Requests without a good answer."""
        return int(np.isinf(self.latency_s).sum())

    @property
    def late_s(self) -> NDArray[np.float64]:
        """How late the generator itself was, shape ``(R,)``."""
        return self.sent_s - self.due_s


def run_load(
    address: str, traffic: Traffic, load: Load, *, on_reply: OnReply | None = None
) -> LoadResult:
    """Offer a Poisson load and wait for the last answer. May be called from any thread.

    Args:
        address: the server's gRPC ``HOST:PORT``.
        traffic: what to send.
        load: rate, duration and seed of the arrivals.
        on_reply: called with sample index and reply of every success; what it raises ends the run.

    Raises:
        ServerError: no connection could be made. Failing requests are not errors; they are kept.
    """
    transcript = Transcript(on_reply)
    started, cpu = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(drive(address, traffic, poisson(load), transcript))
    wall_s = time.perf_counter() - started
    return transcript.result(load, cpu_share=(time.process_time() - cpu) / wall_s)


def poisson(load: Load) -> Iterator[float]:
    """Arrival times of a Poisson process, in seconds, until the load's duration is over."""
    source = np.random.default_rng(load.seed)
    at = 0.0
    while True:
        for gap in source.exponential(1.0 / load.rate_per_s, 1024):
            at += float(gap)
            if at >= load.duration_s:
                return
            yield at


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that wakes up in time: epoll and poll round up to whole milliseconds.

    ``select`` does not, but takes only low file numbers; without them the rounding must do.
    """
    with socket.socket() as probe:
        fits = probe.fileno() < _SELECT_FILES
    selector = selectors.SelectSelector() if fits else selectors.DefaultSelector()
    return asyncio.SelectorEventLoop(selector)


@dataclass(slots=True)
class Transcript:
    """What was sent and came back, in columns; filled by one event loop."""

    on_reply: OnReply | None = None
    due_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def open(self, due_s: float, sample: int) -> int:
        """Note a request that is due, as failed until its answer comes; returns its row."""
        self.due_s.append(due_s)
        self.sent_s.append(due_s)
        self.latency_s.append(np.inf)
        self.samples.append(sample)
        self.versions.append("")
        return len(self.due_s) - 1

    def close(self, row: int, answer: Answer, now_s: float) -> None:
        """Note what came back."""
        if answer.error:
            self.errors[answer.error] += 1
            return
        self.latency_s[row] = now_s - self.due_s[row]
        self.versions[row] = answer.version
        if self.on_reply is not None:
            self.on_reply(self.samples[row], answer.reply())

    def result(self, load: Load, *, cpu_share: float) -> LoadResult:
        """The columns as arrays; rows that are being opened by another thread are left out."""
        rows = len(self.versions)
        return LoadResult(
            load=load,
            due_s=np.array(self.due_s[:rows], np.float64),
            sent_s=np.array(self.sent_s[:rows], np.float64),
            latency_s=np.array(self.latency_s[:rows], np.float64),
            samples=np.array(self.samples[:rows], np.int64),
            versions=np.array(self.versions[:rows], np.str_),
            errors=dict(self.errors),
            cpu_share=cpu_share,
        )


async def drive(
    address: str,
    traffic: Traffic,
    arrivals: Iterator[float],
    transcript: Transcript,
    *,
    until: asyncio.Event | None = None,
) -> None:
    """Send at the given times, until they end or ``until`` is set; then wait for every answer."""
    asker = AsyncAsker(address)
    try:
        if not await asker.connect(_CONNECT_S):
            raise ServerError(
                f"No connection to Triton at {address} within {_CONNECT_S:g} s, so no load was "
                "sent. Check that the server runs and that this is its gRPC address."
            )
        async with asyncio.TaskGroup() as group:
            pacer = group.create_task(_pace(group, asker, traffic, arrivals, transcript))
            if until is not None:
                group.create_task(_cancel_when(until, pacer))
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    finally:
        await asker.close()


async def _cancel_when(event: asyncio.Event, pacer: "asyncio.Task[None]") -> None:
    await event.wait()
    pacer.cancel()


async def _pace(
    group: asyncio.TaskGroup,
    asker: AsyncAsker,
    traffic: Traffic,
    arrivals: Iterator[float],
    transcript: Transcript,
) -> None:
    clock, order = time.perf_counter, traffic.order()
    start_s = clock() + _LEAD_S

    async def send(row: int, request: bytes) -> None:
        transcript.sent_s[row] = clock() - start_s
        answer = await asker.ask(request, traffic.timeout_s)
        transcript.close(row, answer, clock() - start_s)

    for due_s in arrivals:
        await asyncio.sleep(max(0.0, start_s + due_s - clock()))
        sample = next(order)
        group.create_task(send(transcript.open(due_s, sample), traffic.requests[sample]))
