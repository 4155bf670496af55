"""What happened to a scorecard since it was made: its state, and a timeline.

A `TimelineEntry` is one line of it, whoever noted it. `page_history` makes both from the audit log
of the live repository and the checks of the watch.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import Field, PositiveInt

from enginegate.approval_rules import acceptable, expires_at, may_not_reject
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted
from enginegate.policy.operating import Approval, person
from enginegate.records import Record
from enginegate.repository.history.audit import Event, LiveChange, live_changes
from enginegate.repository.history.broken_promises import broken_promises
from enginegate.repository.store.scorecard_history import ScorecardHistory
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

    known: bool = Field(default=True, description="false: no audit log could be asked")
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
        if scorecard.winner is None and not self.entries and not self.sentence:
            standing = Standing.NOTHING
        return self.model_copy(update={"entries": (made, *self.entries), "standing": standing})


NO_HISTORY = PageHistory()


def history_of(
    scorecard: Scorecard, found: ScorecardHistory, rules: Approval | None = None
) -> PageHistory:
    """A scorecard's history from what was read of it.

    Args:
        scorecard: that the page is about.
        found: in the repository that it is promoted into, and in the workspace.
        rules: say for how long an approval stands; None: as the scorecard says.
    """
    newest = found.approvals[-1] if found.approvals else None
    expires = expires_at(newest, rules) if newest and rules else None
    return page_history(scorecard, found.events, found.checks, expires=expires, rules=rules)


def page_history(
    scorecard: Scorecard,
    events: Sequence[Event],
    checks: Iterable[WatchCheck] = (),
    *,
    expires: datetime | None = None,
    rules: Approval | None = None,
) -> PageHistory:
    """A scorecard's history from the log of the repository that it is promoted into.

    Args:
        scorecard: that the page is about.
        events: of the audit log, oldest first, of every model.
        checks: of the releases that were published of it.
        expires: when its newest approval ends to count; None: as long after the log has it as the
            scorecard says.
        rules: say how many people must approve, and whether an inconclusive candidate may be
            accepted; None: not known, so that one person is enough and none may.
    """
    own = [event for event in events if event.model == scorecard.model]
    releases = _releases(scorecard, own)
    seen = [check for check in checks if check.version in releases]
    entries = [
        *(_entry(told, scorecard) for told in _told(scorecard, own, releases)),
        *(line for number in releases for line in _checked(seen, number)),
    ]
    standing, sentence = _standing(scorecard, own, releases, seen, rules)
    return PageHistory(
        standing=standing,
        sentence=sentence,
        release=releases[-1] if releases else None,
        expires_at=(expires or _ends(scorecard, own)) if standing is Standing.APPROVED else None,
        entries=tuple(sorted(entries, key=lambda entry: entry.at)),
    )


def _ends(scorecard: Scorecard, own: Sequence[Event]) -> datetime | None:
    """When the newest approval ends to count, if it was given when the log took it in."""
    noted = [e.at for e in own if e.event == "approved" and e.scorecard == scorecard.digest]
    if not noted or scorecard.approval_hours is None:
        return None
    return noted[-1] + timedelta(hours=scorecard.approval_hours)


def _releases(scorecard: Scorecard, own: Sequence[Event]) -> tuple[int, ...]:
    """The releases that were published of it, or given its promise, in that order."""
    found = (
        event.release
        for event in own
        if event.scorecard == scorecard.digest and event.event in {"published", "promised"}
    )
    return tuple(dict.fromkeys(release for release in found if release is not None))


def _told(
    scorecard: Scorecard, own: Sequence[Event], releases: Sequence[int]
) -> list[Event | LiveChange]:
    """The events about this scorecard, and those of its releases from their publication on."""
    changes = {change.event.sequence: change for change in live_changes(own)}
    begun = {
        event.release: event.sequence
        for event in reversed(own)
        if event.scorecard == scorecard.digest and event.event in {"published", "promised"}
    }
    told: list[Event | LiveChange] = []
    for event in own:
        change = changes.get(event.sequence)
        since = [n for n in releases if begun[n] <= event.sequence]
        if change is not None:
            if {change.before, change.after} & set(since):
                told.append(change)
        elif event.scorecard == scorecard.digest or event.release in since:
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


def _checked(checks: Sequence[WatchCheck], release: int) -> list[TimelineEntry]:
    """A release's checks that broke nothing as one line; those that failed are events."""
    fine = [check for check in checks if check.version == release and not check.broken]
    if not fine:
        return []
    passed = sum(check.outcome is Outcome.PASSED for check in fine)
    others = len(fine) - passed
    said = f"{counted(passed, 'check')} passed" if passed else "checked"
    why = f"{counted(others, 'check')} could not decide." if others else ""
    tone = "good" if passed else "waiting"
    what = f"release {release}: {said}"
    return [TimelineEntry(at=fine[-1].at, what=what, tone=tone, who="watch", why=why)]


