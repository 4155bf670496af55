"""The documents of `--json`, one for each verb that reports; docs/json.md is written from these.

A field is never renamed or removed within a schema version; new ones may come.
"""

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from enginegate.candidate import Sha256
from enginegate.decision import Decision, Promise, Release
from enginegate.evidence import Finding, OutcomeWord
from enginegate.measurement import Measurement, Percentile
from enginegate.records import Record
from enginegate.report import ServingReport
from enginegate.repository.history.audit import Event
from enginegate.repository.verify import VerifyCheck
from enginegate.serving import ServingConfig
from enginegate.shadow import SampleInfo
from enginegate.watch.log import WatchCheck
from enginegate.watch.probe import LiveReading

ReleaseState = Literal["live", "standing by", "rolled back", "withdrawn", "replaced"]


class Document(Record):
    """What every document has."""

    schema_version: Literal[1] = 1


class InstalledPart(Record):
    """One thing that the pipeline can use."""

    name: str
    found: str = Field(description="version, place or what it can do; empty: it is missing")
    cost: str = Field(description="what is not possible without it")
    remedy: str = Field(description="how to get it")


class CheckedPromise(Record):
    """One thing that promotions rely on, tried on a running server."""

    promise: str
    outcome: OutcomeWord = Field(description="passed, inconclusive, failed or errored")
    reason: str


class UpgradeProblem(Record):
    """Why what is live would not load with what is installed."""

    certain: bool = Field(description="read from the server's machine; else usual for its version")
    reason: str


class ServerCheck(Record):
    """A running Triton, as `doctor --server` found it."""

    address: str
    triton: str = Field(description="its version")
    backends: str = Field(description="which of Triton's own backends it has, in a sentence")
    versions: str = Field(description="TensorRT and driver, in a sentence")
    outcome: OutcomeWord = Field(description="the worst of the checks")
    checks: tuple[CheckedPromise, ...]
    upgrades: tuple[UpgradeProblem, ...] = ()


class DoctorDocument(Document):
    """What is installed; with `--server` what that server keeps instead."""

    parts: tuple[InstalledPart, ...] = ()
    server: ServerCheck | None = Field(default=None, description="with --server")


class OpenCandidate(Record):
    """A candidate that cannot be decided here."""

    candidate: str
    why: str
    remedy: str


class PolicyDocument(Document):
    """A valid policy, and what will be inconclusive under it."""

    policy: str = Field(description="its file")
    model: str = Field(description="the model's name in Triton")
    model_uri: str
    repository: str
    candidates: tuple[str, ...] = Field(description="as KIND-PRECISION")
    slo_p99_ms: NonNegativeFloat
    slo_min_throughput_per_s: NonNegativeFloat
    slo_confidence: NonNegativeFloat
    policy_sha256: Sha256 = Field(description="digest of what it asks for, as scorecards name it")
    inconclusive: tuple[OpenCandidate, ...]
    notes: tuple[str, ...] = Field(description="what else will be inconclusive, or not work later")


class FirstPolicyDocument(Document):
    """The policy that `init` wrote."""

    policy: str = Field(description="its file")
    model: str = Field(description="the model's name in Triton")
    model_uri: str
    task: str
    candidates: tuple[str, ...] = Field(description="as KIND-PRECISION")
    notes: tuple[str, ...] = Field(description="what will be inconclusive, or not work later")
    next: tuple[str, ...] = Field(description="commands that come next")


class PolicyKey(Record):
    """One key of a policy."""

    table: str = Field(description="empty: the top of the file")
    key: str
    value: str = Field(description="as TOML, or `not set`; a rule in words without a policy")
    origin: Literal["stated", "default", "required"] = Field(
        description="stated by the file, left out of it, or required of every file"
    )
    meaning: str


