"""A report's content, before it is laid out. Nothing is decided here.

The task's score is shown as the change against FP32, so a loss is negative; shares in percentage
points, other scores and errors in their own unit. Intervals are in parentheses. n/a means that a
number was not measured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from enginegate.candidate import Candidate
from enginegate.evidence import Benchmark, EngineSpeed, Finding, Outcome, Scorecard, Verdict
from enginegate.measurement import Percentile
from enginegate.messages import counted

EngineSizes: TypeAlias = Mapping[Candidate, int]

NO_SIZES: EngineSizes = MappingProxyType({})
COLUMNS = (
    "candidate",
    "outcome",
    "acc. vs FP32, pp",
    "worst slice",
    "at SLO, req/s",
    "p99, ms",
    "engine",
)
MISSING = "n/a"
_REASONS_SHOWN = 4
_REASON_LENGTH = 240
_SLICES_SHOWN = 5
_DIGEST_SHOWN = 12
_SMALL_SHARE = 0.01
_KIB, _MIB = 1 << 10, 1 << 20


class Row(NamedTuple):
    """One candidate's line of the table, as text, in the order of `COLUMNS`."""

    candidate: str
    outcome: str
    accuracy: str
    worst_slice: str
    throughput: str
    p99: str
    size: str


@dataclass(frozen=True, slots=True)
class CandidateObstacle:
    """Why some candidates did not pass, worst first; candidates with the same share one.

    ``unmeasured`` says why they were not benchmarked; empty where they were, or could not be.
    """

    candidates: tuple[Candidate, ...]
    outcome: Outcome
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    unmeasured: str = ""

    @property
    def names(self) -> str:
        """The candidates in one line."""
        return ", ".join(candidate.name for candidate in self.candidates)

    @property
    def lines(self) -> tuple[str, ...]:
        """The first reasons, and what to do about them."""
        hidden = len(self.reasons) - _REASONS_SHOWN
        more = (f"and {hidden} more",) if hidden > 0 else ()
        do = tuple(f"-> {remedy}" for remedy in self.remedies[:_REASONS_SHOWN])
        skipped = (f"not benchmarked: {self.unmeasured}",) if self.unmeasured else ()
        return (*self.reasons[:_REASONS_SHOWN], *more, *do, *skipped)


def row_of(scorecard: Scorecard, candidate: Candidate, sizes: EngineSizes = NO_SIZES) -> Row:
    """One candidate's row of the table; ``sizes`` are engine bytes, else its benchmark's count."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    measured_bytes = benchmark.engine_bytes if benchmark else None
    return Row(
        candidate=candidate.name + _mark(scorecard, candidate),
        outcome=scorecard.outcome(candidate).word,
        accuracy=accuracy_text(verdict),
        worst_slice=_worst_slice(verdict),
        throughput=_throughput(scorecard, benchmark),
        p99=percentile_text(benchmark.p99_at_slo if benchmark else None),
        size=size_text(sizes.get(candidate, measured_bytes)),
    )


def columns_of(scorecard: Scorecard) -> tuple[str, ...]:
    """`COLUMNS`, with the change against FP32 in the words and the unit of the model's task."""
    return tuple(change_heading(scorecard) if c == COLUMNS[2] else c for c in COLUMNS)


def change_heading(scorecard: Scorecard) -> str:
    """For example ``acc. vs FP32, pp``, or ``MAE vs FP32, °C``; plain where nothing was judged."""
    losses = (verdict.task_loss for verdict in scorecard.verdicts)
    loss = next((each for each in losses if each is not None), None)
    if loss is None:
        return "change vs FP32"
    word = "acc." if loss.measure == "accuracy" else loss.measure
    return ", ".join(filter(None, (f"{word} vs FP32", change_unit(loss))))


def change_unit(loss: Finding) -> str:
    """``pp`` for shares, else the metric's own unit, which may be none."""
    return "pp" if loss.in_points else loss.unit


def _throughput(scorecard: Scorecard, benchmark: Benchmark | None) -> str:
    """Requests a second, with the share of the engine's own speed where that was measured."""
    if benchmark is None:
        return MISSING
    share = scorecard.engine_share(benchmark.candidate)
    of_engine = "" if share is None else f" ({share_text(share)} of engine)"
    return f"{benchmark.throughput_text}{benchmark.rows_text}{of_engine}"


def alone_sentence(scorecard: Scorecard, candidate: Candidate) -> str:
    """What the engine computes without a server, and how much of it is served; empty: unknown."""
    speed = scorecard.engine_speed(candidate)
    return speed_sentence(speed, scorecard.engine_share(candidate)) if speed else ""


