"""The words of a notice: what is asked, the commands, and nothing that acts in a messenger."""

from datetime import timedelta

import pytest

from enginegate.errors import EnginegateError, RepositoryError, ServerError
from enginegate.notifications import (
    ApprovalRequest,
    approval_notice,
    over_notice,
    promise_notices,
    watch_notice,
)
from enginegate.notifications.notice import quoted
from enginegate.repository.history.broken_promises import BrokenPromise
from tests.fakes.evidence import scorecard
from tests.fakes.notices import NOON, notice


def asked(**changes):
    return ApprovalRequest(**({"question": "q", "asked_at": NOON, "policy": "p.toml"} | changes))


def test_approval_says_what_where_and_until_when():
    """The verdict in a sentence, both links, who may, and the commands."""
    card = scorecard(model="digits", model_uri="models:/digits/3")

    told = approval_notice(
        card,
        asked(
            page="http://mlflow/#/page?a=b",
            start_command="enginegate ui",
            form="http://prefect/runs/flow-run/1",
            until=NOON + timedelta(hours=24),
            missing=2,
            approved_by=("ada",),
            may_approve=("bob", "cyd@example.com"),
        ),
        "/live",
    )

    assert told.title == "digits v3 waits for an approval"
    assert f"Winner {card.winner}: {card.reason}" in told.body
    assert "2 people more of bob, cyd@\u200bexample.com must approve. Approved by ada." in told.body
    assert "No answer by 2026-11-24 12:00 UTC means no." in told.body
    assert "Evidence: http://mlflow/#/page?a=b (while `enginegate ui` runs" in told.body
    assert "Answer in Prefect: http://prefect/runs/flow-run/1" in told.body
    assert f"  enginegate approve {card.digest[:12]} --reason WHY" in told.body
    assert "enginegate promote" not in told.body


def test_qualified_scorecard_waits_with_the_commands_up_to_the_promotion():
    """Nothing is suspended: there is no form, and no time after which it means no."""
    card = scorecard()
    body = approval_notice(card, asked(), "/live").body

    assert f"  enginegate promote p.toml {card.digest[:12]}" in body
    assert "Prefect" not in body
    assert "means no" not in body


def broken(release, check, acknowledged=None):
    return BrokenPromise(release, check, NOON, "server_time: promised <= 3 ms", acknowledged)


def test_release_is_told_once_from_its_first_failed_check():
    """Later failed checks change nothing; one after an acknowledgement is another story."""
    first = promise_notices("digits", "/live", [broken(3, 1)], 2, "p.toml")
    later = promise_notices("digits", "/live", [broken(3, 1), broken(3, 2)], 2, "p.toml")
    other = promise_notices("digits", "/live", [broken(3, 2), broken(4, 1)], None, "p.toml")

    assert [each.key for each in later] == [each.key for each in first]
    assert not {each.key for each in other} & {each.key for each in first}
    assert first[0].title == "digits: release 3 broke its promise"
    for said in ["promised <= 3 ms", "Release 2 is live now.", "acknowledge p.toml --release 3"]:
        assert said in first[0].body
    assert "Nothing is live now." in other[0].body


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ServerError("no server"), "what is live could not be measured"),
        (RepositoryError("changed"), "the live repository is not as it should be"),
        (EnginegateError("busy"), "the watch could not do its work"),
        (ValueError("x"), "the watch failed by a fault in it"),
    ],
)
def test_errored_watch_says_which_kind_of_error(error, says):
    """Each kind is told by itself: a tampered repository is not hidden behind a dead server."""
    told = watch_notice("digits", "/live", error, "p.toml", NOON, "")

    assert told.title == f"digits: {says}"
    assert str(error) in told.body
    assert over_notice(told, (), "check 9: passed", NOON).body == (
        f"It is over: {says}, since 2026-11-23 12:00 UTC.\nNewest: check 9: passed"
    )


def test_end_of_a_promise_names_who_acknowledged_it():
    from types import SimpleNamespace

    begun = notice(1, subject="promise", release=3, has_end=True)
    act = SimpleNamespace(who="ada", why="known, fixed in 4")

    told = over_notice(begun, [broken(3, 1, act)], "", NOON)

    assert told.title == "digits: the broken promise of release 3 was acknowledged"
    assert told.body == "By ada: known, fixed in 4"


def test_what_others_wrote_does_not_act():
    """No mention, no link under other words, no sign-in, no control character, no endless text."""
    text = "@everyone <!channel> [pay](http://ada:pw@evil/?token=1) \x1b[31m\u202e"

    said = quoted(text + "x" * 5000)

    for acting in ("@everyone", "<!channel>", "](", ":pw@", "token=1", "\x1b", "\u202e"):
        assert acting not in said
    assert "everyone" in said
    assert len(said) < 1100
