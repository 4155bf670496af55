"""Which candidates need no benchmark, because no speed could make them win: no I/O."""

from collections.abc import Mapping, Sequence

from enginegate.candidate import Candidate, EngineKindName, Precision
from enginegate.evidence import Outcome, Verdict


def not_benchmarked(
    verdicts: Sequence[Verdict], *, also_inconclusive: bool, baselines: bool
) -> Mapping[Candidate, str]:
    """The candidates whose verdict keeps them from winning, and why, in a few words.

    One that no device here can run, or that has no engine, is not among them: it cannot be
    measured anyway.

    Args:
        verdicts: on every candidate that may be measured.
        also_inconclusive: whether a person may accept one that is inconclusive, for which its
            speed must be known.
        baselines: whether candidates are compared with the FP32 engine of their kind, which is
            then measured whatever its verdict is.
    """
    measurable = [verdict for verdict in verdicts if _is_measurable(verdict)]
    found = {v.candidate: _why(v, also_inconclusive=also_inconclusive) for v in measurable}
    kinds = {candidate.kind for candidate, why in found.items() if not why} if baselines else set()
    needed = {_fp32(kind) for kind in kinds}
    return {candidate: why for candidate, why in found.items() if why and candidate not in needed}


def _fp32(kind: EngineKindName) -> Candidate:
    return Candidate(kind=kind, precision=Precision.FP32)


def _is_measurable(verdict: Verdict) -> bool:
    ran = verdict.finding("runnable", "engine")
    unrunnable = ran is not None and ran.outcome is Outcome.INCONCLUSIVE
    return verdict.engine_sha256 is not None and not unrunnable


def _why(verdict: Verdict, *, also_inconclusive: bool) -> str:
    wins = verdict.outcome is Outcome.PASSED
    if wins or (verdict.outcome is Outcome.INCONCLUSIVE and also_inconclusive):
        return ""
    first = verdict.blocking[0] if verdict.blocking else None
    return f"verdict {verdict.outcome.word}" + (f" ({first.gate})" if first else "")
