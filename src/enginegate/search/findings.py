"""What a search found, as findings: number, relation, limit, count, and what to do about it.

The gates ``p99_ms`` and ``throughput``; advisory ones of what happens past the answer
(``overload``) and of the comparison with what is live (``champion``).
"""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from enginegate.evidence import Finding, Outcome, Rival
from enginegate.measurement import TIMERS_MS, LatencySample, Percentile
from enginegate.measuring.bottleneck import largest_stage
from enginegate.measuring.p99 import SloDecision, decide_fixed, decide_on_server
from enginegate.messages import per_second, short_number
from enginegate.policy.benchmarking import Slo
from enginegate.search.confirmation import Confirmation, ConfirmedPoint, Overload
from enginegate.search.queueing import ServiceTimeEstimate
from enginegate.search.strategy import SearchState
from enginegate.serving import ServingConfig

_SCOPE = "benchmark"
_ROUNDING = 1.0 + 1e-6
# Throughput past the answer that is left by a server that only queues; less is a collapse.
_LEAST_LEFT = 0.9


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the gates are judged by.

    Attributes:
        best: confirmed, undecided or refuted (its decision says which); None: nothing sustained.
        ended_early: a better answer may have been missed, for want of time or of a confirmation.
        untried: configurations that are not shown to fail at the lowest rate.
        alone: that of a request that runs alone, where it is too slow; None: not seen.
    """

    state: SearchState
    best: ConfirmedPoint | None
    ended_early: bool
    untried: tuple[ServingConfig, ...]
    alone: ServiceTimeEstimate | None

    @property
    def samples(self) -> list[LatencySample]:
        """All measurements of this engine."""
        return self.state.runner.samples

    @property
    def cut_short(self) -> bool:
        """Whether a better answer may have been missed, also above what could be sent in time."""
        return self.ended_early or self.state.runner.too_fast_per_s is not None

    @property
    def leaves_open(self) -> bool:
        """Whether what was missed may be the rate that is wanted.

        A generator that was late hides nothing where it was in time up to that rate, or up to one
        that the best configuration did not sustain.
        """
        runner, best = self.state.runner, self.best
        if runner.too_fast_per_s is None or self.ended_early:
            return self.ended_early
        unsustained = self.state.history.unsustained(best.config) if best else None
        return unsustained is None and runner.grid.high < self.slo.min_throughput_per_s

    @property
    def slo(self) -> Slo:
        """What must be met."""
        return self.state.slo


def slo_findings(
    state: SearchState, confirmation: Confirmation, best: ConfirmedPoint | None
) -> tuple[Finding, Finding]:
    """The gates ``p99_ms`` and ``throughput``."""
    runner = state.runner
    evidence = _Evidence(
        state=state,
        best=best,
        ended_early=runner.budget.exhausted or confirmation.unusable,
        untried=state.untried(),
        alone=state.too_slow_alone(),
    )
    latency = _latency(evidence, best) if best else _nothing_sustained(evidence)
    return latency, _throughput(evidence, latency)


def _latency(evidence: _Evidence, best: ConfirmedPoint) -> Finding:
    outcome, remedy, doubt = best.decision.outcome, "", ""
    if outcome is not Outcome.PASSED:
        ruled_out = outcome is Outcome.FAILED and _is_ruled_out(evidence)
        outcome, remedy, doubt = _ruling(
            evidence, best.decision, best.runs[-1], ruled_out=ruled_out
        )
    clusters = ""
    if best.clustering > 1.0:
        independent = best.decision.requests / best.clustering
        clusters = f"; neighbours are alike, so they count as {independent:.0f} independent ones"
    return _p99_finding(
        best.p99,
        outcome,
        evidence.slo,
        reason=f"{_number(best.p99, evidence.slo)} at {per_second(best.rate_per_s)} "
        f"({best.config}): {_decided(best.decision, evidence.slo)}{clusters}{doubt}",
        remedy=remedy,
    )


def _nothing_sustained(evidence: _Evidence) -> Finding:
    slo = evidence.slo
    valid = [sample for sample in evidence.samples if not sample.measurement.invalid]
    if not valid:
        return _nothing_measured(evidence)
    nearest = min(valid, key=lambda sample: sample.over(slo.p99_ms) / len(sample.latencies_ms))
    measurement = nearest.measurement
    decision = decide_fixed(
        len(nearest.latencies_ms), nearest.over(slo.p99_ms), confidence=slo.confidence
    )
    p99 = measurement.p99
    outcome, remedy, doubt = _ruling(evidence, decision, nearest, ruled_out=_is_ruled_out(evidence))
    return _p99_finding(
        p99,
        outcome,
        slo,
        reason=f"no configuration met the SLO ({_tried(evidence)}); nearest: "
        f"{_number(p99, slo)} at {per_second(measurement.rate_per_s)} ({measurement.config}): "
        f"{_decided(decision, slo)}{doubt}",
        remedy=remedy,
    )


def _nothing_measured(evidence: _Evidence) -> Finding:
    if not evidence.samples:
        reason = "the budget is shorter than one measurement and its confirmations"
        remedy = "raise [search] budget_s, or lower measurement_s or [slo] confirm_requests"
    else:
        reason = f"none of {len(evidence.samples)} measurements is valid"
        remedy = evidence.samples[-1].measurement.invalid[0]
    return _p99_finding(None, Outcome.INCONCLUSIVE, evidence.slo, reason=reason, remedy=remedy)


def _is_ruled_out(evidence: _Evidence) -> bool:
    """Whether no configuration can meet the SLO: all are refuted, or one request alone is too slow.

    What is refuted at the lowest rate is so whatever could not be measured above it, and what is
    too slow for the server alone whatever else could not be.
    """
    if evidence.untried:
        return False
    if evidence.alone is None or not evidence.cut_short:
        return True
    return _fails_on_server(evidence)


def _ruling(
    evidence: _Evidence, decision: SloDecision, nearest: LatencySample, *, ruled_out: bool
) -> tuple[Outcome, str, str]:
    """Outcome, remedy, and why not even a refuted SLO is the engine's loss (empty where it is).

    Below what the sender itself takes nothing could meet the SLO, so there the server's own time
    alone has to be over the limit, in every configuration at the lowest rate.
    """
    if not ruled_out:
        return Outcome.INCONCLUSIVE, _remedy(evidence, decision, nearest), ""
    known = (sample.measurement.generator.null_p99_ms for sample in evidence.samples)
    sender_ms = max((null_ms for null_ms in known if null_ms is not None), default=TIMERS_MS)
    if evidence.slo.p99_ms > sender_ms or _fails_on_server(evidence):
        return Outcome.FAILED, largest_stage(nearest.measurement), ""
    sender = f"{short_number(sender_ms)} ms"
    remedy = f"raise [slo] p99_ms above {sender}, or send from a machine that needs less"
    doubt = (
        f"; but sending alone takes up to {sender} here, and the server's own time is not surely "
        f"above {evidence.slo.p99_ms:g} ms, so this may be the sender"
    )
    return Outcome.INCONCLUSIVE, remedy, doubt


def _fails_on_server(evidence: _Evidence) -> bool:
    """Whether the server's own time is over the limit at the lowest rate, in each configuration."""
    lowest_per_s = evidence.state.lowest_per_s * _ROUNDING
    groups: dict[ServingConfig, list[LatencySample]] = {}
    for sample in evidence.samples:
        measurement = sample.measurement
        # No other configuration makes a request faster that has the server to itself.
        counts = evidence.alone is None or measurement.config == evidence.alone.config
        if counts and not measurement.invalid and measurement.rate_per_s <= lowest_per_s:
            groups.setdefault(measurement.config, []).append(sample)
    return bool(groups) and all(
        decide_on_server(runs, evidence.slo).outcome is Outcome.FAILED for runs in groups.values()
    )


