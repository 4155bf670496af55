"""What happened to a scorecard since it was made: its state, and a timeline.

A `TimelineEntry` is one line of it, whoever noted it. `page_history` makes both from the audit log
of the live repository and the checks of the watch.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

from pydantic import Field, PositiveInt

from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted
from enginegate.records import Record
from enginegate.repository.history.audit import LIVE_EVENTS, Event, LiveChange, live_changes
from enginegate.repository.history.broken_promises import broken_promises
from enginegate.watch.log import WatchCheck


class Standing(StrEnum):
    """Where a scorecard stands; its value is shown."""

    NOTHING = "nothing to approve"
    WAITING = "waiting for approval"
    APPROVED = "approved, not yet live"
    REJECTED = "rejected"
    LIVE = "live"
    BROKEN = "promise broken"
    REPLACED = "replaced"
    ROLLED_BACK = "rolled back"
    WITHDRAWN = "withdrawn"

    @property
    def tone(self) -> str:
        """How it is coloured: good, bad, waiting or past."""
        if self is Standing.LIVE:
            return "good"
        if self in {Standing.BROKEN, Standing.REJECTED, Standing.ROLLED_BACK, Standing.WITHDRAWN}:
            return "bad"
        return "waiting" if self in {Standing.WAITING, Standing.APPROVED} else "past"


class TimelineEntry(Record):
    """One thing that happened, in the words of whoever did it."""

    at: datetime
    what: str = Field(description="e.g. qualified, approved, live as release 4")
    tone: str = Field(default="past", description="good, bad, waiting or past")
    who: str = ""
    why: str = ""
    origin: str = Field(default="", description="from where: user, host and channel")


class PageHistory(Record):
    """The part of a page that changes after the scorecard was made."""

    standing: Standing = Standing.WAITING
    sentence: str = Field(default="", description="the standing in one sentence")
    release: PositiveInt | None = Field(default=None, description="published of this scorecard")
    expires_at: datetime | None = Field(
        default=None, description="when the newest approval ends to count; None: none was given"
    )
    entries: tuple[TimelineEntry, ...] = Field(default=(), description="oldest first")

    def started(self, scorecard: Scorecard) -> "PageHistory":
        """The same with its first line: that and when the scorecard was made."""
        made = TimelineEntry(
            at=scorecard.created_at,
            what="qualified",
            tone="good" if scorecard.winner else "bad",
            who=scorecard.requested_by,
            why=scorecard.reason,
        )
        standing = self.standing
        if scorecard.winner is None and not self.entries:
            standing = Standing.NOTHING
        return self.model_copy(update={"entries": (made, *self.entries), "standing": standing})


NO_HISTORY = PageHistory()


def page_history(
    scorecard: Scorecard,
    events: Sequence[Event],
    checks: Iterable[WatchCheck] = (),
    *,
    expires_at: datetime | None = None,
) -> PageHistory:
    """A scorecard's history from the log of the repository that it is promoted into.

    Args:
        scorecard: that the page is about.
        events: of the audit log, oldest first, of every model.
        checks: of the release that was published of it.
        expires_at: when its newest approval ends to count; see ``approval_rules.expires_at``.
    """
    own = [event for event in events if event.model == scorecard.model]
    release = _release(scorecard, own)
    seen = [check for check in checks if check.version == release]
    entries = [
        *(_entry(change, scorecard) for change in _told(scorecard, own, release)),
        *_checked(seen),
    ]
    standing, sentence = _standing(scorecard, own, release, seen)
    return PageHistory(
        standing=standing,
        sentence=sentence,
        release=release,
        expires_at=expires_at if standing is Standing.APPROVED else None,
        entries=tuple(sorted(entries, key=lambda entry: entry.at)),
    )


def _release(scorecard: Scorecard, own: Sequence[Event]) -> int | None:
    """The release that serves this scorecard's engine, or was given its promise."""
    found = [
        event.release
        for event in own
        if event.scorecard == scorecard.digest and event.event in {"published", "promised"}
    ]
    return found[-1] if found else None


