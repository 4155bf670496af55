"""What a search found, as findings: number, relation, limit, count, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from enginegate.evidence import Finding, Outcome
from enginegate.measurement import TIMERS_MS, LatencySample, Percentile
from enginegate.measuring.advice import largest_stage
from enginegate.measuring.p99 import P99, SloDecision, decide, decide_on_server
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.confirmed_point import ConfirmedPoint
from enginegate.search.service_time import ServiceTimeEstimate
from enginegate.serving import ServingConfig
from enginegate.wording import per_second, short_number

SCOPE = "benchmark"
_ROUNDING = 1.0 + 1e-6


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """All that a search knows at its end.

    Attributes:
        best: confirmed, undecided or refuted (its decision says which); None: nothing held once.
        out_of_budget: some point was not tried for want of time.
        unusable: some point could not be measured validly.
        rejected_per_s: lowest rate at which the best configuration was not seen to hold.
        untried: configurations that are not shown to fail at the lowest rate.
        lowest_per_s: that rate.
        alone: a request that runs alone is too slow, so nothing can hold; None: not seen.
        refused: configurations that do not load, with what the server said.
    """

    best: ConfirmedPoint | None
    measured: tuple[LatencySample, ...]
    out_of_budget: bool
    unusable: bool
    rejected_per_s: float | None = None
    untried: tuple[ServingConfig, ...] = ()
    lowest_per_s: float = 0.0
    alone: ServiceTimeEstimate | None = None
    refused: Mapping[ServingConfig, str] = field(default_factory=dict)

    @property
    def cut_short(self) -> bool:
        """Whether a better answer may have been missed."""
        return self.out_of_budget or self.unusable

    @property
    def ruled_out(self) -> bool:
        """Whether it is shown of every configuration that it does not hold even the lowest rate."""
        return not self.cut_short and not self.untried


def slo_findings(found: SearchOutcome, bounds: Search, slo: Slo) -> tuple[Finding, ...]:
    """The gates ``p99_ms`` and ``throughput``."""
    latency = _latency(found, found.best, slo) if found.best else _nothing_held(found, bounds, slo)
    return latency, _throughput(found, latency, bounds, slo)


def _latency(found: SearchOutcome, best: ConfirmedPoint, slo: Slo) -> Finding:
    outcome = best.decision.outcome
    ruling = _Ruling(outcome, "")
    if outcome is not Outcome.PASSED:
        ruling = _Ruling(Outcome.INCONCLUSIVE, _remedy(found, best.decision, best.runs[-1]))
    doubt = ""
    if outcome is Outcome.FAILED and _is_ruled_out(found, slo):
        doubt = _sender_decides(found, slo)
        ruling = _ruled_out(largest_stage(best.runs[-1].measurement), found, doubt)
    return _finding(
        best.p99,
        ruling.outcome,
        slo,
        reason=f"{_number(best.p99, slo)} at {per_second(best.rate_per_s)} ({best.config}): "
        f"{_decided(best.decision, slo)}{_clusters(best)}{doubt}",
        remedy=ruling.remedy,
    )


def _nothing_held(found: SearchOutcome, bounds: Search, slo: Slo) -> Finding:
    valid = [sampled for sampled in found.measured if not sampled.measurement.invalid]
    if not valid:
        return _nothing_measured(found, slo)
    nearest = min(valid, key=lambda sampled: sampled.over(slo.p99_ms) / len(sampled.latencies_ms))
    measurement = nearest.measurement
    decision = decide(
        len(nearest.latencies_ms), nearest.over(slo.p99_ms), confidence=slo.confidence
    )
    p99 = measurement.percentile(P99)
    ruling, doubt = _Ruling(Outcome.INCONCLUSIVE, _remedy(found, decision, nearest)), ""
    if _is_ruled_out(found, slo):
        doubt = _sender_decides(found, slo)
        ruling = _ruled_out(largest_stage(measurement), found, doubt)
    return _finding(
        p99,
        ruling.outcome,
        slo,
        reason=f"no configuration held the SLO ({_tried(found, bounds)}); nearest: "
        f"{_number(p99, slo)} at {per_second(measurement.rate_per_s)} ({measurement.config}): "
        f"{_decided(decision, slo)}{doubt}",
        remedy=ruling.remedy,
    )


def _is_ruled_out(found: SearchOutcome, slo: Slo) -> bool:
    """Whether no configuration can hold: all are refuted, or one request alone is too slow.

    What is too slow for the server alone is so whatever else could not be measured.
    """
    return found.ruled_out or (found.alone is not None and _fails_on_server(found, slo))


def _ruled_out(remedy: str, found: SearchOutcome, doubt: str) -> "_Ruling":
    if not doubt:
        return _Ruling(Outcome.FAILED, remedy)
    return _Ruling(
        Outcome.INCONCLUSIVE,
        f"raise [slo] p99_ms above {short_number(_sender_ms(found))} ms, or send from a machine "
        "that needs less",
    )


def _sender_decides(found: SearchOutcome, slo: Slo) -> str:
    """Why not even a refuted SLO is the engine's loss; empty where it is.

    Below what the sender itself takes nothing could hold, so there the server's own time alone has
    to be over the limit, in every configuration at the lowest rate.
    """
    sender_ms = _sender_ms(found)
    if slo.p99_ms > sender_ms or _fails_on_server(found, slo):
        return ""
    return (
        f"; but sending alone takes up to {short_number(sender_ms)} ms here, and the server's own "
        f"time is not surely above {slo.p99_ms:g} ms, so this may be the sender"
    )


def _sender_ms(found: SearchOutcome) -> float:
    """What a do-nothing model takes at p99; where that is not known, a busy machine's timers."""
    known = (s.measurement.generator.null_p99_ms for s in found.measured)
    return max((null_ms for null_ms in known if null_ms is not None), default=TIMERS_MS)