def _tried(evidence: _Evidence) -> str:
    bounds, errors = evidence.state.bounds, evidence.state.history.load_errors
    tried = len({sample.measurement.config for sample in evidence.samples})
    parts = [f"{tried} of {bounds.configurations} were measured"]
    if tried >= bounds.configurations:
        parts = ["all were measured"]
    if evidence.alone is not None:
        parts.append(
            f"a request alone takes {short_number(evidence.alone.service_ms, 4)} ms on the server "
            f"({evidence.alone.config}), so no other can meet the SLO"
        )
    if evidence.untried:
        lowest = per_second(evidence.state.lowest_per_s)
        parts.append(f"{len(evidence.untried)} are not shown to fail at {lowest}")
    if errors:
        config, message = next(iter(errors.items()))
        parts.append(f"{len(errors)} do not load, such as {config}: {message.splitlines()[0]}")
    return "; ".join(parts)


def _throughput(evidence: _Evidence, latency: Finding) -> Finding:
    wanted = evidence.slo.min_throughput_per_s
    best = evidence.best if latency.outcome is Outcome.PASSED else None
    value = best.throughput_per_s if best else 0.0
    if best is None:
        outcome, remedy = latency.outcome, latency.remedy
        reason = "no rate is shown to meet the latency SLO"
    else:
        enough = value >= wanted
        outcome, remedy = (Outcome.PASSED, "") if enough else _too_slow(evidence, best)
        relation = ">=" if enough else "<"
        rates = f"{per_second(value)} {relation} {per_second(wanted)}"
        reason = f"{rates} within the latency SLO ({best.config})"
        unsustained = evidence.state.history.unsustained(best.config)
        if unsustained:
            reason += f"; {per_second(unsustained)} was not seen to be sustained"
    return Finding(
        gate="throughput",
        scope=_SCOPE,
        outcome=outcome,
        reason=reason,
        value=value,
        limit=wanted,
        relation=">=",
        unit="1/s",
        samples=best.decision.requests if best else 0,
        remedy=remedy,
    )


