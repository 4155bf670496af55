"""Finds the configuration that meets the SLO at the highest rate, in few measurements; confirms it.

How a search goes: `SearchStrategy` chooses trials by a queueing model fitted to the answers so far
(strategy.py, queueing.py); `TrialRunner` makes them within the budget; `Confirmation` measures the
best point again with fresh seeds. Equal policies and equal answers ask for equal trials, so that
measurements can be cached.

Not in scope: how a measurement is made. This room does no I/O.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from enginegate.errors import ServerError
from enginegate.evidence import Finding, Outcome, Point, PointDecision, Rival
from enginegate.measurement import Arrivals, Load, Measurement, Percentile
from enginegate.measuring.p99 import decide_points, lowest_refuted
from enginegate.messages import per_second
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.confirmation import Confirmation, ConfirmedPoint
from enginegate.search.explain import pareto_points, reasons
from enginegate.search.findings import champion_finding, overload_finding, slo_findings
from enginegate.search.queueing import EngineTimes
from enginegate.search.space import seed_of
from enginegate.search.strategy import SearchState, SearchStrategy
from enginegate.search.trial_history import TrialHistory
from enginegate.search.trial_runner import (
    Budget,
    Champion,
    Measure,
    SearchProgress,
    SearchSettings,
    TrialRunner,
)
from enginegate.serving import ServingConfig

# Resolutions above the answer at which it is bounded: as exact as the search is, and, where that
# much more may be sustained, a bound.
_UPPER_BOUND_STEPS = (2, 4)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was found.

    Attributes:
        measurements: all of this engine, in the order they were made.
        chosen: the configuration that was confirmed; None if none was.
        throughput_at_slo_per_s: requests a second it was confirmed at; 0 if none was.
        p99: over all its confirming measurements together.
        findings: of the gates ``p99_ms`` and ``throughput``; advisory ones of ``overload`` and,
            with a champion, ``champion``.
        pareto: what no other sustained point beats in rate, p99 and cost together.
        rival: the confirmed point in turns with the champion.
        rejected_rate_per_s: the lowest rate above that was tried and not seen to be sustained.
        reasons: field of the configuration -> the measurements that chose its value.
        confirmed_rate_per_s: rate that was offered when it was confirmed; None if none was.
        decisions: whether the SLO is shown at each point, by the rule of the gate ``p99_ms``.
        cut_short: why a higher rate may have been missed, with what to do; empty if none was.
        generator_limit_per_s: the lowest rate above the answer that only the generator kept from
            being measured: the answer is a lower bound then. None if there is none.
    """

    measurements: tuple[Measurement, ...]
    chosen: ServingConfig | None
    throughput_at_slo_per_s: float
    p99: Percentile | None
    findings: tuple[Finding, ...]
    pareto: tuple[Point, ...] = ()
    rival: Rival | None = None
    rejected_rate_per_s: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    confirmed_rate_per_s: float | None = None
    decisions: tuple[PointDecision, ...] = ()
    cut_short: str = ""
    generator_limit_per_s: float | None = None

    @property
    def confirmed(self) -> bool:
        """Whether a configuration was shown to meet the SLO."""
        return self.chosen is not None


def search(  # noqa: PLR0913 - the room's one entrance, and all but three are optional
    measure: Measure,
    bounds: Search,
    slo: Slo,
    *,
    champion: Champion | None = None,
    floor_per_s: float = 0.0,
    price_per_hour: float | None = None,
    arrivals: Arrivals = "poisson",
    alone: EngineTimes | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[SearchProgress], None] = lambda _: None,
) -> SearchResult:
    """Find and confirm the best configuration within the budget.

    Args:
        measure: serves a configuration under a load; its errors end the search, but for a
            configuration that does not load.
        bounds: what to try, and how much may be spent.
        slo: what must be met.
        champion: what is live; confirmations then alternate with it.
        floor_per_s: a candidate that cannot reach this is not searched to its capacity.
        price_per_hour: of the machine, or of each GPU.
        arrivals: how requests are spaced.
        alone: the engine's own times: the first trial is then near the answer.
        clock: seconds, monotonic.
        progress: called after each measurement.

    Raises:
        ServerError: from ``measure``: the server died; or no configuration loads.
    """
    settings = SearchSettings(bounds, slo, arrivals, clock, progress, alone)
    runner = TrialRunner(measure, settings, Budget(settings), TrialHistory(slo))
    state = SearchState(runner)
    confirmation = Confirmation(state, champion)
    strategy = SearchStrategy(state, confirmation.durations_s, floor_per_s)
    strategy.explore()
    errors = runner.history.load_errors
    if errors and not runner.samples:
        config, message = next(iter(errors.items()))
        raise ServerError(
            f"None of the {len(errors)} configurations that were tried loads.\nThe first "
            f"({config}): {message}"
        )
    best = confirmation.confirm_best(strategy.follow_leader)
    if best is None or best.decision.outcome is not Outcome.PASSED:
        return SearchResult(
            measurements=_measurements(runner),
            chosen=None,
            throughput_at_slo_per_s=0.0,
            p99=None,
            findings=slo_findings(state, confirmation, best),
            pareto=pareto_points(runner.history, None, price_per_hour),
            decisions=decide_points(runner.samples, slo),
        )
    return _confirmed_result(state, confirmation, best, price_per_hour)


