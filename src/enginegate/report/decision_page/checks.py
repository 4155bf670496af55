"""Checks as people know them from code review: what failed first, with its remedy; then warnings.

Headroom is the part of a limit that is left, counted from the end of the interval that decides.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from enginegate.candidate import Candidate
from enginegate.evidence import Finding, Outcome, Scorecard, Verdict
from enginegate.messages import counted, short_number
from enginegate.report.content import one_line, without_line_breaks
from enginegate.report.decision_page.forest import EMULATED
from enginegate.report.decision_page.verdict_band import ICONS

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "build": "Can be built",
        "runnable": "Runs here",
        "precision_proof": "Precision is proven",
        "provenance": "Made elsewhere",
        "samples": "Enough samples",
        "nonfinite": "NaN or infinity",
        "kl_p99": "KL divergence, 99th percentile",
        "max_abs_error": "Largest absolute error",
        "max_rel_error": "Largest relative error",
        "p99_abs_error": "Absolute error, 99th percentile",
        "p99_rel_error": "Relative error, 99th percentile",
        "top1_agreement": "Top-1 agreement with FP32",
        "decision_agreement": "Agreement with FP32 in labels, pixels or boxes",
        "sqnr": "Signal to noise",
        "cosine_p1": "Cosine, 1st percentile",
        "noise_floor": "FP32's own noise",
        "slice_samples": "Slices are large enough",
        "shadow_integrity": "Traffic belongs to this model",
        "shadow_version": "Traffic belongs to this version",
        "input_drift": "Input drift",
        "emulated_range": "Range, emulated",
        "p99_ms": "p99 latency",
        "throughput": "Throughput within the SLO",
        "speedup": "Speedup",
        "overload": "Load past the answer",
        "faster_alone": "Faster than the winner without a server",
        "slower_than_eager": "Slower than PyTorch without compiling",
    }
)
_DATA: Mapping[str, str] = MappingProxyType(
    {"evaluation": "labelled data", "shadow": "recorded traffic", "benchmark": "under Triton"}
)
_SLICE_SIZES = "slice_samples"
_ALL_LEFT = 0.995
_SMALLEST = 1e-3
# Counts of things have no part that is left.
_COUNTED_UNITS = frozenset({"samples", "versions"})


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One gate, or the same gate over all slices of some data.

    Attributes:
        data: on what it was checked.
        said: of one without a number, what was found.
        headroom: the part of the limit that is left, in words.
        left: the same as a share from 0 to 1 to draw; None: there is none to draw.
        reason: of what did not pass, and what to do.
    """

    outcome: str
    icon: str
    name: str
    data: str
    said: str
    value: str
    limit: str
    headroom: str
    left: float | None
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CandidateChecks:
    """Everything that was checked of one candidate, or of several that end for the same reasons.

    Attributes:
        names: of the candidates.
        summary: how many ended how.
        open: whether it is shown unfolded.
        blocking: what keeps it from passing, worst first.
        warnings: what decides nothing and somebody should know.
        lines: the rest; empty for a candidate that is not proposed where another one is.
        fine: how many those are, and which has the least headroom.
        unlimited: what was measured and has no limit, in one sentence.
    """

    names: str
    outcome: str
    icon: str
    summary: str
    open: bool
    blocking: tuple[CheckLine, ...]
    warnings: tuple[CheckLine, ...]
    lines: tuple[CheckLine, ...]
    fine: str
    unlimited: str


@dataclass(frozen=True, slots=True)
class NotJudged:
    """A part of the evidence that is missing.

    Attributes:
        what: in a few words.
        reason: all of it.
    """

    what: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Checks:
    """All candidates, the proposed one first.

    Attributes:
        not_judged: of the proposed candidate, what no verdict is about.
    """

    not_judged: tuple[NotJudged, ...]
    candidates: tuple[CandidateChecks, ...]


def checks_section(scorecard: Scorecard) -> Checks:
    """Every gate of the proposed candidate; of the others what did not pass."""
    order = sorted(
        scorecard.verdicts,
        key=lambda v: (v.candidate != scorecard.winner, -scorecard.outcome(v.candidate)),
    )
    proposed = scorecard.winner or (order[0].candidate if order else None)
    missing = not_judged(scorecard, proposed) if proposed else ()
    above = frozenset(each.reason for each in missing)
    return Checks(
        not_judged=missing,
        candidates=tuple(_of_group(scorecard, group, above) for group in _groups(scorecard, order)),
    )


