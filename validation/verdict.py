"""Findings about one candidate, put together: the verdict."""

from collections.abc import Sequence

from enginegate.candidate import Candidate, Engine, Unbuilt
from enginegate.evidence import Finding, Outcome, Verdict
from validation.expectations import Judged

_ENGINE = "engine"
_NOT_COMPARED = Finding(
    gate="samples",
    scope="evaluation",
    outcome=Outcome.INCONCLUSIVE,
    reason="it was not compared with FP32 on the evaluation data",
    remedy="Validate it; without a comparison nothing is known.",
)


def verdict_on(engine: Engine, judged: Sequence[Judged], *notes: Finding) -> Verdict:
    """The verdict on a candidate that ran.

    Args:
        engine: what was run.
        judged: findings of each comparison; without one of the evaluation data the verdict is
            inconclusive at best.
        notes: findings about the evidence itself, such as the shadow sample's integrity.
    """
    ran = _runnable(Outcome.PASSED, f"ran on {engine.proof.device}")
    findings = [finding for part in judged for finding in part.findings]
    if not any(part.findings and part.scope.startswith("evaluation") for part in judged):
        findings.insert(0, _NOT_COMPARED)
    return _verdict_of(engine, ran, precision_proof(engine), *findings, *notes)


def for_unrunnable(engine: Engine, why: str, *emulated: Finding) -> Verdict:
    """The verdict on an engine that was built, but that no device here can run: inconclusive.

    Args:
        engine: what was built.
        why: what is missing.
        emulated: what an emulation showed; it can fail the candidate, never pass it.
    """
    remedy = f"Qualify on a machine with a device for {engine.target}."
    finding = _runnable(Outcome.INCONCLUSIVE, f"no device can run it here: {why}", remedy)
    return _verdict_of(engine, finding, precision_proof(engine), *emulated)


def for_undecidable(attempt: Unbuilt) -> Verdict:
    """The verdict on a candidate that no device or data here can decide: inconclusive."""
    why = f"cannot be decided here: {attempt.why}"
    finding = _runnable(Outcome.INCONCLUSIVE, why, attempt.remedy)
    return Verdict(candidate=attempt.candidate, engine_sha256=None, findings=(finding,))


def for_unbuilt(candidate: Candidate, why: str, *, broke: bool = False) -> Verdict:
    """The verdict on a candidate whose engine could not be built: failed, with the builder's text.

    Args:
        candidate: what was to be built.
        why: the message of the BuildError.
        broke: a tool broke, so nothing was found out: errored instead.
    """
    finding = Finding(
        gate="build",
        scope=_ENGINE,
        outcome=Outcome.ERRORED if broke else Outcome.FAILED,
        reason=f"could not be built: {why}",
        remedy="Mend what the builder reports, or take this candidate out of the policy.",
    )
    return Verdict(candidate=candidate, engine_sha256=None, findings=(finding,))


def for_errored(engine: Engine, why: str) -> Verdict:
    """The verdict on an engine that was built and broke when it ran: nothing was found out."""
    remedy = "Run it again; if it breaks again, look at how it was built."
    finding = _runnable(Outcome.ERRORED, f"broke when it ran: {why}", remedy)
    return _verdict_of(engine, finding, precision_proof(engine))


def precision_proof(engine: Engine) -> Finding:
    """Whether the built graph computes in the precision that the candidate's name claims."""
    proof = engine.proof
    return Finding(
        gate="precision_proof",
        scope=_ENGINE,
        outcome=Outcome.PASSED if proof.proven else Outcome.FAILED,
        reason=proof.detail,
        samples=sum(proof.weighted_layers.values()),
        remedy="" if proof.proven else "It is not what its name says; look at how it was built.",
    )


def _runnable(outcome: Outcome, reason: str, remedy: str = "") -> Finding:
    return Finding(gate="runnable", scope=_ENGINE, outcome=outcome, reason=reason, remedy=remedy)


def _provenance(engine: Engine) -> tuple[Finding, ...]:
    """Where an engine comes from that something else made; it decides nothing, and is told."""
    if engine.made is None:
        return ()
    finding = Finding(
        gate="provenance",
        scope=_ENGINE,
        outcome=Outcome.PASSED,
        reason=str(engine.made),
        advisory=True,
    )
    return (finding,)


def _verdict_of(engine: Engine, *findings: Finding) -> Verdict:
    findings = (*findings, *_provenance(engine))
    return Verdict(candidate=engine.candidate, engine_sha256=engine.file.sha256, findings=findings)