def speed_sentence(speed: EngineSpeed, share: float | None) -> str:
    """An engine's own speed at its best batch size, with its spread; empty: not measured."""
    best = speed.best
    if best is None:
        return ""
    low, high = min(best.windows_per_s), max(best.windows_per_s)
    said = (
        f"Alone, without a server, its engine computes {best.samples_per_s:,.0f} samples/s at a "
        f"batch of {best.batch_size} (median of {len(best.windows_per_s)} windows, {low:,.0f} to "
        f"{high:,.0f}; inputs on the {speed.inputs_on})"
    )
    served = "" if share is None else f"; {share_text(share)} of that is served within the SLO"
    left_out = f" Not measured: {one_line(speed.unmeasured)}." if speed.unmeasured else ""
    return f"{said}{served}.{left_out}"


def share_text(share: float) -> str:
    return f"{share:.0%}" if share >= _SMALL_SHARE else f"<{_SMALL_SHARE:.0%}"


def _mark(scorecard: Scorecard, candidate: Candidate) -> str:
    if candidate == scorecard.winner:
        return " (winner)"
    return " (tied)" if candidate in scorecard.tied else ""


def obstacles(scorecard: Scorecard) -> tuple[CandidateObstacle, ...]:
    """Why each candidate that did not pass did not, in the scorecard's order."""
    groups: dict[tuple[Outcome, tuple[str, ...], tuple[str, ...], str], list[Candidate]] = {}
    for verdict in scorecard.verdicts:
        outcome = scorecard.outcome(verdict.candidate)
        if outcome is not Outcome.PASSED:
            found = _blocking(verdict, scorecard.benchmark(verdict.candidate))
            reasons = tuple(_reason(finding) for finding in found) or ("it was not benchmarked",)
            remedies = tuple(dict.fromkeys(one_line(f.remedy) for f in found if f.remedy))
            skipped = scorecard.unmeasured.get(verdict.candidate.name, "")
            groups.setdefault((outcome, reasons, remedies, skipped), []).append(verdict.candidate)
    return tuple(
        CandidateObstacle(tuple(candidates), outcome, reasons, remedies, skipped)
        for (outcome, reasons, remedies, skipped), candidates in groups.items()
    )


def sentences(scorecard: Scorecard) -> tuple[str, ...]:
    """The scorecard in words: the result, the winner's numbers, and what it would replace."""
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    passed = outcomes.count(Outcome.PASSED)
    subject = f"Winner: {scorecard.winner}" if scorecard.winner else "No winner"
    judged = counted(len(outcomes), "candidate")
    return (
        f"{passed} of {judged} of {scorecard.model_uri} passed every gate.",
        f"{subject}: {one_line(scorecard.reason).rstrip('.')}.",
        *fp32_sentences(scorecard),
        *fp32_slices(scorecard),
        *winner_sentences(scorecard),
    )


def fp32_sentences(scorecard: Scorecard) -> tuple[str, ...]:
    """FP32's own scores on the labelled data, one sentence for each measure."""
    whole = (score for score in scorecard.fp32_scores if "/" not in score.scope)
    return tuple(f"{one_line(_at_output(score))}." for score in whole)


def fp32_slices(scorecard: Scorecard, *, most: int | None = _SLICES_SHOWN) -> tuple[str, ...]:
    """FP32's own score in each slice, the worst first; one line for each measure.

    Args:
        most: so many slices a line at most; None: all of them.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for score in scorecard.fp32_scores:
        scope, _, part = score.scope.partition("/")
        if part and score.value is not None:
            groups.setdefault((score.gate, scope), []).append(score)
    return tuple(_slices_line(scores, most) for scores in groups.values())


def _slices_line(scores: list[Finding], most: int | None) -> str:
    errors = scores[0].relation == "<="
    ordered = sorted(scores, key=lambda score: score.value or 0.0, reverse=errors)
    shown = ordered if most is None else ordered[:most]
    slices = [f"{score.scope.partition('/')[2]} {own_score_text(score)}" for score in shown]
    hidden = len(ordered) - len(shown)
    name = scores[0].measure
    return f"FP32's own {name} by slice, the worst first: {', '.join(slices)}" + (
        f", and {hidden} better ones." if hidden else "."
    )


def own_score_text(score: Finding) -> str:
    """FP32's own score with its interval: as a percentage, or in the metric's own unit."""
    share = score.unit == "fraction"

    def show(number: float) -> str:
        return f"{100 * number:.1f}" if share else f"{number:.4g}"

    unit = " %" if share else f" {score.unit}" if score.unit else ""
    value = f"{show(score.value or 0.0)}{unit}"
    if score.low is None or score.high is None:
        return value
    return f"{value} ({show(score.low)} to {show(score.high)})"


def _at_output(score: Finding) -> str:
    output = score.scope.partition(":")[2]
    return f"{score.reason} (output {output})" if output else score.reason


def binding(scorecard: Scorecard) -> str:
    """The scorecard that an answer is bound to."""
    return (
        f"An approval is for scorecard {scorecard.digest} and nothing else: other evidence needs a "
        "new one. No answer means no."
    )


def short_digest(scorecard: Scorecard) -> str:
    """Enough of the digest to name the scorecard in a command."""
    return scorecard.digest[:_DIGEST_SHOWN]


def one_line(text: str) -> str:
    """The beginning, in whole words: text of a builder or server may have many lines."""
    joined = without_line_breaks(text)
    if len(joined) <= _REASON_LENGTH:
        return joined
    begun = joined[:_REASON_LENGTH]
    return f"{begun.rpartition(' ')[0] or begun} … (`enginegate explain` shows all of it)"


def without_line_breaks(text: str) -> str:
    """All of it as one line, where there is room."""
    return " ".join(text.split())


def winner_sentences(scorecard: Scorecard) -> Iterator[str]:
    """The winner's accuracy, how it was served, last what it would replace; none without one."""
    winner = scorecard.winner
    if winner is None:
        return
    verdict, benchmark = scorecard.verdict(winner), scorecard.benchmark(winner)
    loss = task_loss(verdict)
    if loss:
        unit = " percentage points" if in_points(loss) else f" {loss.unit}" if loss.unit else ""
        worst = _worst_slice(verdict)
        slices = "" if worst == MISSING else f"; the worst slice is {worst}"
        yield (
            f"{loss.measure_title} changed by {change_text(loss)}{unit} over {loss.samples:,} "
            f"samples{slices}."
        )
    if benchmark and benchmark.chosen and benchmark.p99_at_slo:
        yield (
            f"Served with {benchmark.chosen}, it sustained {benchmark.throughput_text} "
            f"requests a second at a p99 of {percentile_text(benchmark.p99_at_slo)} ms over "
            f"{benchmark.p99_at_slo.samples:,} requests."
        )
    alone = alone_sentence(scorecard, winner)
    if alone:
        yield alone
    for finding in scorecard.speed_findings:
        if finding.outcome is not Outcome.PASSED:
            named = "" if finding.scope in finding.reason else f"{finding.scope}: "
            yield f"{named}{one_line(finding.reason).rstrip('.')}."
    replaced = f"release {scorecard.replaces}" if scorecard.replaces else "nothing"
    yield f"It would replace {replaced}."