def _groups(scorecard: Scorecard, order: Sequence[Verdict]) -> Iterable[list[Candidate]]:
    """The proposed candidate alone; others with the same outcome and reasons together."""
    groups: dict[object, list[Candidate]] = {}
    for verdict in order:
        candidate = verdict.candidate
        blocking = tuple((f.gate, f.scope, f.reason) for f in verdict.blocking)
        measured = scorecard.benchmark(candidate) is not None
        alone = candidate if measured or not blocking else None
        key = (alone, scorecard.outcome(candidate), blocking)
        groups.setdefault(key, []).append(candidate)
    return groups.values()


def not_judged(scorecard: Scorecard, candidate: Candidate) -> tuple[NotJudged, ...]:
    """What was not judged of a candidate, once for each kind of data."""
    verdict = scorecard.verdict(candidate)
    return tuple(
        _not_judged(finding)
        for finding in (verdict.findings if verdict else ())
        if finding.gate == _SLICE_SIZES and finding.outcome is not Outcome.PASSED
    )


def _not_judged(finding: Finding) -> NotJudged:
    scope = finding.scope.partition("/")[0]
    which = {"evaluation": "labelled slices", "shadow": "traffic slices"}.get(scope, "slices")
    counts = re.match(r"(\d+ of \d+) slices", finding.reason)
    what = f"{counts[1] if counts else 'some'} {which}, too small"
    return NotJudged(what, without_line_breaks(finding.reason), finding.remedy)


def _of_group(
    scorecard: Scorecard, group: Sequence[Candidate], above: frozenset[str]
) -> CandidateChecks:
    """The checks of candidates that end alike; ``above``: reasons that stand above them all."""
    candidate = group[0]
    verdict, measured = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    findings = [*(verdict.findings if verdict else ()), *(measured.findings if measured else ())]
    findings = [f for f in findings if not f.of_fp32]
    counting = [f for f in findings if not f.advisory]
    blocking = [f for f in counting if f.outcome is not Outcome.PASSED]
    passed = [f for f in counting if f.outcome is Outcome.PASSED]
    unlimited = [f for f in findings if f.advisory and _without_limit(f)]
    advice = [f for f in findings if f.advisory and f not in unlimited]
    warnings = [f for f in advice if f.outcome is not Outcome.PASSED]
    warnings += [
        f
        for f in scorecard.speed_findings
        if f.scope == candidate.name and f.outcome is not Outcome.PASSED
    ]
    warnings = [f for f in warnings if f.scope.partition("/")[0] != EMULATED]
    shown = [f for f in warnings if without_line_breaks(f.reason) not in above]
    outcome = scorecard.outcome(candidate)
    proposed = candidate == scorecard.winner
    # All of every candidate would make the page too long to send; without a winner people compare.
    whole = proposed or (scorecard.winner is None and measured is not None)
    lines = tuple(_grouped(passed)) if whole else ()
    return CandidateChecks(
        names=", ".join(each.name for each in group),
        outcome=outcome.word,
        icon=ICONS[outcome],
        summary=_summary(passed if len(group) == 1 else [], blocking, len(warnings)),
        open=proposed or outcome >= Outcome.FAILED,
        blocking=tuple(_line(f) for f in sorted(blocking, key=lambda f: -f.outcome)),
        warnings=tuple(_line(f) for f in shown),
        lines=lines,
        fine=_fine_text(lines),
        unlimited=_unlimited_text(unlimited) if whole else "",
    )


def _fine_text(lines: Sequence[CheckLine]) -> str:
    drawn = [(line.left, line) for line in lines if line.left is not None]
    if not drawn:
        return f"{counted(len(lines), 'check')} passed"
    _, tightest = min(drawn, key=lambda pair: pair[0])
    said = f"{counted(len(lines), 'check')} passed, each with value, limit and headroom"
    return f"{said}; the least headroom is {tightest.headroom}: {tightest.name}"


def _without_limit(finding: Finding) -> bool:
    """Whether it is only shown, because the policy sets no limit."""
    return finding.limit is None and finding.relation is not None


def _unlimited_text(findings: Sequence[Finding]) -> str:
    names = dict.fromkeys(_name(finding) for finding in findings)
    if not names:
        return ""
    return f"Measured, and without a limit in the policy: {', '.join(names)}."


def _summary(passed: Sequence[Finding], blocking: Sequence[Finding], warnings: int) -> str:
    words = [
        counted(sum(f.outcome is outcome for f in blocking), outcome.word, outcome.word)
        for outcome in (Outcome.ERRORED, Outcome.FAILED, Outcome.INCONCLUSIVE)
        if any(f.outcome is outcome for f in blocking)
    ]
    if passed:
        words.append(f"{len(passed)} passed")
    if warnings:
        words.append(counted(warnings, "warning"))
    return ", ".join(words)


