"""A scorecard as the document of `qualify --json` and `explain --json`."""

from collections.abc import Collection, Iterable
from pathlib import Path

from enginegate.candidate import Candidate
from enginegate.cli.output.records import CandidateSummary, ScorecardDocument
from enginegate.evidence import Finding, Outcome, Scorecard, Verdict
from enginegate.report import candidate_meaning, row_of

_DIGEST_SHOWN = 12


def scorecard_document(
    card: Scorecard,
    *,
    only: Collection[Candidate] | None = None,
    blocking: bool = False,
    commands: Iterable[str] = (),
) -> ScorecardDocument:
    """What is on a scorecard.

    Args:
        card: the scorecard.
        only: these candidates; None: all of them.
        blocking: only candidates that did not pass, and only the findings that kept them from it.
        commands: that come next.
    """
    shown = [v for v in card.verdicts if only is None or v.candidate in only]
    if blocking:
        shown = [v for v in shown if card.outcome(v.candidate) is not Outcome.PASSED]
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
        candidates=tuple(_summary(card, verdict, blocking=blocking) for verdict in shown),
        next=tuple(commands),
    )


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
