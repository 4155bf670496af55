"""What is live of one model and how it got there, as Markdown: the artifact that the watch keeps.

The state is one sentence that stays the same until something happens. So an artifact that is
replaced only when the sentence changes leaves a history in which each entry is an event.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginegate.decision import Release
from enginegate.evidence import Outcome
from enginegate.messages import counted
from enginegate.report.approval_form import version_words
from enginegate.report.content import one_line
from enginegate.report.markdown import escape_markdown
from enginegate.repository.history.audit import LIVE_EVENTS, Event
from enginegate.repository.history.broken_promises import BrokenPromise, broken_promises
from enginegate.watch.log import WatchCheck

_MOST_EVENTS, _MOST_CHECKS = 30, 12
_TIME = "%Y-%m-%d %H:%M %Z"


@dataclass(frozen=True, slots=True)
class LiveTimeline:
    """One entry of a model's history.

    Attributes:
        state: what is live and whether it keeps its promise, in one sentence of Markdown; the same
            until something happens.
        markdown: the newest check, what to do, and the events so far.
    """

    state: str
    markdown: str


def live_timeline(
    model: str,
    release: Release | None,
    events: Sequence[Event],
    checks: Sequence[WatchCheck],
    *,
    policy: str,
) -> LiveTimeline:
    """The state of a model and its timeline.

    Args:
        model: its name in the live repository.
        release: what is live, with the promise that it is held to; None: nothing is.
        events: of the audit log, oldest first.
        checks: of the live release, oldest first.
        policy: the file's path, for the commands to run next.
    """
    own = [event for event in events if event.model == model]
    broken = broken_promises(own, model, checks)
    state = _state(model, release, own, checks, broken)
    parts = [f"# {state}", *_now(release, checks), *_open(broken, policy)]
    parts += _check_table(checks)
    parts += _event_table(own)
    return LiveTimeline(state, "\n\n".join(parts) + "\n")


def _state(
    model: str,
    release: Release | None,
    own: Sequence[Event],
    checks: Sequence[WatchCheck],
    broken: Sequence[BrokenPromise],
) -> str:
    open_ones = [each for each in broken if each.acknowledged is None]
    live = f"release {release.version} is live" if release else "nothing is live"
    named = f"{model}: {live}"
    if release is not None:
        named += f" ({version_words(release.model_uri)} as {release.engine.candidate})"
    sentence = f"{named}{_how_it_came(own)}"
    if open_ones:
        first = open_ones[0]
        which = "its" if release and first.release == release.version else "the"
        whose = "" if which == "its" else f" of release {first.release}"
        more = f", and {len(open_ones) - 1} later" if len(open_ones) > 1 else ""
        return (
            f"❌ {escape_markdown(sentence)}; {which} promise{whose} was BROKEN at check "
            f"{first.check}{more}, and nobody has acknowledged that"
        )
    if release is None:
        return f"⚪ {escape_markdown(sentence)}"
    if checks and checks[-1].outcome is Outcome.ERRORED:
        return f"⚠ {escape_markdown(sentence)}; it could not be measured"
    of_this = [each for each in broken if each.release == release.version and each.acknowledged]
    if of_this and (event := of_this[-1].acknowledged) is not None:
        acknowledged = f"; the promise broken at check {of_this[-1].check} was acknowledged by "
        return f"⚠ {escape_markdown(f'{sentence}{acknowledged}{event.who}')}"
    word = "no promise is broken" if checks else "not checked yet"
    return f"{'✅' if checks else '⚪'} {escape_markdown(sentence)}; {word}"


def _how_it_came(own: Sequence[Event]) -> str:
    changes = [event for event in own if event.event in LIVE_EVENTS]
    if not changes or changes[-1].event == "published":
        return ""
    return f", {changes[-1].event} {changes[-1].at:{_TIME}}"


def _now(release: Release | None, checks: Sequence[WatchCheck]) -> Iterator[str]:
    if release is None:
        return
    yield f"**Promise:** {escape_markdown(str(release.promise))}."
    if not checks:
        return
    newest = checks[-1]
    ended = [check.outcome for check in checks]
    words = ", ".join(
        f"{ended.count(outcome)} {outcome.word}" for outcome in Outcome if outcome in ended
    )
    yield (
        f"**Newest check:** {newest.number}, {newest.at:{_TIME}}, **{newest.outcome.word}**. "
        f"Of {counted(len(checks), 'check')} kept: {words}."
    )


def _open(broken: Sequence[BrokenPromise], policy: str) -> Iterator[str]:
    for each in (each for each in broken if each.acknowledged is None):
        yield f"**Broken:** {escape_markdown(one_line(str(each)))}."
    if any(each.acknowledged is None for each in broken):
        yield f"It stays so until somebody runs\n\n    enginegate acknowledge {policy} --reason WHY"


def _check_table(checks: Sequence[WatchCheck]) -> Iterator[str]:
    if not checks:
        return
    rows = [
        (
            f"{check.at:{_TIME}}",
            str(check.number),
            check.outcome.word,
            one_line("; ".join(f"{f.gate}: {f.reason}" for f in check.problems)),
        )
        for check in reversed(checks[-_MOST_CHECKS:])
    ]
    yield "## Newest checks"
    yield _table(("when", "check", "outcome", "why"), rows)


def _event_table(own: Sequence[Event]) -> Iterator[str]:
    if not own:
        return
    rows = [
        (
            f"{event.at:{_TIME}}",
            event.event if event.release is None else f"{event.event}: release {event.release}",
            event.who,
            one_line(event.why),
        )
        for event in reversed(own[-_MOST_EVENTS:])
    ]
    yield "## Timeline, the newest first"
    yield _table(("when", "what", "who", "why"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text if text == "---" else escape_markdown(text)
