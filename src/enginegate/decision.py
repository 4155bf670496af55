"""A person's answer, and what it makes possible.

- **Decision**: who, when, why, and which scorecard digest. Anything changed needs a new one.
- **Promise**: what the release's scorecard said it would do live.
- **Release**: engine + config published as one version of the live repository.
"""

from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from enginegate.candidate import Candidate, FileDigest, Sha256, TensorSpec
from enginegate.canonical import Record
from enginegate.errors import ApprovalError
from enginegate.evidence import Outcome, Scorecard, ServingConfig
from enginegate.policy import Approval


class Decision(Record):
    """One answer to "may this go live?"."""

    schema_version: Literal[1] = 1
    scorecard_sha256: Sha256
    answer: Literal["approve", "reject"]
    approver: str = Field(min_length=2)
    reason: str = Field(min_length=5)
    decided_at: datetime


class Promise(Record):
    """What the scorecard said this release would do, to compare live traffic with."""

    p99_ms: NonNegativeFloat
    throughput_per_s: NonNegativeFloat
    slo_p99_ms: NonNegativeFloat


class Release(Record):
    """One published version: everything needed to verify it and to bring it back."""

    schema_version: Literal[1] = 1
    model: str
    version: PositiveInt = Field(description="issued once, never reused")
    model_uri: str
    candidate: Candidate
    engine_sha256: Sha256
    serving: ServingConfig
    backend: str = Field(description="Triton backend, e.g. python")
    gpu: bool = Field(default=False, description="whether instances are placed on GPUs")
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    golden: FileDigest = Field(description="samples and answers every load is proved with")
    golden_max_abs_error: NonNegativeFloat
    files: dict[str, FileDigest] = Field(description="path inside the version folder -> digest")
    scorecard_sha256: Sha256
    decision: Decision
    previous_version: PositiveInt | None
    promise: Promise
    published_at: datetime


def check_decision(
    decision: Decision | None, scorecard: Scorecard, rules: Approval, *, now: datetime
) -> Decision:
    """The decision, if it allows this very scorecard to be promoted now.

    Raises:
        ApprovalError: there is none, it is for another scorecard, says no, is by somebody the
            policy does not name, has expired, or the scorecard has no winner that passed.
    """
    if scorecard.winner is None or scorecard.outcome(scorecard.winner) is not Outcome.PASSED:
        raise ApprovalError(
            f"Scorecard {scorecard.digest[:12]} has no candidate that passed every gate, so there "
            f"is nothing to approve: {scorecard.reason}"
        )
    if decision is None:
        raise ApprovalError(
            f"Nobody has decided on scorecard {scorecard.digest[:12]}. Answer with:\n"
            f"  enginegate approve {scorecard.digest[:12]} --approver NAME --reason WHY"
        )
    if decision.scorecard_sha256 != scorecard.digest:
        raise ApprovalError(
            f"The decision is for scorecard {decision.scorecard_sha256[:12]}, not for "
            f"{scorecard.digest[:12]}. The evidence changed, so it needs a new decision."
        )
    if decision.answer == "reject":
        raise ApprovalError(f"Rejected by {decision.approver}: {decision.reason}")
    if rules.approvers and decision.approver not in rules.approvers:
        raise ApprovalError(
            f"{decision.approver!r} may not approve this model. The policy names: "
            f"{', '.join(rules.approvers)}."
        )
    age = now - decision.decided_at
    if (
        not timedelta(0)
        <= age + timedelta(minutes=5)
        <= timedelta(hours=rules.expires_hours, minutes=5)
    ):
        raise ApprovalError(
            f"The approval by {decision.approver} is {age.total_seconds() / 3600:.1f} h old; it "
            f"stands for {rules.expires_hours:g} h. Look at the scorecard and approve again."
        )
    return decision
