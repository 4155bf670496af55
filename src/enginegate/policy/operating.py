"""Tables of a policy that say where a release goes, on whose word, and who looks after it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from enginegate.machine import LAST_PORT
from enginegate.messages import matching
from enginegate.object_storage import OBJECT_URL
from enginegate.policy.gates import Confidence
from enginegate.policy.paths import SafePath, as_written
from enginegate.records import Record


def _with_port(address: str) -> str:
    if not 1 <= int(address.rpartition(":")[2]) <= LAST_PORT:
        raise ValueError(f"must be HOST:PORT with a port from 1 to {LAST_PORT:,}")
    return address


Name = Annotated[
    str,
    matching(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", "a name of letters, digits, '_', '.' and '-'"),
]
Address = Annotated[
    str,
    matching(r"^[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}$", "HOST:PORT, e.g. 127.0.0.1:8001"),
    AfterValidator(_with_port),
]
ObjectUrl = Annotated[
    str,
    matching(OBJECT_URL, "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"),
]


class EnsembleStep(Record):
    """One more Triton model of an ensemble: a folder with ``config.pbtxt`` and ``model.py``."""

    name: Name = Field(description="the part's name; Triton knows it as MODEL.NAME")
    folder: SafePath = Field(description="the model's files; config.pbtxt says its tensors")
    inputs: dict[str, str] = Field(description="its input -> tensor of the ensemble")
    outputs: dict[str, str] = Field(description="its output -> tensor of the ensemble")


class Ensemble(Record):
    """Several Triton models published as one release: before the engine, the engine, after it.

    Tensors of the engine keep their own names; what the first steps need and nobody gives is the
    ensemble's input, and what nobody takes is its output.
    """

    before: tuple[EnsembleStep, ...] = Field(
        default=(), description="[[ensemble.before]], in order"
    )
    after: tuple[EnsembleStep, ...] = Field(default=(), description="[[ensemble.after]], in order")
    samples: SafePath | None = Field(
        default=None,
        description="inputs of the ensemble, to prove its releases with; none: those of "
        "data.evaluation, which fits where no step comes before the engine",
    )


# Folders in which a file that was moved or removed is the system's.
_SYSTEM = "bin boot dev etc home lib lib64 proc root run sbin sys usr var"
_NOT_OURS = frozenset({"/", ".", *(f"/{name}" for name in _SYSTEM.split())})


def _own_folder(path: Path) -> Path:
    written = as_written(path)
    if os.path.normpath(written.as_posix().replace("//", "/")) in _NOT_OURS:
        raise ValueError(
            f"{written.as_posix()!r} cannot be meant: releases are written and removed there. "
            "Name a folder of its own, such as /srv/models or .enginegate/live/digits"
        )
    return path


RepositoryPath = Annotated[SafePath, AfterValidator(_own_folder)]


class ServerEntry(Record):
    """One more server that a release goes to."""

    name: Name
    endpoint: Address = Field(description="gRPC HOST:PORT of that Triton")
    repository: RepositoryPath | None = Field(
        default=None, description="its own live repository; none: it serves the target's"
    )
    metrics: Address | None = Field(
        default=None,
        description="HOST:PORT of its metrics; none: its queue and GPU memory are not watched",
    )
    device: str = Field(
        default="", description="its kind of device, of [devices]; none: that of the target"
    )


class PromotionTarget(Record):
    """Where a promoted release goes live."""

    repository: RepositoryPath = Field(description="the live Triton model repository")
    objects: ObjectUrl | None = Field(
        default=None,
        description="object storage (s3://BUCKET/PREFIX, gs://…, az://…) that releases are "
        "published to instead; `repository` is then the local copy that servers read",
    )
    endpoint: Address | None = Field(
        default=None, description="gRPC HOST:PORT of the live Triton; none: an embedded one"
    )
    metrics: Address | None = Field(
        default=None,
        description="HOST:PORT of that Triton's metrics; none: its queue and GPU memory are not "
        "watched (an embedded one's address is known)",
    )
    device: str = Field(
        default="",
        description="kind of device of the server above, of [devices]; none: the first named there",
    )
    fleet: tuple[ServerEntry, ...] = Field(
        default=(), description="further servers, loaded one at a time once the first was accepted"
    )
    canary_s: NonNegativeFloat = Field(
        default=0.0,
        description="how long the first server is watched before the rest of the fleet follows",
    )
    load_timeout_s: PositiveFloat = Field(default=120.0, description="limit on one model load")
    when_memory_is_short: Literal["refuse", "replace"] = Field(
        default="refuse",
        description="where a server's GPUs cannot hold a new release beside the live one: refuse "
        "the promotion, or unload the live one first, so that nobody is answered meanwhile",
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [member.name for member in self.fleet]
        if len(names) != len(set(names)):
            raise ValueError("two members of the fleet have the same name")
        return self


class Approval(Record):
    """Who may approve, and for how long an approval stands."""

    approvers: tuple[str, ...] = Field(
        default=(), description="names that may approve; empty: anybody who gives a name"
    )
    required: PositiveInt = Field(
        default=1, le=5, description="different people that must approve the same scorecard"
    )
    requester_may_approve: bool = Field(
        default=True, description="false: whoever ran `qualify` cannot approve its scorecard"
    )
    accept_inconclusive: bool = Field(
        default=False,
        description="whether a person may accept a candidate whose evidence is inconclusive; never "
        "one that failed",
    )
    expires_hours: PositiveFloat = Field(description="an approval older than this is invalid")
    timeout_hours: PositiveFloat = Field(
        default=24.0, description="how long a suspended promotion waits; no answer means no"
    )

    @model_validator(mode="after")
    def _enough_people(self) -> Self:
        people: dict[str, str] = {}
        for name in self.approvers:
            if not person(name):
                raise ValueError(f"approvers: {name!r} names nobody")
            if person(name) in people:
                raise ValueError(
                    f"approvers: {people[person(name)]!r} and {name!r} are one person: neither "
                    "case nor what follows @ tells people apart. Name each person once"
                )
            people[person(name)] = name
        if people and self.required > len(people):
            raise ValueError(
                f"required is {self.required}, and approvers names {len(people)}: nothing could "
                f"ever be approved. Allowed is 1 to {len(people)}, or name more people"
            )
        return self


def person(name: str) -> str:
    """The same for ``ada``, ``Ada`` and ``ada@host``: counting one person twice is the fault."""
    return name.strip().casefold().partition("@")[0].strip()


class Signing(Record):
    """Signatures on releases."""

    required: bool = Field(
        default=False,
        description="refuse to serve or roll back to a release without a signature; one that was "
        "signed when it was published needs its signature in any case",
    )
    private_key: SafePath | None = Field(
        default=None, description="PEM; none: a key of this workspace, made on first use"
    )
    public_key: SafePath | None = Field(
        default=None, description="PEM that signatures must verify with; none: the private key's"
    )


class Watch(Record):
    """What a live release must keep to after its promotion, and what follows if it does not."""

    window_s: NonNegativeFloat = Field(
        default=600.0, description="a release younger than this is watched intensively"
    )
    look_s: PositiveFloat = Field(
        default=30.0, description="time over which live counters are compared in one check"
    )
    max_error_share: float = Field(
        default=0.001, ge=0.0, le=1.0, description="requests that may fail on the server"
    )
    p99_over_promise: PositiveFloat = Field(
        default=1.5, description="live latency over the promised, from which a check fails"
    )
    max_pending: PositiveInt = Field(
        default=1000, description="requests waiting in the live queue, from which a check fails"
    )
    max_gpu_memory_share: float = Field(
        default=0.95, gt=0.0, le=1.0, description="of the fullest GPU, above which a check fails"
    )
    min_requests: PositiveInt = Field(
        default=100, description="fewer live requests in a check decide nothing"
    )
    min_agreement: float = Field(
        default=0.98, ge=0.0, le=1.0, description="with FP32, on recorded live requests"
    )
    max_drift: NonNegativeFloat | None = Field(
        default=None,
        description="population stability index of any live input against calibration, from which "
        "a check fails (it alerts, and never rolls back); none: 0.25, and only shown",
    )
    confidence: Confidence = Field(default=0.99, description="over all checks together")
    on_failure: Literal["nothing", "alert", "rollback"] = Field(
        default="alert",
        description="what follows a failed check; one that could not measure always alerts",
    )


class Scan(Record):
    """Which new versions of the registry are qualified by themselves."""

    alias: str | None = Field(default=None, description="versions this alias comes to stand for")
    tag: str | None = Field(
        default=None, description="versions with this tag, as NAME or NAME=VALUE"
    )


class Retention(Record):
    """What is kept."""

    releases: PositiveInt = Field(default=5, description="releases kept in the live repository")
    shadow_days: PositiveInt = Field(
        default=30, description="age in days at which shadow samples are deleted"
    )
    unused_days: PositiveInt | None = Field(
        default=None,
        description="days without use after which the scheduled watch deletes what nothing refers "
        "to (docs/retention.md); none: only `enginegate prune` deletes it",
    )


@dataclass(frozen=True, slots=True)
class LiveTables:
    """Everything in a policy about the model that is live: where, by whose word, kept, watched.

    Attributes:
        device: kind of device of the target's own server; empty: the policy names no kinds.
    """

    model: str
    target: PromotionTarget
    signing: Signing
    retention: Retention
    watch: Watch
    approval: Approval
    device: str = ""
