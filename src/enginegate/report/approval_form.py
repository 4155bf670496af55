"""The text above the form that a person approves with: enough to decide, on one screen.

Prefect's pages show it in a window beside the fields. At 1440 x 900 there is room for a text of
about 470 x 430 pixels beside three fields; a longer one scrolls, and what nobody scrolls to was not
read. Tables are cut there at the right, so what is compared is a block of code, and the least
important warnings give way to a count of them.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from enginegate.candidate import Candidate, registered_version
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted, escape_markdown, short_number
from enginegate.report.content import short_digest, without_line_breaks
from enginegate.report.decision_page.checks import not_judged, share_left
from enginegate.report.decision_page.comparison import comparison_section

# Measured in Prefect 3.8.8's form at 1440 x 900: what fits without scrolling or a second line.
_CODE_WIDTH, _TEXT_WIDTH, _BULLET_WIDTH = 53, 56, 54
_LINE_PX, _GAP_PX, _BULLET_GAP_PX, _CODE_EDGE_PX = 24, 12, 4, 32
_ROOM_PX, _FIELD_PX = 424, 92
# A remark of two lines; the page has all of it.
_LONGEST_REMARK = 2 * _BULLET_WIDTH - 4
# Names of the page's lines, in few enough characters for a column.
_NAMES = {
    "rate within the slo": "rate",
    "p99 at that rate": "p99",
    "engine size": "size",
    "gpu memory": "GPU mem",
    "cost of a million requests": "cost/1M",
}
_IN_TURNS = ", in turns"
_LONGEST_NAME = 8
# The question names these of both.
_IN_THE_QUESTION = frozenset({"engine", "model version"})
_SPEED_WORDS = {
    "faster_alone": "is faster without a server",
    "slower_than_eager": "is slower than PyTorch without compiling",
}
_BRACKETS = re.compile(r" \([^()]*\)")
_BRACKETS_BUT_INTERVALS = re.compile(r" \((?![^()]* to )[^()]*\)")


@dataclass(frozen=True, slots=True)
class ApprovalQuestion:
    """What is asked of a person besides the scorecard.

    Attributes:
        approved_by: whose approvals count already.
        missing: how many more people must approve.
        may_approve: names that the policy has and that have not approved; empty: anybody.
        objections: why other approvals do not count.
        until: when no answer becomes a no.
        open_candidates: inconclusive candidates that may be accepted by name.
        page_url: the decision page; empty: there is none to link to.
        start_command: the page is there while this runs; empty: a server has it.
    """

    missing: int
    until: datetime
    approved_by: tuple[str, ...] = ()
    may_approve: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    open_candidates: tuple[Candidate, ...] = ()
    page_url: str = ""
    start_command: str = ""


def approval_form_text(scorecard: Scorecard, question: ApprovalQuestion) -> str:
    """Question, now against proposed, what was not judged, warnings, link: as Markdown."""
    first, compared = f"**{_asked(scorecard)}**", _compared(scorecard)
    last = _footer(scorecard, question)
    room = _ROOM_PX - (_FIELD_PX if question.open_candidates else 0)
    room -= _height(first) + _height(last) + _code_height(compared)
    bullets = tuple(_bullets(scorecard, question))
    code = f"```\n{compared}\n```" if compared else ""
    shown = "\n".join(_fitting(bullets, room))
    return "\n\n".join(part for part in (first, code, shown, last) if part)


def _asked(scorecard: Scorecard) -> str:
    old, new = scorecard.replaced, version_words(scorecard.model_uri)
    if scorecard.winner is None:
        asked = f"Publish an inconclusive candidate of {new}? None passed every gate."
    elif scorecard.replaces is None:
        asked = f"Make {new} live as {scorecard.winner}? Nothing is live now."
    else:
        was = f" ({version_words(old.model_uri)} as {old.candidate})" if old else ""
        same = old is not None and old.engine_sha256 == _engine_sha256(scorecard)
        becomes = f"{new} as {scorecard.winner}{', the same bytes' if same else ''}"
        asked = f"Replace release {scorecard.replaces}{was} with {becomes}?"
    return escape_markdown(asked)


def _engine_sha256(scorecard: Scorecard) -> str | None:
    verdict = scorecard.verdict(scorecard.winner) if scorecard.winner else None
    return verdict.engine_sha256 if verdict else None


def version_words(uri: str) -> str:
    """``digits v3`` for a version of the registry, else the address."""
    found = registered_version(uri)
    return f"{found[0]} v{found[1]}" if found else uri


def _compared(scorecard: Scorecard) -> str:
    """Columns of text: what, now, proposed; empty without a winner."""
    comparison = comparison_section(scorecard)
    if comparison is None:
        return ""
    lines = [line for line in comparison.lines if line.name.lower() not in _IN_THE_QUESTION]
    known = any(line.now for line in lines)
    rows = [("", f"now: {comparison.now_title}" if known else "", "proposed")]
    rows += [
        (
            _line_name(line.name),
            _short(_BRACKETS.sub("", line.now)),
            _short(_BRACKETS_BUT_INTERVALS.sub("", line.proposed)),
        )
        for line in lines
    ]
    left = max(len(row[0]) for row in rows) + 2
    middle = max(len(row[1]) for row in rows) + 2 if known else 0
    drawn = [f"{name:<{left}}{now:<{middle}}{new}".rstrip() for name, now, new in rows]
    return "\n".join(line[:_CODE_WIDTH] for line in drawn)


def _line_name(name: str) -> str:
    if name.endswith(_IN_TURNS):
        return "in turns"
    short = _NAMES.get(name.lower(), name if name.startswith("p99") else name.lower())
    return short[:_LONGEST_NAME]


def _short(value: str) -> str:
    return value.replace(" requests/s", "/s").replace("`", "'")


def _bullets(scorecard: Scorecard, question: ApprovalQuestion) -> Iterator[str]:
    for lead, words in _remarks(scorecard, question):
        yield f"- **{lead}:** {escape_markdown(_cut(words, _LONGEST_REMARK - len(lead)))}"


def _remarks(scorecard: Scorecard, question: ApprovalQuestion) -> Iterator[tuple[str, str]]:
    """What somebody should know before they say yes, the most important first."""
    for each in question.objections:
        yield "Does not count", each
    winner = scorecard.winner
    yield from _on_other_devices(scorecard)
    if winner is None:
        for candidate in question.open_candidates:
            yield candidate.name, _open_findings(scorecard, candidate)
        return
    yield from _worse(scorecard)
    for missing in not_judged(scorecard, winner):
        yield "Not judged", missing.what
    if scorecard.data.shadow is None:
        yield "Not judged", "recorded traffic, as there is none"
    others = [each.name for each in scorecard.tied if each != winner]
    if others:
        yield "Tied", f"with {', '.join(others)}"
    yield "Gates", _gates(scorecard, winner)
    yield from _about_speed(scorecard, winner)


def _on_other_devices(scorecard: Scorecard) -> Iterator[tuple[str, str]]:
    """An approval is for every kind of device; the question names the first kind's winner."""
    for view in scorecard.by_device[1:]:
        measured = view.benchmark(view.winner) if view.winner is not None else None
        if view.winner is None:
            yield f"On {view.device}", "no winner, so its servers would be refused"
        elif measured is None or measured.p99_at_slo is None:
            yield f"Also on {view.device}", view.winner.name
        else:
            p99 = short_number(measured.p99_at_slo.value_ms)
            rate = f"{measured.throughput_text}/s, p99 {p99} ms"
            yield f"Also on {view.device}", f"{view.winner.name}, {rate}"