class PolicyLimit(Record):
    """One limit of the gates, by precision."""

    key: str
    values: dict[str, str] = Field(description="precision -> as TOML, or `not set`")
    stated: tuple[str, ...] = Field(description="precisions whose value the file states")
    meaning: str
    reason: str = Field(description="why the standard tolerance is what it is; empty: it has none")


class PolicyListing(Document):
    """Every key of a policy with its value and meaning."""

    policy: str = Field(description="its file; empty: the defaults of every policy")
    keys: tuple[PolicyKey, ...]
    limits: tuple[PolicyLimit, ...] = Field(description="of the gates")


class CandidateSummary(Record):
    """One candidate of a scorecard."""

    candidate: str = Field(description="as KIND-PRECISION")
    outcome: OutcomeWord = Field(description="passed, inconclusive, failed or errored")
    meaning: str = Field(description="whether it may be approved, in a sentence")
    tied: bool = Field(description="passed, and not told apart from the winner")
    engine_sha256: Sha256 | None = Field(description="null: no engine could be built")
    engine_bytes: NonNegativeInt | None = None
    accuracy: str = Field(description="change against FP32 with its interval, as in the table")
    throughput_per_s: NonNegativeFloat | None = Field(
        description="requests within the SLO; null: not benchmarked"
    )
    throughput_is_bound: bool = Field(
        description="whether the policy allowed no higher rate, so that it is a lower bound"
    )
    p99: Percentile | None
    serving: ServingConfig | None
    unmeasured: str = Field(description="why it was not benchmarked; empty: it was, or could not")
    findings: tuple[Finding, ...] = Field(description="of verdict and benchmark")


class DeviceSummary(Document):
    """What a scorecard, or a part of one, says of one kind of device."""

    device: str = Field(description="its name under [devices]")
    winner: str | None = Field(description="null: nothing would be published for it")
    reason: str
    candidates: tuple[CandidateSummary, ...]


class PartDocument(Document):
    """One kind of device's part of a qualification, as `qualify --device` made it."""

    part: Sha256 = Field(description="digest of everything that decides it")
    model: str
    model_uri: str
    policy_sha256: Sha256
    found: DeviceSummary
    made_at: datetime
    made_by: str
    next: tuple[str, ...] = Field(description="commands that come next")


class BundleDocument(Document):
    """Evidence in one file, as `evidence export` wrote or `evidence import` read it."""

    file: str = Field(description="its absolute path")
    sha256: Sha256 = Field(description="of the file")
    part: Sha256 = Field(description="digest of everything that decides the part in it")
    device: str
    model_uri: str
    policy_sha256: Sha256
    winner: str | None


class ScorecardDocument(Document):
    """A scorecard, as `qualify` made it or as `explain` reads it."""

    scorecard: Sha256 = Field(description="the digest that an approval binds to")
    model: str
    model_uri: str
    created_at: datetime
    requested_by: str
    policy_sha256: Sha256
    winner: str | None = Field(description="null: nothing can be approved")
    reason: str
    replaces: PositiveInt | None = Field(description="the release that was live; null: none")
    mlflow_run: str | None
    candidates: tuple[CandidateSummary, ...] = Field(
        description="in the scorecard's order; `explain --candidate` and `--only` leave some out"
    )
    devices: tuple[DeviceSummary, ...] = Field(
        default=(),
        description="kinds of device, that of the target's own server (also above) first; empty: "
        "the policy names none",
    )
    next: tuple[str, ...] = Field(description="commands that come next; empty: no winner")
    policy: str = Field(default="", description="its file; empty: `explain` does not know it")


class PageDocument(Document):
    """The page that `report` wrote."""

    scorecard: Sha256
    file: str = Field(description="its absolute path")


