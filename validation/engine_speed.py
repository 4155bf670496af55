"""What engines alone say about how they are served: shown beside the decision, deciding nothing.

- ``faster_alone``: a candidate that also passed is faster than the winner without a server. The
  device was not what decided then; the finding names what took most of its time under load.
- ``slower_than_eager``: an engine loses to the source's own PyTorch model, not compiled, on the
  same kind of device.

Medians are compared only where their windows do not overlap: an overlap is called a tie.
"""

from collections.abc import Iterator, Sequence

from enginegate.candidate import Candidate, Precision
from enginegate.evidence import (
    BatchSpeed,
    Benchmark,
    EagerSpeed,
    EngineSpeed,
    Finding,
    Outcome,
    Scorecard,
)
from enginegate.measuring.bottleneck import largest_stage
from enginegate.messages import per_second


def judge_engine_speeds(card: Scorecard) -> tuple[Finding, ...]:
    """Every finding on the engines' own speeds, all advisory."""
    return (*_faster_alone(card), *_slower_than_eager(card.engine_speeds, card.eager_speeds))


def _faster_alone(card: Scorecard) -> Iterator[Finding]:
    winner = card.winner
    own = card.engine_speed(winner) if winner else None
    if winner is None or own is None or own.best is None:
        return
    for speed in card.engine_speeds:
        passed = card.outcome(speed.candidate) is Outcome.PASSED
        alike = speed.inputs_on == own.inputs_on
        best = speed.best
        if speed.candidate == winner or not passed or not alike or best is None:
            continue
        if best.samples_per_s > own.best.samples_per_s:
            yield _compared(winner, own.best, speed.candidate, best, card)


def _compared(
    winner: Candidate, own: BatchSpeed, loser: Candidate, best: BatchSpeed, card: Scorecard
) -> Finding:
    factor = best.samples_per_s / own.samples_per_s if own.samples_per_s else float("inf")
    tied = best.ties_with(own)
    numbers = f"{_text(best)} alone, {winner} {_text(own)}"
    if tied:
        reason = f"{loser} makes {numbers}: a tie, for their windows overlap"
    else:
        benchmark = card.benchmark(loser)
        why = _limit(benchmark) if benchmark else "it was not served"
        reason = (
            f"{loser} makes {numbers}, so it is {factor:.2g} times as fast without a server, and "
            f"{winner} is served at a higher rate or as well; {why}"
        )
    return Finding(
        gate="faster_alone",
        scope=loser.name,
        outcome=Outcome.PASSED if tied else Outcome.INCONCLUSIVE,
        reason=reason,
        value=factor if own.samples_per_s else None,
        unit="times",
        samples=len(best.windows_per_s),
        advisory=True,
        remedy=""
        if tied
        else f"Serving, not the device, decided. Mend what holds {loser} back, then qualify again.",
    )


def _limit(benchmark: Benchmark) -> str:
    """What kept a served engine from its own speed, as its measurements have it."""
    if benchmark.generator_limit_per_s is not None:
        return (
            f"the generator was its limit at {per_second(benchmark.generator_limit_per_s)}, not "
            "the server"
        )
    if benchmark.at_ceiling:
        return "it reached the highest rate that the policy allows to try"
    if benchmark.cut_short:
        return f"its search was cut short: {benchmark.cut_short}"
    measured = benchmark.at_slo
    stage = largest_stage(measured) if measured else ""
    return f"under load, {stage}" if stage else "where its time goes under load was not counted"


def _slower_than_eager(
    speeds: Sequence[EngineSpeed], eager: Sequence[EagerSpeed]
) -> Iterator[Finding]:
    for speed in speeds:
        baseline = _baseline(speed, eager)
        best, other = speed.best, baseline.best if baseline else None
        if baseline is None or best is None or other is None:
            continue
        loses = best.samples_per_s < other.samples_per_s and not best.ties_with(other)
        if not loses:
            continue
        share = best.samples_per_s / other.samples_per_s
        yield Finding(
            gate="slower_than_eager",
            scope=speed.candidate.name,
            outcome=Outcome.INCONCLUSIVE,
            reason=f"{_text(best)} alone, and {baseline.library} makes {_text(other)} with the "
            f"same model in {baseline.precision}, not compiled: {share:.2g} times as fast",
            value=share,
            limit=1.0,
            relation=">=",
            unit="times",
            samples=len(best.windows_per_s),
            advisory=True,
            remedy="Look at the engine's layers and at what its session fell back to; another kind "
            "or precision may suit this model.",
        )


def _baseline(speed: EngineSpeed, eager: Sequence[EagerSpeed]) -> EagerSpeed | None:
    """Eager in the candidate's precision, else in FP32; on the same kind of device."""
    alike = {each.precision: each for each in eager if each.inputs_on == speed.inputs_on}
    return alike.get(speed.candidate.precision) or alike.get(Precision.FP32)


def _text(batch: BatchSpeed) -> str:
    low, high = min(batch.windows_per_s), max(batch.windows_per_s)
    return (
        f"{batch.samples_per_s:,.0f} samples/s ({low:,.0f} to {high:,.0f}, batch "
        f"{batch.batch_size})"
    )
