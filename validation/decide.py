"""Which candidate wins, and why: numbers that were found, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

from enginegate.candidate import Candidate
from enginegate.canonical import Record
from enginegate.evidence import Benchmark, Outcome, Verdict

Objective: TypeAlias = Literal["throughput", "cost", "latency"]


class Choice(Record):
    """The winner, or None, with the reason in one sentence."""

    winner: Candidate | None
    reason: str


def choose(
    verdicts: Sequence[Verdict],
    benchmarks: Sequence[Benchmark],
    *,
    objective: Objective = "throughput",
) -> Choice:
    """The best candidate among those that passed every gate.

    Best is the highest throughput within the SLO; with another objective the lowest cost of a
    request there, or the lowest p99 at the rate asked for. At a draw the lower p99 wins, then the
    order of the policy.
    """
    measured = {benchmark.candidate: benchmark for benchmark in benchmarks}
    passed = [
        measured[verdict.candidate]
        for verdict in verdicts
        if verdict.outcome is Outcome.PASSED
        and verdict.candidate in measured
        and measured[verdict.candidate].outcome is Outcome.PASSED
    ]
    if not passed:
        return Choice(winner=None, reason=_why_none(verdicts, measured))
    return _best(passed, objective)


def choose_served(benchmarks: Sequence[Benchmark], objective: Objective) -> Choice:
    """The one that serves best, where only serving was looked at; its answers may be wrong."""
    passed = [benchmark for benchmark in benchmarks if benchmark.outcome is Outcome.PASSED]
    if not passed:
        said = ", ".join(f"{b.candidate} {b.outcome.word}" for b in benchmarks)
        return Choice(
            winner=None, reason=f"No candidate holds the SLO: {said or 'none was measured'}."
        )
    best = _best(passed, objective)
    return Choice(
        winner=best.winner,
        reason=f"{best.reason} Accuracy was not judged here.{_unjudged(passed, best.winner)}",
    )


def _unjudged(passed: Sequence[Benchmark], winner: Candidate | None) -> str:
    """That the winner was not compared with what the policy names, where this run left that out."""
    found = (f for b in passed if b.candidate == winner for f in b.findings)
    said = (f.reason for f in found if f.gate == "speedup" and f.advisory)
    return "".join(f" Speedup was {reason}." for reason in said)


def _best(passed: Sequence[Benchmark], objective: Objective) -> Choice:
    rank, words = _OBJECTIVES[objective]
    best = max(passed, key=lambda b: (rank(b), -_p99_ms(b)))
    others = len(passed) - 1
    return Choice(
        winner=best.candidate,
        reason=(
            f"serves {best.throughput_at_slo_per_s:.0f} requests/s within the SLO "
            f"(p99 {_p99_ms(best):.1f} ms); "
            + (
                f"of {len(passed)} candidates that passed, {words}."
                if others
                else "no other candidate passed."
            )
        ),
    )


def _p99_ms(benchmark: Benchmark) -> float:
    return benchmark.p99_at_slo.value_ms if benchmark.p99_at_slo else float("inf")


def _cheapness(benchmark: Benchmark) -> float:
    """Without a price nothing is cheaper than anything."""
    cost = benchmark.cost_per_million
    return -cost if cost is not None else float("-inf")


_OBJECTIVES: Mapping[Objective, tuple[Callable[[Benchmark], float], str]] = MappingProxyType(
    {
        "throughput": (
            lambda b: b.throughput_at_slo_per_s,
            "the highest rate, then the lowest p99",
        ),
        "cost": (_cheapness, "the lowest cost of a request, then the lowest p99"),
        "latency": (lambda b: -_p99_ms(b), "the lowest p99 at that rate"),
    }
)


def _why_none(verdicts: Sequence[Verdict], measured: dict[Candidate, Benchmark]) -> str:
    outcomes = []
    for verdict in verdicts:
        benchmark = measured.get(verdict.candidate)
        outcome = max(verdict.outcome, benchmark.outcome if benchmark else Outcome.INCONCLUSIVE)
        outcomes.append(f"{verdict.candidate} {outcome.word}")
    return f"No candidate passed every gate: {', '.join(outcomes) or 'there was none'}."
