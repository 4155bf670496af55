"""What a promotion reads and writes under the lock."""

import pytest

from enginegate.repository import AuditLog, AuditRecord, Layout, record_act
from enginegate.repository.history.audit import Event
from enginegate.repository.history.journal import Entry, Journal


@pytest.mark.parametrize("kind", [Entry, Event], ids=["journal", "audit-log"])
def test_each_line_of_a_log_is_parsed_once_by_a_promotion(repository, package, monkeypatch, kind):
    """However many steps it takes, and whatever it appends meanwhile."""
    repository.publish(package(1.0), expected=None)
    log = Journal(repository.root) if kind is Entry else AuditLog(repository.root)
    before, parsed = log.read(), []
    parse = kind.model_validate_json

    def counted(line):
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(kind, "model_validate_json", counted)
    repository.publish(package(2.0), expected=1)

    assert len(parsed) == len(before)


def test_no_audit_event_writes_the_live_pointer(repository, package):
    """It has one writer: the commit of a change."""
    repository.publish(package(1.0), expected=None)
    file = Layout(repository.root, "digits").current_file
    before = file.stat()

    record_act(
        repository.root,
        AuditRecord(event="approved", model="digits", who="ada", why="wide margins", origin="here"),
    )

    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