def _told(
    scorecard: Scorecard, own: Sequence[Event], release: int | None
) -> list[Event | LiveChange]:
    """The events that are about this scorecard or its release, or took it from service."""
    changes = {change.event.sequence: change for change in live_changes(own)}
    told: list[Event | LiveChange] = []
    for event in own:
        change = changes.get(event.sequence)
        if change is not None and release is not None and release in {change.before, change.after}:
            told.append(change)
        elif event.event not in LIVE_EVENTS and (
            event.scorecard == scorecard.digest
            or (release is not None and event.release == release)
        ):
            told.append(event)
    return told


def _entry(what: Event | LiveChange, scorecard: Scorecard) -> TimelineEntry:
    event = what.event if isinstance(what, LiveChange) else what
    words, tone = _words(what, scorecard)
    return TimelineEntry(
        at=event.at, what=words, tone=tone, who=event.who, why=event.why, origin=event.origin
    )


_TONES = {
    "approved": "good",
    "rejected": "bad",
    "promise broken": "bad",
    "refused": "bad",
    "acknowledged": "waiting",
}


def _words(what: Event | LiveChange, scorecard: Scorecard) -> tuple[str, str]:
    if isinstance(what, Event):
        word = f"refused release {what.release}" if what.event == "refused" else str(what.event)
        return word, _TONES.get(what.event, "past")
    if what.event.scorecard == scorecard.digest and what.kind == "published":
        return f"live as release {what.after}", "good"
    if what.kind == "withdrawn":
        return f"release {what.before} withdrawn", "bad"
    if what.kind == "rolled back":
        return f"rolled back to release {what.after}", "bad"
    return f"replaced by release {what.after}", "past"


def _checked(checks: Sequence[WatchCheck]) -> list[TimelineEntry]:
    """The checks that broke nothing as one line; the audit log has each of the others."""
    fine = [check for check in checks if not check.broken]
    if not fine:
        return []
    passed = sum(check.outcome is Outcome.PASSED for check in fine)
    newest = fine[-1]
    others = len(fine) - passed
    said = f"{counted(passed, 'check')} of the watch passed" if passed else "checked by the watch"
    why = f"{others} could not decide." if others else ""
    return [
        TimelineEntry(
            at=newest.at, what=said, tone="good" if passed else "waiting", who="watch", why=why
        )
    ]


def _standing(
    scorecard: Scorecard, own: Sequence[Event], release: int | None, checks: Sequence[WatchCheck]
) -> tuple[Standing, str]:
    answers = [
        event
        for event in own
        if event.scorecard == scorecard.digest and event.event in {"approved", "rejected"}
    ]
    if release is None:
        return _unpublished(scorecard, answers)
    changes = live_changes(own)
    ended = [change for change in changes if change.before == release != change.after]
    began = [change for change in changes if change.after == release]
    if ended and ended[-1].event.sequence > began[-1].event.sequence:
        return _over(ended[-1], release)
    broken = [
        each
        for each in broken_promises(own, scorecard.model, checks)
        if each.release == release and each.acknowledged is None
    ]
    if broken:
        return Standing.BROKEN, f"Release {release} is live and broke its promise: {broken[-1].why}"
    return Standing.LIVE, f"Live as release {release}."


def _over(ended: LiveChange, release: int) -> tuple[Standing, str]:
    who = f"{ended.event.who}: {ended.event.why}" if ended.event.why else ended.event.who
    if ended.kind == "withdrawn":
        return Standing.WITHDRAWN, f"Release {release} was withdrawn by {who}"
    if ended.kind == "rolled back":
        return (
            Standing.ROLLED_BACK,
            f"Release {release} was rolled back to release {ended.after} by {who}",
        )
    return Standing.REPLACED, f"Release {release} was replaced by release {ended.after}."


def _unpublished(scorecard: Scorecard, answers: Sequence[Event]) -> tuple[Standing, str]:
    if not answers:
        nothing = scorecard.winner is None
        return (Standing.NOTHING, "") if nothing else (Standing.WAITING, "Nobody has answered yet.")
    last = answers[-1]
    if last.event == "rejected":
        return Standing.REJECTED, f"Rejected by {last.who}: {last.why}"
    return Standing.APPROVED, f"Approved by {last.who}: {last.why}"
