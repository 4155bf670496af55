"""Whether a search may have missed a higher rate: told from its progress, and of what is live."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from enginegate.evidence import Outcome, Rival
from enginegate.measurement import LatencySample, Load
from enginegate.measuring.p99 import SequentialTest, decide_pooled
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.search import SearchResult
from enginegate.search.trial_history import TrialHistory
from enginegate.search.trial_runner import (
    Champion,
    Measure,
    OverheadEstimate,
    SearchProgress,
    quiet,
)
from enginegate.serving import ServingConfig
from enginegate.wording import per_second

_SPARE = 1.2
_MARGIN = 0.02
_SEARCHING = ("search", "confirm")


@dataclass(slots=True)
class SearchTruncation:
    """Listens to a search, and says afterwards whether its answer is known to be the highest.

    Attributes:
        in_a_turn: measurements of one turn of a confirmation: 2 with a champion.
        then: told of each measurement as well.
    """

    bounds: Search
    slo: Slo
    in_a_turn: int = 1
    then: Callable[[SearchProgress], None] = quiet
    seen: list[SearchProgress] = field(default_factory=list)

    def saw(self, at: SearchProgress) -> None:
        """One measurement further."""
        self.seen.append(at)
        self.then(at)

    def cut_short(self, found: SearchResult) -> str:
        """Why a rate above the answer may hold and was not found, with what to do; or nothing.

        Where one more look with its confirmations did not fit after the last look, the search may
        have wanted it. So a search that ended by itself with its last seconds counts as cut short.
        """
        if not found.confirmed:
            return ""
        if not self._fits_another(found.throughput_at_slo_per_s):
            return "the budget ended the search: raise [search] budget_s"
        return self._void_above(found)

    def _fits_another(self, rate_per_s: float) -> bool:
        looks = [number for number, at in enumerate(self.seen) if at.step == "search"]
        if not looks:
            return True
        bounds, slo = self.bounds, self.slo
        last = self.seen[looks[-1]]
        pace = OverheadEstimate()
        for at in self.seen[: looks[-1] + 1]:
            pace.took(at.spent_s, _lasted_s(at), count=at.done - pace.done)
        confirming_s = max(
            bounds.measurement_s, _SPARE * slo.confirm_requests / slo.confirmations / rate_per_s
        )
        count = slo.confirmations * self.in_a_turn
        # The look, the confirmations, and the one past the answer.
        needed_s = 2 * bounds.measurement_s + count * confirming_s + (count + 2) * pace.each_s
        in_time = last.spent_s + needed_s <= (1.0 - _MARGIN) * bounds.budget_s
        return in_time and last.done + count + 2 <= bounds.max_measurements

    def _void_above(self, found: SearchResult) -> str:
        """What could not be measured: every attempt at a point above the answer was void.

        Past a rate at which the chosen configuration did not hold nothing of it is missed.
        """
        rejected = found.rejected_rate_per_s or math.inf
        points: dict[tuple[ServingConfig, float], list[str]] = {}
        for at in self.seen:
            made = at.measurement
            beyond = made.config == found.chosen and made.rate_per_s > rejected
            above = made.rate_per_s > found.throughput_at_slo_per_s
            if at.step in _SEARCHING and above and not beyond:
                reasons = points.setdefault((made.config, made.rate_per_s), [])
                reasons.append(made.invalid[0] if made.invalid else "")
        void = (
            f"no measurement at {per_second(rate)} is valid: {reasons[-1]}"
            for (_, rate), reasons in points.items()
            if all(reasons)
        )
        return next(void, "")


@dataclass(frozen=True, slots=True)
class Noting:
    """Measures what is live, and remembers at which rates it did not hold."""

    measure: Measure
    known: TrialHistory

    def __call__(
        self, config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
    ) -> LatencySample:
        """As `measure`."""
        sampled = self.measure(config, load, ends=ends)
        if not sampled.measurement.invalid:
            self.known.add(sampled)
        return sampled

    def refuted_per_s(self, config: ServingConfig) -> float | None:
        """The lowest rate at which it is shown not to hold; None: at none."""
        slo = self.known.slo
        refuted = (
            probe.rate_per_s
            for probe in self.known.of(config)
            if decide_pooled(probe.runs, slo).outcome is Outcome.FAILED
        )
        return min(refuted, default=None)


def bounded(rival: Rival | None, champion: Champion | None) -> Rival | None:
    """The comparison with what is live, and at which rate that is shown not to hold."""
    if rival is None or champion is None or not isinstance(champion.measure, Noting):
        return rival
    refuted = champion.measure.refuted_per_s(champion.config)
    return rival.model_copy(update={"champion_rejected_per_s": refuted})


def _lasted_s(at: SearchProgress) -> float:
    made = at.measurement
    return made.load.duration_s if made.lasted_s is None else made.lasted_s
