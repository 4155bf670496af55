"""What became live, by the audit log, and what somebody outside has not been told of it."""

import pytest

from enginegate.repository import AuditLog
from enginegate.repository.history.audit import (
    REPLICATION,
    Cursor,
    live_changes,
    undelivered_changes,
)
from enginegate.workspace import Workspace


@pytest.fixture
def log(tmp_path):
    """Two models; one goes to its second release and back, and the other is taken away."""
    made = AuditLog(tmp_path)
    for event, model, release in [
        ("approved", "tiny", None),
        ("published", "tiny", 1),
        ("published", "other", 5),
        ("published", "tiny", 2),
        ("refused", "tiny", 3),
        ("rolled back", "tiny", 1),
        ("repaired", "tiny", 1),
        ("withdrawn", "other", 5),
    ]:
        made.tell(event, model, why="because", release=release)
    return made


def said(changes):
    return [(c.event.model, c.before, c.after) for c in changes]


def test_every_change_says_what_was_live_before_and_after(log):
    """Each model by itself; what was refused or repaired changed nothing."""
    assert said(live_changes(log.read())) == [
        ("tiny", None, 1),
        ("other", None, 5),
        ("tiny", 1, 2),
        ("tiny", 2, 1),
        ("other", 5, None),
    ]


def test_after_a_position_the_rest_is_undelivered_changes(log):
    """What was live before is known all the same; nothing is left after the last change."""
    events = log.read()
    changes = live_changes(events)

    assert said(undelivered_changes(events, changes[1].head)) == said(changes[2:])
    assert undelivered_changes(events, changes[-1].head) == ()
    assert undelivered_changes(events, log.head()) == ()


def test_another_log_is_told_from_its_beginning(log, tmp_path):
    """Somebody took a damaged log away and a new one began: its position is nobody's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = AuditLog(elsewhere)
    other.tell("published", "tiny", why="because", release=7)

    assert said(undelivered_changes(other.read(), log.head())) == [("tiny", None, 7)]
    assert said(undelivered_changes(log.read(), other.head())) == said(live_changes(log.read()))
    assert said(undelivered_changes(log.read(), None)) == said(live_changes(log.read()))


def test_replicated_change_is_notified_by_its_own_host(log):
    """What this host decides next still says what was live here before it."""
    told = log.head()
    AuditLog(log.root, channel=REPLICATION).tell("published", "tiny", why="because", release=9)
    log.tell("rolled back", "tiny", why="because", release=2)

    assert said(undelivered_changes(log.read(), told)) == [("tiny", 9, 2)]


def test_refetched_release_is_not_new(log):
    """Its bytes were gone here, so the log says published; its number is older."""
    log.tell("published", "tiny", why="because", release=4)
    log.tell("published", "tiny", why="because", release=2)

    assert [change.kind for change in live_changes(log.read())[-2:]] == ["published", "rolled back"]


def test_cursor_belongs_to_one_reader_and_one_log(log, tmp_path):
    """It outlives the process; a damaged one says nothing."""
    workspace = Workspace(tmp_path / "workspace")
    here = Cursor.of(workspace, "http://a/api", log.root)

    assert here.read() is None
    here.move(log.head())

    assert Cursor.of(workspace, "http://a/api", log.root).read() == log.head()
    assert Cursor.of(workspace, "http://b/api", log.root).read() is None
    assert Cursor.of(workspace, "http://a/api", tmp_path / "other").read() is None
    here.path.write_bytes(b"{")
    assert here.read() is None