def _fails_on_server(found: SearchOutcome, slo: Slo) -> bool:
    groups: dict[ServingConfig, list[LatencySample]] = {}
    for sampled in found.measured:
        made = sampled.measurement
        if not made.invalid and made.rate_per_s <= found.lowest_per_s * _ROUNDING:
            groups.setdefault(made.config, []).append(sampled)
    if found.alone is not None:
        # No other configuration makes a request faster that has the server to itself.
        groups = {config: runs for config, runs in groups.items() if config == found.alone.config}
    return bool(groups) and all(
        decide_on_server(runs, slo).outcome is Outcome.FAILED for runs in groups.values()
    )


def _tried(found: SearchOutcome, bounds: Search) -> str:
    tried = len({sampled.measurement.config for sampled in found.measured})
    said = [f"{tried} of {bounds.configurations} were measured"]
    if tried >= bounds.configurations:
        said = ["all were measured"]
    if found.alone is not None:
        said.append(
            f"a request alone takes {short_number(found.alone.service_ms, 4)} ms on the server "
            f"({found.alone.config}), so no other can hold"
        )
    if found.untried:
        said.append(
            f"{len(found.untried)} are not shown to fail at {per_second(found.lowest_per_s)}"
        )
    if found.refused:
        said.append(_refused(found))
    return "; ".join(said)


def _refused(found: SearchOutcome) -> str:
    config, message = next(iter(found.refused.items()))
    return f"{len(found.refused)} do not load, such as {config}: {message.splitlines()[0]}"


def _nothing_measured(found: SearchOutcome, slo: Slo) -> Finding:
    if not found.measured:
        reason = "the budget is shorter than one measurement and its confirmations"
        remedy = "raise [search] budget_s, or lower measurement_s or [slo] confirm_requests"
    else:
        reason = f"none of {len(found.measured)} measurements is valid"
        remedy = found.measured[-1].measurement.invalid[0]
    return _finding(None, Outcome.INCONCLUSIVE, slo, reason=reason, remedy=remedy)


def _throughput(found: SearchOutcome, latency: Finding, bounds: Search, slo: Slo) -> Finding:
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
        reason = (
            f"{per_second(value)} {relation} {per_second(wanted)} while p99 holds ({best.config})"
        )
        if found.rejected_per_s:
            reason += f"; {per_second(found.rejected_per_s)} was not seen to hold"
    return Finding(
        gate="throughput",
        scope=SCOPE,
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


def _too_slow(found: SearchOutcome, best: ConfirmedPoint, bounds: Search, wanted: float) -> _Ruling:
    if bounds.max_rate_per_s < wanted:
        remedy = f"raise [search] max_rate_per_s to {wanted:g} or more"
        return _Ruling(Outcome.INCONCLUSIVE, remedy)
    if found.cut_short:
        return _Ruling(Outcome.INCONCLUSIVE, _why_cut_short(found))
    above = (
        sampled.measurement
        for sampled in found.measured
        if sampled.measurement.rate_per_s > best.rate_per_s
    )
    return _Ruling(Outcome.FAILED, next((largest_stage(m) for m in above), ""))


def _why_cut_short(found: SearchOutcome) -> str:
    if found.out_of_budget:
        return "the budget ended the search: raise [search] budget_s"
    void = (s.measurement.invalid[0] for s in found.measured if s.measurement.invalid)
    return next(void, "")


def _finding(
    p99: Percentile | None, outcome: Outcome, slo: Slo, *, reason: str, remedy: str
) -> Finding:
    return Finding(
        gate="p99_ms",
        scope=SCOPE,
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
    return f"p99 {short_number(p99.value_ms, 4)} ms {relation} {slo.p99_ms:g} ms"


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


def _clusters(best: ConfirmedPoint) -> str:
    if best.clustering <= 1.0:
        return ""
    worth = best.decision.requests / best.clustering
    return f"; neighbours are alike, so they count as {worth:.0f} independent ones"


def _remedy(found: SearchOutcome, decision: SloDecision, nearest: LatencySample) -> str:
    if found.cut_short:
        return _why_cut_short(found)
    if decision.outcome is Outcome.FAILED and found.untried:
        return (
            f"what was not tried may hold, such as {found.untried[0]} at "
            f"{per_second(found.lowest_per_s)}: "
            "lower [search] max_rate_per_s, shorten its lists, or raise budget_s and "
            "max_measurements"
        )
    if decision.outcome is Outcome.INCONCLUSIVE and decision.needed is not None:
        return (
            f"about {decision.needed} requests would decide: raise [slo] confirm_requests, and "
            "[search] budget_s for it"
        )
    return largest_stage(nearest.measurement)
