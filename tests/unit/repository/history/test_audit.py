"""The audit log: every event survives, and whatever is changed in it shows."""

import json
from dataclasses import replace

import pytest

from enginegate.decision import Head
from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository import AuditLog, record_decision
from enginegate.repository.history.audit import Event
from tests.fakes.evidence import decision, scorecard


@pytest.fixture
def log(tmp_path):
    """A log with an approval, a publication and a repair."""
    card = scorecard()
    root = tmp_path / "live"
    record_decision(root, decision(card, origin="ada@host, command"), "digits")
    made = AuditLog(root, channel="watch")
    made.tell("published", "digits", why="margins are wide", release=1)
    made.tell("repaired", "digits", why="config.pbtxt was put back", release=1)
    return made


def test_event_records_who_what_when_why_and_origin(log):
    """Also before the repository was there: the decision made its folder."""
    approved, published, _ = log.read()

    assert (approved.event, approved.who, approved.why) == ("approved", "ada", "margins are wide")
    assert (approved.origin, approved.scorecard) == ("ada@host, command", scorecard().digest)
    assert (published.event, published.release) == ("published", 1)
    assert published.origin.endswith(", watch")


def test_decision_is_recorded_once(log):
    """The command tells it, and so does the promotion: whoever comes first."""
    record_decision(log.root, decision(scorecard(), origin="ada@host, command"), "digits")

    assert [event.event for event in log.read()] == ["approved", "published", "repaired"]


@pytest.mark.parametrize("cut", [1, 40])
def test_torn_last_line_is_dropped(log, cut):
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
def test_edited_line_is_named(log, edit, line):
    """Whoever reads it is told, and nothing more is written to it."""
    lines = log.path.read_bytes().splitlines()
    log.path.write_bytes(b"".join(line + b"\n" for line in edit(lines)))

    with pytest.raises(TamperedError, match=rf"audit\.jsonl, line {line}"):
        log.check()
    with pytest.raises(TamperedError, match=rf"line {line}"):
        log.tell("published", "digits", why="as if nothing had happened")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda lines: lines[:-1], "has 2 lines; .*json knows of 3", id="one"),
        pytest.param(lambda _: [], "has 0 lines", id="all"),
        pytest.param(
            lambda lines: [*lines[:-1], lines[-1].replace(b"put back", b"taken away")],
            "line 3: its digest is",
            id="last-line-changed",
        ),
    ],
)
def test_lines_missing_from_the_end_show_by_the_head_that_was_kept(log, edit, message):
    """The chain alone cannot show it, and writing on does not hide it."""
    log.check()
    lines = log.path.read_bytes().splitlines()
    log.path.write_bytes(b"".join(line + b"\n" for line in edit(lines)))

    with pytest.raises(TamperedError, match=message):
        log.check()
    for _ in range(3):
        log.tell("watched", "digits", why="nothing happened")
    with pytest.raises(TamperedError, match=r"head\.json has"):
        log.check()


@pytest.mark.parametrize("left", [None, b"{"], ids=["removed", "damaged"])
def test_missing_head_is_named(log, left):
    """Without it a log that was cut would not show."""
    log.head_file.unlink() if left is None else log.head_file.write_bytes(left)

    with pytest.raises(TamperedError, match=r"audit-head\.json"):
        log.check()


def test_the_head_is_the_last_line(log):
    """Count and digest, in a file beside the log."""
    last = log.read()[-1]

    assert log.head() == Head(count=3, sha256=last.digest) == Head.read(log.head_file)
    assert json.loads(log.path.read_bytes().splitlines()[-1])["sequence"] == 2


def test_kill_between_log_and_head_is_no_damage(log):
    """The log may be ahead of its head, also when it has one line and there is no head yet."""
    old = log.head_file.read_bytes()
    log.tell("watched", "digits", why="nothing happened")
    log.head_file.write_bytes(old)
    log.check()

    log.path.write_bytes(log.path.read_bytes().splitlines(keepends=True)[0])
    log.head_file.unlink()
    log.check()


def test_lines_are_parsed_once_until_somebody_else_writes(log, monkeypatch):
    """However often they are asked for; what is appended is known already."""
    parsed = []
    monkeypatch.setattr(Event, "model_validate_json", _counting(Event.model_validate_json, parsed))
    log.tell("watched", "digits", why="nothing happened")
    assert len(log.read()) == 4
    assert parsed == []

    AuditLog(log.root).tell("watched", "digits", why="by somebody else")
    parsed.clear()
    assert len(log.read()) == len(log.read()) == 5
    assert len(parsed) == 5


def _counting(parse, parsed):
    def counted(line):
        parsed.append(line)
        return parse(line)

    return counted


def test_unwritable_log_is_named(log, tmp_path):
    """Not a traceback."""
    (tmp_path / "file").write_text("")

    with pytest.raises(RepositoryError, match="cannot be written"):
        replace(log, root=tmp_path / "file").tell("published", "digits", why="x")