def _too_slow(evidence: _Evidence, best: ConfirmedPoint) -> tuple[Outcome, str]:
    wanted = evidence.slo.min_throughput_per_s
    if evidence.state.bounds.max_rate_per_s < wanted:
        return Outcome.INCONCLUSIVE, f"raise [search] max_rate_per_s to {wanted:g} or more"
    if evidence.leaves_open:
        return Outcome.INCONCLUSIVE, _why_cut_short(evidence)
    above = (s.measurement for s in evidence.samples if s.measurement.rate_per_s > best.rate_per_s)
    return Outcome.FAILED, next((largest_stage(measurement) for measurement in above), "")


def _why_cut_short(evidence: _Evidence) -> str:
    if evidence.state.runner.budget.exhausted:
        return "the budget ended the search: raise [search] budget_s"
    reasons = (s.measurement.invalid[0] for s in evidence.samples if s.measurement.invalid)
    return next(reasons, "")


def _remedy(evidence: _Evidence, decision: SloDecision, nearest: LatencySample) -> str:
    if evidence.cut_short:
        return _why_cut_short(evidence)
    if decision.outcome is Outcome.FAILED and evidence.untried:
        return (
            f"what was not tried may meet the SLO, such as {evidence.untried[0]} at "
            f"{per_second(evidence.state.lowest_per_s)}: lower [search] max_rate_per_s, shorten "
            "its lists, or raise budget_s and max_measurements"
        )
    if decision.outcome is Outcome.INCONCLUSIVE and decision.needed is not None:
        return (
            f"about {decision.needed} requests would decide: raise [slo] confirm_requests, and "
            "[search] budget_s for it"
        )
    return largest_stage(nearest.measurement)


def _p99_finding(
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
    return f"p99 {short_number(p99.value_ms, 4)} ms {relation} {slo.p99_ms:g} ms"


def _decided(decision: SloDecision, slo: Slo) -> str:
    words = {
        Outcome.PASSED: "which shows that the SLO is met",
        Outcome.FAILED: "which shows that the SLO is not met",
    }
    verdict = words.get(decision.outcome, "which decides nothing")
    return (
        f"{decision.over} of {decision.requests} requests over the limit, {verdict} "
        f"(confidence {slo.confidence:g})"
    )


def overload_finding(confirmed: ConfirmedPoint, overload: Overload | None) -> Finding:
    """Advisory: what becomes of throughput past the answer."""
    if overload is None:
        return _advisory(
            "overload",
            Outcome.INCONCLUSIVE,
            "nothing past the answer was measured",
            remedy="raise [search] max_rate_per_s and budget_s to half as much again as the answer",
        )
    left = overload.throughput_per_s / confirmed.throughput_per_s
    collapsed = not left >= _LEAST_LEFT
    reason = (
        f"{per_second(overload.throughput_per_s)} served of {per_second(overload.rate_per_s)} "
        f"offered, {left:.0%} of the answer's throughput {'<' if collapsed else '>='} "
        f"{_LEAST_LEFT:.0%}; {overload.failed_share:.1%} failed"
    )
    remedy = "drop max_queue_size, or keep the load away from the edge: admit less"
    return _advisory(
        "overload",
        Outcome.FAILED if collapsed else Outcome.PASSED,
        reason,
        remedy=remedy if collapsed else "",
        value=left,
        limit=_LEAST_LEFT,
        relation=">=",
    )


def champion_finding(rival: Rival) -> Finding:
    """Advisory: how the answer's p99 compares with that of what is live."""
    ours, theirs = median(rival.candidate_p99_ms), median(rival.champion_p99_ms)
    outcome, word = Outcome.INCONCLUSIVE, "within the noise of"
    if ours < theirs - rival.noise_ms:
        outcome, word = Outcome.PASSED, "below"
    elif ours > theirs + rival.noise_ms:
        outcome, word = Outcome.FAILED, "above"
    reason = (
        f"p99 {short_number(ours, 4)} ms is {word} that of release {rival.release}, "
        f"{short_number(theirs, 4)} ms, at {per_second(rival.rate_per_s)} in "
        f"{len(rival.candidate_p99_ms)} turns (it differs from itself by "
        f"{short_number(rival.noise_ms)} ms); the release sustained "
        f"{per_second(rival.champion_throughput_per_s)}"
    )
    return _advisory("champion", outcome, reason, value=ours, limit=theirs, relation="<=")


def _advisory(  # noqa: PLR0913 - a finding has many fields
    gate: str,
    outcome: Outcome,
    reason: str,
    *,
    remedy: str = "",
    value: float | None = None,
    limit: float | None = None,
    relation: Literal["<=", ">="] | None = None,
) -> Finding:
    return Finding(
        gate=gate,
        scope=_SCOPE,
        outcome=outcome,
        reason=reason,
        value=value,
        limit=limit,
        relation=relation,
        advisory=True,
        remedy=remedy,
    )