def accuracy_text(verdict: Verdict | None) -> str:
    """The task's loss against FP32, as a change with its interval; n/a where not judged."""
    loss = task_loss(verdict)
    return MISSING if loss is None else change_text(loss)


def task_loss(verdict: Verdict | None) -> Finding | None:
    """The task's loss on all labelled data; None: it was not judged."""
    return verdict.task_loss if verdict else None


def in_points(loss: Finding) -> bool:
    """Whether a loss is a share of the answers."""
    return loss.in_points


def change_text(loss: Finding) -> str:
    """A loss as a change, with its interval: in percentage points, or in the metric's own unit."""
    show = _points if in_points(loss) else _plain
    value, ends = show(loss.as_change(loss.value or 0.0)), loss.change_ends
    return value if ends is None else f"{value} ({show(ends[0])} to {show(ends[1])})"


def _worst_slice(verdict: Verdict | None) -> str:
    """The evaluation slice with the worst outcome and, among those, the largest loss."""
    findings = verdict.findings if verdict else ()
    slices = [
        finding
        for finding in findings
        if finding.gate.startswith("slice_")
        and finding.gate.endswith("_loss")
        and finding.value is not None
        and finding.scope.startswith("evaluation")
    ]
    loss = task_loss(verdict)
    if loss is not None:  # those of another measure are in another unit
        slices = [each for each in slices if each.measure == loss.measure] or slices
    if not slices:
        return MISSING
    worst = max(slices, key=lambda finding: (finding.outcome, finding.value))
    return f"{worst.scope.partition('/')[2]} {change_text(worst)}"


def _points(points: float) -> str:
    """Percentage points with a sign; a loss too small to show is not a negative zero."""
    return f"{round(points, 2) + 0.0:+.2f}"


def _plain(number: float) -> str:
    return f"{number + 0.0:+.4g}"


def percentile_text(percentile: Percentile | None) -> str:
    """A percentile in milliseconds with its interval; n/a where it was not measured."""
    if percentile is None:
        return MISSING
    if percentile.low_ms is None or percentile.high_ms is None:
        return f"{percentile.value_ms:.2f}"
    return f"{percentile.value_ms:.2f} ({percentile.low_ms:.2f} to {percentile.high_ms:.2f})"


def size_text(size_bytes: int | None) -> str:
    if size_bytes is None:
        return MISSING
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB else f"{size_bytes / _KIB:.0f} KiB"


def _blocking(verdict: Verdict, benchmark: Benchmark | None) -> tuple[Finding, ...]:
    """Blocking findings of both, worst first; a benchmark has the same rule as a verdict."""
    measured = benchmark.findings if benchmark else ()
    found = [f for f in measured if not f.advisory and f.outcome is not Outcome.PASSED]
    return tuple(sorted((*verdict.blocking, *found), key=lambda finding: -finding.outcome))


def _reason(finding: Finding) -> str:
    reason = f"{finding.gate} on {finding.scope}: {one_line(finding.reason)}"
    if finding.outcome is Outcome.FAILED and finding.would_pass is not None:
        reason += f"; a limit of {finding.would_pass:.4g} would have passed"
    return reason