def _measurements(runner: TrialRunner) -> tuple[Measurement, ...]:
    return tuple(sample.measurement for sample in runner.samples)


def _confirmed_result(
    state: SearchState,
    confirmation: Confirmation,
    best: ConfirmedPoint,
    price_per_hour: float | None,
) -> SearchResult:
    """Measure what the confirmed point leaves open, and put everything together."""
    runner, history = state.runner, state.history
    overload, rival = confirmation.overload(best), confirmation.rival(best)
    durations_s = confirmation.durations_s(best.throughput_per_s)
    cut_short, generator_limit_per_s = _unmeasurable_above(runner, best)
    left_room = runner.budget.left_room_for(
        state.bounds.measurement_s, *durations_s[:-1], *durations_s
    )
    if confirmation.cautious or not left_room or runner.budget.left_out:
        cut_short = "the budget ended the search: raise [search] budget_s"
    return SearchResult(
        measurements=_measurements(runner),
        chosen=best.config,
        throughput_at_slo_per_s=best.throughput_per_s,
        p99=best.p99,
        findings=(
            *slo_findings(state, confirmation, best),
            overload_finding(best, overload),
            *([champion_finding(rival)] if rival else []),
        ),
        pareto=pareto_points(history, best, price_per_hour),
        rival=rival,
        rejected_rate_per_s=history.unsustained(best.config),
        reasons=reasons(history, state.predicted(), best),
        confirmed_rate_per_s=best.rate_per_s,
        decisions=decide_points(runner.samples, state.slo),
        cut_short=cut_short,
        generator_limit_per_s=generator_limit_per_s,
    )


def _unmeasurable_above(runner: TrialRunner, best: ConfirmedPoint) -> tuple[str, float | None]:
    """Which point above the answer could not be measured: every attempt was invalid.

    Past a rate that a configuration does not sustain, nothing of it is missed.

    Returns:
        Why a higher rate may have been missed (empty: none was), and the lowest rate at which the
        generator was the reason, each time.
    """
    missed, limited = [], []
    for (config, rate_per_s), invalid in runner.reasons_invalid.items():
        beyond = rate_per_s > (runner.history.unsustained(config) or math.inf)
        if rate_per_s > best.throughput_per_s and not beyond and all(invalid):
            missed.append(f"no measurement at {per_second(rate_per_s)} is valid: {invalid[-1]}")
            if _generator_limited(runner, config, rate_per_s):
                limited.append(rate_per_s)
    return next(iter(missed), ""), min(limited, default=None)


def _generator_limited(runner: TrialRunner, config: ServingConfig, rate_per_s: float) -> bool:
    """Whether the generator alone made every measurement of a point invalid."""
    there = [
        sample.measurement
        for sample in runner.samples
        if sample.measurement.config == config and sample.measurement.rate_per_s == rate_per_s
    ]
    return bool(there) and all(measured.generator_limited for measured in there)


def confirm_upper_bound(
    found: SearchResult, measure: Measure, bounds: Search, slo: Slo, *, arrivals: Arrivals
) -> SearchResult:
    """Try one or two rates slightly above the answer, where none that close is refuted.

    The search stops below a configuration's capacity, because a queue does not settle near it. A
    comparison of throughputs needs to know that little more than the answer is not sustained.

    Args:
        found: what a search ended in.
        measure: of the same engine.
        bounds: of that search; nothing above its highest rate is offered.
        slo: what must be met.
        arrivals: how requests are spaced.

    Raises:
        ServerError: from ``measure``.
    """
    if found.chosen is None or bounds.objective == "latency":
        return found
    answer_per_s = found.throughput_at_slo_per_s
    for steps in _UPPER_BOUND_STEPS:
        rate_per_s = answer_per_s * (1.0 + bounds.resolution) ** steps
        refuted = lowest_refuted(found.decisions, found.chosen, above_per_s=answer_per_s)
        if rate_per_s > bounds.max_rate_per_s or (refuted is not None and refuted <= rate_per_s):
            break
        load = Load(
            rate_per_s=rate_per_s,
            duration_s=bounds.measurement_s,
            seed=seed_of(bounds.seed, found.chosen, rate_per_s, "just past"),
            arrivals=arrivals,
            order_seed=seed_of(bounds.seed, found.chosen, rate_per_s, "just past order"),
        )
        sample = measure(found.chosen, load)
        decisions = decide_points([sample], slo)
        rejected = found.rejected_rate_per_s
        if any(decision.outcome is Outcome.FAILED for decision in decisions):
            rejected = rate_per_s if rejected is None else min(rate_per_s, rejected)
        found = replace(
            found,
            measurements=(*found.measurements, sample.measurement),
            decisions=(*found.decisions, *decisions),
            rejected_rate_per_s=rejected,
        )
    return found
