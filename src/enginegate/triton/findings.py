"""What a search found, as findings: number, relation, limit, count, and what to do about it."""

from dataclasses import dataclass

from enginegate.evidence import Finding, Measurement, Outcome, Percentile, ServingConfig
from enginegate.policy import Search, Slo
from enginegate.triton.measure import Sampled
from enginegate.triton.slo import P99, SloDecision, decide

_SCOPE = "benchmark"
_ADVICE = {
    "queueing": "add instances, shorten max_queue_delay, or let batches grow",
    "computing": "use a faster precision or engine, or smaller batches",
    "preparing inputs": "send fewer or smaller inputs, or use shared memory",
    "returning outputs": "return fewer or smaller outputs, or use shared memory",
}


@dataclass(frozen=True, slots=True)
class Best:
    """The point that a search ended at.

    Attributes:
        throughput_per_s: offered rate times the share of requests that were answered.
        p99: over all its runs together; None when that falls on a failure.
        decision: whether the SLO is shown to hold there.
    """

    config: ServingConfig
    rate_per_s: float
    throughput_per_s: float
    p99: Percentile | None
    decision: SloDecision
    runs: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """All that a search knows at its end.

    Attributes:
        best: confirmed, undecided or refuted (its decision says which); None: nothing held once.
        out_of_budget: some point was not tried for want of time.
        unusable: some point could not be measured validly.
    """

    best: Best | None
    measured: tuple[Sampled, ...]
    out_of_budget: bool
    unusable: bool

    @property
    def cut_short(self) -> bool:
        """Whether a better answer may have been missed."""
        return self.out_of_budget or self.unusable


def slo_findings(found: Found, bounds: Search, slo: Slo) -> tuple[Finding, ...]:
    """The gates ``p99_ms`` and ``throughput``."""
    latency = _latency(found, found.best, slo) if found.best else _nothing_held(found, slo)
    return latency, _throughput(found, latency, bounds, slo)


def largest_stage(measurement: Measurement) -> str:
    """Where most of the server's time goes, and what to try; empty when it was not counted."""
    stages = measurement.stages
    if stages is None:
        return ""
    times_ms = {
        "queueing": stages.queue_ms,
        "computing": stages.compute_infer_ms,
        "preparing inputs": stages.compute_input_ms,
        "returning outputs": stages.compute_output_ms,
    }
    total_ms = sum(times_ms.values())
    name, time_ms = max(times_ms.items(), key=lambda item: item[1])
    if total_ms == 0.0:
        return ""
    return f"{name} is {time_ms / total_ms:.0%} of the mean server time: {_ADVICE[name]}"


def _latency(found: Found, best: Best, slo: Slo) -> Finding:
    outcome = best.decision.outcome
    if outcome is Outcome.FAILED and found.cut_short:
        outcome = Outcome.INCONCLUSIVE
    return _finding(
        best.p99,
        outcome,
        slo,
        reason=f"{_number(best.p99, slo)} at {best.rate_per_s:g}/s ({best.config}): "
        f"{_decided(best.decision, slo)}",
        remedy="" if outcome is Outcome.PASSED else _remedy(found, best.decision, best.runs[-1]),
    )


def _nothing_held(found: Found, slo: Slo) -> Finding:
    valid = [sampled for sampled in found.measured if not sampled.measurement.invalid]
    if not valid:
        return _nothing_measured(found, slo)
    nearest = min(valid, key=lambda sampled: sampled.over(slo.p99_ms) / len(sampled.latencies_ms))
    measurement = nearest.measurement
    decision = decide(
        len(nearest.latencies_ms), nearest.over(slo.p99_ms), confidence=slo.confidence
    )
    refuted = decision.outcome is Outcome.FAILED and not found.cut_short
    p99 = measurement.percentile(P99)
    return _finding(
        p99,
        Outcome.FAILED if refuted else Outcome.INCONCLUSIVE,
        slo,
        reason=f"no configuration held the SLO; nearest: {_number(p99, slo)} at "
        f"{measurement.load.rate_per_s:g}/s ({measurement.config}): {_decided(decision, slo)}",
        remedy=_remedy(found, decision, nearest),
    )


