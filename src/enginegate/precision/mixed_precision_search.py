"""The fewest nodes that must stay FP32 for a failed candidate to pass: a search over builds.

Nodes are ranked by what each costs alone. The search doubles the number of worst nodes it keeps
until the gates pass, halves the gap, then tries to give single nodes back, because errors do not
add. It is a search under a budget: what it finds is the smallest set among those tried.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from enginegate.candidate import Candidate, Sha256
from enginegate.charts import COLOURS, drawing
from enginegate.evidence import OutcomeWord
from enginegate.policy import Repair
from enginegate.precision.sensitivity import Sensitivity
from enginegate.records import Record

_COST, _FAILED, _PASSED = COLOURS[:3]
_KIB = 1024.0


class PrecisionTrial(Record):
    """One build with some nodes kept at FP32, and how it was judged."""

    kept: tuple[str, ...] = Field(description="nodes at fp32, the most sensitive first")
    passed: bool
    outcome: OutcomeWord
    reason: str = Field(description="the finding that decided, as people read it")
    divergence: NonNegativeFloat | None = Field(description="value of `measure`; None: not finite")
    measure: str = Field(description="what divergence is, e.g. kl_p99 nats")
    size_bytes: NonNegativeInt | None = None
    latency_ms: NonNegativeFloat | None = Field(
        default=None, description="median of one full batch here; None: cannot run here"
    )
    engine_sha256: Sha256 | None = None


class TradeoffCurve(Record):
    """What keeping nodes costs and gains: every trial of one repair."""

    schema_version: Literal[1] = 1
    candidate: Candidate
    nodes: PositiveInt = Field(description="nodes that could be kept")
    ranked: tuple[Sensitivity, ...]
    trials: tuple[PrecisionTrial, ...] = Field(
        description="in the order they were built; first as it was"
    )
    repaired: PrecisionTrial | None = Field(description="fewest kept among those that passed")
    reason: str = Field(description="why the search ended")


Attempt = Callable[[tuple[str, ...]], PrecisionTrial]


@dataclass(slots=True)
class _Spending:
    """Builds, each set tried once, until the policy's budget is spent."""

    attempt: Attempt
    limits: Repair
    clock: Callable[[], float]
    started: float
    trials: list[PrecisionTrial]
    spent: str = field(default="")

    def passes(self, kept: tuple[str, ...]) -> bool | None:
        """Whether the gates pass with these nodes kept; None when nothing more may be built."""
        elapsed = self.clock() - self.started
        if len(self.trials) - 1 >= self.limits.max_builds:
            self.spent = f"{self.limits.max_builds} builds, the policy's limit, are made"
            return None
        if elapsed >= self.limits.budget_s:
            self.spent = f"{self.limits.budget_s:g} s, the policy's limit, are spent"
            return None
        self.trials.append(self.attempt(kept))
        return self.trials[-1].passed


def search_mixed_precision(
    before: PrecisionTrial,
    ranked: Sequence[Sensitivity],
    attempt: Attempt,
    *,
    candidate: Candidate,
    limits: Repair,
    clock: Callable[[], float] = time.monotonic,
) -> TradeoffCurve:
    """Search for the smallest set of nodes to keep.

    Args:
        before: the candidate as it failed, with nothing kept.
        ranked: all nodes that could be kept, the most costly first; at least one.
        attempt: builds and judges with these nodes kept.
        limits: of builds, time and the share of nodes.
        clock: seconds, monotonic.
    """
    order = tuple(each.node for each in ranked)
    spending = _Spending(attempt, limits, clock, clock(), [before])
    most = int(limits.max_kept_share * len(order))
    found = _smallest_prefix(order, most, spending)
    if found is not None:
        _give_back(found, spending)
    good = [trial for trial in spending.trials if trial.passed]
    best = min(good, key=lambda trial: len(trial.kept), default=None)
    return TradeoffCurve(
        candidate=candidate,
        nodes=len(order),
        ranked=tuple(ranked),
        trials=tuple(spending.trials),
        repaired=best,
        reason=_reason(best, most, len(order), spending.spent),
    )


def _smallest_prefix(
    order: tuple[str, ...], most: int, spending: _Spending
) -> tuple[str, ...] | None:
    """The shortest passing beginning of the ranking; None if none was found."""
    failed, passed = 0, 0
    for count in _doubling(most):
        verdict = spending.passes(order[:count])
        if verdict is None:
            return None
        if verdict:
            passed = count
            break
        failed = count
    while passed - failed > 1:
        middle = (failed + passed) // 2
        verdict = spending.passes(order[:middle])
        if verdict is None:
            break
        failed, passed = (failed, middle) if verdict else (middle, passed)
    return order[:passed] if passed else None


def _doubling(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


def _give_back(kept: tuple[str, ...], spending: _Spending) -> None:
    """Try without single nodes; the last is needed, because the prefix before it failed."""
    needed = kept
    for node in reversed(kept[:-1]):
        fewer = tuple(name for name in needed if name != node)
        verdict = spending.passes(fewer)
        if verdict is None:
            return
        needed = fewer if verdict else needed


def _reason(best: PrecisionTrial | None, most: int, nodes: int, spent: str) -> str:
    if best is not None:
        end = f"; {spent}" if spent else ""
        return f"passes with {len(best.kept)} of {nodes} nodes at fp32{end}"
    if spent:
        return f"no passing set was found before {spent}"
    if not most:
        return f"the policy's max_kept_share leaves none of {nodes} nodes to keep"
    return f"it fails even with the {most} worst of {nodes} nodes at fp32, the most allowed"


def tradeoff_chart(curve: TradeoffCurve) -> bytes:
    """SVG: nodes kept at FP32 against divergence, and against latency or else size.

    Latency is drawn where it was measured for all trials, else size; nothing if neither is known
    for all of them.
    """
    trials = sorted(curve.trials, key=lambda trial: (len(trial.kept), trial.passed))
    measure = trials[0].measure
    xlabel = f"nodes kept at fp32, of {curve.nodes}"
    with drawing(f"{curve.candidate}: {curve.reason}", xlabel, f"{measure} (log)") as chart:
        for passed, colour, marker in ((True, _PASSED, "o"), (False, _FAILED, "x")):
            shown = [t for t in trials if t.passed is passed and t.divergence is not None]
            chart.axes.plot(
                [len(trial.kept) for trial in shown],
                [trial.divergence or 0.0 for trial in shown],
                marker,
                color=colour,
                label="passed" if passed else "failed",
            )
        if any(trial.divergence for trial in trials):
            chart.axes.set_yscale("log")
        chart.whole_numbers()
        latencies = [t.latency_ms for t in trials if t.latency_ms is not None]
        sizes = [t.size_bytes / _KIB for t in trials if t.size_bytes is not None]
        costs = next((c for c in (latencies, sizes) if len(c) == len(trials)), None)
        if costs is not None:
            second = chart.axes.twinx()
            second.plot([len(t.kept) for t in trials], costs, ".-", color=_COST, linewidth=1.0)
            second.set_ylabel("ms a batch" if costs is latencies else "KiB", color=_COST)
            second.set_ylim(bottom=0.0)
        return chart.svg()
