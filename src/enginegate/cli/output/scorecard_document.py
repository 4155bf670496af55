"""A scorecard as the document of `qualify --json` and `explain --json`."""

from collections.abc import Collection, Iterable
from pathlib import Path

from enginegate.candidate import Candidate
from enginegate.cli.output.records import (
    CandidateSummary,
    DeviceSummary,
    PartDocument,
    ScorecardDocument,
)
from enginegate.devices import DeviceQualification
from enginegate.evidence import Finding, Outcome, Scorecard, Verdict
from enginegate.report import candidate_meaning, row_of

_DIGEST_SHOWN = 12


def scorecard_document(
    card: Scorecard,
    *,
    only: Collection[Candidate] | None = None,
    blocking: bool = False,
    policy: Path | None = None,
) -> ScorecardDocument:
    """What is on a scorecard.

    Args:
        card: the scorecard.
        only: these candidates; None: all of them.
        blocking: only candidates that did not pass, and only the findings that kept them from it.
        policy: the file it was just qualified under, for the commands that come next.
    """
    return ScorecardDocument(
        scorecard=card.digest,
        model=card.model,
        model_uri=card.model_uri,
        created_at=card.created_at,
        requested_by=card.requested_by,
        policy_sha256=card.policy_sha256,
        winner=card.winner.name if card.winner else None,
        reason=card.reason,
        replaces=card.replaces,
        mlflow_run=card.mlflow_run,
        candidates=_summaries(card, only, blocking=blocking),
        devices=tuple(
            _on_device(card.on(device), only, blocking=blocking) for device in card.devices
        ),
        next=() if policy is None else commands_after(card, policy),
        policy="" if policy is None else str(policy),
    )


def part_document(part: DeviceQualification, commands: Iterable[str]) -> PartDocument:
    """What one kind of device's part of a qualification says.

    Args:
        part: the part.
        policy: the file it was just qualified under, for the commands that come next.
    """
    identity = part.identity
    return PartDocument(
        part=identity.digest,
        model=identity.model,
        model_uri=identity.model_uri,
        policy_sha256=identity.policy_sha256,
        found=_on_device(part.shown(), None, blocking=False),
        made_at=part.made_at,
        made_by=part.made_by,
        next=tuple(commands),
    )


def _on_device(
    view: Scorecard, only: Collection[Candidate] | None, *, blocking: bool
) -> DeviceSummary:
    return DeviceSummary(
        device=view.device,
        winner=view.winner.name if view.winner else None,
        reason=view.reason,
        candidates=_summaries(view, only, blocking=blocking),
    )


def _summaries(
    card: Scorecard, only: Collection[Candidate] | None, *, blocking: bool
) -> tuple[CandidateSummary, ...]:
    shown = [v for v in card.verdicts if only is None or v.candidate in only]
    if blocking:
        shown = [v for v in shown if card.outcome(v.candidate) is not Outcome.PASSED]
    return tuple(_summary(card, verdict, blocking=blocking) for verdict in shown)


def commands_after(card: Scorecard, policy: Path) -> tuple[str, ...]:
    """The commands that come after a qualification; none where nothing won."""
    if card.winner is None:
        return ()
    short = card.digest[:_DIGEST_SHOWN]
    return f"enginegate approve {short} --reason WHY", f"enginegate promote {policy} {short}"


def qualification_outcome(card: Scorecard) -> Outcome:
    """How a qualification ended: passed where there is a winner, else by its worst candidate."""
    if card.winner is not None:
        return Outcome.PASSED
    outcomes = [card.outcome(verdict.candidate) for verdict in card.verdicts]
    worst = max(outcomes, default=Outcome.INCONCLUSIVE)
    return Outcome.FAILED if worst is Outcome.PASSED else worst


def _summary(card: Scorecard, verdict: Verdict, *, blocking: bool) -> CandidateSummary:
    candidate, measured = verdict.candidate, card.benchmark(verdict.candidate)
    findings = (*verdict.findings, *(measured.findings if measured else ()))
    return CandidateSummary(
        candidate=candidate.name,
        outcome=card.outcome(candidate),
        meaning=candidate_meaning(card, candidate),
        tied=candidate in card.tied,
        engine_sha256=verdict.engine_sha256,
        engine_bytes=measured.engine_bytes if measured else None,
        accuracy=row_of(card, candidate).accuracy,
        throughput_per_s=measured.throughput_at_slo_per_s if measured else None,
        throughput_is_bound=bool(measured and measured.is_lower_bound),
        p99=measured.p99_at_slo if measured else None,
        serving=measured.chosen if measured else None,
        unmeasured=card.unmeasured.get(candidate.name, ""),
        findings=tuple(f for f in findings if not blocking or _blocks(f)),
    )


def _blocks(finding: Finding) -> bool:
    return not finding.advisory and finding.outcome is not Outcome.PASSED
