"""Records requests that this program sends itself, with their answers.

No trace is needed, so every type that Triton serves can be recorded, and values are exact.
Redaction, slices and limits of the policy apply as they do to live requests.
"""

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from enginegate.data import DataSet
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import EarlyEnd, LoadResult, Traffic, run_load
from enginegate.measurement import Load
from enginegate.policy.recording import Shadow
from enginegate.shadow.record import RecordingTarget, TraceLimits
from enginegate.shadow.record_batch import NO_LABEL, STAGES, RecordBatch
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import SampleInfo, SampleOrigin, SampleWriter
from enginegate.shadow.store import new_sample, sample_info
from enginegate.triton.types import Reply

_NS = 1e9


def record_sent(
    address: str, traffic: DataSet, wanted: Shadow, load: Load, target: RecordingTarget
) -> SampleInfo:
    """Send inputs at a rate, and record one request in so many with its answer.

    Args:
        address: gRPC ``HOST:PORT`` of the server.
        traffic: inputs to send, one request a sample; the recorded rows have its slices.
        wanted: share, limits and redaction.
        load: rate and longest time; the sending ends once enough was recorded.
        target: where the sample goes, and which model is asked.

    Raises:
        ServerError: a request failed, or no connection could be made.
        DataError: nothing was recorded, or the redaction does not fit the inputs.
    """
    answers = _SampledAnswers(TraceLimits.of(wanted), traffic)
    requests = Traffic.from_data(target.model, traffic)
    ends = EarlyEnd(limit_s=load.duration_s, skip_s=0.0, decided=lambda *_: answers.done.is_set())
    sent = run_load(address, requests, load, on_reply=answers.add, ends=ends)
    if sent.failed:
        raise ServerError(
            f"{sent.failed} of {len(sent.due_s)} requests to {address} failed while the shadow "
            f"sample was recorded: {sent.errors}."
        )
    origin = SampleOrigin(target.text, target.model, datetime.now(tz=UTC), wanted.trace_rate)
    with new_sample(target.path, origin, Preparation.of(wanted)) as writer:
        answers.write(writer, sent)
    return sample_info(target.path)


@dataclass(frozen=True, slots=True)
class _Answered:
    """One request that is recorded.

    Attributes:
        place: how many were answered before it.
        row: of the traffic.
    """

    place: int
    row: int
    reply: Reply


@dataclass(slots=True)
class _SampledAnswers:
    """One answer in ``one_in``, until a limit is reached."""

    limits: TraceLimits
    traffic: DataSet
    answered: int = 0
    size_bytes: int = 0
    full: bool = False
    items: list[_Answered] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def add(self, row: int, reply: Reply) -> None:
        """Count one answer, and keep it if it is its turn."""
        place, self.answered = self.answered, self.answered + 1
        if self.done.is_set() or self.answered % self.limits.one_in:
            return
        self.items.append(_Answered(place, row, reply))
        inputs = (array[row] for array in self.traffic.inputs.values())
        self.size_bytes += sum(array.nbytes for array in (*inputs, *reply.outputs.values()))
        self.full = self.size_bytes >= self.limits.max_bytes
        if self.full or len(self.items) >= self.limits.max_requests:
            self.done.set()

    def write(self, writer: SampleWriter, sent: LoadResult) -> None:
        """Write the kept answers, one request after the other."""
        # Answers were counted in the order in which they came.
        in_order = np.argsort(sent.due_s + sent.latency_s, kind="stable")
        for item in self.items:
            sent_s = float(sent.sent_s[in_order[item.place]])
            writer.add(_batch(self.traffic, item.row, item.reply, sent_s))
        writer.capped = self.full


def _batch(traffic: DataSet, row: int, reply: Reply, sent_s: float) -> RecordBatch:
    rows = slice(row, row + 1)
    return RecordBatch(
        inputs={name: np.asarray(array[rows]) for name, array in traffic.inputs.items()},
        outputs=dict(reply.outputs),
        requests=np.zeros(1, np.int64),
        request_ids=traffic.ids[rows],
        arrival_ns=np.array([round(max(sent_s, 0.0) * _NS)], np.int64),
        model_versions=np.array([int(reply.model_version or 0)], np.int64),
        stages_us={stage: np.full(1, np.nan) for stage in STAGES},
        labels=np.full(1, NO_LABEL, np.int64),
        slices={name: column[rows] for name, column in traffic.slices.items()},
    )