class BenchmarkDocument(Document):
    """What `benchmark` measured: a search here, or one load on a server."""

    outcome: OutcomeWord = Field(description="passed: the SLO is shown to be met")
    report: ServingReport | None = Field(default=None, description="of a search")
    measurement: Measurement | None = Field(default=None, description="with --server")
    conclusion: str = Field(default="", description="with --server: whether the SLO is met")
    unmeasured: dict[str, str] = Field(default_factory=dict, description="candidate -> why")
    files: tuple[str, ...] = Field(description="that were written")


class DecisionDocument(Document):
    """An answer to a scorecard, as `approve` or `reject` recorded it."""

    decision: Decision
    model: str
    model_uri: str
    in_audit_log: bool = Field(description="false: a promotion writes it there later")
    missing: NonNegativeInt = Field(description="approvals by other people that are still needed")
    resumed: tuple[str, ...] = Field(description="suspended Prefect runs that go on now")
    next: str = Field(description="the command that comes next; empty: none here")


class ReleaseDocument(Document):
    """What `promote`, `rollback`, `withdraw` or `pull` did."""

    action: Literal["published", "promised", "rolled back", "withdrawn", "pulled", "none"] = Field(
        description="promised: the same bytes serve already, and have a new promise; none: nothing "
        "is live in object storage"
    )
    model: str
    live: bool = Field(description="whether the release is live now")
    release: Release | None
    promise: Promise | None = Field(description="that the watch holds it to now")
    undelivered: str = Field(default="", description="why MLflow does not know yet; empty: it does")


class ReleaseStatus(Record):
    """One release of the live repository."""

    release: PositiveInt
    state: ReleaseState
    candidate: str
    model_uri: str
    published_at: datetime
    approved_by: str
    reason: str
    since: datetime | None = Field(description="when that state began; null: not in the audit log")
    engine_sha256: Sha256
    release_sha256: Sha256 = Field(description="digest of the release's manifest")
    has_bytes: bool = Field(description="false: only its history is kept")


class MeasuredLive(Record):
    """The newest check of what is live."""

    check: PositiveInt
    at: datetime
    outcome: OutcomeWord
    reading: LiveReading | None = Field(description="null: nothing could be read")
    findings: tuple[Finding, ...]


class BrokenPromiseStatus(Record):
    """A failed check that nobody has acknowledged."""

    release: PositiveInt
    check: PositiveInt
    at: datetime
    why: str


class WaitingScorecard(Record):
    """A scorecard that somebody has to do something about."""

    scorecard: str = Field(description="its digest; empty for those that are counted together")
    state: str
    sentence: str
    next: str = Field(default="", description="the command that comes next; empty: none here")


class ServerStatus(Record):
    """One server of the live repository, or the object storage that servers follow."""

    kind: Literal["server", "object storage"] = "server"
    name: str = Field(description="empty: the first")
    address: str = Field(description="gRPC address, folder or URL; empty: not known")
    state: str


class ModelStatus(Record):
    """One policy's model."""

    policy: str
    model: str
    repository: str
    state: Literal["live", "nothing live", "withdrawn"]
    words: str = Field(description="the state in a sentence")
    live: ReleaseStatus | None
    watch: str | None = Field(
        description="passed, inconclusive, failed (until acknowledged), errored or not checked"
    )
    promise: Promise | None
    promised_by: Sha256 | None = Field(description="the scorecard whose promise it is")
    measured: MeasuredLive | None
    broken: tuple[BrokenPromiseStatus, ...]
    releases: tuple[ReleaseStatus, ...] = Field(description="the newest first")
    servers: tuple[ServerStatus, ...]
    waiting: tuple[WaitingScorecard, ...]
    problems: tuple[str, ...] = Field(description="what could not be read")


class StatusDocument(Document):
    """What is live of each policy's model, and what waits for a person."""

    models: tuple[ModelStatus, ...]
    errors: tuple[str, ...] = Field(description="policies and scorecards that cannot be read")


