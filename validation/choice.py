"""Which candidates are worth a benchmark, and which wins: numbers that were found, no I/O.

Best is the highest rate that is confirmed within the SLO; with the objective cost the lowest cost
of a request there, with latency the lowest p99 at the rate asked for. *Tied* with the best is what
has the same confirmed rate (or cost) and a p99 interval that overlaps the best's: such a difference
is noise, and another day it is the other way round. Tied is also what the generator, not the
server, kept from a higher rate: a lower bound loses against nothing. It wins by its size against
nothing either, since only the rate that was confirmed is known. Among the tied at the best value
the smallest engine wins, then the lowest cost, then the order of the policy; none of these is
measured anew by the next run.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from enginegate.candidate import Candidate, Precision
from enginegate.evidence import Benchmark, Outcome, Verdict
from enginegate.policy.benchmarking import Search
from enginegate.records import Record

_ROUNDING = 1e-6  # rates are of one grid, so only rounding can part equal ones
_KIB, _MIB = 1 << 10, 1 << 20


class Choice(Record):
    """The winner, or None, with the reason in one sentence.

    Attributes:
        tied: what the measurements do not tell from the winner, in the order of the policy.
    """

    winner: Candidate | None
    reason: str
    tied: tuple[Candidate, ...] = ()


def choose(
    verdicts: Sequence[Verdict],
    benchmarks: Sequence[Benchmark],
    bounds: Search,
    *,
    fp32_may_win: bool = True,
) -> Choice:
    """The best candidate among those that passed every gate; the top of this file says which.

    Args:
        verdicts: of every candidate, in the order of the policy.
        benchmarks: of those that were measured.
        bounds: its objective says what the best is.
        fp32_may_win: whether an FP32 engine may; else it is only what others are compared with.
    """
    measured = {benchmark.candidate: benchmark for benchmark in benchmarks}
    passed = [
        measured[verdict.candidate]
        for verdict in verdicts
        if verdict.outcome is Outcome.PASSED
        and verdict.candidate in measured
        and measured[verdict.candidate].outcome is Outcome.PASSED
    ]
    baselines = [] if fp32_may_win else [b for b in benchmarks if _is_fp32(b.candidate)]
    may_win = [found for found in passed if found not in baselines]
    if not may_win:
        why = _why_none(verdicts, measured, fp32_may_win=fp32_may_win)
        return Choice(winner=None, reason=why)
    best = _best(may_win, bounds, barred=len(may_win) < len(passed))
    compared = "".join(_baseline(found) for found in baselines if found.chosen is not None)
    return best.model_copy(update={"reason": best.reason + compared})


def _is_fp32(candidate: Candidate) -> bool:
    return candidate.precision is Precision.FP32


def _baseline(found: Benchmark) -> str:
    return (
        f" {found.candidate}, which may not win, serves {found.throughput_text} requests/s "
        f"(p99 {_p99_text(found)})."
    )


def choose_served(benchmarks: Sequence[Benchmark], bounds: Search) -> Choice:
    """The one that serves best, where only serving was measured; its answers may be wrong."""
    passed = [benchmark for benchmark in benchmarks if benchmark.outcome is Outcome.PASSED]
    if not passed:
        said = ", ".join(f"{b.candidate} {b.outcome.word}" for b in benchmarks)
        return Choice(
            winner=None, reason=f"No candidate meets the SLO: {said or 'none was measured'}."
        )
    best = _best(passed, bounds)
    findings = next(b.findings for b in passed if b.candidate == best.winner)
    # The policy may name a reference for speedup that is not part of this run.
    unjudged = (f.reason for f in findings if f.gate == "speedup" and f.advisory)
    speedup = "".join(f" Speedup was {reason}." for reason in unjudged)
    reason = f"{best.reason} Accuracy was not judged here.{speedup}"
    return best.model_copy(update={"reason": reason})


def _best(passed: Sequence[Benchmark], bounds: Search, *, barred: bool = False) -> Choice:
    """The best of those that may win; ``barred``: others passed that may not."""
    same = _with_the_best_value(passed, bounds)
    best = min(same, key=_p99_ms)
    at_best = {id(found) for found in same}
    tied = [
        found
        for found in passed
        if (
            _overlap(found, best)
            if id(found) in at_best
            else found.generator_limit_per_s is not None
        )
    ]
    proven = [found for found in tied if id(found) in at_best]
    winner = min(proven, key=lambda found: (_size(found), _cost(found)))
    others = [found for found in tied if found is not winner]
    if others:
        rivals = [found for found in proven if found is not winner]
        why = _why_of_the_tied(winner, others, rivals, bounds)
    elif len(passed) == 1:
        why = f"no other candidate {'that may win ' if barred else ''}passed"
    else:
        why = f"of {len(passed)} candidates that passed, {_WORDS[bounds.objective]}"
        why += ", and surely the lowest p99" if len(same) > 1 else ""
    return Choice(
        winner=winner.candidate,
        reason=f"serves {winner.throughput_text} requests/s within the SLO "
        f"(p99 {_p99_text(winner)}); {why}.",
        tied=tuple(found.candidate for found in others),
    )


_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "throughput": "the highest rate",
        "cost": "the lowest cost of a request",
        "latency": "the lowest p99 at that rate",
    }
)


def _with_the_best_value(passed: Sequence[Benchmark], bounds: Search) -> list[Benchmark]:
    """Those that no other beats in what the objective maximises, before p99 is compared."""
    values = [_value(found, bounds) for found in passed]
    least = max(values) * (1.0 - _ROUNDING)
    return [found for found, value in zip(passed, values, strict=True) if value >= least]


def _value(found: Benchmark, bounds: Search) -> float:
    """What the objective maximises; without a price nothing is cheaper than anything."""
    if bounds.objective == "throughput":
        return found.offered_at_slo_per_s
    cost = math.inf if bounds.objective == "latency" else _cost(found)
    return math.inf if cost == 0.0 else 1.0 / cost


def _overlap(one: Benchmark, other: Benchmark) -> bool:
    """Whether the p99 of both may be the same; an end that is not known leaves that open."""
    (one_low, one_high), (other_low, other_high) = _p99_interval(one), _p99_interval(other)
    return one_low <= other_high and other_low <= one_high


def _p99_interval(benchmark: Benchmark) -> tuple[float, float]:
    p99 = benchmark.p99_at_slo
    low, high = (p99.low_ms, p99.high_ms) if p99 else (None, None)
    return 0.0 if low is None else low, math.inf if high is None else high


def _why_of_the_tied(
    winner: Benchmark, others: Sequence[Benchmark], rivals: Sequence[Benchmark], bounds: Search
) -> str:
    """That it is a tie, with whom, and which rule broke it.

    Args:
        rivals: those of the others that were confirmed at the winner's value.
    """
    names = " and ".join(found.candidate.name for found in others)
    alike = "cost" if bounds.objective == "cost" else "rate"
    said = f"tied with {names} (the same {alike}, and p99 intervals that overlap)"
    bounded = [found for found in (winner, *others) if found.generator_limit_per_s is not None]
    if bounded:
        limited = " and ".join(found.candidate.name for found in bounded)
        said = (
            f"tied with {names} (of {limited} the generator, not the server, is the limit, so the "
            "rate is a lower bound)"
        )
    if not rivals:
        return f"{said}; of the tied the only one that is confirmed at this {alike}"
    if all(_size(winner) < _size(found) for found in rivals):
        next_bytes = min(_size(found) for found in rivals)
        smaller = f", against {_bytes(next_bytes)}" if math.isfinite(next_bytes) else ""
        return f"{said}; of the tied the smallest engine ({_bytes(_size(winner))}{smaller})"
    as_small = [found for found in rivals if _size(found) == _size(winner)]
    if all(_cost(winner) < _cost(found) for found in as_small):
        return f"{said}; of the smallest engines of the tied the lowest cost of a request"
    return (
        f"{said}; of the tied the first in the policy, for neither size nor cost tells them apart"
    )


def _size(found: Benchmark) -> float:
    """Bytes; an engine of unknown size is never the smallest."""
    return math.inf if found.engine_bytes is None else found.engine_bytes


def _cost(found: Benchmark) -> float:
    """Of a million offered requests; infinite without a price.

    The share that was answered is noise between equal rates, so it is left out, with rounding.
    """
    cost, offered_per_s = found.cost_per_million, found.offered_at_slo_per_s
    if cost is None or not offered_per_s:
        return math.inf
    return float(f"{cost * found.throughput_at_slo_per_s / offered_per_s:.6g}")


def _bytes(size: float) -> str:
    return f"{size / _MIB:.1f} MiB" if size >= _MIB else f"{size / _KIB:.0f} KiB"


def _p99_ms(benchmark: Benchmark) -> float:
    return benchmark.p99_at_slo.value_ms if benchmark.p99_at_slo else math.inf


def _p99_text(found: Benchmark) -> str:
    p99 = found.p99_at_slo
    if p99 is None or p99.low_ms is None or p99.high_ms is None:
        return f"{_p99_ms(found):.1f} ms"
    return f"{p99.value_ms:.1f} ms, {p99.low_ms:.1f} to {p99.high_ms:.1f}"


def _why_none(
    verdicts: Sequence[Verdict], measured: dict[Candidate, Benchmark], *, fp32_may_win: bool
) -> str:
    outcomes, barred = [], False
    for verdict in verdicts:
        benchmark = measured.get(verdict.candidate)
        if _is_fp32(verdict.candidate) and not fp32_may_win:
            # Its verdict stands alone where nothing was left to compare its speed with.
            outcome = max(verdict.outcome, benchmark.outcome if benchmark else Outcome.PASSED)
            barred = barred or outcome is Outcome.PASSED
            ending = " but may not win" if outcome is Outcome.PASSED else ""
            outcomes.append(f"{verdict.candidate} {outcome.word}{ending}")
            continue
        outcome = max(verdict.outcome, benchmark.outcome if benchmark else Outcome.INCONCLUSIVE)
        outcomes.append(f"{verdict.candidate} {outcome.word}")
    may = "that may win " if barred else ""
    return f"No candidate {may}passed every gate: {', '.join(outcomes) or 'there was none'}."


def not_benchmarked(
    verdicts: Sequence[Verdict],
    *,
    also_inconclusive: bool,
    baselines: bool,
    fp32_may_win: bool = True,
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
        fp32_may_win: whether an FP32 engine may; else it is measured for the others alone.
    """
    measurable = [verdict for verdict in verdicts if _is_measurable(verdict)]
    found = {v.candidate: _why(v, also_inconclusive=also_inconclusive) for v in measurable}
    if not fp32_may_win:
        for candidate in [c for c, why in found.items() if not why and _is_fp32(c)]:
            found[candidate] = "may not win, and nothing is left to compare with it"
    compared = baselines or not fp32_may_win
    kinds = {candidate.kind for candidate, why in found.items() if not why} if compared else set()
    needed = {Candidate(kind=kind, precision=Precision.FP32) for kind in kinds}
    return {candidate: why for candidate, why in found.items() if why and candidate not in needed}


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
