"""State and timeline follow from the audit log, in its order."""

from datetime import timedelta

import pytest

from enginegate.chained_log.hash_chain import GENESIS
from enginegate.evidence import Outcome
from enginegate.policy.operating import Approval
from enginegate.report import decision_page, history_of, page_history
from enginegate.repository.history.audit import Event
from enginegate.repository.store.scorecard_history import ScorecardHistory
from tests.fakes.evidence import decision, finding, scorecard, sha, verdict

CARD = scorecard(replaces=3)


def log(*lines: tuple) -> tuple[Event, ...]:
    """Events in order, a minute apart: what happened, the release, and more fields."""
    return tuple(
        Event(
            event=what,
            model=CARD.model,
            who="ada",
            why=f"reason {number}",
            origin="ada@host, command",
            at=CARD.created_at + timedelta(minutes=number + 1),
            sequence=number,
            previous=GENESIS,
            release=number_of,
            scorecard=CARD.digest if mine else sha("9"),
            check=7 if what in {"promise broken", "acknowledged"} else None,
        )
        for number, (what, number_of, mine) in enumerate(lines)
    )


_BEFORE = ("published", 3, False)
_YES, _NO = ("approved", None, True), ("rejected", None, True)
_LIVE = ("published", 4, True)


@pytest.mark.parametrize(
    ("lines", "standing"),
    [
        pytest.param((_BEFORE,), "waiting for approval", id="nobody-answered"),
        pytest.param((_BEFORE, _YES), "approved, not yet live", id="approved"),
        pytest.param((_BEFORE, _YES, _NO), "rejected", id="rejected"),
        pytest.param((_BEFORE, _YES, _LIVE), "live", id="live"),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("promise broken", 4, True)), "promise broken", id="broken"
        ),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("promise broken", 4, True), ("acknowledged", 4, True)),
            "live",
            id="acknowledged",
        ),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("rolled back", 3, False)), "rolled back", id="rolled-back"
        ),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("published", 5, False)), "replaced", id="replaced-by-a-newer"
        ),
        pytest.param((_YES, _LIVE, ("withdrawn", 4, True)), "withdrawn", id="withdrawn"),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("rolled back", 3, False), _YES),
            "approved, not yet live",
            id="approved-again",
        ),
        pytest.param(
            (_BEFORE, _YES, _LIVE, ("rolled back", 3, False), _YES, ("published", 5, True)),
            "live",
            id="live-again",
        ),
    ],
)
def test_the_state_follows_from_the_log(lines, standing):
    """The last thing that happened decides, not the last that was published."""
    history = page_history(CARD, log(*lines))

    assert history.standing == standing


def test_the_timeline_is_of_this_scorecard():
    """What other releases did before and after is another page's."""
    events = log(
        _BEFORE,
        ("promise broken", 3, False),
        _YES,
        _LIVE,
        ("published", 5, False),
        ("promise broken", 5, False),
        ("rolled back", 4, True),
    )

    told = [entry.what for entry in page_history(CARD, events).entries]

    assert told == [
        "approved",
        "live as release 4",
        "replaced by release 5",
        "rolled back to release 4",
    ]


def test_events_of_other_models_are_left_out():
    """One repository holds many models."""
    other = [event.model_copy(update={"model": "letters"}) for event in log(_YES, _LIVE)]

    assert page_history(CARD, other).standing == "waiting for approval"
    assert page_history(CARD, other).entries == ()


def test_an_approval_shows_when_it_ends():
    """By the newest answer that the log has, and the hours of the policy."""
    yes = decision(CARD)
    rules = Approval(expires_hours=48)
    found = ScorecardHistory(events=log(_BEFORE, _YES), approvals=(yes,))

    assert history_of(CARD, found, rules).expires_at == yes.decided_at + timedelta(hours=48)
    assert history_of(CARD, found).expires_at is None
    bound = CARD.model_copy(update={"approval_hours": 24.0})
    events = [e.model_copy(update={"scorecard": bound.digest}) for e in log(_YES)]
    assert page_history(bound, events).expires_at == events[0].at + timedelta(hours=24)
    live = ScorecardHistory(events=log(_BEFORE, _YES, _LIVE), approvals=(yes,))
    assert history_of(CARD, live, rules).expires_at is None


def test_the_first_line_is_the_qualification():
    """A page has a timeline before anybody answered."""
    page = decision_page(CARD)

    assert "Qualified" in page
    assert CARD.created_at.strftime("%Y-%m-%d %H:%M") in page


def test_nothing_waits_where_nothing_passed():
    """A scorecard without a winner asks nobody."""
    none = scorecard(winner=None, verdicts=(verdict(finding()),), benchmarks=())

    assert page_history(none, ()).standing == "nothing to approve"
    assert "nothing to approve" in decision_page(none)
    assert "waiting for approval" not in decision_page(none)


def test_one_of_two_approvals_leaves_it_waiting():
    """A second person must say yes; the first cannot say it twice, and a no starts anew."""
    rules = Approval(expires_hours=48, required=2)

    def standing(*answers: tuple[str, str]):
        events = log(*((what, None, True) for what, _ in answers))
        said = [e.model_copy(update={"who": w}) for e, (_, w) in zip(events, answers, strict=True)]
        found = ScorecardHistory(events=tuple(said))
        return history_of(CARD, found, rules)

    first = standing(("approved", "ada"))
    assert first.standing == "waiting for approval"
    assert "1 more approval needed" in first.sentence
    assert standing(("approved", "ada"), ("approved", "ada")).standing == "waiting for approval"
    both = ("approved", "ada"), ("approved", "bob")
    assert standing(*both).standing == "approved, not yet live"
    voided = standing(("approved", "ada"), ("rejected", "eve"), ("approved", "bob"))
    assert voided.standing == "waiting for approval"


def test_inconclusive_candidate_that_may_be_accepted_waits():
    """Where the policy allows it, somebody can still say yes, and no words rule that out."""
    open_one = verdict(finding(Outcome.INCONCLUSIVE))
    card = scorecard(winner=None, verdicts=(open_one,))
    rules = Approval(expires_hours=48, accept_inconclusive=True)

    history = history_of(card, ScorecardHistory(), rules)

    assert history.started(card).standing == "waiting for approval"
    assert "can go live" not in decision_page(card, history)
    strict = history_of(card, ScorecardHistory(), Approval(expires_hours=48))
    assert strict.started(card).standing == "nothing to approve"
