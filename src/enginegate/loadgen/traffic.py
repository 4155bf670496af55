"""Offers a load to a server, whether or not it keeps up, and keeps every outcome.

Latency counts from when a request was *meant* to leave, so a server that stalls is charged for the
requests that piled up behind the stall. Not in scope: judging the numbers (measuring/measure.py).
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from enginegate.data import DataSet, Tensors
from enginegate.errors import InputError
from enginegate.loadgen.grpc_message import encode_request
from enginegate.loadgen.http_message import http_request
from enginegate.loadgen.schedule import batches, load_pattern, shuffled
from enginegate.loadgen.shared_memory import in_shared_memory, is_here
from enginegate.loadgen.transcript import MaturedCounts, OnReply, SentRequests, Transcript
from enginegate.loadgen.worker_load import RunClock, WorkerLoad, send_load
from enginegate.loadgen.workers import send_from_processes
from enginegate.measurement import ClosedLoad, Generator, Load, SharedMemory, WireProtocol

# What one process sends with a third of a core or less, so that it is on time on a busy machine.
_RATE_A_PROCESS = 6000.0
# More in one process make it the slowest part; each process takes a core from the server.
_CLIENTS_A_PROCESS = 64
# Of a run, for its first and last part: where its least late requests are looked for.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in wire form, the order they are drawn in, and recorded arrivals.

    Attributes:
        requests: made once, request ``i`` from sample ``i``.
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
            encode_request(model, sample, request_id=str(index))
            for index, sample in enumerate(samples)
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
            order_seed: also of the combination of sizes and samples.
            batch_sizes: samples a request, each as often as it is named: of ``(1, 1, 1, 8)``
                every fourth request holds eight. Its id is its first sample's.

        Raises:
            InputError: a batch size below 1, or none.
        """
        requests = tuple(
            encode_request(
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
        shared_memory: where input tensors are, and outputs of a known size unless answers are
            checked; the server must be on this machine. CUDA: GPU 0.
        processes: that send; 0: one for 6,000 requests a second, or 64 clients; at most half of
            the cores, the others are the server's, or all but one where the server is on another
            machine.
        control: gRPC ``HOST:PORT``; needed for shared memory when requests travel over HTTP.
    """

    protocol: WireProtocol = "grpc"
    shared_memory: SharedMemory = "none"
    processes: int = 0
    control: str = ""

    def processes_for(self, load: Load | ClosedLoad, *, cores: int, beside_server: bool) -> int:
        """How many processes send this load.

        Args:
            load: what is sent.
            cores: of this machine, that this process may use.
            beside_server: whether the server runs on this machine too.
        """
        if self.processes > 0:
            return self.processes
        wanted = (
            load.clients / _CLIENTS_A_PROCESS
            if isinstance(load, ClosedLoad)
            else load.rate_per_s / _RATE_A_PROCESS
        )
        most = cores // 2 if beside_server else cores - 1
        return max(1, min(most, math.ceil(wanted)))


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
        load: as it was asked for.
        due_s: when each should have left, seconds from the start, shape ``(R,)``. In a closed loop:
            when its client was free to send it.
        sent_s: when it left.
        latency_s: from due to answered; infinite for a failure.
        samples: which sample was sent.
        versions: model version that answered; empty for a failure.
        errors: status, by its gRPC name -> failures.
        cpu_share: processor over wall time of the busiest sender; near 1 the numbers are its own.
        lasted_s: for how long requests were sent; less than the load's when decided early.
        missing: requests that were due then too, of which the sender tells nothing.
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
    missing: int = 0

    @classmethod
    def of(cls, load: Load | ClosedLoad, sent: SentRequests, *, processes: int = 1) -> "LoadResult":
        """Of requests that this program's own generator sent."""
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
        """Rate sent over rate asked for; 1 is perfect, also of fewer than two moments.

        Between the least late request of the first quarter and that of the last: one late request
        at either end says nothing about the rate.
        """
        if not len(self.due_s):
            return 1.0
        quarter = max(1, len(self.due_s) // _PARTS)
        first = int(np.argmin(self.late_s[:quarter]))
        last = len(self.due_s) - quarter + int(np.argmin(self.late_s[-quarter:]))
        asked_s = self.due_s[last] - self.due_s[first]
        if asked_s <= 0.0:
            return 1.0
        return float(asked_s / max(self.sent_s[last] - self.sent_s[first], 1e-9))


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
        InputError: there is no such load pattern, a replay has no recorded arrivals, or
            ``on_reply`` is given with several processes.
        ServerError: no connection could be made, memory could not be shared, or a process that
            sent requests has died. Failing requests are not errors; they are kept.
    """
    sending = sending or Transport()
    processes = 1
    if on_reply is None:
        cores, beside_server = len(os.sched_getaffinity(0)), is_here(address)
        processes = sending.processes_for(load, cores=cores, beside_server=beside_server)
    if on_reply is not None and sending.processes > 1:
        raise InputError(
            f"Replies can be checked in one process only, not in {sending.processes}. Set "
            "processes to 1, or leave out on_reply."
        )
    work = whole_load(address, traffic, load, sending.protocol)
    work.due()  # A schedule that cannot be made is refused before anything starts.
    control = address if sending.protocol == "grpc" else sending.control
    shared = in_shared_memory(
        control, work.requests, sending.shared_memory, outputs=on_reply is None
    )
    with shared as encoded:
        is_http = sending.protocol == "http"
        requests = tuple(http_request(address, each) for each in encoded) if is_http else encoded
        work = replace(work, requests=requests)
        counts = None if ends is None else MaturedCounts(ends.limit_s, ends.skip_s)
        if processes > 1:
            decided = ends.decided if ends else None
            sent = send_from_processes(work, processes, counts=counts, decided=decided)
        else:
            sent = send_load(work, Transcript(on_reply), _EarlyEndClock(counts=counts, ends=ends))
    return LoadResult.of(load, sent, processes=processes)


def whole_load(
    address: str, traffic: Traffic, load: Load | ClosedLoad, protocol: WireProtocol = "grpc"
) -> WorkerLoad:
    """A load as one process would send all of it.

    Raises:
        InputError: there is no such load pattern.
    """
    order_seed = load.order_seed if isinstance(load, Load) else load.seed
    return WorkerLoad(
        address=address,
        protocol=protocol,
        requests=traffic.requests,
        order_seed=traffic.order_seed if order_seed is None else order_seed,
        timeout_s=traffic.timeout_s,
        load=load,
        pattern=load_pattern(load.arrivals) if isinstance(load, Load) else None,
        recorded_s=traffic.arrivals_s,
    )


@dataclass(slots=True)
class _EarlyEndClock(RunClock):
    """Ends a run of one process when it is decided."""

    counts: MaturedCounts | None = None
    ends: EarlyEnd | None = None

    def tick(self, transcript: Transcript) -> None:
        if self.counts is None or self.ends is None or math.isfinite(self.stop_s):
            return
        now_s = self.now_s()
        self.counts.update(transcript, now_s)
        if self.ends.decided(self.counts.count, self.counts.over):
            self.stop_s = now_s
