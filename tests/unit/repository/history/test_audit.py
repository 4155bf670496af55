"""The audit log: every event survives, and whatever is changed in it shows."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from enginegate.decision import Head
from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository import AuditLog, record_decision
from enginegate.repository.store.layout import Current, Layout
from tests.fakes.evidence import decision, scorecard


@pytest.fixture
def log(tmp_path):
    """A log with an approval, a publication and a repair."""
    card = scorecard()
    root = tmp_path / "live"
    record_decision(root, decision(card, origin="ada@host, command"), "digits")
    made = AuditLog(root, way="watch")
    made.tell("published", "digits", why="margins are wide", release=1)
    made.tell("repaired", "digits", why="config.pbtxt was put back", release=1)
    return made


def test_an_event_says_who_did_what_when_why_and_from_where(log):
    """Also before the repository was there: the decision made its folder."""
    approved, published, _ = log.read()

    assert (approved.event, approved.who, approved.why) == ("approved", "ada", "margins are wide")
    assert (approved.origin, approved.scorecard) == ("ada@host, command", scorecard().digest)
    assert (published.event, published.release) == ("published", 1)
    assert published.origin.endswith(", watch")


def test_a_decision_is_told_once(log):
    """The command tells it, and so does the promotion: whoever comes first."""
    record_decision(log.root, decision(scorecard(), origin="ada@host, command"), "digits")

    assert [event.event for event in log.read()] == ["approved", "published", "repaired"]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_cut_short_by_a_crash_is_dropped(log, cut):
    """And the next event goes in its place."""
    log.path.write_bytes(log.path.read_bytes()[:-cut])

    log.tell("refused", "digits", why="expired")

    assert [event.event for event in log.read()] == ["approved", "published", "refused"]


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        pytest.param(lambda ls: [ls[0].replace(b"ada", b"eve"), *ls[1:]], 2, id="changed"),
        pytest.param(lambda ls: [ls[0], ls[2]], 2, id="removed"),
        pytest.param(lambda ls: [ls[1], ls[0], ls[2]], 1, id="swapped"),
        pytest.param(lambda ls: [b'{"event":"approved"}', *ls], 1, id="added"),
    ],
)
def test_an_edit_is_named_by_its_line(log, edit, line):
    """Whoever reads it is told, and nothing more is written to it."""
    lines = log.path.read_bytes().splitlines()
    log.path.write_bytes(b"".join(line + b"\n" for line in edit(lines)))

    with pytest.raises(TamperedError, match=rf"audit\.jsonl, line {line}"):
        log.check("digits")
    with pytest.raises(TamperedError, match=rf"line {line}"):
        log.tell("published", "digits", why="as if nothing had happened")


def live(log):
    """The log's model goes live, and one more event is noted about it."""
    layout = Layout(log.root, "digits")
    layout.current_file.parent.mkdir(parents=True, exist_ok=True)
    current = Current(version=1, known=(1,), changed_at=datetime.now(tz=UTC))
    layout.current_file.write_bytes(current.pretty_json())
    log.tell("repaired", "digits", why="loaded and proved", release=1)
    return layout


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda lines: lines[:-1], "has 3 lines; .*json knows of 4", id="one"),
        pytest.param(lambda _: [], "has 0 lines", id="all"),
        pytest.param(
            lambda lines: [*lines[:-1], lines[-1].replace(b"proved", b"broken")],
            "line 4: its digest is",
            id="last-line-changed",
        ),
    ],
)
def test_lines_missing_from_the_end_show_by_the_head_that_was_kept(log, edit, message):
    """The chain alone cannot show it; the model's commit point knows how far the log had come."""
    live(log)
    log.check("digits")
    lines = log.path.read_bytes().splitlines()
    log.path.write_bytes(b"".join(line + b"\n" for line in edit(lines)))

    with pytest.raises(TamperedError, match=message):
        log.check("digits")


def test_the_head_is_the_last_line(log):
    """Count and digest, as the commit point keeps them."""
    layout = live(log)

    last = log.read()[-1]

    assert log.head() == Head(count=4, sha256=last.digest) == layout.current().audit
    assert json.loads(log.path.read_bytes().splitlines()[-1])["sequence"] == 3


def test_a_log_that_cannot_be_written_is_named(log, tmp_path):
    """Not a traceback."""
    (tmp_path / "file").write_text("")

    with pytest.raises(RepositoryError, match="cannot be written"):
        replace(log, root=tmp_path / "file").tell("published", "digits", why="x")
