"""Slices of the data against candidates: where an engine loses more than on the whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from enginegate.evidence import Finding, Outcome, Scorecard
from enginegate.report.content import in_points
from enginegate.report.decision_page.forest import EMULATED, forest_section

# Rows of all groups together: more are a page of their own, and `explain` has every one.
_MOST_ROWS = 32
# Shares of the margin at which a cell's shade grows darker; above the last one it is used up.
_SHADES = (0.0, 0.25, 0.5, 0.75, 1.0)
# A smaller share of the margin reads as no change at one decimal.
_ROUNDED_AWAY = 0.005
_EVALUATION = "evaluation"
_OF_SLICES = "slice_"
_DATA = {_EVALUATION: "labelled data", "shadow": "recorded traffic"}
_LOSS, _AGREEMENT = "_loss", "_agreement"
_MARKS = {
    Outcome.PASSED: "",
    Outcome.INCONCLUSIVE: "?",
    Outcome.FAILED: "✕",
    Outcome.ERRORED: "!",
}


class SliceCell(NamedTuple):
    """What was found about one candidate on one slice.

    Attributes:
        text: the change against FP32, or the agreement with it.
        interval: its ends; empty where none is known.
        samples: that it is of.
        outcome: in a word.
        mark: what stands beside the number where it did not pass.
        shade: 0 (nothing lost) to 4 (nearly all of the margin), 5 beyond it; None: no margin.
        is_emulated: it decides nothing.
    """

    text: str
    interval: str
    samples: int
    outcome: str
    mark: str
    shade: int | None
    is_emulated: bool


class SliceRow(NamedTuple):
    """One slice, and a cell for each column; None: not judged there."""

    name: str
    cells: tuple[SliceCell | None, ...]


class SliceColumn(NamedTuple):
    """One candidate."""

    kind: str
    precision: str
    is_emulated: bool
    is_winner: bool


class SliceGroup(NamedTuple):
    """The slices of one data set under one gate.

    Attributes:
        columns: the candidates that were judged on it.
        heading: what the numbers are, and on which data.
        limits: what may be lost.
        hidden: slices that are left out, none of which is worse than those that are shown.
    """

    columns: tuple[SliceColumn, ...]
    heading: str
    limits: str
    rows: tuple[SliceRow, ...]
    hidden: int


class SliceTable(NamedTuple):
    """The heat map.

    Attributes:
        missing: candidates without a number on any slice.
        too_small: what was not judged, one sentence for each data set.
    """

    groups: tuple[SliceGroup, ...]
    missing: tuple[str, ...]
    too_small: tuple[str, ...]

    @property
    def has_emulated(self) -> bool:
        """Whether the legend has to explain emulated columns."""
        return any(column.is_emulated for group in self.groups for column in group.columns)


def slices_section(scorecard: Scorecard) -> SliceTable | None:
    """The content of ``slices.html``; None: no slice was judged, and none was too small."""
    found = {
        verdict.candidate.name: [f for f in verdict.findings if _is_of_slice(f)]
        for verdict in scorecard.verdicts
    }
    order = [row.candidate for row in forest_section(scorecard).rows]
    names = [name for name in order if found.get(name)]
    too_small = _too_small(scorecard)
    if not names and not too_small:
        return None
    candidates = {verdict.candidate.name: verdict.candidate for verdict in scorecard.verdicts}
    columns = {
        SliceColumn(
            kind=candidates[name].kind,
            precision=f"{candidates[name].precision}{candidates[name].variant}",
            is_emulated=all(_is_emulated(finding) for finding in found[name]),
            is_winner=candidates[name] == scorecard.winner,
        ): found[name]
        for name in names
    }
    return SliceTable(
        groups=_groups(columns),
        missing=tuple(name for name in order if name not in names),
        too_small=too_small,
    )


def _is_of_slice(finding: Finding) -> bool:
    """Whether it compares with FP32 on one slice; FP32's own score there compares nothing."""
    return (
        finding.gate.startswith(_OF_SLICES)
        and finding.gate.endswith((_LOSS, _AGREEMENT))
        and "/" in finding.scope
    )


def _is_emulated(finding: Finding) -> bool:
    return re.split("[/:]", finding.scope)[0] == EMULATED


def _place(finding: Finding) -> tuple[str, str]:
    """The gate and the data; an emulation was compared on evaluation data."""
    scope = finding.scope.partition("/")[0]
    if _is_emulated(finding):
        scope = f"{_EVALUATION}{scope.removeprefix(EMULATED)}"
    return finding.gate, scope


