"""What is live now against what is proposed, line by line like a diff.

"Now" is what the scorecard holds of the release that was live when it was made, so that the
comparison is part of what is approved. An interval that overlaps the other's shows no difference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from enginegate.candidate import Candidate
from enginegate.evidence import Benchmark, Finding, ReplacedRelease, Scorecard
from enginegate.measurement import Percentile
from enginegate.messages import per_second, short_number
from enginegate.report.content import (
    MISSING,
    in_points,
    percentile_text,
    size_text,
    task_loss,
)

Effect = Literal["better", "worse", "changed", "same", "unknown"]
# Numbers nearer than this are equal for people: they are shown with fewer digits.
_EQUAL = 1e-3


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One property of both.

    Attributes:
        now: of what is live; empty: nothing is.
        proposed: of the candidate.
        effect: what the change is, for its colour and its word.
        change: how much, in words; empty where there is nothing to say.
    """

    name: str
    now: str
    proposed: str
    effect: Effect
    change: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both, and what must be known to compare them.

    Attributes:
        now_title: which release; empty: nothing was live.
        proposed_title: which candidate; empty: none may be approved.
        notes: what makes the numbers less than comparable.
    """

    now_title: str
    proposed_title: str
    lines: tuple[ComparedLine, ...]
    notes: tuple[str, ...]


class _Estimate(NamedTuple):
    """A number and its interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class _Side:
    """One of both, or what is known of it."""

    candidate: Candidate
    engine_sha256: str | None
    model_uri: str
    loss: Finding | None
    fp32: Finding | None
    p99: Percentile | None
    benchmark: Benchmark | None
    engine_bytes: int | None
    gpu_bytes: int | None


def comparison_section(scorecard: Scorecard) -> Comparison | None:
    """The winner beside what it would replace; None: there is no winner.

    Nothing live, or a release of which nothing is known, leaves the left side empty.
    """
    winner = scorecard.winner
    if winner is None:
        return None
    new = _proposed(scorecard, winner)
    old = _live(scorecard.replaced) if scorecard.replaced else None
    now = f"release {scorecard.replaces}" if scorecard.replaces else ""
    return Comparison(
        now_title=now,
        proposed_title=winner.name,
        lines=tuple(_lines(old, new)),
        notes=tuple(_notes(scorecard)),
    )


def _proposed(scorecard: Scorecard, winner: Candidate) -> _Side:
    verdict, measured = scorecard.verdict(winner), scorecard.benchmark(winner)
    loss = task_loss(verdict)
    return _Side(
        candidate=winner,
        engine_sha256=verdict.engine_sha256 if verdict else None,
        model_uri=scorecard.model_uri,
        loss=loss,
        fp32=scorecard.fp32_score_of(loss),
        p99=measured.p99_at_slo if measured else None,
        benchmark=measured,
        engine_bytes=measured.engine_bytes if measured else None,
        gpu_bytes=measured.gpu_bytes if measured else None,
    )


def _live(replaced: ReplacedRelease) -> _Side:
    measured = replaced.benchmark
    return _Side(
        candidate=replaced.candidate,
        engine_sha256=replaced.engine_sha256,
        model_uri=replaced.model_uri,
        loss=replaced.loss,
        fp32=replaced.fp32_score,
        p99=measured.p99_at_slo if measured else None,
        benchmark=measured,
        engine_bytes=replaced.engine_bytes,
        gpu_bytes=replaced.gpu_bytes,
    )


def _lines(old: _Side | None, new: _Side) -> Iterator[ComparedLine]:
    same = old is not None and old.engine_sha256 == new.engine_sha256
    yield _named(
        "Engine", _engine(old) if old else None, _engine(new), same="same bytes" if same else ""
    )
    yield _named("Model version", old.model_uri if old else None, new.model_uri)
    yield _accuracy(old, new)
    yield _rate(old, new)
    yield _p99(old, new)
    yield from _in_turns(new)
    live_bytes, live_gpu = (old.engine_bytes, old.gpu_bytes) if old else (None, None)
    yield _bytes("Engine size", live_bytes, new.engine_bytes, known=bool(old))
    if new.gpu_bytes is not None or live_gpu is not None:
        yield _bytes("GPU memory", live_gpu, new.gpu_bytes, known=bool(old))
    costs = [s.benchmark.cost_per_million if s and s.benchmark else None for s in (old, new)]
    if any(cost is not None for cost in costs):
        currency = new.benchmark.currency if new.benchmark else ""
        words = [MISSING if cost is None else f"{cost:.3g} {currency}" for cost in costs]
        effect, change = _moved(*costs, lower_is_better=True)
        name = "Cost of a million requests"
        yield ComparedLine(name, words[0] if old else "", words[1], effect, change)


