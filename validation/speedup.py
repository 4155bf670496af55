"""Whether a candidate is faster by the policy's margin: throughput at the SLO against a reference.

The reference is the FP32 engine of the same runtime, or what is live. A throughput is known as
exactly as the search tells rates apart only where a rate just above it is refuted by the rule of
the gate p99_ms (`Benchmark.decisions`), and the search ended by itself. Else it is a lower bound,
below a refuted rate where there is one. Only what the bounds of the ratio settle is decided.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from enginegate.candidate import Candidate, Precision, Sha256
from enginegate.evidence import Benchmark, Finding, Outcome, Rival
from enginegate.measuring.p99 import lowest_refuted
from enginegate.messages import per_second
from enginegate.policy.benchmarking import Search, Slo

GATE = "speedup"
# Rates of two searches are equal up to this factor: grids are rounded to six digits.
_ROUNDING = 1.001


@dataclass(frozen=True, slots=True)
class Throughput:
    """What is known of a throughput within the SLO, requests/s.

    Attributes:
        per_s: it is at least that.
        most_per_s: it is at most that; infinite when nothing above was refuted.
        why_open: why it may be more, and what to do about it.
    """

    per_s: float
    most_per_s: float
    why_open: str = ""

    @classmethod
    def exact(cls, per_s: float) -> "Throughput":
        """As closely as the search tells rates apart."""
        return cls(per_s, per_s)

    @classmethod
    def below(cls, per_s: float, refuted_per_s: float | None, bounds: Search) -> "Throughput":
        """Exact where the refuted rate is within two of the search's resolutions, else a bound."""
        near = per_s * (1.0 + bounds.resolution) ** 2 * _ROUNDING
        if refuted_per_s is not None and refuted_per_s <= near:
            return cls.exact(per_s)
        why = (
            "no rate just above it was refuted: raise [search] budget_s and measurement_s, so that "
            "a rate just above it is decided"
        )
        return cls(per_s, max(per_s, math.inf if refuted_per_s is None else refuted_per_s), why)

    @classmethod
    def of(cls, found: Benchmark, bounds: Search) -> "Throughput":
        """A benchmark's; bounded only by rates that are shown not to be sustained.

        One that was only not *seen* to be sustained (`rejected_rate_per_s`) may be on another day.
        """
        per_s = found.throughput_at_slo_per_s
        if found.cut_short:
            return cls(per_s, math.inf, found.cut_short)
        refuted = lowest_refuted(found.decisions, found.chosen, above_per_s=per_s)
        return cls.below(per_s, refuted, bounds)

    def at_top(self, bounds: Search) -> bool:
        """Whether it is the highest rate that is tried, as closely as rates are told apart."""
        return self.per_s >= bounds.ceiling_per_s * (1.0 - bounds.resolution)


@dataclass(frozen=True, slots=True)
class SpeedReference:
    """What a candidate is compared with.

    Attributes:
        name: for people.
        throughput: within the SLO; None when none is shown.
        why: what is known when there is no throughput.
        refuted_per_s: without a throughput, a rate that is shown not to be sustained.
    """

    name: str
    throughput: Throughput | None
    why: str = ""
    refuted_per_s: float | None = None


def with_speed(
    benchmarks: Sequence[Benchmark | None],
    slo: Slo,
    bounds: Search,
    *,
    live: Sha256 | None,
    left_out: Collection[Candidate] = (),
) -> tuple[Benchmark | None, ...]:
    """The benchmarks, each with the finding ``speedup`` where the policy asks for one.

    Args:
        benchmarks: of one run; None where a candidate was not measured.
        slo: says whether, by how much, and than what a candidate must be faster.
        bounds: say at which rate a search ends.
        live: digest of the engine that is live; None when nothing is.
        left_out: the policy's candidates that this run was not asked for. What would be compared
            with one of them is not judged, and the finding says so without counting.
    """
    margin = slo.min_speedup
    if margin is None:
        return tuple(benchmarks)
    made = [found for found in benchmarks if found is not None]
    judged: list[Benchmark | None] = []
    for found in benchmarks:
        against = None if found is None else _reference(found, made, slo, bounds, live)
        if found is None or against is None:
            judged.append(found)
            continue
        if against.throughput is None and against.name in {each.name for each in left_out}:
            finding = _undecided(
                margin,
                f"not judged: {against.name} is not part of this run",
                f"Name {against.name} as well, or no candidate, to have it judged.",
            ).model_copy(update={"advisory": True})
        else:
            finding = judge_speed(Throughput.of(found, bounds), against, margin, bounds)
        judged.append(found.model_copy(update={"findings": (*found.findings, finding)}))
    return tuple(judged)