def _worse(scorecard: Scorecard) -> Iterator[tuple[str, str]]:
    comparison = comparison_section(scorecard)
    if comparison is None or scorecard.replaces is None:
        return
    worse = [
        f"{_line_name(line.name)} ({line.change})"
        for line in comparison.lines
        if line.effect == "worse"
    ]
    if worse:
        yield "Worse than now", ", ".join(worse)
    if scorecard.replaced is None:
        yield "Now", f"the scorecard has no numbers of release {scorecard.replaces}"
        return
    for note in comparison.notes[1:] if scorecard.replaced.benchmark else comparison.notes:
        yield "Now", note


def _about_speed(scorecard: Scorecard, winner: Candidate) -> Iterator[tuple[str, str]]:
    measured = scorecard.benchmark(winner)
    if measured is not None and measured.cut_short:
        yield "Search cut short", measured.cut_short
    elif measured is not None and measured.is_lower_bound:
        yield "Rate", "a lower bound, as no higher one was tried"
    for finding in scorecard.speed_findings:
        if finding.outcome is not Outcome.PASSED:
            words = _SPEED_WORDS.get(finding.gate)
            yield "Speed", f"{finding.scope} {words}" if words else finding.reason


def _open_findings(scorecard: Scorecard, candidate: Candidate) -> str:
    judged = (scorecard.verdict(candidate), scorecard.benchmark(candidate))
    found = [f for each in judged if each is not None for f in each.findings]
    is_open = [f for f in found if f.outcome is Outcome.INCONCLUSIVE and not f.advisory]
    return "; ".join(f"{f.gate} on {f.scope}: {f.reason}" for f in is_open) or "not known well"


