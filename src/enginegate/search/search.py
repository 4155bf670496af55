"""Finds the configuration that holds the SLO at the highest rate, in few measurements; proves it.

The next question is chosen (hunt.py) by a queueing model fitted to the answers so far
(queueing.py); rates are bisected to the SLO's edge (edge.py). First the configuration with the
largest batches and the most instances is followed to its edge. Then those whose optimistic
prediction lies above it are asked to hold slightly more than it does: one that does becomes the
best. Three in a row that do not end this, as no prediction above does; while nothing held at all,
every configuration is asked at the lowest rate, the smallest first. Then the best is measured again
with fresh seeds (confirm.py, proof.py); a refuted point is stepped down from. One measurement
decides nothing, it only says what to try next. The same policy and the same answers ask the same
questions.

Not in scope: how a measurement is made (this file sends nothing), and the words for people
(findings.py, account.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from enginegate.errors import ServerError
from enginegate.evidence import Finding, Outcome, Point, PointDecision, Rival
from enginegate.measurement import Arrivals, Measurement, Percentile
from enginegate.measuring.p99 import decide_points
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.confirmation import Confirmation
from enginegate.search.confirmed_point import ConfirmedPoint, Confirmer
from enginegate.search.explain import pareto, reasons
from enginegate.search.findings import SearchOutcome, slo_findings
from enginegate.search.further_findings import further_findings
from enginegate.search.state import SearchState
from enginegate.search.strategy import SearchStrategy
from enginegate.search.trial_history import TrialHistory
from enginegate.search.trial_runner import (
    Budget,
    Champion,
    Measure,
    SearchProgress,
    SearchSettings,
    TrialRunner,
    quiet,
)
from enginegate.serving import ServingConfig

__all__ = ["Champion", "Measure", "SearchProgress", "SearchResult", "search"]


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
        pareto: what no other held point beats in rate, p99 and cost together.
        rival: the confirmed point in turns with the champion.
        rejected_rate_per_s: the lowest rate at which the chosen configuration was not seen to hold.
        reasons: field of the configuration -> the measurements that chose its value.
        confirmed_rate_per_s: rate that was offered when it was confirmed; None if none was.
        decisions: whether the SLO is shown at each point, by the rule of the gate ``p99_ms``.
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

    @property
    def confirmed(self) -> bool:
        """Whether a configuration was shown to hold the SLO."""
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
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[SearchProgress], None] = quiet,
) -> SearchResult:
    """Find and confirm the best configuration within the budget.

    Args:
        measure: serves a configuration under a load; its errors end the search, but for a
            configuration that does not load.
        bounds: what to try, and how much may be spent.
        slo: what must hold.
        champion: what is live; confirmations then alternate with it.
        floor_per_s: a candidate that cannot reach this is not searched to its edge.
        price_per_hour: of the machine, or of each GPU.
        arrivals: how requests are spaced.
        clock: seconds, monotonic.
        progress: called after each measurement.

    Raises:
        ServerError: from ``measure``: the server died; or no configuration loads.
    """
    terms = SearchSettings(bounds, slo, arrivals, clock, progress)
    prober = TrialRunner(measure, terms, Budget(terms), TrialHistory(slo))
    view, confirmer = SearchState(prober), Confirmer(prober, champion)
    hunt = SearchStrategy(view, confirmer, floor_per_s)
    hunt.explore()
    _check_some_loaded(prober)
    best = Confirmation(view, confirmer, hunt).prove()
    return _result(view, confirmer, best, price_per_hour)


def _check_some_loaded(prober: TrialRunner) -> None:
    refused = prober.known.refused
    if refused and not prober.sampled:
        config, said = next(iter(refused.items()))
        raise ServerError(
            f"None of the {len(refused)} configurations that were tried loads.\nThe first "
            f"({config}): {said}"
        )


def _result(
    view: SearchState,
    confirmer: Confirmer,
    best: ConfirmedPoint | None,
    price_per_hour: float | None,
) -> SearchResult:
    """Look past what was confirmed, and put everything together."""
    prober, bounds, slo = view.prober, view.bounds, view.slo
    confirmed = best if best and best.decision.outcome is Outcome.PASSED else None
    overload = confirmer.overload(confirmed) if confirmed else None
    rival = confirmer.rival(confirmed) if confirmed else None
    found = _found(view, confirmer, best)
    return SearchResult(
        measurements=tuple(sampled.measurement for sampled in prober.sampled),
        chosen=confirmed.config if confirmed else None,
        throughput_at_slo_per_s=confirmed.throughput_per_s if confirmed else 0.0,
        p99=confirmed.p99 if confirmed else None,
        findings=(
            *slo_findings(found, bounds, slo),
            *(further_findings(confirmed, overload, rival) if confirmed else ()),
        ),
        pareto=pareto(prober.known, confirmed, price_per_hour),
        rival=rival,
        rejected_rate_per_s=found.rejected_per_s if confirmed else None,
        reasons=reasons(prober.known, view.predicted(), confirmed) if confirmed else {},
        confirmed_rate_per_s=confirmed.rate_per_s if confirmed else None,
        decisions=decide_points(prober.sampled, slo),
    )


def _found(view: SearchState, confirmer: Confirmer, best: ConfirmedPoint | None) -> SearchOutcome:
    prober = view.prober
    return SearchOutcome(
        best=best,
        measured=tuple(prober.sampled),
        out_of_budget=prober.budget.out,
        unusable=prober.cap_per_s is not None or confirmer.unusable,
        rejected_per_s=prober.known.rejected(best.config) if best else None,
        untried=view.untried(),
        lowest_per_s=view.lowest_per_s,
        alone=view.too_slow_alone(),
        refused=prober.known.refused,
    )
