"""One thing that a person is told, in plain words: of an approval, a promise, a watch, a release.

A notice is text for any messenger, so nothing in it may act there: what comes from a model, a
server or somebody's comment mentions nobody, makes no link of its own and holds no sign-in.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field

from enginegate.candidate import registered_version
from enginegate.errors import EnginegateError, RepositoryError, ServerError
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted
from enginegate.records import Record
from enginegate.redact import masked
from enginegate.repository.history.audit import LiveChange
from enginegate.repository.history.broken_promises import BrokenPromise

# `@everyone`, `<!channel>`, `[a word](an address)`: a space of no width keeps each from acting.
_ACTING = re.compile(r"@|<(?=[!#A-Za-z/])|\](?=\()")
_CONTROL = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Of what others wrote: half of the shortest message that common messengers take, of 2,000.
_LONGEST_QUOTE = 1000
_DIGEST_SHOWN = 12
# A change of what is live that is older is no news: the audit log has it.
_NEWS = timedelta(days=1)


class Notice(Record):
    """What somebody is told.

    A notice with an end is about something that lasts: when it is over, that is told too.
    """

    key: str = Field(description="told once under it; of what lasts, until it is over")
    subject: Literal["approval", "promise", "watch", "release"]
    place: str = Field(description="the live repository, where several have models of one name")
    model: str
    mood: Literal["info", "success", "warning", "failure"]
    title: str
    body: str
    at: datetime = Field(description="when it began, or happened")
    has_end: bool = False
    release: int | None = None
    scorecard: str = Field(default="", description="digest; once it is answered nobody is asked")
    answers: int = Field(default=1, description="how many approvals answer it; one no always does")


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is asked of people besides the scorecard.

    Attributes:
        question: the name of it, for which people are told once.
        asked_at: when.
        policy: file, for the commands.
        page: address of the decision page; empty: there is none.
        start_command: the page is there while this runs; empty: a server has it.
        form: address of Prefect's form; empty: no promotion is suspended.
        until: when no answer becomes a no; None: nothing is suspended.
        missing: how many people must approve.
        approved_by: whose approvals count already.
        may_approve: names that the policy has; empty: anybody.
    """

    question: str
    asked_at: datetime
    policy: str
    page: str = ""
    start_command: str = ""
    form: str = ""
    until: datetime | None = None
    missing: int = 1
    approved_by: tuple[str, ...] = ()
    may_approve: tuple[str, ...] = ()


def approval_notice(scorecard: Scorecard, asked: ApprovalRequest, place: str) -> Notice:
    """Somebody has to decide: on what, by which evidence, where and until when."""
    named = _named(scorecard.model, scorecard.model_uri)
    digest = scorecard.digest[:_DIGEST_SHOWN]
    found = Counter(scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts)
    counts = ", ".join(f"{found[each]} {each.word}" for each in Outcome if found[each])
    lines = [
        f"Winner {scorecard.winner}: {quoted(scorecard.reason)}"
        if scorecard.winner
        else f"No candidate passed every gate ({quoted(scorecard.reason)}); an inconclusive one "
        "may be accepted by name.",
        f"It replaces release {scorecard.replaces}."
        if scorecard.replaces
        else "Nothing is live now.",
        f"{counted(len(scorecard.verdicts), 'candidate')}: {counts}.",
        _who(asked),
        *([f"No answer by {asked.until:%Y-%m-%d %H:%M %Z} means no."] if asked.until else []),
        "",
        *([f"Evidence: {asked.page}{_while(asked)}"] if asked.page else []),
        *([f"Answer in Prefect: {asked.form}"] if asked.form else []),
        f"{'Or' if asked.form else 'Read and answer'} in a terminal:",
        f"  enginegate explain {digest}",
        f"  enginegate approve {digest} --reason WHY",
        f"  enginegate reject {digest} --reason WHY",
        *([] if asked.form else [f"  enginegate promote {asked.policy} {digest}"]),
    ]
    return Notice(
        key=f"approval/{place}/{scorecard.digest}/{asked.question}",
        subject="approval",
        place=place,
        model=scorecard.model,
        mood="info",
        title=f"{named} waits for an approval",
        body="\n".join(lines),
        at=asked.asked_at,
        scorecard=scorecard.digest,
        # Prefect's form takes one answer, and each further one is a question of its own.
        answers=asked.missing if asked.until is None else 1,
    )


def promise_notices(
    model: str, place: str, broken: Sequence[BrokenPromise], live: int | None, policy: str
) -> tuple[Notice, ...]:
    """One for each release with failed checks that nobody has acknowledged, from the first on."""
    waiting: dict[int, list[BrokenPromise]] = {}
    for each in broken:
        if each.acknowledged is None:
            waiting.setdefault(each.release, []).append(each)
    now_live = f"Release {live} is live now." if live is not None else "Nothing is live now."

    def first_words(failed: BrokenPromise) -> str:
        return f"At check {failed.check} ({_time(failed.at)}): {quoted(failed.why)}"

    return tuple(
        Notice(
            key=f"promise/{place}/{model}/{release}/{failed[0].check}",
            subject="promise",
            place=place,
            model=model,
            mood="failure",
            title=f"{quoted(model)}: release {release} broke its promise",
            body="\n".join(
                (
                    first_words(failed[0]),
                    now_live,
                    "",
                    "See what is live and why:",
                    f"  enginegate status {policy}",
                    "It stays failed until a person acknowledges it:",
                    f"  enginegate acknowledge {policy} --release {release} --reason WHY",
                )
            ),
            at=failed[0].at,
            has_end=True,
            release=release,
        )
        for release, failed in waiting.items()
    )


