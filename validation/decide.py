"""Which candidate wins, and why: numbers that were found, no I/O."""

from collections.abc import Sequence

from enginegate.candidate import Candidate
from enginegate.canonical import Record
from enginegate.evidence import Benchmark, Outcome, Verdict


class Choice(Record):
    """The winner, or None, with the reason in one sentence."""

    winner: Candidate | None
    reason: str


def choose(verdicts: Sequence[Verdict], benchmarks: Sequence[Benchmark]) -> Choice:
    """The candidate with the highest throughput within the SLO, among those that passed every gate.

    At equal throughput the lower p99 wins, then the order of the policy.
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
    best = max(passed, key=lambda b: (b.throughput_at_slo_per_s, -_p99_ms(b)))
    others = len(passed) - 1
    return Choice(
        winner=best.candidate,
        reason=(
            f"serves {best.throughput_at_slo_per_s:.0f} requests/s within the SLO "
            f"(p99 {_p99_ms(best):.1f} ms); "
            + (
                f"of {len(passed)} candidates that passed, the highest rate, then the lowest p99."
                if others
                else "no other candidate passed."
            )
        ),
    )


def _p99_ms(benchmark: Benchmark) -> float:
    return benchmark.p99_at_slo.value_ms if benchmark.p99_at_slo else float("inf")


def _why_none(verdicts: Sequence[Verdict], measured: dict[Candidate, Benchmark]) -> str:
    outcomes = []
    for verdict in verdicts:
        benchmark = measured.get(verdict.candidate)
        outcome = max(verdict.outcome, benchmark.outcome if benchmark else Outcome.INCONCLUSIVE)
        outcomes.append(f"{verdict.candidate} {outcome.word}")
    return f"No candidate passed every gate: {', '.join(outcomes) or 'there was none'}."
