"""Answers to a scorecard: files, and what only the audit log knows of them."""

import pytest

from enginegate.repository import AuditLog, Deed, record_decision, record_deed
from enginegate.repository.decided import answers_to
from tests.fakes.evidence import decision, scorecard, sha

CARD = scorecard()


def happen(root, *events):
    """Events of (what, whose scorecard) each."""
    for event, card in events:
        record_deed(
            root,
            Deed(event=event, model="digits", who="ada", why="why", origin="here", scorecard=card),
        )


def test_a_no_that_only_the_log_holds_is_heard(tmp_path):
    """The workspace was lost, or was another machine's; one that is in both is one."""
    no = decision(CARD, answer="reject", reason="too early")
    yes = decision(CARD, approver="grace")
    for each in (no, yes):
        record_decision(tmp_path, each, "digits")

    lost = answers_to(CARD, [yes], tmp_path)
    both = answers_to(CARD, [no, yes], tmp_path)

    assert [(d.answer, d.approver, d.reason) for d in lost.decisions] == [
        ("approve", "grace", "margins are wide"),
        ("reject", "ada", "too early"),
    ]
    assert [lost.record.places[d.digest] for d in lost.decisions] == [1, 0]
    assert both.decisions == (no, yes)
    assert both.record.places == {no.digest: 0, yes.digest: 1}


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        pytest.param([("published", CARD.digest)], None, id="live"),
        pytest.param([("rolled back", sha("9"))], None, id="another-one-was-left"),
        pytest.param([("published", CARD.digest), ("rolled back", sha("9"))], 1, id="rolled-back"),
        pytest.param([("published", CARD.digest), ("withdrawn", None)], 1, id="withdrawn"),
        pytest.param([("promised", CARD.digest), ("withdrawn", None)], 1, id="only-promised"),
        pytest.param(
            [("published", CARD.digest), ("rolled back", sha("9")), ("rolled back", CARD.digest)],
            1,
            id="and-brought-back",
        ),
        pytest.param([("published", CARD.digest), ("published", sha("9"))], None, id="replaced"),
    ],
)
def test_what_was_taken_back_is_known(tmp_path, events, ended):
    """From the events after this very scorecard was published."""
    happen(tmp_path, *events)

    record = answers_to(CARD, [], tmp_path).record

    assert (record.ended[0] if record.ended else None) == ended
    if ended is not None:
        assert record.ended[1] == AuditLog(tmp_path).read()[ended].at
