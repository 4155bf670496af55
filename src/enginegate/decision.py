"""A person's answer, and what it makes possible.

- **Decision**: who, when, why, and which scorecard digest. Anything changed needs a new one.
- **OnRecord**: what the audit log knows of the answers to one scorecard.
- **Promise**: what the release's scorecard said it would do live.
- **Release**: config and engines (one for each kind of device) published as one version of the
  live repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    field_validator,
)

from enginegate.candidate import Candidate, FileDigest, Sha256, TensorSpec
from enginegate.errors import RepositoryError
from enginegate.evidence import ReplacedRelease, Scorecard
from enginegate.records import Record
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions

# What clocks of several machines may differ by.
CLOCK_TOLERANCE = timedelta(minutes=5)


class Decision(Record):
    """One answer to "may this go live?"."""

    schema_version: Literal[1] = 1
    scorecard_sha256: Sha256
    answer: Literal["approve", "reject"]
    approver: str = Field(min_length=2)
    reason: str = Field(min_length=5)
    decided_at: datetime
    origin: str = Field(
        default="", description="from where: user and host, and by which way (command, UI, Python)"
    )
    accepts: tuple[str, ...] = Field(
        default=(),
        description="inconclusive findings that this person accepts, as GATE/SCOPE; only where the "
        "policy allows it",
    )
    candidate: Candidate | None = Field(
        default=None, description="what is to be published; none: the scorecard's winner"
    )


@dataclass(frozen=True, slots=True)
class OnRecord:
    """What the audit log knows of the answers to one scorecard.

    Attributes:
        places: digest of an answer -> its place in the log, which is the order they arrived in.
        ended: place and time of the last event that took a release of this scorecard back.
        written: digest of an answer -> when the log took it in, by the clock of that machine.
        unbacked: digests of approvals that are only files: nothing shows that anybody gave them.
    """

    places: Mapping[str, int] = field(default_factory=dict)
    ended: tuple[int, datetime] | None = None
    written: Mapping[str, datetime] = field(default_factory=dict)
    unbacked: frozenset[str] = frozenset()

    def position(self, answer: Decision) -> tuple[float, datetime]:
        """What answers are sorted by: their order in the log, else their clock."""
        return self.places.get(answer.digest, float("inf")), answer.decided_at

    def follows(self, yes: Decision, no: Decision) -> bool:
        """Whether an approval was surely given after a rejection, whatever a clock said.

        By the order of arrival and the clock, or by that order alone where a clock was set back
        between them; where the order is not known, by a distance that clocks do not differ by.
        """
        if yes.digest in self.places and no.digest in self.places:
            if self.places[yes.digest] < self.places[no.digest]:
                return False
            noted_at = self.written.get(no.digest)
            return yes.decided_at > no.decided_at or self._after_set_back(yes, noted_at)
        return yes.decided_at - no.decided_at > CLOCK_TOLERANCE

    def used_up(self, approval: Decision) -> bool:
        """Whether its release was replaced since: going live again needs a new answer."""
        if self.ended is None:
            return False
        place, at = self.ended
        if self.places.get(approval.digest, place + 1) < place:
            return True
        return approval.decided_at <= at and not self._after_set_back(approval, at)

    def _after_set_back(self, approval: Decision, noted_at: datetime | None) -> bool:
        """Whether the clock was set back between an earlier line of the log and this approval.

        The log is written in order, so a later line with an earlier time shows that. The approval
        must have been written down when it was given: an answer in a form arrives when a worker
        comes, which may be long after a no that was given later.
        """
        written = self.written.get(approval.digest)
        if written is None or noted_at is None or written >= noted_at:
            return False
        return abs(written - approval.decided_at) <= CLOCK_TOLERANCE


class Head(Record):
    """How far a chained file had come: what shows that lines were removed from its end."""

    count: PositiveInt
    sha256: Sha256 = Field(description="digest of the last line")


class Promise(Record):
    """What the scorecard said this release would do, to compare live traffic with."""

    p99_ms: NonNegativeFloat
    throughput_per_s: NonNegativeFloat
    slo_p99_ms: NonNegativeFloat
    p50_ms: NonNegativeFloat | None = None
    server_ms: NonNegativeFloat | None = Field(
        default=None, description="mean time on the server at that load, by Triton's counters"
    )

    def __str__(self) -> str:
        return (
            f"p99 {self.p99_ms:.4g} ms (SLO {self.slo_p99_ms:g} ms) at "
            f"{self.throughput_per_s:.4g} requests/s"
        )


class RenewedPromise(Record):
    """What a release is held to from now on: another approved scorecard of the very same engine.

    The release itself is not changed, and nothing is loaded.
    """

    schema_version: Literal[1] = 1
    model: str
    version: PositiveInt = Field(description="the release that it is about")
    release_sha256: Sha256 = Field(description="digest of that release's manifest")
    scorecard_sha256: Sha256
    promise: Promise
    decision: Decision
    further_decisions: tuple[Decision, ...] = Field(
        default=(), description="of the other people that had to approve"
    )
    renewed_at: datetime
    replaces: Sha256 | None = Field(
        default=None, description="digest of the renewed promise before it; none: the release's own"
    )
    promises: dict[str, Promise] = Field(
        default={}, description="those of the release's further kinds of device, by kind"
    )


class ComposingModel(Record):
    """One Triton model of a release that is made of several."""

    name: str = Field(description="as Triton knows it, e.g. digits.preprocess")
    version: PositiveInt
    files: dict[str, FileDigest] = Field(description="path inside the version folder -> digest")
    config: FileDigest = Field(description="its configuration as published, kept with the release")
    golden: FileDigest | None = Field(
        default=None, description="samples and validated answers of this model alone"
    )
    golden_max_abs_error: NonNegativeFloat = 0.0


class ReleasedEngine(Record):
    """What one kind of device serves of a release, as it was validated and measured there."""

    device: str = Field(
        description="kind of device that runs it: one of the policy's, else cpu or gpu"
    )
    candidate: Candidate
    engine_sha256: Sha256
    serving: ServingConfig
    backend: str = Field(description="Triton backend, e.g. python")
    golden: FileDigest = Field(description="samples and answers every load is proved with")
    golden_max_abs_error: NonNegativeFloat
    files: dict[str, FileDigest] = Field(description="path inside the version folder -> digest")
    promise: Promise
    options: ServingOptions = ServingOptions()
    settings: BackendSettings = Field(
        default=BackendSettings(),
        description="backend settings with which it runs the engine as it was validated",
    )
    parts: tuple[ComposingModel, ...] = Field(
        default=(), description="the models of an ensemble, in the order they run; else empty"
    )
    gpu_bytes: NonNegativeInt | None = Field(
        default=None,
        description="memory that it took of the fullest GPU when it was benchmarked; None: not "
        "measured",
    )
    builder: str = Field(
        default="", description="library and version that built it; empty: not recorded"
    )
    version_compatible: bool = Field(
        default=False, description="whether later versions of that library load it too"
    )
    cold_start_s: NonNegativeFloat | None = Field(
        default=None, description="from the load call to the first answer, in its benchmark"
    )
    on_gpu: bool | None = Field(
        default=None, description="whether instances are placed on GPUs; None: by the device"
    )

    @property
    def gpu(self) -> bool:
        """Whether instances are placed on GPUs."""
        return self.device != "cpu" if self.on_gpu is None else self.on_gpu


class Release(Record):
    """One published version: everything needed to verify it and to bring it back."""

    schema_version: Literal[2] = 2
    model: str
    version: PositiveInt = Field(description="issued once, never reused")
    model_uri: str
    engines: tuple[ReleasedEngine, ...] = Field(
        min_length=1,
        description="one for each kind of device, that of the repository that published it first",
    )
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scorecard_sha256: Sha256
    decision: Decision
    previous_version: PositiveInt | None
    published_at: datetime
    further_decisions: tuple[Decision, ...] = Field(
        default=(), description="of the other people that had to approve"
    )
    audit: Head | None = Field(
        default=None, description="the audit log when this release was staged, approvals included"
    )
    _device: str = PrivateAttr(default="")

    @field_validator("engines")
    @classmethod
    def _one_for_each_device(
        cls, engines: tuple[ReleasedEngine, ...]
    ) -> tuple[ReleasedEngine, ...]:
        if len({engine.device for engine in engines}) < len(engines):
            raise ValueError("two engines are for the same kind of device")
        return engines

    def engine_for(self, device: str | None = None) -> ReleasedEngine:
        """The engine of one kind of device.

        Args:
            device: None: of the only kind that the release is for.

        Raises:
            RepositoryError: there is none for it, or several to choose from.
        """
        found = [engine for engine in self.engines if device in {None, engine.device}]
        if len(found) != 1:
            kinds = ", ".join(engine.device for engine in self.engines)
            raise RepositoryError(
                f"Release {self.version} of {self.model} has engines for {kinds}, and "
                f"{device or 'one kind of device alone'} is asked for. Publish to a server of one "
                "of these kinds."
            )
        return found[0]

    def seen_from(self, device: str) -> "Release":
        """The release as a repository of one kind of device has it; its digest is the same.

        Args:
            device: the kind; empty: that of the repository that published it.

        Raises:
            RepositoryError: it has engines of several kinds, and none of this one.
        """
        seen = self.model_copy()
        if len(self.engines) > 1:
            seen._device = self.engine_for(device).device if device else ""  # noqa: SLF001 - own
        return seen

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that it has engines for."""
        return tuple(engine.device for engine in self.engines)

    @property
    def engine(self) -> ReleasedEngine:
        """The engine of the kind of device that the repository it was read from serves.

        Of a release that was not read from one it is the publisher's.
        """
        return self.engine_for(self._device) if self._device else self.engines[0]

    @property
    def promise(self) -> Promise:
        """Of that engine."""
        return self.engine.promise


