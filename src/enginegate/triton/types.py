"""Values that a Triton server answers with; nothing here knows a wire format."""

from dataclasses import dataclass, field, fields

from enginegate.data import Tensors


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """A server's name, version and protocol extensions."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of one model in the repository index.

    Attributes:
        version: 0 when Triton has never loaded the model (it lists every folder it sees).
        state: READY, LOADING, UNLOADING, UNAVAILABLE, or empty.
        reason: why it is not ready, in Triton's words.
    """

    name: str
    version: int
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether this version answers requests."""
        return self.state == "READY"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request."""

    outputs: Tensors
    model_version: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Triton's counters of one model since it was loaded; subtract two readings for an interval.

    Attributes:
        requests: answered well. The server does not count every rejected or cancelled request, so
            failures are counted at the client.
        failures: requests that failed inside Triton.
        inferences: samples, that is requests times their batch size.
        executions: batches run.
        success_ns: total over answered requests, from arrival to answer.
        queue_ns: total over requests; so are the compute times.
        batches: batch size -> executions of that size.
    """

    requests: int = 0
    failures: int = 0
    inferences: int = 0
    executions: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    batches: dict[int, int] = field(default_factory=dict)
    success_ns: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every sample's batch is counted too; never of an ensemble, which runs none."""
        return self.inferences <= sum(size * runs for size, runs in self.batches.items())

    def __sub__(self, earlier: "Statistics") -> "Statistics":
        """The counters' change since an earlier reading."""
        return self._combine(earlier, -1)

    def __add__(self, other: "Statistics") -> "Statistics":
        """The sum of two readings, e.g. of two versions of a model."""
        return self._combine(other, 1)

    def _combine(self, other: "Statistics", sign: int) -> "Statistics":
        counters: dict[str, int] = {
            each.name: getattr(self, each.name) + sign * getattr(other, each.name)
            for each in fields(self)
            if each.name != "batches"
        }
        batches = {
            size: self.batches.get(size, 0) + sign * other.batches.get(size, 0)
            for size in sorted({*self.batches, *other.batches})
        }
        return Statistics(
            **counters, batches={size: count for size, count in batches.items() if count}
        )