def judge_speed(
    ours: Throughput, against: SpeedReference, margin: float, bounds: Search
) -> Finding:
    """Judge "at least ``margin`` times the reference's throughput at the SLO".

    Args:
        ours: the candidate's; 0 when nothing was confirmed.
        against: the reference.
        margin: the least ratio that passes.
        bounds: of both searches.
    """
    if not ours.per_s:
        return _undecided(
            margin,
            "no rate of its own is shown to meet the SLO",
            "See the findings p99_ms and throughput of this candidate.",
        )
    if against.throughput is not None and against.throughput.per_s:
        return _compared(ours, against.throughput, against.name, margin, bounds)
    refuted = against.refuted_per_s
    if refuted is not None and ours.per_s >= margin * refuted:
        # The reference is slower than the lowest rate that is tried.
        ratio = ours.per_s / refuted
        reason = (
            f"{per_second(ours.per_s)}, and {against.name} is shown not to meet the SLO at "
            f"{per_second(refuted)}, nor at less as far as was tried: more than {ratio:.3g} >= "
            f"{margin:g}"
        )
        return _finding(Outcome.PASSED, reason, margin, ratio=ratio)
    return _undecided(
        margin,
        f"{against.name} has no throughput at the SLO to compare with"
        + (f": {against.why}" if against.why else ""),
        f"See why {against.name} was not measured, or did not pass; then qualify again.",
    )


def _compared(
    ours: Throughput, theirs: Throughput, name: str, margin: float, bounds: Search
) -> Finding:
    tops = [ours.at_top(bounds), theirs.at_top(bounds)]
    # At the highest rate that is tried both are equal, as closely as a search tells rates apart.
    ratio = 1.0 if all(tops) else ours.per_s / theirs.per_s
    if tops[0]:
        ours = Throughput(ours.per_s, math.inf, ours.why_open or _raise_top(bounds))
    if tops[1]:
        theirs = Throughput(theirs.per_s, math.inf, theirs.why_open or _raise_top(bounds))
    outcome = _outcome(ours, theirs, margin, equal=all(tops))
    rates = [
        f"{'≥ ' if top else ''}{per_second(known.per_s)}"
        for known, top in zip((ours, theirs), tops, strict=True)
    ]
    reason = f"{rates[0]} over {rates[1]} of {name} is {ratio:.3g}"
    if all(tops):
        reason += (
            f"; both sustain the highest rate that is tried ({per_second(bounds.ceiling_per_s)}), "
            f"so neither is known to be faster; {margin:g} is asked for"
        )
    else:
        reason += f"; {ratio:.3g} {'>=' if ratio >= margin else '<'} {margin:g}"
        reason += "".join((*_bound("this candidate", ours), *_bound(name, theirs)))
    return _finding(
        outcome, reason, margin, ratio=ratio, remedy=_remedy(outcome, ours, theirs, bounds)
    )


def _bound(name: str, known: Throughput) -> Iterator[str]:
    if known.most_per_s <= known.per_s:
        return
    yield f". A bound: {name} may sustain more"
    if known.most_per_s < math.inf:
        yield f", below {per_second(known.most_per_s)}"
    if known.why_open:
        yield f" ({known.why_open.partition(':')[0]})"


def _outcome(ours: Throughput, theirs: Throughput, margin: float, *, equal: bool) -> Outcome:
    """By the lowest and the highest ratio that the bounds leave."""
    if equal:
        return Outcome.PASSED if margin <= 1.0 else Outcome.INCONCLUSIVE
    if ours.per_s / theirs.most_per_s >= margin:
        return Outcome.PASSED
    return Outcome.FAILED if ours.most_per_s / theirs.per_s < margin else Outcome.INCONCLUSIVE


