"""What is live of one model and how it got there, as Markdown: the artifact that the watch keeps.

The state is one sentence that stays the same until something happens. So an artifact that is
replaced only when the sentence changes leaves a history in which each entry is an event.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from enginegate.decision import Release
from enginegate.evidence import Outcome
from enginegate.messages import counted, escape_markdown
from enginegate.report.approval_form import version_words
from enginegate.report.content import one_line
from enginegate.repository.history.audit import LIVE_EVENTS, Event
from enginegate.repository.history.broken_promises import BrokenPromise, broken_promises
from enginegate.watch.log import WatchCheck, gate_of

_MOST_LINES, _MOST_BROKEN = 20, 3
_TIME = "%Y-%m-%d %H:%M %Z"


@dataclass(frozen=True, slots=True)
class LiveTimeline:
    """One entry of a model's history.

    Attributes:
        word: the state in two or three words, e.g. ``promise broken at check 3``.
        state: what is live and whether it keeps its promise, in one sentence of Markdown that
            begins with the word; the same until something happens.
        markdown: the newest check, what to do, and the events so far.
    """

    word: str
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
    word = _word(release, checks, broken)
    open_ones = [each for each in broken if each.acknowledged is None]
    parts = [
        *_open(open_ones, policy),
        *_now(release, checks),
        *_listed("Timeline, the newest first", (_event_line(event) for event in reversed(own))),
        *_listed("Checks, the newest first", (_check_line(check) for check in reversed(checks))),
    ]
    state = f"**{word.capitalize()}:** {escape_markdown(_live(model, release, own))}"
    return LiveTimeline(word, state, "\n\n".join(parts) + "\n")


def _word(
    release: Release | None, checks: Sequence[WatchCheck], broken: Sequence[BrokenPromise]
) -> str:
    open_ones = [each for each in broken if each.acknowledged is None]
    if open_ones:
        first = open_ones[0]
        here = release is not None and first.release == release.version
        whose = "" if here else f" of release {first.release}"
        more = f" and {len(open_ones) - 1} later" if len(open_ones) > 1 else ""
        return f"promise{whose} broken at check {first.check}{more}, not acknowledged"
    if release is None:
        return "nothing live"
    if not checks:
        return "not checked yet"
    if checks[-1].outcome is Outcome.ERRORED:
        return "not measured"
    known = [each for each in broken if each.release == release.version]
    if known and (event := known[-1].acknowledged) is not None:
        return f"broken promise acknowledged by {event.who}"
    return "no promise broken"


def _live(model: str, release: Release | None, own: Sequence[Event]) -> str:
    changes = [event for event in own if event.event in LIVE_EVENTS]
    # Of a promotion the number says enough; a release may be live again and again.
    again = changes and changes[-1].event != "published"
    how = f", {changes[-1].event} {changes[-1].at:{_TIME}}" if again else ""
    if release is None:
        return f"no release of {model} is live{how}"
    version = version_words(release.model_uri)
    named = ", ".join(engine.candidate.name for engine in release.engines)
    return f"release {release.version} of {model} ({version} as {named}) is live{how}"


def _open(open_ones: Sequence[BrokenPromise], policy: str) -> Iterator[str]:
    if not open_ones:
        return
    yield from (
        f"**Broken:** {escape_markdown(one_line(str(each)))}." for each in open_ones[:_MOST_BROKEN]
    )
    if len(open_ones) > _MOST_BROKEN:
        yield f"And {len(open_ones) - _MOST_BROKEN} more, below."
    release = open_ones[-1].release
    yield "It stays so, and each run of the watch fails, until a person acknowledges it:"
    yield f"    enginegate acknowledge {policy} --release {release} --reason WHY"


def _now(release: Release | None, checks: Sequence[WatchCheck]) -> Iterator[str]:
    if release is None:
        return
    yield f"**Promise:** {escape_markdown(str(release.promise))}."
    if not checks:
        return
    newest, ended = checks[-1], [check.outcome for check in checks]
    counts = [f"{ended.count(outcome)} {outcome.word}" for outcome in Outcome if outcome in ended]
    yield (
        f"**Newest check:** {newest.number}, {newest.at:{_TIME}}, **{newest.outcome.word}**; "
        f"of {counted(len(checks), 'check')} kept: {', '.join(counts)}."
    )


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A list: Prefect's pages cut what a table's cell has no room for."""
    shown = [f"- {line}" for line in lines]
    if not shown:
        return
    yield f"## {title}"
    more = [f"- and {len(shown) - _MOST_LINES} older"] if len(shown) > _MOST_LINES else []
    yield "\n".join([*shown[:_MOST_LINES], *more])


def _event_line(event: Event) -> str:
    about = f" release {event.release}" if event.release is not None else ""
    check = f", check {event.check}" if event.check is not None else ""
    why = f": {one_line(event.why)}" if event.why else ""
    what = f"**{event.event}{about}{check}**"
    return f"{event.at:{_TIME}} {what} by {escape_markdown(f'{event.who}{why}')}"


def _check_line(check: WatchCheck) -> str:
    problems = one_line("; ".join(f"{gate_of(f)}: {f.reason}" for f in check.problems))
    why = f": {escape_markdown(problems)}" if problems else ""
    return f"{check.at:{_TIME}} check {check.number} **{check.outcome.word}**{why}"