def _engine(side: _Side) -> str:
    digest = side.engine_sha256[:12] if side.engine_sha256 else MISSING
    return f"{side.candidate.name} {digest}"


def _named(name: str, now: str | None, proposed: str, *, same: str = "") -> ComparedLine:
    if now is None:
        return ComparedLine(name, "", proposed, "unknown", "")
    if now == proposed or same:
        return ComparedLine(name, now, proposed, "same", same or "the same")
    return ComparedLine(name, now, proposed, "changed", "changed")


def _absolute(side: _Side) -> _Estimate | None:
    """A side's own score with its paired interval around FP32's, in the measure's unit."""
    loss, base = side.loss, side.fp32.value if side.fp32 else None
    if loss is None or loss.value is None or base is None:
        return None
    rising = side.fp32 is not None and side.fp32.relation == ">="
    value = base - loss.value if rising else base + loss.value
    if loss.low is None or loss.high is None:
        return _Estimate(value)
    if rising:
        return _Estimate(value, base - loss.high, base - loss.low)
    return _Estimate(value, base + loss.low, base + loss.high)


def _accuracy(old: _Side | None, new: _Side) -> ComparedLine:
    name = new.loss.measure_title if new.loss else "Answers"
    share = new.loss is None or in_points(new.loss)
    now, proposed = _absolute(old) if old else None, _absolute(new)
    words = [_score_text(each, share=share) for each in (now, proposed)]
    if old is None or now is None or proposed is None:
        return ComparedLine(name, words[0] if old else "", words[1], "unknown", "")
    higher = new.fp32 is None or new.fp32.relation == ">="
    if old.model_uri != new.model_uri:
        # Each interval is around its own FP32, which is only as certain as its own interval.
        now, proposed = _with_fp32(now, old), _with_fp32(proposed, new)
    effect, change = _apart(now, proposed, higher_is_better=higher)
    return ComparedLine(name, words[0], words[1], effect, change)


def _with_fp32(score: _Estimate, side: _Side) -> _Estimate:
    """A score with the wider interval: around FP32's, or FP32's own, of the same samples."""
    base = side.fp32
    if base is None or score.low is None or score.high is None:
        return score
    if base.value is None or base.low is None or base.high is None:
        return score
    moved = score.value - base.value
    low, high = min(score.low, base.low + moved), max(score.high, base.high + moved)
    return score._replace(low=low, high=high)


def _score_text(score: _Estimate | None, *, share: bool) -> str:
    def show(number: float) -> str:
        return f"{100 * number:.2f}" if share else short_number(number, 4)

    if score is None:
        return MISSING
    unit = " %" if share else ""
    if score.low is None or score.high is None:
        return f"{show(score.value)}{unit}"
    return f"{show(score.value)}{unit} ({show(score.low)} to {show(score.high)})"


def _p99(old: _Side | None, new: _Side) -> ComparedLine:
    """Each at its own rate, so that they compare only where the rates are equal."""
    name, words = "p99 at that rate", _ms(new.p99)
    if old is None:
        return ComparedLine(name, "", words, "unknown", "")
    now = _ms(old.p99)
    if old.p99 is None or new.p99 is None or old.benchmark is None or new.benchmark is None:
        return ComparedLine(name, now, words, "unknown", "")
    rates = [side.benchmark.offered_at_slo_per_s for side in (old, new) if side.benchmark]
    if not math.isclose(*rates, rel_tol=_EQUAL):
        return ComparedLine(name, now, words, "changed", "at another rate")
    ends = [_Estimate(p.value_ms, p.low_ms, p.high_ms) for p in (old.p99, new.p99)]
    effect, change = _apart(ends[0], ends[1], higher_is_better=False)
    return ComparedLine(name, now, words, effect, change)


def _ms(percentile: Percentile | None) -> str:
    return MISSING if percentile is None else f"{percentile_text(percentile)} ms"


def _in_turns(new: _Side) -> Iterator[ComparedLine]:
    """p99 of both at one rate, where they were measured in turns; the spread is over the turns."""
    rival = new.benchmark.rival if new.benchmark else None
    if rival is None or not rival.candidate_p99_ms or not rival.champion_p99_ms:
        return
    ends = [_turns(turns) for turns in (rival.champion_p99_ms, rival.candidate_p99_ms)]
    words = [f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f}) ms" for e in ends]
    effect, change = _apart(ends[0], ends[1], higher_is_better=False)
    if abs(ends[0].value - ends[1].value) <= rival.noise_ms:
        effect, change = "same", "within the live release's own noise"
    name = f"p99 at {per_second(rival.rate_per_s)}, in turns"
    yield ComparedLine(name, words[0], words[1], effect, change)