def replaced_release(release: Release, evidence: Scorecard | None) -> ReplacedRelease:
    """What a new scorecard says of the release that is live.

    A promise that the release was given later changes nothing of it: the same release is the same
    record whenever the model is qualified again.

    Args:
        release: that is live, of one kind of device.
        evidence: the scorecard that it was published of; None: it is not here.
    """
    engine = release.engines[0]
    verdict = evidence.verdict(engine.candidate) if evidence else None
    measured = evidence.benchmark(engine.candidate) if evidence else None
    loss = verdict.task_loss if verdict else None
    sizes = {file.sha256: file.size_bytes for file in engine.files.values()}
    led_to = {"measurements": (), "decisions": (), "pareto": (), "patterns": (), "rival": None}
    recorded = measured.engine_bytes if measured else None
    return ReplacedRelease(
        release=release.version,
        model_uri=release.model_uri,
        candidate=engine.candidate,
        engine_sha256=engine.engine_sha256,
        scorecard_sha256=release.scorecard_sha256,
        promised_p99_ms=engine.promise.p99_ms,
        promised_per_s=engine.promise.throughput_per_s,
        engine_bytes=sizes.get(engine.engine_sha256) if recorded is None else recorded,
        gpu_bytes=engine.gpu_bytes,
        qualified_at=evidence.created_at if evidence else None,
        onnx_sha256=evidence.onnx_sha256 if evidence else None,
        evaluation_sha256=evidence.data.evaluation if evidence else None,
        benchmark=measured.model_copy(update=led_to) if measured else None,
        loss=loss,
        fp32_score=evidence.fp32_score_of(loss) if evidence else None,
    )