class VerifiedRepository(Record):
    """One policy's live repository and servers."""

    policy: str
    model: str
    repository: str
    outcome: Literal["ok", "problem", "unknown"]
    checks: tuple[VerifyCheck, ...] = Field(description="without problem and unknown: as published")
    repaired: tuple[str, ...] = Field(description="with --repair: what was finished or undone")
    server: str = Field(description="why no server was checked; empty: it was")
    also: tuple[str, ...] = Field(
        default=(), description="further policies of the very same repository and servers"
    )


class VerifyDocument(Document):
    """Whether everything is as it was published."""

    repositories: tuple[VerifiedRepository, ...]
    errors: tuple[str, ...] = Field(description="policies that cannot be read")


class CheckDone(Record):
    """One check of the watch with its outcome."""

    outcome: OutcomeWord
    check: WatchCheck


class WatchDocument(Document):
    """One run of the watch."""

    done: tuple[str, ...] = Field(description="one sentence for each thing that was done")
    checks: tuple[CheckDone, ...] = Field(description="of the live release; none: nothing is live")
    broken: str = Field(description="the broken promise that nobody has acknowledged; empty: none")


class AnsweredOutput(Record):
    """One output that the live model answered, beside its label."""

    name: str
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    values: tuple[float | int | str, ...] = Field(description="the first thousand, in order")
    answer: int | None = Field(description="the class with the largest value; null: no classes")
    label: tuple[float | int | str, ...] = Field(description="empty: the data has none")
    agrees: bool | None = Field(description="whether answer and label are the same class")


class AnsweredSample(Record):
    """One sample that was sent."""

    sample: NonNegativeInt = Field(description="its position in the data, from 0")
    id: str
    answered_by: str = Field(description="the release that answered, as Triton names it")
    took_ms: NonNegativeFloat = Field(description="at this client; one request measures nothing")
    outputs: tuple[AnsweredOutput, ...]


class CallDocument(Document):
    """What the live model answered to samples of the evaluation data."""

    model: str
    release: PositiveInt = Field(description="that is live")
    server: str = Field(description="gRPC address")
    data: str = Field(description="where the samples are from")
    samples: tuple[AnsweredSample, ...]
    python: str = Field(description="a program that sends the first sample with tritonclient")
    curl: str = Field(description="a line that sends it; empty: JSON has no type of an input")
    http_is_known: bool = Field(description="false: the port in `curl` is Triton's usual one")


class AcknowledgeDocument(Document):
    """Broken promises that were acknowledged."""

    acknowledged: tuple[BrokenPromiseStatus, ...]
    states: dict[int, str] = Field(description="release -> how it is shown now")


class ScanDocument(Document):
    """The versions whose qualification was started."""

    started: tuple[str, ...] = Field(description="model URIs")


class AutomationsDocument(Document):
    """What was created or updated on the Prefect server."""

    done: tuple[str, ...]


class PrunedEntry(Record):
    """One thing that nothing refers to, and nobody used lately."""

    kind: str
    place: str = Field(description="its path in the workspace, or its address elsewhere")
    about: str = Field(default="", description="candidate, version or release that it is of")
    size_bytes: NonNegativeInt
    used_at: datetime
    state: Literal["shown", "deleted", "in use", "failed"] = Field(
        description="shown: nothing was deleted; in use: somebody began to use it meanwhile"
    )
    why: str = Field(default="", description="why it could not be deleted")


class KeptEntries(Record):
    """How much of one kind is kept for one reason."""

    kind: str
    reason: str
    count: NonNegativeInt
    size_bytes: NonNegativeInt


class PruneDocument(Document):
    """What `prune` would delete, or has deleted, and why the rest is kept."""

    workspace: str
    policies: tuple[str, ...] = Field(description="whose releases and scorecards refer to it")
    unused_since: datetime = Field(description="what was used after this is kept")
    done: bool = Field(description="whether it was deleted; false: it was only shown")
    entries: tuple[PrunedEntry, ...]
    kept: tuple[KeptEntries, ...]
    size_bytes: NonNegativeInt = Field(description="of all entries")
    freed_bytes: NonNegativeInt = Field(description="of those that are deleted")
    free_bytes: NonNegativeInt = Field(description="on the workspace's disk when this ended")