def _gates(scorecard: Scorecard, winner: Candidate) -> str:
    """How many gates passed, and how near the nearest came to its limit."""
    judged = (scorecard.verdict(winner), scorecard.benchmark(winner))
    found = [f for each in judged if each is not None for f in each.findings]
    counting = [f for f in found if not f.advisory and f.outcome is Outcome.PASSED]
    left = [(share, f) for f in counting if (share := share_left(f)) is not None]
    said = f"all {len(counting)} passed"
    if not left:
        return said
    share, nearest = min(left, key=lambda pair: pair[0])
    part = nearest.scope.partition("/")[2]
    name = nearest.gate.replace("_", " ") + (f" of {part}" if part else "")
    return f"{said}, the tightest ({name}) with {100 * max(0.0, share):.0f} % to spare"


def _footer(scorecard: Scorecard, question: ApprovalQuestion) -> str:
    by = f"approved by {', '.join(question.approved_by)}, " if question.approved_by else ""
    more = counted(question.missing, "more approval" if by else "approval")
    runs = f" (while `{question.start_command}` runs)" if question.start_command else ""
    parts = [
        f"[Decision page]({question.page_url}){runs}" if question.page_url else "",
        f"scorecard {short_digest(scorecard)}",
        escape_markdown(f"{by}{more} needed" if question.missing > 1 or by else ""),
        f"no answer by {question.until:%Y-%m-%d %H:%M %Z} means no",
    ]
    return " · ".join(part for part in parts if part)


def _cut(words: str, length: int) -> str:
    joined = without_line_breaks(words).rstrip(".")
    return joined if len(joined) <= length else textwrap.shorten(joined, length, placeholder=" …")


def _fitting(bullets: Sequence[str], room_px: int) -> Iterator[str]:
    """As many as the screen has room for, and how many more the page has."""
    heights = [_height(bullet, _BULLET_WIDTH, _BULLET_GAP_PX) for bullet in bullets]
    one_more = _LINE_PX + _BULLET_GAP_PX
    for place, bullet in enumerate(bullets):
        rest = heights[place:]
        if sum(rest) > room_px and rest[0] + one_more > room_px:
            yield f"- and {len(rest)} more on the decision page"
            return
        yield bullet
        room_px -= rest[0]


def _height(markdown: str, width: int = _TEXT_WIDTH, gap_px: int = _GAP_PX) -> int:
    """In pixels, with the gap below; what a link leads to takes no room."""
    text = re.sub(r"\]\([^)]*\)", "", markdown).replace("\\", "").replace("**", "")
    return _LINE_PX * max(1, len(textwrap.wrap(text, width))) + gap_px


def _code_height(code: str) -> int:
    return _LINE_PX * (code.count("\n") + 1) + _CODE_EDGE_PX + _GAP_PX if code else 0
