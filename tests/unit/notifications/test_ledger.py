"""What was told is told once; what nobody took is tried again; what is over is told once more."""

from datetime import timedelta

import pytest

from enginegate.notifications import NoticeLedger, ledger
from enginegate.workspace import Workspace
from tests.fakes.notices import NOON, notice

ROOM, MAIL = "1 (slack)", "2 (mailto)"
SECONDS = timedelta(seconds=1)


@pytest.fixture
def told(tmp_path):
    return NoticeLedger.of(Workspace(tmp_path))


def claimed(ledger, at=NOON, receivers=(ROOM,)):
    return ledger.claim(lambda _: True, receivers, at)


def titles(entries):
    return [entry.notice.title for entry in entries]


def say(ledger, at=NOON, receivers=(ROOM,)):
    """Everything that is to be said, taken by each receiver."""
    entries = claimed(ledger, at, receivers)
    for receiver in receivers:
        ledger.took(entries, receiver, at)
    return titles(entries)


def over(begun):
    return notice(99, key=f"{begun.key}/over", title=f"{begun.title} is over")


def test_what_lasts_is_told_when_it_begins_and_when_it_ends(told):
    """Not in between; and once more when it comes back."""
    lasting = notice(1, has_end=True)
    told.settle([lasting], over)
    assert say(told) == ["title 1"]
    for minute in range(1, 20):
        told.settle([lasting.model_copy(update={"body": "other words"})], over)
        assert say(told, NOON + timedelta(minutes=10 * minute)) == []

    told.settle([], over)
    assert say(told, NOON + timedelta(hours=4)) == ["title 1 is over"]
    told.settle([], over)
    assert say(told, NOON + timedelta(hours=5)) == []

    told.settle([lasting], over)
    assert say(told, NOON + timedelta(hours=6)) == ["title 1"]


def test_what_nobody_was_told_of_ends_without_a_word(told):
    told.settle([notice(1, has_end=True)], over)
    told.settle([], over)

    assert say(told) == []


def test_what_is_not_known_to_be_over_stays(told):
    """A run that broke off cannot say so."""
    told.settle([notice(1, has_end=True)], over)
    say(told)
    told.settle([], lambda _: None)
    told.settle([notice(1, has_end=True)], over)

    assert say(told, NOON + timedelta(hours=1)) == []


def test_receiver_that_was_away_gets_it_later_and_others_do_not_twice(told):
    """Each receiver has its own account; two processes at a time do not both send."""
    told.add([notice(1)])
    entries = claimed(told, receivers=(ROOM, MAIL))
    assert claimed(told, NOON + SECONDS, (ROOM, MAIL)) == ()
    told.took(entries, ROOM, NOON)

    (again,) = claimed(told, NOON + 90 * SECONDS, (ROOM, MAIL))
    assert again.taken_by == (ROOM,)
    told.took([again], MAIL, NOON)
    told.add([notice(1)])

    assert claimed(told, NOON + timedelta(hours=1), (ROOM, MAIL)) == ()


def test_news_is_given_up_after_a_day_and_what_lasts_is_not(told):
    told.add([notice(1)])
    told.settle([notice(2, has_end=True)], over)

    assert titles(claimed(told, NOON + timedelta(hours=25))) == ["title 2"]


def test_question_that_was_answered_is_asked_nobody(told):
    told.add([notice(1, scorecard="a"), notice(2, scorecard="b")])
    told.forget(lambda each: each.scorecard == "a")
    told.add([notice(1, scorecard="a")])

    assert say(told) == ["title 2"]


def test_flood_of_a_thousand_models_is_held_back_but_for_approvals(told, monkeypatch, caplog):
    """People read thirty messages an hour; the rest waits, and is not told once it is over."""
    monkeypatch.setattr(ledger, "_MOST_AN_HOUR", 3)
    told.settle([notice(number, has_end=True) for number in range(8)], over)
    told.add([notice(50, subject="approval")])

    assert say(told) == ["title 0", "title 1", "title 2", "title 50"]
    assert "held back for an hour" in caplog.text
    assert say(told, NOON + timedelta(minutes=30)) == []

    told.settle([notice(number, has_end=True) for number in (0, 1, 2, 7)], over)
    assert say(told, NOON + timedelta(minutes=90)) == ["title 7"]


def test_flood_that_many_workers_tell_at_a_time_is_held_back_too(told, monkeypatch):
    """What another process is sending just now counts: a schedule starts all watches at once."""
    monkeypatch.setattr(ledger, "_MOST_AN_HOUR", 3)
    told.settle([notice(number, has_end=True) for number in range(8)], over)

    taken = [
        told.claim(lambda n, k=number: n.key == f"key {k}", (ROOM,), NOON) for number in range(8)
    ]

    assert sum(map(len, taken)) == 3


def test_what_comes_and_goes_counts_each_time(told, monkeypatch):
    """A server that flaps is told of no more often than thirty others that died."""
    monkeypatch.setattr(ledger, "_MOST_AN_HOUR", 3)
    said = []
    for minute in range(10):
        now_open = [] if minute % 2 else [notice(1, has_end=True)]
        told.settle(now_open, lambda begun, m=minute: notice(m, key=f"{begun.key}/over/{m}"))
        said += say(told, NOON + timedelta(minutes=minute))

    assert len(said) == 3


def test_notices_are_their_owners_to_read(told):
    """They hold people's comments."""
    told.add([notice(1)])

    assert {path.stat().st_mode & 0o077 for path in told.folder.glob("*.json")} == {0}


def test_damaged_file_is_told_again_rather_than_never(told):
    told.add([notice(1)])
    say(told)
    (path,) = told.folder.glob("*.json")
    path.write_text("{")
    told.add([notice(1)])

    assert say(told, NOON + SECONDS) == ["title 1"]