def _reference(
    found: Benchmark, made: Sequence[Benchmark], slo: Slo, bounds: Search, live: Sha256 | None
) -> SpeedReference | None:
    """None: nothing to be faster than, because it is the reference itself."""
    if slo.faster_than == "champion" and live is not None:
        if found.engine_sha256 == live:
            return None
        if found.rival is None:
            return SpeedReference("the live release", None, "not measured beside this candidate")
        return _champion(found.rival, bounds)
    fp32 = Candidate(kind=found.candidate.kind, precision=Precision.FP32)
    return None if found.candidate == fp32 else _fp32(fp32, made, bounds)


def _fp32(fp32: Candidate, made: Sequence[Benchmark], bounds: Search) -> SpeedReference:
    own = next((b for b in made if b.candidate == fp32), None)
    if own is None:
        return SpeedReference(fp32.name, None, "it is no candidate, or was not measured")
    if own.chosen is not None:
        return SpeedReference(fp32.name, Throughput.of(own, bounds))
    why = f"its own benchmark is {own.outcome.word}"
    return SpeedReference(fp32.name, None, why, refuted_per_s=_refuted_lowest_rate(own, bounds))


def _refuted_lowest_rate(own: Benchmark, bounds: Search) -> float | None:
    """The lowest rate that is tried, if every configuration measured there is refuted.

    That nothing was confirmed is not enough: it may only be known of higher rates.
    """
    latency = bounds.objective == "latency"
    lowest = bounds.ceiling_per_s if latency else bounds.min_rate_per_s
    failed = any(f.gate == "p99_ms" and f.outcome is Outcome.FAILED for f in own.findings)
    there = [
        point.outcome is Outcome.FAILED
        for point in own.decisions
        if point.rate_per_s <= lowest * _ROUNDING
    ]
    return lowest if failed and there and all(there) else None


def _champion(rival: Rival, bounds: Search) -> SpeedReference:
    """What is live; it was only tried up to the candidate's own rate."""
    name, per_s = f"live release {rival.release}", rival.champion_throughput_per_s
    refuted = rival.champion_rejected_per_s
    if not per_s:
        return SpeedReference(name, None, "it met the SLO at no rate that was tried", refuted)
    if refuted is None and per_s >= rival.rate_per_s / _ROUNDING:
        why = f"{name} sustains this candidate's rate: benchmark it alone to know how much more"
        return SpeedReference(name, Throughput(per_s, math.inf, why))
    return SpeedReference(name, Throughput.below(per_s, refuted, bounds))


def _raise_top(bounds: Search) -> str:
    return (
        f"nothing above {per_second(bounds.ceiling_per_s)} is tried: raise [search] "
        "max_rate_per_s, and let the generator reach it (more processors, nothing else on this "
        "machine)"
    )


def _remedy(outcome: Outcome, ours: Throughput, theirs: Throughput, bounds: Search) -> str:
    if outcome is Outcome.FAILED:
        return "Use a faster precision or engine, or lower [slo] min_speedup."
    if outcome is Outcome.PASSED:
        return ""
    if bounds.objective == "latency":
        return (
            "The objective latency compares at one rate: use throughput, or leave out [slo] "
            "min_speedup."
        )
    reasons = dict.fromkeys(known.why_open for known in (theirs, ours) if known.why_open)
    return "; ".join(reasons) + "."


def _undecided(margin: float, reason: str, remedy: str) -> Finding:
    return _finding(Outcome.INCONCLUSIVE, reason, margin, remedy=remedy)


def _finding(
    outcome: Outcome, reason: str, margin: float, *, ratio: float | None = None, remedy: str = ""
) -> Finding:
    return Finding(
        gate=GATE,
        scope="benchmark",
        outcome=outcome,
        reason=reason,
        value=ratio,
        limit=margin,
        relation=">=",
        remedy=remedy,
        would_pass=ratio if outcome is Outcome.FAILED else None,
    )
