"""What our runner counts on a GPU, where Triton's own counters see half of a request.

There a batch is handed over and answered later: Triton counts it as computed when it was handed
over. The runner tells the rest, and its stages, as counters of the metrics endpoint.
"""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from enginegate.errors import ServerError
from enginegate.triton.metrics import read_metrics
from enginegate.triton.types import Statistics

_FAMILY = "enginegate_runner"
_RENEWED_S = 0.2  # the runner writes its counters every 0.05 s, later where it is busy


class PipelineReading(NamedTuple):
    """Requests answered well, and seconds summed over them from the handing over to the answer."""

    requests: float
    pending_s: float


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """The runner's counters of one model from some moment on.

    Attributes:
        address: of the metrics endpoint; None where it is not known.
        version: counted alone; empty: all of them.
        before: at that moment; None where they could not be read.
    """

    address: str | None
    model: str
    version: str
    before: PipelineReading | None

    @classmethod
    def begin(cls, address: str | None, model: str, version: str = "") -> "PipelineCounts":
        """Count from now on."""
        return cls(address, model, version, _reading(address, model, version))

    def complete(self, counted: Statistics) -> Statistics:
        """Triton's counters of the same time, with what the runner adds to them.

        Where the runner's cannot be read, no executions are counted, so that nobody splits a
        request's time into stages that are not known.
        """
        time.sleep(_RENEWED_S)
        before, now = self.before, _reading(self.address, self.model, self.version)
        if before is None or now is None or now.requests <= before.requests:
            return replace(counted, executions=0, success_ns=0)
        pending_s = (now.pending_s - before.pending_s) / (now.requests - before.requests)
        pending_ns = round(pending_s * counted.requests * 1e9)
        return replace(
            counted,
            compute_infer_ns=counted.compute_infer_ns + pending_ns,
            success_ns=counted.success_ns + pending_ns,
        )


def _reading(address: str | None, model: str, version: str) -> PipelineReading | None:
    if address is None:
        return None
    try:
        metrics = read_metrics(address)
    except ServerError:
        return None
    labels = {"model": model} | ({"version": version} if version else {})

    def values(counted: str) -> list[float]:
        return [series.value for series in metrics.matching(_FAMILY, counted=counted, **labels)]

    requests = values("requests")
    return PipelineReading(sum(requests), sum(values("pending"))) if requests else None
