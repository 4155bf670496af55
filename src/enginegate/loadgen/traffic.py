"""Offers a load to a server, whether or not it keeps up, and keeps every outcome.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Not in scope: what the numbers mean (measure.py).
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginegate.data import DataSet, Tensors
from enginegate.errors import InputError
from enginegate.loadgen.grpc_sender import prepare
from enginegate.loadgen.http_sender import http_request
from enginegate.loadgen.sample_order import batches, shuffled
from enginegate.loadgen.schedule import achieved_share
from enginegate.loadgen.shared_memory import shared
from enginegate.loadgen.transcript import MaturedCounts, OnReply, Sent, Transcript
from enginegate.loadgen.worker_load import RunClock, WorkerLoad, send
from enginegate.loadgen.workers import spread
from enginegate.measurement import ClosedLoad, Generator, Load, Protocol, SharedMemory

# Half of what one Python process was shown to send with clean tails on two cores.
_RATE_A_PROCESS = 1500.0
_CLIENTS_A_PROCESS = 64


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent: requests in wire form, the order they are drawn in, and recorded arrivals.

    Attributes:
        requests: made once; sample ``i`` of whatever they were made from.
        order_seed: seed of the order, apart from the seed of the arrivals.
        timeout_s: a request without an answer by then has failed.
        arrivals_s: recorded arrival times, seconds from the first; a replay needs them.
    """

    requests: tuple[bytes, ...]
    order_seed: int = 0
    timeout_s: float = 5.0
    arrivals_s: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        model: str,
        samples: Sequence[Tensors],
        *,
        order_seed: int = 0,
        timeout_s: float = 5.0,
        arrivals_s: tuple[float, ...] | None = None,
    ) -> "Traffic":
        """Requests from samples, each with its batch axis in front; their sizes may differ."""
        requests = tuple(
            prepare(model, sample, request_id=str(index)) for index, sample in enumerate(samples)
        )
        return cls(requests, order_seed, timeout_s, arrivals_s)

    @classmethod
    def from_data(
        cls,
        model: str,
        data: DataSet,
        *,
        order_seed: int = 0,
        timeout_s: float = 5.0,
        arrivals_s: tuple[float, ...] | None = None,
        batch_sizes: tuple[int, ...] = (1,),
    ) -> "Traffic":
        """One request for each sample of a data set, under the sample's own id; or larger ones.

        Args:
            model: its name in Triton.
            data: every sample is used at least once.
            order_seed: also of how sizes and samples are put together.
            batch_sizes: samples a request, each as often as it is named: of ``(1, 1, 1, 8)``
                every fourth request holds eight. Its id is its first sample's.

        Raises:
            InputError: a batch size below 1, or none.
        """
        requests = tuple(
            prepare(
                model,
                {name: array[rows] for name, array in data.inputs.items()},
                request_id=str(data.ids[rows[0]]),
            )
            for rows in batches(len(data), batch_sizes, order_seed)
        )
        return cls(requests, order_seed, timeout_s, arrivals_s)

    def order(self) -> Iterator[int]:
        """Sample indices without end: every sample once in each round, shuffled anew."""
        return shuffled(len(self.requests), self.order_seed)


@dataclass(frozen=True, slots=True)
class Transport:
    """How requests travel.

    Attributes:
        protocol: with ``http``, the address of a load is the server's HTTP address.
        shared_memory: where input tensors are; the server must be on this machine. CUDA: GPU 0.
        processes: that send; 0: one for 1,500 requests a second or 64 clients, at most one less
            than there are cores.
        control: gRPC ``HOST:PORT``; needed for shared memory when requests travel over HTTP.
    """

    protocol: Protocol = "grpc"
    shared_memory: SharedMemory = "none"
    processes: int = 0
    control: str = ""

    def processes_for(self, load: Load | ClosedLoad) -> int:
        """How many processes send this load."""
        if self.processes > 0:
            return self.processes
        wanted = (
            load.clients / _CLIENTS_A_PROCESS
            if isinstance(load, ClosedLoad)
            else load.rate_per_s / _RATE_A_PROCESS
        )
        return max(1, min(len(os.sched_getaffinity(0)) - 1, math.ceil(wanted)))


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """When a run may end before its time.

    Attributes:
        limit_s: the SLO's latency, seconds.
        skip_s: requests due before this are warm-up and are not counted.
        decided: asked about every 0.1 s, with the requests that have matured (`MaturedCounts`) and
            how many of them were over the limit or failed: whether to end now.
    """

    limit_s: float
    skip_s: float
    decided: Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every request of one run, in the order it was due. R requests.

    Attributes:
        load: what was asked for.
        due_s: when each should have left, seconds from the start, shape ``(R,)``. In a closed loop:
            when its client was free to send it.
        sent_s: when it left.
        latency_s: from due to answered; infinite for a failure.
        samples: which sample was sent.
        versions: model version that answered; empty for a failure.
        errors: status, by its gRPC name -> failures.
        cpu_share: processor over wall time of the busiest sender; near 1 the numbers are its own.
        lasted_s: how long was sent; less than asked when the run was decided early.
    """

    load: Load | ClosedLoad
    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    samples: NDArray[np.int64]
    versions: NDArray[np.str_]
    errors: dict[str, int]
    cpu_share: float
    lasted_s: float
    generator: Generator = field(default_factory=Generator)

    @classmethod
    def of(cls, load: Load | ClosedLoad, sent: Sent, *, processes: int = 1) -> "LoadResult":
        """What this program's own generator sent, from so many processes."""
        return cls(
            load=load,
            due_s=sent.due_s,
            sent_s=sent.sent_s,
            latency_s=sent.latency_s,
            samples=sent.samples,
            versions=sent.versions,
            errors=sent.errors,
            cpu_share=sent.cpu_share,
            lasted_s=min(load.duration_s, sent.stop_s),
            generator=Generator(
                processes=processes, cpu_share=float(np.nan_to_num(sent.cpu_share))
            ),
        )

    @property
    def failed(self) -> int:
        """Requests without a good answer."""
        return int(np.isinf(self.latency_s).sum())

    @property
    def late_s(self) -> NDArray[np.float64]:
        """How late the generator itself was, shape ``(R,)``."""
        return self.sent_s - self.due_s

    @property
    def achieved_share(self) -> float:
        """Rate sent over rate asked for; 1 is perfect."""
        return achieved_share(self.due_s, self.sent_s)


