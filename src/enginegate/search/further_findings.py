"""Advisory findings of a search: what happens past the answer, and against what is live."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from enginegate.evidence import Finding, Outcome, Rival
from enginegate.search.confirmed_point import ConfirmedPoint, Overload
from enginegate.search.findings import SCOPE
from enginegate.wording import per_second, short_number

_LEAST_KEPT = 0.9


def further_findings(
    best: ConfirmedPoint, overload: Overload | None, rival: Rival | None
) -> tuple[Finding, ...]:
    """Advisory: what happens just past the answer, and how it compares with what is live."""
    against = () if rival is None else (_rival(rival),)
    return _overload(best, overload), *against


def _overload(best: ConfirmedPoint, overload: Overload | None) -> Finding:
    if overload is None:
        outcome, reason = Outcome.INCONCLUSIVE, "nothing past the answer was measured"
        remedy = "raise [search] max_rate_per_s and budget_s to half as much again as the answer"
        return _advisory("overload", outcome, reason, remedy)
    kept = overload.throughput_per_s / best.throughput_per_s
    collapsed = not kept >= _LEAST_KEPT
    reason = (
        f"{per_second(overload.throughput_per_s)} served of {per_second(overload.rate_per_s)} "
        "offered, "
        f"{kept:.0%} of the answer's throughput {'<' if collapsed else '>='} {_LEAST_KEPT:.0%}; "
        f"{overload.failed_share:.1%} failed"
    )
    remedy = "drop max_queue_size, or keep the load away from the edge: admit less"
    return _advisory(
        "overload",
        Outcome.FAILED if collapsed else Outcome.PASSED,
        reason,
        remedy if collapsed else "",
        numbers=_Numbers(kept, _LEAST_KEPT, ">="),
    )


def _rival(rival: Rival) -> Finding:
    ours, theirs = median(rival.candidate_p99_ms), median(rival.champion_p99_ms)
    outcome, word = Outcome.INCONCLUSIVE, "within the noise of"
    if ours < theirs - rival.noise_ms:
        outcome, word = Outcome.PASSED, "below"
    elif ours > theirs + rival.noise_ms:
        outcome, word = Outcome.FAILED, "above"
    reason = (
        f"p99 {short_number(ours, 4)} ms is {word} that of release {rival.release}, "
        f"{short_number(theirs, 4)} ms, at "
        f"{per_second(rival.rate_per_s)} in {len(rival.candidate_p99_ms)} turns (it differs "
        "from itself "
        f"by {short_number(rival.noise_ms)} ms); the release held "
        f"{per_second(rival.champion_throughput_per_s)}"
    )
    return _advisory("champion", outcome, reason, "", numbers=_Numbers(ours, theirs, "<="))


@dataclass(frozen=True, slots=True)
class _Numbers:
    value: float
    limit: float
    relation: Literal["<=", ">="]


def _advisory(
    gate: str, outcome: Outcome, reason: str, remedy: str, *, numbers: _Numbers | None = None
) -> Finding:
    return Finding(
        gate=gate,
        scope=SCOPE,
        outcome=outcome,
        reason=reason,
        value=numbers.value if numbers else None,
        limit=numbers.limit if numbers else None,
        relation=numbers.relation if numbers else None,
        advisory=True,
        remedy=remedy,
    )