def watch_notice(
    model: str, place: str, error: Exception, policy: str, at: datetime, run: str
) -> Notice:
    """The watch could not measure, or found that the repository is not what was published.

    Args:
        model: its name.
        place: its live repository.
        error: how the run of the watch ended.
        policy: file, for the commands.
        at: when.
        run: address of the run in Prefect; empty: there is none.
    """
    kind, says = _watch_words(error)
    lines = (
        quoted(str(error) or type(error).__name__),
        "",
        *([f"The run: {run}"] if run else []),
        "Look again:",
        f"  enginegate watch {policy} --once",
        f"  enginegate verify {policy}",
        "Nothing more is said about this until it is over.",
    )
    return Notice(
        key=f"watch/{place}/{model}/{kind}",
        subject="watch",
        place=place,
        model=model,
        mood="failure",
        title=f"{quoted(model)}: {says}",
        body="\n".join(lines),
        at=at,
        has_end=True,
    )


def _watch_words(error: Exception) -> tuple[str, str]:
    if isinstance(error, ServerError):
        return "not-measured", "what is live could not be measured"
    if isinstance(error, RepositoryError):
        return "repository", "the live repository is not as it should be"
    if isinstance(error, EnginegateError):
        return "failed", "the watch could not do its work"
    return "crashed", "the watch failed by a fault in it"


def release_notices(
    changes: Iterable[LiveChange], model: str, place: str, now: datetime
) -> tuple[Notice, ...]:
    """One for each change of what is live within the last day."""
    made = []
    for change in changes:
        event = change.event
        if event.model != model or change.replicated or event.at < now - _NEWS:
            continue
        live = f"release {change.after} is live" if change.after else "nothing is live"
        lines = [
            f"{change.kind.capitalize()} by {quoted(event.who)}: {quoted(event.why)}",
            f"Before: {f'release {change.before}' if change.before else 'nothing'}.",
        ]
        made.append(
            Notice(
                key=f"release/{place}/{event.digest}",
                subject="release",
                place=place,
                model=model,
                mood="success" if change.kind == "published" else "warning",
                title=f"{quoted(model)}: {live} ({change.kind})",
                body="\n".join(lines),
                at=event.at,
            )
        )
    return tuple(made)


def over_notice(
    begun: Notice, broken: Sequence[BrokenPromise], newest: str, at: datetime
) -> Notice:
    """The end of something that people were told of.

    Args:
        begun: what they were told.
        broken: every failed check that is known of the model, with its acknowledgement.
        newest: how the newest check ended, in words; empty: there is none.
        at: when that was seen.
    """
    mood: Literal["info", "success"] = "success"
    lines: list[str] = []
    if begun.subject == "promise":
        title = f"the broken promise of release {begun.release} was dealt with"
        mood = "info"
        acts = [b.acknowledged for b in broken if b.release == begun.release and b.acknowledged]
        if acts:
            title = f"the broken promise of release {begun.release} was acknowledged"
            lines = [f"By {quoted(acts[-1].who)}: {quoted(acts[-1].why)}"]
    else:
        title = "the watch is well again"
        lines = [f"It is over: {begun.title.partition(': ')[2]}, since {_time(begun.at)}."]
    if newest:
        lines.append(f"Newest: {quoted(newest)}")
    return Notice(
        key=f"{begun.key}/over/{at.isoformat()}",
        subject=begun.subject,
        place=begun.place,
        model=begun.model,
        mood=mood,
        title=f"{quoted(begun.model)}: {title}",
        body="\n".join(lines),
        at=at,
        release=begun.release,
    )


def quoted(text: str) -> str:
    """What others wrote, as it may stand in a message: short, without a sign-in, and inert."""
    plain = _CONTROL.sub(" ", masked(text.strip()))
    cut = plain if len(plain) <= _LONGEST_QUOTE else f"{plain[: _LONGEST_QUOTE - 2]} …"
    return _ACTING.sub(lambda found: f"{found.group()}\u200b", cut)


def _named(model: str, uri: str) -> str:
    found = registered_version(uri)
    return quoted(f"{found[0]} v{found[1]}" if found else f"{model} ({uri})")


def _who(asked: ApprovalRequest) -> str:
    by = f" Approved by {', '.join(map(quoted, asked.approved_by))}." if asked.approved_by else ""
    among = f" of {', '.join(map(quoted, asked.may_approve))}" if asked.may_approve else ""
    more = " more" if asked.approved_by else ""
    return f"{counted(asked.missing, 'person', 'people')}{more}{among} must approve.{by}"


def _while(asked: ApprovalRequest) -> str:
    runs = asked.start_command
    return f" (while `{runs}` runs on the machine that qualified it)" if runs else ""


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M %Z}"
