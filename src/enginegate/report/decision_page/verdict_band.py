"""The verdict in one band, and the digests and the command that prove it."""

from dataclasses import dataclass

from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted
from enginegate.report.content import one_line, short_digest

ICONS = {
    Outcome.PASSED: "✓",
    Outcome.INCONCLUSIVE: "?",
    Outcome.FAILED: "✕",
    Outcome.ERRORED: "!",
}


@dataclass(frozen=True, slots=True)
class VerdictBand:
    """The answer before any number.

    Attributes:
        outcome: in one word, which is also its colour.
        headline: the answer.
        question: what it answers.
        reason: why.
    """

    outcome: str
    icon: str
    headline: str
    question: str
    reason: str


def verdict_band(scorecard: Scorecard) -> VerdictBand:
    """What may be approved and why; else what kept every candidate from passing."""
    winner = scorecard.winner
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    outcome = min(outcomes, default=Outcome.INCONCLUSIVE)
    if winner is None:
        # A policy may let people accept an inconclusive candidate, so nothing is ruled out here.
        headline = f"No candidate of {scorecard.model_uri} passed every gate"
    elif scorecard.tied:
        ties = ", ".join(candidate.name for candidate in scorecard.tied if candidate != winner)
        headline = f"{winner} passed every gate, tied with {ties}"
    else:
        headline = f"{winner} passed every gate"
    reason = one_line(scorecard.reason)
    passed = outcomes.count(Outcome.PASSED)
    return VerdictBand(
        outcome=outcome.word,
        icon=ICONS[outcome],
        headline=headline,
        question=f"{scorecard.model_uri} for {scorecard.model}: "
        f"{passed} of {counted(len(outcomes), 'candidate')} passed",
        reason=reason[:1].upper() + reason[1:],
    )


@dataclass(frozen=True, slots=True)
class Footer:
    """What the evidence was made from, and how anybody checks it.

    Attributes:
        digests: name and sha256, or that there is none.
        environment: versions and machine.
        commands: to check the page and the live repository with.
    """

    digests: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]


def footer(scorecard: Scorecard) -> Footer:
    """The digests of a scorecard and of what it was made from."""
    data = scorecard.data.model_dump()
    return Footer(
        digests=(
            ("scorecard", scorecard.digest),
            ("model (FP32 ONNX)", scorecard.onnx_sha256),
            ("policy", scorecard.policy_sha256),
            *((f"{name} data", digest or "none was given") for name, digest in data.items()),
        ),
        environment=tuple(sorted(scorecard.environment.items())),
        commands=(
            f"enginegate explain {short_digest(scorecard)}",
            f"enginegate report {short_digest(scorecard)} -o again.html",
            "enginegate verify POLICY",
        ),
    )