def _turns(values_ms: Sequence[float]) -> _Estimate:
    return _Estimate(fmean(values_ms), min(values_ms), max(values_ms))


def _rate(old: _Side | None, new: _Side) -> ComparedLine:
    name = "Rate within the SLO"
    words = [
        f"{side.benchmark.throughput_text} requests/s{side.benchmark.rows_text}"
        if side and side.benchmark
        else MISSING
        for side in (old, new)
    ]
    if old is None:
        return ComparedLine(name, "", words[1], "unknown", "")
    if old.benchmark is None or new.benchmark is None:
        return ComparedLine(name, words[0], words[1], "unknown", "")
    effect, change = _moved_rate(old.benchmark, new.benchmark)
    return ComparedLine(name, words[0], words[1], effect, change)


def _moved_rate(now: Benchmark, proposed: Benchmark) -> tuple[Effect, str]:
    """How far a rate moved, where a lower bound is no more than that."""
    rates = [each.throughput_at_slo_per_s for each in (now, proposed)]
    if now.is_lower_bound and proposed.is_lower_bound:
        ceiling = now.at_ceiling and proposed.at_ceiling
        return "unknown", "both at the search's ceiling" if ceiling else "both may be more"
    effect, change = _moved(rates[0], rates[1], lower_is_better=False)
    bound = now if now.is_lower_bound else proposed if proposed.is_lower_bound else None
    if bound is None:
        return effect, change
    lower = rates[0] if bound is proposed else rates[1]
    if bound.throughput_at_slo_per_s <= lower:
        return "unknown", "not told apart: one may be more"
    return effect, f"at least {change}"


def _bytes(name: str, now: int | None, proposed: int | None, *, known: bool) -> ComparedLine:
    effect, change = _moved(now, proposed, lower_is_better=True)
    left = size_text(now) if known else ""
    return ComparedLine(name, left, size_text(proposed), effect, change)


def _moved(
    now: float | None, proposed: float | None, *, lower_is_better: bool
) -> tuple[Effect, str]:
    """How far a number moved, as a share of what it was."""
    if not now or proposed is None:
        return "unknown", ""
    share = proposed / now - 1.0
    if abs(share) < _EQUAL:
        return "same", "the same"
    better = (share < 0) == lower_is_better
    effect: Effect = "better" if better else "worse"
    if share >= 1:
        return effect, f"{share + 1:.3g} times as much"
    return effect, f"{100 * abs(share):.3g} % {'less' if share < 0 else 'more'}"


def _apart(now: _Estimate, proposed: _Estimate, *, higher_is_better: bool) -> tuple[Effect, str]:
    """Whether intervals tell two numbers apart."""
    if now == proposed:
        return "same", "the same"
    if now.low is None or now.high is None or proposed.low is None or proposed.high is None:
        return "unknown", ""
    if proposed.low > now.high or proposed.high < now.low:
        rose = proposed.value > now.value
        effect: Effect = "better" if rose == higher_is_better else "worse"
        return effect, _moved(now.value, proposed.value, lower_is_better=not higher_is_better)[1]
    return "same", "intervals overlap: no difference shown"


def _notes(scorecard: Scorecard) -> Iterator[str]:
    replaced = scorecard.replaced
    if scorecard.replaces is None:
        yield "Nothing was live when this was qualified."
    elif replaced is None:
        yield (
            f"Of release {scorecard.replaces} this scorecard holds no numbers: it was made before "
            "they were recorded."
        )
    elif replaced.benchmark is None:
        yield (
            f"The evidence of release {replaced.release} is not on the machine that qualified. Its "
            f"promise: p99 {replaced.promised_p99_ms:.4g} ms at {replaced.promised_per_s:.4g} "
            "requests/s."
        )
    else:
        when = f"{replaced.qualified_at:%Y-%m-%d}" if replaced.qualified_at else "earlier"
        yield (
            f"Release {replaced.release} as it was qualified on {when}, on "
            f"{replaced.benchmark.server}."
        )
        if replaced.evaluation_sha256 != scorecard.data.evaluation:
            yield "It was judged on other labelled data, so the scores compare only roughly."
