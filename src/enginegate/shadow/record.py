"""Records a sample of a live server's requests: traces in, a private sample out."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import block_of_request
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import Origin, SampleInfo, SampleWriter
from enginegate.shadow.store import new_place, new_sample, sample_info
from enginegate.shadow.trace import Recorder, TraceLimits, recorded
from enginegate.shadow.trace_file import Damage
from enginegate.shadow.trace_recovery import restore_traces
from enginegate.triton.server import Server

_MIB = 1 << 20
_NOTES = ".tracing"
_UNWRITTEN = (
    "Triton sampled requests that it did not write: it refused them, held them back after it had "
    "refused another, or took longer than five seconds to answer"
)


def notes_in(home: Path) -> Path:
    """Where recordings note what must be put back; see `enginegate.shadow.trace_recovery`."""
    return home / _NOTES


def recover(home: Path) -> tuple[str, ...]:
    """Undo what killed recordings left: trace settings, and Triton's own files of user data.

    The next recording does the same; a scheduled flow should not wait for one.

    Returns:
        A sentence for each that could not be undone yet, e.g. since its server does not answer.
    """
    return restore_traces(notes_in(home))


def limits_of(wanted: Shadow) -> TraceLimits:
    """How much the policy lets be recorded."""
    return TraceLimits(wanted.trace_rate, wanted.max_samples, wanted.max_mib * _MIB)


def record_live(
    server: Server, model: str, wanted: Shadow, *, home: Path, duration_s: float
) -> tuple[Path, SampleInfo]:
    """Record a model's live requests for a while, or until a limit of the policy is reached.

    Args:
        server: where it is served; it must write traces to a folder of this machine.
        model: name in the repository.
        wanted: sampling rate, limits, redaction and slices.
        home: where samples are kept.
        duration_s: how long to listen at most.

    Returns:
        The sample's folder, and what is known about it.

    Raises:
        ServerError: it cannot be recorded there, or does not answer.
        ModelError: the model has a tensor that Triton's traces cannot hold.
        DataError: no request came, or the redaction does not fit the inputs.
    """
    with recorded(server, model, limits_of(wanted), notes=notes_in(home)) as recorder:
        recorder.wait(duration_s)
        target = RecordingTarget.of(home, model, f"live traffic of {model} at {server.grpc}")
        return target.path, target.take(recorder, wanted)


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """Where a recording goes."""

    path: Path
    model: str
    text: str

    @classmethod
    def of(cls, home: Path, model: str, text: str) -> "RecordingTarget":
        """A new place in ``home``."""
        return cls(new_place(home, model, datetime.now(tz=UTC)), model, text)

    def take(self, recorder: Recorder, wanted: Shadow) -> SampleInfo:
        """End a recording and keep what it holds."""
        origin = Origin(self.text, self.model, datetime.now(tz=UTC), wanted.trace_rate)
        preparation = Preparation.of(wanted)
        with new_sample(self.path, origin, preparation) as writer:
            _fill(writer, recorder)
        return sample_info(self.path)


def _fill(writer: SampleWriter, recorder: Recorder) -> None:
    for item in recorder.stop():
        if isinstance(item, Damage):
            writer.lose(item.reason)
        else:
            writer.add(block_of_request(item))
    if recorder.unwritten:
        writer.lose(_UNWRITTEN, requests=recorder.unwritten)
    writer.capped = recorder.full