def _grouped(findings: Sequence[Finding]) -> Iterator[CheckLine]:
    """One line for each gate; a gate's slices are one line, that of the least headroom."""
    slices: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        data, _, part = finding.scope.partition("/")
        if part:
            slices.setdefault((finding.gate, data), []).append(finding)
    told: set[tuple[str, str]] = set()
    for finding in findings:
        data, _, part = finding.scope.partition("/")
        if not part:
            yield _line(finding)
        elif (finding.gate, data) not in told:
            told.add((finding.gate, data))
            yield _slices_line(slices[finding.gate, data])


def _slices_line(found: Sequence[Finding]) -> CheckLine:
    tightest = min(found, key=lambda f: 1.0 if (left := share_left(f)) is None else left)
    line = _line(tightest)
    data, _, part = tightest.scope.partition("/")
    return CheckLine(
        outcome=line.outcome,
        icon=line.icon,
        name=f"{line.name}, {counted(len(found), 'slice')}",
        data=f"{_DATA.get(data, data)}, tightest {part}",
        said="",
        value=line.value,
        limit=line.limit,
        headroom=line.headroom,
        left=line.left,
        reason="",
        remedy="",
    )


def _line(finding: Finding) -> CheckLine:
    left = share_left(finding)
    fine = finding.outcome is Outcome.PASSED
    data, _, part = finding.scope.partition("/")
    return CheckLine(
        outcome=finding.outcome.word,
        icon=ICONS[finding.outcome],
        name=_name(finding),
        data=f"{_DATA.get(data, data)}{f', {part}' if part else ''}",
        said=one_line(finding.reason) if fine and finding.value is None else "",
        value="" if finding.value is None else _number(finding, finding.value),
        limit=_limit(finding),
        headroom=_headroom(finding, left),
        left=None if left is None else max(0.0, min(1.0, left)),
        reason="" if fine else one_line(finding.reason),
        remedy="" if fine else _sentence(finding.remedy),
    )


def _sentence(remedy: str) -> str:
    said = one_line(remedy)
    return said[:1].upper() + said[1:]


def _name(finding: Finding) -> str:
    gate = finding.gate.removeprefix("slice_") if finding.gate not in _NAMES else finding.gate
    if gate in _NAMES:
        return _NAMES[gate]
    if finding.of_fp32:
        return f"{finding.measure_title} of FP32"
    if gate.endswith("_loss"):
        return f"{finding.measure_title} {'growth' if finding.of_error else 'loss'}"
    return gate.replace("_", " ").capitalize()


def _number(finding: Finding, number: float) -> str:
    if finding.in_points and finding.gate.endswith("_loss"):
        return f"{100 * number:.2f} pp"
    if finding.unit == "fraction":
        return f"{100 * number:.4g} %"
    unit = {"1/s": "/s", "": ""}.get(finding.unit, f" {finding.unit}")
    # Longer than this in digits, it is read as a power.
    shown = f"{number:.2g}" if 0 < abs(number) < _SMALLEST else short_number(number, 3)
    return f"{shown}{unit}"


def _limit(finding: Finding) -> str:
    if finding.limit is None or finding.relation is None:
        return ""
    sign = {"<=": "≤", ">=": "≥", "==": "="}[finding.relation]
    return f"{sign} {_number(finding, finding.limit)}"


def share_left(finding: Finding) -> float | None:
    """The part of a limit that is left, from the end of the interval that decides.

    For an upper limit ``1 - end / limit``; for a lower limit of a share, the distance to the limit
    over the distance from 1 to it. Negative: the limit is broken. None: it has no such part.
    """
    limit, value = finding.limit, finding.value
    if limit is None or value is None:
        return None
    if finding.unit in _COUNTED_UNITS:
        return None
    if finding.relation == "<=" and limit > 0:
        end = finding.high if finding.high is not None else value
        return 1.0 - end / limit
    if finding.relation == ">=" and finding.unit == "fraction" and limit < 1:
        end = finding.low if finding.low is not None else value
        return (end - limit) / (1.0 - limit)
    return None


def _headroom(finding: Finding, left: float | None) -> str:
    if left is not None:
        if left == 0 and finding.outcome is Outcome.PASSED:
            return ""  # a count that must be just that, such as one version
        if left < 0:
            return "over the limit" if finding.relation == "<=" else "below the limit"
        return "> 99 %" if left > _ALL_LEFT else f"{100 * left:.0f} %"
    if finding.relation == ">=" and finding.limit and finding.value is not None:
        times = finding.value / finding.limit
        return "below the limit" if times < 1 else f"{times:.3g} times the limit"
    return ""