def _nothing_measured(found: Found, slo: Slo) -> Finding:
    if not found.measured:
        reason = "the budget is shorter than one measurement and its confirmations"
        remedy = "raise [search] budget_s, or shorten measurement_s"
    else:
        reason = f"none of {len(found.measured)} measurements is valid"
        remedy = found.measured[-1].measurement.invalid[0]
    return _finding(None, Outcome.INCONCLUSIVE, slo, reason=reason, remedy=remedy)


def _throughput(found: Found, latency: Finding, bounds: Search, slo: Slo) -> Finding:
    wanted = slo.min_throughput_per_s
    best = found.best if latency.outcome is Outcome.PASSED else None
    value = best.throughput_per_s if best else 0.0
    if best is None:
        ruling = _Ruling(latency.outcome, latency.remedy)
        reason = "no rate is shown to hold the latency SLO"
    else:
        enough = value >= wanted
        ruling = _Ruling(Outcome.PASSED, "") if enough else _too_slow(found, best, bounds, wanted)
        relation = ">=" if enough else "<"
        reason = f"{value:.4g}/s {relation} {wanted:.4g}/s while p99 holds ({best.config})"
    return Finding(
        gate="throughput",
        scope=_SCOPE,
        outcome=ruling.outcome,
        reason=reason,
        value=value,
        limit=wanted,
        relation=">=",
        unit="1/s",
        samples=best.decision.requests if best else 0,
        remedy=ruling.remedy,
    )


@dataclass(frozen=True, slots=True)
class _Ruling:
    outcome: Outcome
    remedy: str


def _too_slow(found: Found, best: Best, bounds: Search, wanted: float) -> _Ruling:
    if bounds.rates_per_s[-1] < wanted:
        remedy = f"add a rate of {wanted:g} or more to [search] rates_per_s"
        return _Ruling(Outcome.INCONCLUSIVE, remedy)
    if found.cut_short:
        return _Ruling(Outcome.INCONCLUSIVE, _why_cut_short(found))
    above = (
        sampled.measurement
        for sampled in found.measured
        if sampled.measurement.load.rate_per_s > best.rate_per_s
    )
    return _Ruling(Outcome.FAILED, next((largest_stage(m) for m in above), ""))


def _why_cut_short(found: Found) -> str:
    if found.out_of_budget:
        return "the budget ended the search: raise [search] budget_s"
    void = (s.measurement.invalid[0] for s in found.measured if s.measurement.invalid)
    return next(void, "")


def _finding(
    p99: Percentile | None, outcome: Outcome, slo: Slo, *, reason: str, remedy: str
) -> Finding:
    return Finding(
        gate="p99_ms",
        scope=_SCOPE,
        outcome=outcome,
        reason=reason,
        value=p99.value_ms if p99 else None,
        limit=slo.p99_ms,
        relation="<=",
        unit="ms",
        low=p99.low_ms if p99 else None,
        high=p99.high_ms if p99 else None,
        samples=p99.samples if p99 else 0,
        remedy=remedy,
    )


def _number(p99: Percentile | None, slo: Slo) -> str:
    if p99 is None:
        return "p99 falls on failed requests"
    relation = "<=" if p99.value_ms <= slo.p99_ms else ">"
    return f"p99 {p99.value_ms:.4g} ms {relation} {slo.p99_ms:g} ms"


def _decided(decision: SloDecision, slo: Slo) -> str:
    words = {
        Outcome.PASSED: "which shows that it holds",
        Outcome.FAILED: "which shows that it does not hold",
    }
    verdict = words.get(decision.outcome, "which decides nothing")
    return (
        f"{decision.over} of {decision.requests} requests over the limit, {verdict} "
        f"(confidence {slo.confidence:g})"
    )


def _remedy(found: Found, decision: SloDecision, nearest: Sampled) -> str:
    if found.cut_short:
        return _why_cut_short(found)
    if decision.outcome is Outcome.INCONCLUSIVE and decision.needed is not None:
        return (
            f"about {decision.needed} requests would decide: raise [search] measurement_s or "
            "[slo] confirmations"
        )
    return largest_stage(nearest.measurement)