def _groups(columns: Mapping[SliceColumn, Sequence[Finding]]) -> tuple[SliceGroup, ...]:
    """One group for each gate and data set, the rows of all within the page's room."""
    places = list(dict.fromkeys(_place(f) for findings in columns.values() for f in findings))
    most = max(1, _MOST_ROWS // max(1, len(places)))
    return tuple(_group(place, columns, most) for place in places)


def _group(
    place: tuple[str, str], columns: Mapping[SliceColumn, Sequence[Finding]], most: int
) -> SliceGroup:
    """The worst slices, in the order of their names."""
    judged = {
        column: {f.scope.partition("/")[2]: f for f in findings if _place(f) == place}
        for column, findings in columns.items()
    }
    judged = {column: by_slice for column, by_slice in judged.items() if by_slice}
    names = dict.fromkeys(name for by_slice in judged.values() for name in by_slice)
    rows = {name: [by_slice.get(name) for by_slice in judged.values()] for name in names}
    worst_first = sorted(rows, key=lambda name: _badness(rows[name]), reverse=True)
    shown = sorted(worst_first[:most], key=_natural)
    known = [finding for by_slice in judged.values() for finding in by_slice.values()]
    return SliceGroup(
        columns=tuple(judged),
        heading=_heading(*place, known[0]),
        limits=_limits(known),
        rows=tuple(
            SliceRow(name, tuple(_cell(f) if f else None for f in rows[name])) for name in shown
        ),
        hidden=len(rows) - len(shown),
    )


def _heading(gate: str, scope: str, finding: Finding) -> str:
    measure = gate.removeprefix(_OF_SLICES)
    data, _, output = scope.partition(":")
    where = _DATA.get(data, data)
    of_output = f", output {output}" if output else ""
    if measure.endswith(_LOSS):
        unit = "percentage points" if in_points(finding) else finding.unit
        what = ", ".join(filter(None, (f"{finding.measure_title} change against FP32", unit)))
        return f"{what}, on {where}{of_output}"
    return f"Answers equal to FP32's, %, on {where}{of_output}"


def _limits(findings: Sequence[Finding]) -> str:
    """What is allowed: the margin of a change, the least of an agreement."""
    known = [(f, f.limit) for f in findings if f.limit is not None]
    if not known:
        return "no limit is set"
    least = "margin" if known[0][0].relation == "<=" else "at least"
    texts = dict.fromkeys(_number(finding, _turned(finding, limit)) for finding, limit in known)
    by_precision = ", by precision" if len(texts) > 1 else ""
    return f"{least} {' or '.join(texts)}{by_precision}"


def _cell(finding: Finding) -> SliceCell:
    known = (end for end in (finding.low, finding.high) if end is not None)
    ends = sorted(_turned(finding, end) for end in known)
    return SliceCell(
        text="n/a" if finding.value is None else _number(finding, _turned(finding, finding.value)),
        interval=" to ".join(_number(finding, end) for end in ends),
        samples=finding.samples,
        outcome=finding.outcome.word,
        mark=_MARKS[finding.outcome],
        shade=_shade(finding),
        is_emulated=_is_emulated(finding),
    )


def _turned(finding: Finding, number: float) -> float:
    """A loss as a change; an agreement as it is."""
    return finding.as_change(number) if finding.relation == "<=" else number


def _number(finding: Finding, value: float) -> str:
    """A change with its sign, or an agreement in per cent."""
    if finding.relation != "<=":
        return f"{100 * value:.1f}" if finding.unit == "fraction" else f"{value:.3g}"
    text = f"{value:+.1f}" if in_points(finding) else f"{value + 0.0:+.3g}"
    return "0" if not text.strip("+-0.") else text


def _used(finding: Finding) -> float | None:
    """How much of the margin is used; None: there is none."""
    if finding.value is None or finding.limit is None:
        return None
    if finding.relation == ">=":
        if finding.unit != "fraction" or finding.limit >= 1.0:
            return None
        return (1.0 - finding.value) / (1.0 - finding.limit)
    return finding.value / finding.limit if finding.limit > 0.0 else None


def _shade(finding: Finding) -> int | None:
    used = _used(finding)
    if used is None:
        return None
    return 0 if used < _ROUNDED_AWAY else sum(used > share for share in _SHADES)


def _badness(findings: Sequence[Finding | None]) -> tuple[int, float]:
    """Worst outcome, then the most of a margin that is used."""
    known = [finding for finding in findings if finding is not None]
    return (
        max((f.outcome for f in known), default=Outcome.PASSED),
        max((_used(f) or 0.0 for f in known), default=0.0),
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """An order in which digit=10 follows digit=9."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _too_small(scorecard: Scorecard) -> tuple[str, ...]:
    """What was not judged for want of samples; one sentence for each data set."""
    return tuple(dict.fromkeys(_small_sentences(scorecard)))


def _small_sentences(scorecard: Scorecard) -> Iterator[str]:
    for verdict in scorecard.verdicts:
        for finding in verdict.findings:
            small = finding.gate == "slice_samples" and finding.outcome is not Outcome.PASSED
            if small and not _is_emulated(finding):
                data, _, output = finding.scope.partition(":")
                of_output = f", output {output}" if output else ""
                yield f"{_DATA.get(data, data)}{of_output}: {finding.reason}"
