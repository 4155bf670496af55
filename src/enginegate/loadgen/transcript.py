"""Requests of a run and their answers, in columns."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginegate.loadgen.grpc_message import Response
from enginegate.triton.types import Reply

OnReply = Callable[[int, Reply], None]


@dataclass(frozen=True, slots=True)
class SentRequests:
    """Requests and their fate, in the order they were due. R requests, shapes ``(R,)``.

    Attributes:
        stop_s: from when nothing was sent any more; infinite if sent to the end.
        cpu_share: processor time over wall time of the busiest sending process; NaN: not known.
    """

    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    samples: NDArray[np.int64]
    versions: NDArray[np.str_]
    errors: dict[str, int]
    stop_s: float = math.inf
    cpu_share: float = math.nan


@dataclass(slots=True)
class Transcript:
    """Requests and their answers as they come; filled by one event loop."""

    on_reply: OnReply | None = None
    due_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add_request(self, due_s: float, sample: int, sent_s: float) -> int:
        """Add a request that leaves, as failed until its answer comes; returns its row."""
        self.due_s.append(due_s)
        self.sent_s.append(sent_s)
        self.latency_s.append(np.inf)
        self.samples.append(sample)
        self.versions.append("")
        return len(self.due_s) - 1

    def add_answer(self, row: int, answer: Response, now_s: float) -> None:
        """Add the answer to a request."""
        if answer.error:
            self.errors[answer.error] += 1
            return
        self.latency_s[row] = now_s - self.due_s[row]
        self.versions[row] = answer.version
        if self.on_reply is not None:
            self.on_reply(self.samples[row], answer.reply())

    def sent(self, *, stop_s: float = math.inf, cpu_share: float = math.nan) -> SentRequests:
        """The columns as arrays, without a row that another thread is adding."""
        rows = len(self.versions)
        return SentRequests(
            due_s=np.array(self.due_s[:rows], np.float64),
            sent_s=np.array(self.sent_s[:rows], np.float64),
            latency_s=np.array(self.latency_s[:rows], np.float64),
            samples=np.array(self.samples[:rows], np.int64),
            versions=np.array(self.versions[:rows], np.str_),
            errors=dict(self.errors),
            stop_s=stop_s,
            cpu_share=cpu_share,
        )


@dataclass(slots=True)
class MaturedCounts:
    """Counts requests whose outcome is final: due at least the limit ago, warm-up left out.

    Each of them was answered within the limit, was answered late, has failed, or is over the limit
    by now. Which requests are counted depends on the clock alone, never on their answers, so fast
    answers are not counted sooner than slow ones.
    """

    limit_s: float
    skip_s: float
    count: int = 0
    over: int = 0
    row: int = 0

    def update(self, transcript: Transcript, now_s: float) -> None:
        """Count the requests that have matured since the last update."""
        due_s, latency_s = transcript.due_s, transcript.latency_s
        while self.row < len(due_s) and due_s[self.row] <= now_s - self.limit_s:
            if due_s[self.row] >= self.skip_s:
                self.count += 1
                self.over += latency_s[self.row] > self.limit_s
            self.row += 1