def run_load(
    address: str,
    traffic: Traffic,
    load: Load | ClosedLoad,
    *,
    on_reply: OnReply | None = None,
    ends: EarlyEnd | None = None,
    sending: Transport | None = None,
) -> LoadResult:
    """Offer a load and wait for the last answer. May be called from any thread.

    Args:
        address: the server's ``HOST:PORT`` for the protocol, gRPC unless said otherwise.
        traffic: what to send.
        load: open loop or closed loop, for how long, and its seeds.
        on_reply: called with sample index and reply of every success; what it raises ends the run.
            All requests are then sent by this process.
        ends: when the run may end before its time.
        sending: how requests travel.

    Raises:
        InputError: a replay without recorded arrivals, or ``on_reply`` with several processes.
        ServerError: no connection could be made, memory could not be shared, or a process that
            sent requests has died. Failing requests are not errors; they are kept.
    """
    sending = sending or Transport()
    processes = 1 if on_reply is not None else sending.processes_for(load)
    if on_reply is not None and sending.processes > 1:
        raise InputError(
            f"Replies can be looked at in one process only, not in {sending.processes}. Set "
            "processes to 1, or leave out on_reply."
        )
    with _travelling(address, traffic.requests, sending) as requests:
        errand = _errand(address, traffic, load, requests, sending.protocol)
        errand.due()  # A schedule that cannot be made is refused before anything starts.
        settled = None if ends is None else MaturedCounts(ends.limit_s, ends.skip_s)
        if processes > 1:
            decided = ends.decided if ends else None
            found = spread(errand, processes, settled=settled, decided=decided)
        else:
            found = send(errand, Transcript(on_reply), _Deciding(settled=settled, ends=ends))
    return LoadResult.of(load, found, processes=processes)


@contextmanager
def _travelling(
    address: str, requests: tuple[bytes, ...], sending: Transport
) -> Iterator[tuple[bytes, ...]]:
    """The requests as they are written to a connection."""
    control = address if sending.protocol == "grpc" else sending.control
    with shared(control, requests, sending.shared_memory) as known:
        if sending.protocol == "http":
            yield tuple(http_request(address, request) for request in known)
        else:
            yield known


def _errand(
    address: str,
    traffic: Traffic,
    load: Load | ClosedLoad,
    requests: tuple[bytes, ...],
    protocol: Protocol,
) -> WorkerLoad:
    order_seed = load.seed if isinstance(load, ClosedLoad) else load.order_seed
    return WorkerLoad(
        address=address,
        protocol=protocol,
        requests=requests,
        order_seed=traffic.order_seed if order_seed is None else order_seed,
        timeout_s=traffic.timeout_s,
        load=load,
        recorded_s=traffic.arrivals_s,
    )


@dataclass(slots=True)
class _Deciding(RunClock):
    """Ends a run of one process when it is decided."""

    settled: MaturedCounts | None = None
    ends: EarlyEnd | None = None

    def look(self, transcript: Transcript) -> None:
        if self.settled is None or self.ends is None or math.isfinite(self.stop_s):
            return
        now_s = self.now_s()
        self.settled.look(transcript, now_s)
        if self.ends.decided(self.settled.count, self.settled.over):
            self.stop_s = now_s