class NotifyReceiver(Record):
    """One that messages go to."""

    receiver: str = Field(description="its place among the addresses and its kind")
    why_not: str = Field(default="", description="it did not take the message; empty: it did")


class NotifyDocument(Document):
    """Who gets messages to people; no address is in it."""

    origin: str = Field(description="where the addresses were found")
    receivers: tuple[NotifyReceiver, ...]


class DeployDocument(Document):
    """What was created or updated on the Prefect server: its deployments, by flow and name."""

    pool: str
    deployments: tuple[str, ...]


class SampleDocument(Document):
    """A sample of live traffic; holds no value that users sent."""

    folder: str
    sample: SampleInfo


class LeftOutOfBackup(Record):
    """Something that a backup does not hold."""

    what: str
    why: str


class BackupDocument(Document):
    """A backup that was written."""

    file: str = Field(description="its absolute path")
    sha256: Sha256 = Field(description="of the file; `restore --sha256` takes its beginning")
    size_bytes: NonNegativeInt
    made_at: datetime
    files: NonNegativeInt = Field(description="in it, without keys")
    keys: NonNegativeInt = Field(description="files of keys in it, all encrypted")
    repositories: tuple[str, ...] = Field(description="as the policies say them")
    policies: tuple[str, ...] = Field(description="below the project's folder")
    left_out: tuple[LeftOutOfBackup, ...]


class RestoreDocument(Document):
    """A backup that was restored, or only checked."""

    file: str = Field(description="its absolute path")
    sha256: Sha256
    made_at: datetime
    made_by: str = Field(description="user and host")
    files: NonNegativeInt = Field(description="in it, without keys")
    keys: NonNegativeInt = Field(description="files of keys that were opened")
    restored: tuple[str, ...] = Field(
        description="folders and files that are there now; empty: it was only checked"
    )
    left_out: tuple[LeftOutOfBackup, ...] = Field(description="when it was written")


# In the order of the story; `audit` prints one event a line, so that it can be read while it grows.
DOCUMENTS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "doctor": DoctorDocument,
        "init": FirstPolicyDocument,
        "policy check": PolicyDocument,
        "policy show": PolicyListing,
        "qualify": ScorecardDocument,
        "qualify --device": PartDocument,
        "explain": ScorecardDocument,
        "report": PageDocument,
        "benchmark": BenchmarkDocument,
        "shadow record": SampleDocument,
        "shadow import": SampleDocument,
        "shadow info": SampleDocument,
        "evidence export": BundleDocument,
        "evidence import": BundleDocument,
        "approve": DecisionDocument,
        "reject": DecisionDocument,
        "promote": ReleaseDocument,
        "status": StatusDocument,
        "verify": VerifyDocument,
        "rollback": ReleaseDocument,
        "withdraw": ReleaseDocument,
        "pull": ReleaseDocument,
        "call": CallDocument,
        "watch": WatchDocument,
        "acknowledge": AcknowledgeDocument,
        "audit": Event,
        "scan": ScanDocument,
        "automations": AutomationsDocument,
        "notify test": NotifyDocument,
        "notify save": NotifyDocument,
        "deploy": DeployDocument,
        "prune": PruneDocument,
        "backup": BackupDocument,
        "restore": RestoreDocument,
    }
)


def main() -> None:
    """Print the JSON Schema of one verb's document: ``python -m … "policy check"``."""
    verb = " ".join(sys.argv[1:])
    if verb not in DOCUMENTS:
        sys.exit(f"{verb!r} has no document. These have: {', '.join(DOCUMENTS)}.")
    schema = DOCUMENTS[verb].model_json_schema(mode="serialization")
    sys.stdout.write(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