def _standing(
    scorecard: Scorecard,
    own: Sequence[Event],
    releases: Sequence[int],
    checks: Sequence[WatchCheck],
    rules: Approval | None,
) -> tuple[Standing, str]:
    changes = live_changes(own)
    live = changes[-1].after if changes else None
    answers = [
        event
        for event in own
        if event.scorecard == scorecard.digest and event.event in {"approved", "rejected"}
    ]
    published = [
        event.sequence
        for event in own
        if event.scorecard == scorecard.digest and event.event in {"published", "promised"}
    ]
    if not releases or (live not in releases and answers and answers[-1].sequence > published[-1]):
        used_up = published[-1] if published else -1
        return _unpublished(scorecard, [a for a in answers if a.sequence > used_up], rules)
    if live not in releases:
        ended = [change for change in changes if change.before in releases]
        return _over(ended[-1])
    broken = [
        each
        for each in broken_promises(own, scorecard.model, checks)
        if each.release == live and each.acknowledged is None
    ]
    if broken:
        return Standing.BROKEN, f"Release {live} is live and broke its promise: {broken[-1].why}"
    return Standing.LIVE, ""


def _over(ended: LiveChange) -> tuple[Standing, str]:
    by = f"{ended.event.who}: {ended.event.why}" if ended.event.why else ended.event.who
    if ended.kind == "withdrawn":
        return Standing.WITHDRAWN, f"Release {ended.before} was withdrawn by {by}"
    if ended.kind == "rolled back":
        said = f"Release {ended.before} was rolled back to release {ended.after} by {by}"
        return Standing.ROLLED_BACK, said
    said = f"Release {ended.before} was replaced by release {ended.after}."
    return Standing.REPLACED, said


def _unpublished(
    scorecard: Scorecard, answers: Sequence[Event], rules: Approval | None
) -> tuple[Standing, str]:
    if not answers:
        may_be_accepted = rules is not None and acceptable(scorecard, rules)
        nothing = scorecard.winner is None and not may_be_accepted
        return (Standing.NOTHING, "") if nothing else (Standing.WAITING, "Nobody has answered yet.")
    last = answers[-1]
    if last.event == "rejected":
        return Standing.REJECTED, f"Rejected by {last.who}: {last.why}"
    said = f"Approved by {last.who}: {last.why}"
    missing = rules.required - _approving(answers, rules) if rules else 0
    if missing <= 0:
        return Standing.APPROVED, said
    return Standing.WAITING, f"{said} ({counted(missing, 'more approval')} needed)"


def _approving(answers: Sequence[Event], rules: Approval) -> int:
    """People whose approval stands: each one's newest answer counts, and a no voids those before.

    How old an approval is, is not looked at: the page says when the newest one expires.
    """
    newest = {person(a.who): a for a in answers if not may_not_reject(a.who, rules)}
    since = max((a.sequence for a in newest.values() if a.event == "rejected"), default=-1)
    return sum(a.event == "approved" and a.sequence > since for a in newest.values())
